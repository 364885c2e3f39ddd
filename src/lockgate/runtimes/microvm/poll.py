"""The poll set of the loader: descriptors, and who is called when one is ready (epoll(7))."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Final

IN: Final = select.EPOLLIN
OUT: Final = select.EPOLLOUT


class Poll:
    """A poll set with callbacks."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._masks: dict[int, int] = {}
        self._calls: dict[int, Callable[[int], None]] = {}

    def watch(self, fd: int, mask: int, call: Callable[[int], None]) -> None:
        """Call `call(mask)` when `fd` is ready; a mask of 0 waits for its end only."""
        if fd not in self._masks:
            self._epoll.register(fd, mask)
        elif self._masks[fd] != mask:
            self._epoll.modify(fd, mask)
        self._masks[fd] = mask
        self._calls[fd] = call

    def forget(self, fd: int) -> None:
        """Watch `fd` no more; must come before it is closed."""
        if self._masks.pop(fd, None) is not None:
            self._epoll.unregister(fd)
            del self._calls[fd]

    def turn(self, seconds: float | None) -> None:
        """Wait once, at most `seconds`, and make the calls that are due."""
        for fd, mask in self._epoll.poll(-1 if seconds is None else max(seconds, 0.0)):
            call = self._calls.get(fd)
            if call is not None:  # a call before it may have ended it
                call(mask)
