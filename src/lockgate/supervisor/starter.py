"""One thread for the calls that may block: `Template.start` and `Template.close`.

Rule 1: it lives as long as the process. PR_SET_PDEATHSIG follows the *thread* that started a child (prctl(2)), so a
        thread that ended would take its templates along.
Rule 2: it touches nothing of the reactor: a job goes in, its outcome comes back through an eventfd.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockgate.contract.errors import HostFault, LockgateError

if TYPE_CHECKING:
    from lockgate.supervisor.loop import Reactor

Job = Callable[[], Any]
Outcome = Callable[[Any, LockgateError | None], object]


class Starter:
    """Runs jobs one after another off the reactor's thread."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._jobs: queue.SimpleQueue[tuple[Job, Outcome] | None] = queue.SimpleQueue()
        self._outcomes: deque[tuple[Outcome, Any, LockgateError | None]] = deque()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._open = True
        reactor.add(self._event, self._on_event)
        self._thread = threading.Thread(target=self._work, name="starter", daemon=True)
        self._thread.start()

    def submit(self, job: Job, outcome: Outcome) -> None:
        """Run `job` in the thread, then `outcome(value, None)` or `outcome(None, error)` in the reactor."""
        self._jobs.put((job, outcome))

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, outcome = item
            value: Any = None
            error: LockgateError | None = None
            try:
                value = job()
            except LockgateError as err:
                error = err
            except Exception as err:  # noqa: BLE001 - whatever it is, the run that waits must hear of it
                error = HostFault(
                    f"a template could not be started ({type(err).__name__}: {err})",
                    next_step="run `lockgate doctor`; if it agrees with this, report it",
                )
            self._outcomes.append((outcome, value, error))
            with contextlib.suppress(OSError):
                os.eventfd_write(self._event, 1)

    def _on_event(self, _mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        while self._outcomes:
            outcome, value, error = self._outcomes.popleft()
            outcome(value, error)

    def close(self, seconds: float = 15.0) -> None:
        """End the thread after the jobs it has, within `seconds`, and deliver what came of them; idempotent."""
        if self._open:
            self._open = False
            self._jobs.put(None)
            self._thread.join(seconds)
            self._on_event(0)
            self._reactor.remove(self._event)
            os.close(self._event)
