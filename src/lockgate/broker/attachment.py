"""One execution of code as the broker sees it: from `Attach` to `CodeClosed`.

Rule 1: it is closed once, when its channel has ended *and* the supervisor said `Detach`, whichever comes second; a
        call that is still in flight is waited for a few seconds and then told as "running": its rows follow. A channel
        that waits for a request when `Detach` comes has ended by it: no request is taken after that (`enter`).
Rule 2: its row is written before the agent is told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from lockgate.audit.rows import Phase, Row, Value
from lockgate.broker.exports import Spool
from lockgate.broker.runs import Origin, Run, Ticket
from lockgate.contract import wire
from lockgate.contract.run import CallRecord, Via
from lockgate.policy.canary import Watch

OPERATION: Final = "run.code"
SETTLE_SECONDS: Final = 3.0
SCAN_BYTES: Final = 256 * 1024
MAX_URLS: Final = 256
"""URL-safe values that one execution makes known to the render guard; the rest stays unknown, so it is not live."""


class Attachment:
    """The state of one attached channel.

    Attributes:
        ticket: its ticket's value. run, bounds: what it may do. origin: what rows say about it.
        calls: what reached the edge, in order. spool: its exports. intent_id: audit id of its first row.
        urls: values of `lg.SafeUrl` fields in the results that were sent, at most `MAX_URLS`.
        violation: what broke the protocol, or None. running: the operation in flight, "" between calls.

    """

    def __init__(self, ticket: Ticket, attach: wire.Attach) -> None:
        self.ticket = ticket.value
        self.run: Run = ticket.run
        self.bounds = ticket.bounds
        code: dict[str, Value] = {
            "code_sha256": attach.code_sha256,
            "code_bytes": attach.code_bytes,
            "memory_by": attach.memory_by,
            "env": attach.env,
        }
        self.origin = Origin(
            "code", rung=attach.rung, shared_kernel=attach.shared_kernel, weakness=attach.weakness, code=code
        )
        self.calls: list[CallRecord] = []
        self.urls: dict[str, None] = {}
        self.spool = Spool(max_bytes=self.bounds.export, max_files=self.bounds.exports)
        self.intent_id = ""
        self.violation: str | None = None
        self.running = ""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._detach: wire.Detach | None = None
        self._closed = False
        self._inside = False  # whether the channel's thread has taken a request that is not answered yet

    def row(self, phase: Phase, operation: str | None = OPERATION, *, via: Via | None = "code", **more: object) -> Row:
        """A row about this execution."""
        return row(self.run, self.origin, phase, operation, via=via, **more)

    def learn(self, urls: tuple[str, ...]) -> None:
        """Keep the URL-safe values of a result that the code was given."""
        for url in urls[: MAX_URLS - len(self.urls)]:
            self.urls[url] = None

    def carries(self, name: str) -> bool:
        """Whether a complete export, or its name, holds a value that was planted in this run."""
        if not self.run.canary:
            return False
        watch = Watch(self.run.needles)
        return watch.feed(name.encode()) or any(watch.feed(part) for part in self.spool.pieces(name, SCAN_BYTES))

    def enter(self) -> bool:
        """Take a request that has come; False when the run was detached before: it must not be looked at."""
        with self._lock:
            self._inside = self._detach is None
            return self._inside

    def leave(self) -> None:
        """The request is answered; when the run was detached meanwhile, the next `enter` says so."""
        self._inside = False

    def channel_ended(self) -> wire.Detach | None:
        """The channel takes no more calls and has none in flight; returns the `Detach` when this closes it."""
        with self._lock:
            self._ended.set()
            return self._close()

    def detached(self, message: wire.Detach) -> bool:
        """The supervisor is done with it; True when this closes it, because the channel ended before."""
        with self._lock:
            self._detach = message
            self.origin.over = True
            if not self._inside:
                self._ended.set()
            return self._ended.is_set() and self._close() is not None

    def give_up(self) -> wire.Detach | None:
        """Wait `SETTLE_SECONDS` for the call in flight, then close all the same; None when that was done meanwhile."""
        self._ended.wait(SETTLE_SECONDS)
        with self._lock:
            return self._close()

    def _close(self) -> wire.Detach | None:
        """Return the `Detach` once; the caller holds the lock."""
        if self._closed or self._detach is None:
            return None
        self._closed = True
        return self._detach


def row(run: Run, origin: Origin, phase: Phase, operation: str | None, **more: object) -> Row:
    """A row of `run` that is not about an operation of the registry."""
    who = run.principal
    fields: dict[str, object] = {
        "phase": phase,
        "user": who.user,
        "agent": who.agent,
        "run": run.id,
        "tenant": who.tenant,
        "rung": origin.rung,
        "shared_kernel": origin.shared_kernel,
        "weakness": origin.weakness,
        "operation": operation,
        "scope_hash": run.scope.hash,
        **more,
    }
    return Row(**fields)  # type: ignore[arg-type]


Closed = Callable[["Attachment", wire.Detach], None]
