"""Opening a file that a person named, without waiting for somebody who never comes.

Rule 1: a named pipe is refused: open(2) waits for its writer for ever, and without waiting it reads as empty. The pipe
        of a shell's `<(command)` has its writer already and is read.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from lockgate.contract.errors import ConfigError


def open_named(path: Path, what: str) -> BinaryIO:
    """Open a file for reading; `what` it is, for the error.

    Raises:
        ConfigError: it is a named pipe, or its name can be none. OSError: it cannot be opened.

    """
    try:
        pipe = stat.S_ISFIFO(path.stat().st_mode) and "/pipe:[" not in os.path.realpath(path)
    except ValueError:  # a NUL in the name
        raise ConfigError(f"{what} has a name with a NUL in it", next_step="name a file that exists") from None
    if pipe:
        raise ConfigError(
            f"{what} {str(path)!r} is a named pipe, whose writer may never come", next_step="name a regular file"
        )
    return path.open("rb")
