"""Map shared libraries ahead of their use.

Source: dlopen(3): a library that is mapped already is found by device and inode, and nothing is mapped again.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


def map_all(*directories: str) -> list[object]:
    """Map every library below the directories, symbols resolved as they are called; they stay while the list lives.

    One that cannot be mapped (made for another machine, or what it needs is not there) is left to fail where it is
    imported.
    """
    kept: list[object] = []
    for place in directories:
        for path in sorted(Path(place).rglob("*.so*")):
            if path.suffix == ".so" or ".so." in path.name:
                try:
                    kept.append(ctypes.CDLL(str(path), mode=os.RTLD_LAZY | os.RTLD_LOCAL))
                except OSError:
                    continue
    return kept
