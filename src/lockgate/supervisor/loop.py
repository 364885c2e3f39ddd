"""The supervisor's only thread of control: one epoll set and one timer heap (ADR 0015).

Rule 1: no callback blocks. What must block (starting a template) runs in `starter.py` and comes back by a descriptor.
Rule 2: a descriptor that was removed in a batch gets no event of that batch, even if its number is in use again.
Rule 3: timers fire before descriptors of the same turn, so a flood on descriptors cannot hold back a kill.
"""

from __future__ import annotations

import heapq
import select
import time
from collections.abc import Callable
from typing import Final

IN: Final = select.EPOLLIN
OUT: Final = select.EPOLLOUT
PRI: Final = select.EPOLLPRI
GONE: Final = select.EPOLLHUP | select.EPOLLERR

Callback = Callable[[], object]
FdCallback = Callable[[int], object]

_BATCH: Final = 64
_COMPACT: Final = 64


class Timer:
    """One pending call; `cancel` makes it never happen."""

    __slots__ = ("callback", "when")

    def __init__(self, when: float, callback: Callback) -> None:
        self.when = when
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        """Forget the call; idempotent."""
        self.callback = None


class Reactor:
    """Level-triggered epoll with a timer heap on the monotonic clock (epoll(7), seconds)."""

    __slots__ = ("_batch_removed", "_deferred", "_epoll", "_handlers", "_heap", "_leave", "_limit", "_seq", "_stopped")

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, FdCallback] = {}
        self._batch_removed: set[int] = set()
        self._heap: list[tuple[float, int, Timer]] = []
        self._deferred: list[Callback] = []
        self._seq = 0
        self._limit = _COMPACT
        self._leave = False
        self._stopped = False

    # ---- descriptors
    def add(self, fd: int, callback: FdCallback, mask: int = IN) -> None:
        """Watch `fd`; `callback` gets the epoll mask. It must tolerate EAGAIN."""
        self._epoll.register(fd, mask)
        self._handlers[fd] = callback

    def handler(self, fd: int, callback: FdCallback) -> None:
        """Give a watched `fd` another callback (no system call)."""
        self._handlers[fd] = callback

    def mask(self, fd: int, mask: int) -> None:
        """Watch a known `fd` for other events; 0 = only its end."""
        self._epoll.modify(fd, mask)

    def remove(self, fd: int) -> None:
        """Stop watching `fd`, before it is closed; idempotent."""
        if self._handlers.pop(fd, None) is not None:
            self._batch_removed.add(fd)
            self._epoll.unregister(fd)

    @property
    def watched(self) -> int:
        """How many descriptors are watched."""
        return len(self._handlers)

    # ---- time
    def at(self, when: float, callback: Callback) -> Timer:
        """Call `callback` at `when` (monotonic seconds)."""
        timer = Timer(when, callback)
        self._seq += 1
        heapq.heappush(self._heap, (when, self._seq, timer))
        return timer

    def after(self, seconds: float, callback: Callback) -> Timer:
        """Call `callback` in `seconds`."""
        return self.at(time.monotonic() + seconds, callback)

    def defer(self, callback: Callback) -> None:
        """Call `callback` when the present batch of events is done."""
        self._deferred.append(callback)

    # ---- running
    def stop(self) -> None:
        """Make every `run` return, now and from now on."""
        self._stopped = True
        self._leave = True

    def leave(self) -> None:
        """Make the present `run` return after the present turn."""
        self._leave = True

    def run(self, until: float | None = None) -> None:
        """Turn until `leave` or `stop`, or until the monotonic time `until`."""
        while not self._stopped and (until is None or time.monotonic() < until):
            if self.turn(until):
                return

    def turn(self, until: float | None = None) -> bool:
        """Fire what is due, wait for events at most until the next timer, deliver them; True = asked to leave."""
        self._fire()
        events = self._epoll.poll(self._timeout(until), _BATCH)
        self._batch_removed.clear()
        if self._heap and self._heap[0][0] <= time.monotonic():
            self._fire()
        for fd, mask in events:
            if fd in self._batch_removed:
                continue
            handler = self._handlers.get(fd)
            if handler is not None:
                handler(mask)
        while self._deferred:
            deferred, self._deferred = self._deferred, []
            for callback in deferred:
                callback()
        left, self._leave = self._leave, False
        return left

    def close(self) -> None:
        """Close the epoll descriptor and forget everything."""
        self._handlers.clear()
        self._heap.clear()
        self._deferred.clear()
        self._epoll.close()

    def _timeout(self, until: float | None) -> float:
        if self._deferred or self._leave:
            return 0.0
        when = self._next()
        if until is not None and (when is None or until < when):
            when = until
        return -1.0 if when is None else max(0.0, when - time.monotonic())

    def _next(self) -> float | None:
        heap = self._heap
        while heap and heap[0][2].callback is None:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def _fire(self) -> None:
        heap = self._heap
        if not heap:
            return
        now = time.monotonic()
        while heap and (heap[0][0] <= now or heap[0][2].callback is None):
            timer = heapq.heappop(heap)[2]
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback()
        # Cancelled wall clocks of short runs would sit in the heap until their time: keep the heap flat instead.
        if len(heap) > self._limit:
            self._heap = [entry for entry in heap if entry[2].callback is not None]
            heapq.heapify(self._heap)
            self._limit = max(_COMPACT, 2 * len(self._heap))
