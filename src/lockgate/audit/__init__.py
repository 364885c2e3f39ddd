"""Audit: rows, their chain, the process that writes them, the client that sends them, the reader that checks them.

Import the module you need; this file imports nothing, so that the reader does not load the writer and neither loads
a socket. Only `writer_argv` lives here, because whoever starts the writer needs nothing else of this package.
"""

from __future__ import annotations

import sys


def writer_argv(fd: int, path: str) -> list[str]:
    """Return the command line of the audit writer.

    Args:
        fd: the writer's end of a SOCK_STREAM socket pair, inherited under this number. The caller closes its own copy
            after the start: the writer ends when the last copy of the other end is closed.
        path: the database file, absolute.

    """
    return [sys.executable, "-I", "-m", "lockgate.audit.writer", "--fd", str(fd), "--path", path]
