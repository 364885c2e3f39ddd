"""Counts what would leave this process while a case runs, by the interpreter's own audit events.

Source: docs.python.org, "Audit events table": socket.connect, socket.getaddrinfo, socket.sendto, ...
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager

_LEAVING = frozenset(
    ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.getnameinfo",
     "socket.sendto", "socket.sendmsg", "urllib.Request")
)  # fmt: skip
_counting: list[list[str]] = []
_installed: list[bool] = []


def _hook(event: str, _: object) -> None:
    if _counting and event in _LEAVING:
        _counting[-1].append(event)


@contextmanager
def leaving() -> Generator[list[str]]:
    """Collect the names of events by which something would leave."""
    if not _installed:
        sys.addaudithook(_hook)  # cannot be removed; it does nothing while nobody counts
        _installed.append(True)
    seen: list[str] = []
    _counting.append(seen)
    try:
        yield seen
    finally:
        _counting.pop()
