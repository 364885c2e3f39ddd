"""Waiting, the blocking way: the thread that waits reads the links itself. Same names as `pump_async`.

Rule 1: no thread of ours exists. Of several waiting threads one leads (polls and reads), the others follow.
Rule 2: every wait has a deadline, also a follower's: a leader held up by a callback cannot hold up the others.
Rule 3: callbacks of approvals run after the lead was given back.
"""

from __future__ import annotations

import logging
import math
import select
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

from lockgate.gate.values import Approval, Decision

OnApproval = Callable[[Approval], Decision]


class Waiter:
    """What a thread waits for: resolved once, with a value."""

    __slots__ = ("_done", "_value")

    def __init__(self) -> None:
        self._done = False
        self._value: Any = None

    def done(self) -> bool:
        """Whether it is resolved."""
        return self._done

    def cancelled(self) -> bool:
        """Whether the wait itself was given up, which threads cannot do."""
        return False

    def set_result(self, value: Any) -> None:
        """Resolve it."""
        self._value = value
        self._done = True

    def result(self) -> Any:
        """Return what it was resolved with, None before."""
        return self._value


class Pump:
    """Turns readiness of descriptors into calls, in whichever thread waits.

    Attributes:
        Interrupted: what ends a wait early.

    """

    Interrupted: ClassVar[type[BaseException]] = KeyboardInterrupt

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._readers: dict[int, Callable[[], None]] = {}
        self._writers: dict[int, Callable[[], None]] = {}
        self._turn = threading.Condition()
        self._led = False
        self._callbacks: list[Callable[[], None]] = []

    def waiter(self) -> Waiter:
        """Return something to wait for."""
        return Waiter()

    def wait(self, waiter: Waiter, seconds: float) -> Any:
        """Return what the waiter is resolved with, or None after `seconds`."""
        deadline = time.monotonic() + seconds
        while not waiter.done():
            with self._turn:
                while self._led and not waiter.done():
                    if not self._turn.wait(max(0.0, deadline - time.monotonic())):
                        return waiter.result()
                if waiter.done():
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._led = True
            try:
                self._lead(left)
            finally:
                with self._turn:
                    self._led = False
                    self._turn.notify_all()
            while self._callbacks:
                self._callbacks.pop(0)()
        return waiter.result()

    def _lead(self, seconds: float) -> None:
        # Rounded up to whole milliseconds (epoll_wait(2)), or the last one would be spun away.
        for fd, events in self._epoll.poll(math.ceil(seconds * 1000) / 1000):
            if events & select.EPOLLOUT and (write := self._writers.get(fd)):
                write()
            if events & ~select.EPOLLOUT and (read := self._readers.get(fd)):
                read()

    def watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Call `on_readable` whenever `fd` is readable, or at its end."""
        self._readers[fd] = on_readable
        self._epoll.register(fd, select.EPOLLIN)

    def watch_write(self, fd: int, on_writable: Callable[[], None] | None) -> None:
        """Call `on_writable` whenever `fd` is writable; None stops it. Also reaches a leader in epoll_wait."""
        if on_writable is None:
            self._writers.pop(fd, None)
        else:
            self._writers[fd] = on_writable
        if fd in self._readers:
            self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if on_writable else 0))

    def unwatch(self, fd: int) -> None:
        """Forget `fd`; idempotent."""
        self._writers.pop(fd, None)
        if self._readers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def decide(self, on_approval: OnApproval, ask: Approval, answer: Callable[[Decision], None]) -> None:
        """Ask a person through `on_approval` in the thread that read the question; a failing callback declines."""

        def asking() -> None:
            decision: Any = None
            try:
                decision = on_approval(ask)
            except Exception:
                logging.getLogger("lockgate").exception("on_approval failed; the call was declined")
            finally:
                answer(decision if isinstance(decision, Decision) else ask.decline("lockgate: no decision"))

        self._callbacks.append(asking)

    def close(self) -> None:
        """Close the poll set; idempotent."""
        self._epoll.close()
