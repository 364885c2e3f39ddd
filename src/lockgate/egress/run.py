"""One run at the gateway: who it is, what it may still use, what belongs to it.

Rule 1: a token names exactly one run; only its hash is kept here, and it dies with the run.
Rule 2: budgets and canaries are the run's, whatever number of connections it opens. They only ever go down.
Rule 3: when a run ends or is killed, its connections end with it, tunnels in the kernel included.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import threading
from collections.abc import Callable, Iterable
from typing import Final

from lockgate.egress.ca import Authority
from lockgate.egress.model import ModelLink, NoBroker
from lockgate.egress.record import Who
from lockgate.egress.relay import Pump, Tunnel
from lockgate.policy.canary import Needles, Watch
from lockgate.policy.egress import Verdict
from lockgate.policy.egress_budget import RunBudget
from lockgate.policy.egress_spec import Limits
from lockgate.policy.host import Endpoint, Host, Refusal

TOKEN_BYTES: Final = 32
TOKEN_CHARS: Final = 43


def new_token() -> str:
    """Return a fresh token of `TOKEN_CHARS` characters."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def token_key(token: bytes) -> bytes:
    """Return what a token is looked up by: its hash, so that a comparison's time says nothing about the token."""
    return hashlib.sha256(token).digest()


class Run:
    """One run.

    Args:
        who: for its rows.
        limits: its budgets.
        canaries: planted values; a connection that carries one ends the run.
        killed: told once, with the reason, when the run is killed from here.
        model: where its requests to model vendors go; closed with the run.

    Attributes:
        over: it ended; nothing is taken from it any more.
        authority: signs for the hosts whose TLS is opened here, made when first needed.

    """

    def __init__(
        self,
        who: Who,
        limits: Limits,
        canaries: Iterable[str] = (),
        killed: Callable[[str], None] | None = None,
        model: ModelLink | None = None,
    ) -> None:
        self.who = who
        self.over = False
        self.model: ModelLink = model or NoBroker()
        self.authority: Authority | None = None
        self._budget = RunBudget(limits)
        needles = Needles.of(tuple(canaries))
        self._watch = Watch(needles) if canaries else None
        self._killed = killed
        self._lock = threading.Lock()  # the pump charges from its own thread
        self._tasks: set[asyncio.Task[None]] = set()
        self._tunnels: set[Tunnel] = set()

    def enter(self) -> Refusal | None:
        """Take one connection from the budget."""
        with self._lock:
            return self._budget.take_connection()

    def leave(self) -> None:
        """Give the connection back."""
        with self._lock:
            self._budget.drop_connection()

    def request(self, endpoint: Endpoint, verdict: Verdict) -> Refusal | None:
        """Take one request to an allowed destination from the budgets of requests and names."""
        with self._lock:
            refusal = self._budget.take_request()
            return self._budget.take_name(verdict, endpoint.host) if refusal is None else refusal

    def charge(self, host: Host, count: int) -> Refusal | None:
        """Take bytes that are about to leave from the budget."""
        with self._lock:
            return self._budget.take_bytes(host, count)

    def planted(self, *parts: bytes) -> bool:
        """Whether what is about to leave holds a canary."""
        watch = self._watch
        return watch is not None and any(watch.feed(part) for part in parts if part)

    def hold(self, task: asyncio.Task[None]) -> None:
        """Let `task` end with the run."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def hold_tunnel(self, tunnel: Tunnel) -> None:
        """Let `tunnel` end with the run."""
        self._tunnels.add(tunnel)

    def drop_tunnel(self, tunnel: Tunnel) -> None:
        """Forget a tunnel that has ended."""
        self._tunnels.discard(tunnel)

    def kill(self, reason: str, pump: Pump, *, spare: asyncio.Task[None] | None = None) -> None:
        """End the run because of what it did, and tell whoever started it.

        Args:
            reason: of `egress_reasons`.
            pump: where its tunnels are.
            spare: the task that is about to answer; it ends by itself.

        """
        if self.over:
            return
        killed = self._killed
        self.end(pump, spare=spare)
        if killed is not None:
            killed(reason)

    def end(self, pump: Pump, *, spare: asyncio.Task[None] | None = None) -> None:
        """Cut everything that belongs to the run; idempotent."""
        self.over = True
        self.model.close()
        for task in list(self._tasks):
            if task is not spare:
                task.cancel()
        for tunnel in list(self._tunnels):
            pump.cut(tunnel, None)
