"""Waiting, the asyncio way. `pump_sync` has the same names and blocks instead.

Rule 1: every wait has a deadline, armed before it begins (`loop.call_later`, cheaper than `wait_for`).
Rule 2: a waiter is resolved once, with a value; errors travel as values and are raised by who waits for them.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from lockgate.gate.values import Approval, Decision

Waiter = asyncio.Future[Any]
OnApproval = Callable[[Approval], Decision | Awaitable[Decision]]


class Pump:
    """Turns readiness of descriptors into calls, and lets tasks wait for their answers.

    Attributes:
        Interrupted: what a wait raises when its task is cancelled.

    """

    Interrupted: ClassVar[type[BaseException]] = asyncio.CancelledError

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def waiter(self) -> Waiter:
        """Return something to wait for."""
        return self._loop.create_future()

    async def wait(self, waiter: Waiter, seconds: float) -> Any:
        """Return what the waiter is resolved with, or None after `seconds`."""
        if not waiter.done():
            expiry = self._loop.call_later(seconds, _expire, waiter)
            try:
                await waiter
            finally:
                expiry.cancel()
        return waiter.result()

    def watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Call `on_readable` whenever `fd` is readable, or at its end."""
        self._loop.add_reader(fd, on_readable)

    def watch_write(self, fd: int, on_writable: Callable[[], None] | None) -> None:
        """Call `on_writable` whenever `fd` is writable; None stops it."""
        if on_writable is None:
            self._loop.remove_writer(fd)
        else:
            self._loop.add_writer(fd, on_writable)

    def unwatch(self, fd: int) -> None:
        """Forget `fd`; idempotent."""
        if not self._loop.is_closed():
            self._loop.remove_reader(fd)
            self._loop.remove_writer(fd)

    def decide(self, on_approval: OnApproval, ask: Approval, answer: Callable[[Decision], None]) -> None:
        """Ask a person through `on_approval` (plain or async) in a task of its own; a failing callback declines."""

        async def asking() -> None:
            decision: Any = None
            try:
                decision = on_approval(ask)
                if inspect.isawaitable(decision):
                    decision = await asyncio.wait_for(decision, ask.expires_in)
            finally:
                answer(decision if isinstance(decision, Decision) else ask.decline("lockgate: no decision"))

        task = self._loop.create_task(asking())
        self._tasks.add(task)
        task.add_done_callback(self._decided)

    def _decided(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._loop.call_exception_handler(
                {"message": "on_approval failed; the call was declined", "exception": error}
            )

    def close(self) -> None:
        """Cancel what still asks a person."""
        for task in list(self._tasks):
            task.cancel()


def _expire(waiter: Waiter) -> None:
    if not waiter.done():
        waiter.set_result(None)
