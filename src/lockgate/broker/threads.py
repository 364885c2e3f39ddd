"""Threads of the broker, and the one that watches the clock for all of them.

Rule 1: a call runs on the thread that read it. There is no hand-off, hence no wake-up, in the common case.
Rule 2: the deadline is armed before the function is entered. When it passes, the watchdog takes the call away from the
        thread (`Claim`), exactly once, and a fresh thread finishes it; the stuck one finds its call gone and returns.
Rule 3: a thread holds one armed deadline at most, in a slot of its own: no heap, nothing to cancel, nothing to leak.
Rule 4: threads that hang are counted; beyond `MAX_STUCK` no new call starts until some return.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

MAX_IDLE: Final = 16
MAX_STUCK: Final = 64
_TICK: Final = 0.5
_FOREVER: Final = float("inf")


class Claim:
    """The right to finish one call: whoever takes it first has it, everybody else must leave the call alone."""

    __slots__ = ("_taken",)

    def __init__(self) -> None:
        self._taken = threading.Lock()

    def take(self) -> bool:
        """Whether this caller is the one that finishes the call."""
        return self._taken.acquire(blocking=False)


class _Slot:
    __slots__ = ("armed",)

    def __init__(self) -> None:
        self.armed: tuple[float, Claim, Callable[[], None]] | None = None


class Threads:
    """A pool of daemon threads that grows as needed and parks a few; plus the watchdog.

    Attributes:
        stuck: calls that were taken away from a thread which has not come back yet.

    """

    def __init__(self) -> None:
        self.stuck = 0
        self._idle: list[SimpleQueue[Callable[[], None] | None]] = []
        self._slots: set[_Slot] = set()
        self._lock = threading.Lock()
        self._local = threading.local()
        self._turn = threading.Condition()
        self._wake_at = _FOREVER
        self._dirty = False
        self._active = False
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def run(self, work: Callable[[], None]) -> None:
        """Run `work` on a parked thread, or on a new one."""
        with self._lock:
            box = self._idle.pop() if self._idle else None
        if box is None:
            threading.Thread(target=self._serve, args=(work,), daemon=True).start()
        else:
            box.put(work)

    def _serve(self, work: Callable[[], None] | None) -> None:
        box: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        try:
            while work is not None:
                work()
                work = None  # what it held must not live on while this thread is parked
                with self._lock:
                    if len(self._idle) >= MAX_IDLE:
                        return
                    self._idle.append(box)
                work = box.get()
        finally:
            slot = getattr(self._local, "slot", None)
            if slot is not None:
                with self._lock:
                    self._slots.discard(slot)

    # ---- deadlines ------------------------------------------------------------------------------------------
    def arm(self, deadline: float, claim: Claim, late: Callable[[], None]) -> None:
        """Have `late` run on a fresh thread unless `claim` is taken before `deadline` (seconds, monotonic)."""
        slot = getattr(self._local, "slot", None)
        if slot is None:
            slot = self._local.slot = _Slot()
            with self._lock:
                self._slots.add(slot)
        self._active = True
        slot.armed = (deadline, claim, late)
        # The watchdog sets `_wake_at` to infinity before it looks at the slots, so either it sees this one or we see
        # that and tell it to look again.
        if deadline < self._wake_at:
            with self._turn:
                self._dirty = True
                self._turn.notify()

    def disarm(self) -> None:
        """Forget this thread's deadline."""
        self._local.slot.armed = None

    def came_back(self) -> None:
        """A thread whose call was taken away has returned."""
        with self._lock:
            self.stuck -= 1

    def _watch(self) -> None:
        while True:
            with self._turn:
                self._wake_at = _FOREVER
                self._dirty = False
            now = time.monotonic()
            # While calls come, wake at least so often: were this infinite between two short calls, each would have to
            # wake this thread to be seen.
            next_at = now + _TICK if self._active else _FOREVER
            self._active = False
            with self._lock:
                slots = list(self._slots)
            for slot in slots:
                armed = slot.armed
                if armed is None:
                    continue
                if armed[0] > now:
                    next_at = min(next_at, armed[0], now + _TICK)
                elif armed[1].take():
                    with self._lock:
                        self.stuck += 1
                    self.run(armed[2])
            with self._turn:
                if self._dirty:
                    continue
                self._wake_at = next_at
                self._turn.wait(None if next_at == _FOREVER else max(next_at - time.monotonic(), 0.0))
