"""What a machine sends to its supervisor, over its control socket and the two pipes of a run.

Rule 1: pieces leave in the order in which they were put in, whichever descriptor each is for: one without room holds
        up all behind it. So a result never overtakes the output that was written before it.
Rule 2: nothing waits here. What nobody takes any more is dropped, so that the rest can leave.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from typing import Final

_BROKEN: Final = frozenset({errno.EPIPE, errno.ECONNRESET})


class Outbox:
    """Pieces of bytes, each for a non-blocking descriptor."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[int, memoryview]] = deque()

    @property
    def waiting(self) -> bool:
        """Whether anything is in it."""
        return bool(self._pieces)

    def put(self, fd: int, data: bytes) -> None:
        """Add a piece at the end."""
        self._pieces.append((fd, memoryview(data)))

    def flush(self) -> int:
        """Write what goes without waiting; returns the descriptor that has no room, -1 when everything has left.

        Raises:
            OSError: a descriptor failed, and not because its other end is gone.

        """
        while self._pieces:
            fd, view = self._pieces[0]
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:
                return fd
            except OSError as error:
                if error.errno not in _BROKEN:
                    raise
                view = view[:0]
            if view:
                self._pieces[0] = (fd, view)
            else:
                self._pieces.popleft()
        return -1
