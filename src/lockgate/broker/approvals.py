"""Questions to a person, each about one exact call.

Rule 1: a request is bound to the run, the operation, the SHA-256 of the canonical typed arguments and an expiry. Other
        arguments are another request.
Rule 2: a grant is used once. Here that is a pop under a lock; across restarts and races it is the UNIQUE grant id of
        the intent row.
Rule 3: every wait is bounded; a run that ends voids its requests and wakes whoever waits.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from lockgate.broker.runs import Origin, Run
from lockgate.contract import wire
from lockgate.contract.reasons import Reason
from lockgate.policy import ApprovalKey, approval_key

REQUEST_SECONDS: Final = 900.0
MAX_OPEN: Final = 64
"""Open requests of one run."""


class Grant(msgspec.Struct, frozen=True):
    """A person's yes: its id, and who said so."""

    id: str
    approver: str


class _Request:
    __slots__ = ("answered", "approver", "expires", "granted", "id", "key", "run", "waiters")

    def __init__(self, run: Run, key: ApprovalKey, expires: float) -> None:
        self.id = f"ask-{os.urandom(12).hex()}"
        self.run = run
        self.key = key
        self.expires = expires
        self.answered = False
        self.granted = False
        self.approver = ""
        self.waiters = 0


class Approvals:
    """Open requests of all runs.

    Args:
        ask: pushes a request to the agent; False = nobody is there to be asked.
        wait: seconds a call waits for an answer before it is told `approval_required`. The request stays open until
            it expires: after a later yes, the same call passes once.

    """

    def __init__(self, ask: Callable[[wire.ApprovalAsked], bool], *, wait: float) -> None:
        self._ask = ask
        self._wait = wait
        self._turn = threading.Condition()
        self._requests: dict[ApprovalKey, _Request] = {}
        self._by_id: dict[str, _Request] = {}

    def obtain(
        self, run: Run, origin: Origin, operation: str, canonical: bytes, on_asked: Callable[[str], None]
    ) -> Grant | Reason:
        """Return a grant for exactly this call, or why there is none.

        Args:
            run: whose call. operation: the registry's name. canonical: its typed arguments, encoded again.
            origin: stops the wait when it is over.
            on_asked: writes the row of a new request (given its id) before anybody is asked.

        """
        key = approval_key(run.id, operation, canonical)
        now = time.monotonic()
        with self._turn:
            self._expire(now)
            request = self._requests.get(key)
            new = request is None
            if request is None:
                if sum(one.run is run for one in self._requests.values()) >= MAX_OPEN:
                    return "approval_required"
                request = _Request(run, key, min(now + REQUEST_SECONDS, run.scope.expires_at))
                self._requests[key] = self._by_id[request.id] = request
        if new:
            on_asked(request.id)
            asked = wire.ApprovalAsked(
                request=request.id,
                run=run.id,
                operation=operation,
                arguments=msgspec.Raw(canonical),
                expires_in=max(request.expires - now, 0.0),
            )
            if not self._ask(asked):
                with self._turn:
                    self._drop(request)
                return "approval_required"
        return self._await(request, origin, now + self._wait)

    def find(self, request_id: str) -> tuple[Run, str] | None:
        """Return run and operation of a request that waits for an answer, None when there is none."""
        with self._turn:
            self._expire(time.monotonic())
            request = self._by_id.get(request_id)
            if request is None or request.answered or request.run.over:
                return None
            return request.run, request.key.operation

    def decide(self, request_id: str, *, grant: bool, approver: str) -> bool:
        """Take a person's answer; False when the request is unknown, answered or too old."""
        with self._turn:
            self._expire(time.monotonic())
            request = self._by_id.get(request_id)
            if request is None or request.answered or request.run.over:
                return False
            request.answered, request.granted, request.approver = True, grant, approver
            self._turn.notify_all()
            return True

    def void(self, run: Run | None = None) -> None:
        """Drop the requests of an ended run, and have all waiting calls look whether somebody still wants them."""
        with self._turn:
            if run is not None:
                for request in [one for one in self._requests.values() if one.run is run]:
                    self._drop(request)
            self._turn.notify_all()

    def _await(self, request: _Request, origin: Origin, deadline: float) -> Grant | Reason:
        with self._turn:
            while not request.answered:
                left = min(deadline, request.expires) - time.monotonic()
                if left <= 0 or origin.over or request.run.over or request.id not in self._by_id:
                    return "approval_required"
                self._turn.wait(left)
            if request.id not in self._by_id:
                return "approval_required"  # another call of the same arguments took it, or it ran out
            self._drop(request)
            return Grant(request.id, request.approver) if request.granted else "approval_denied"

    def _drop(self, request: _Request) -> None:
        self._requests.pop(request.key, None)
        self._by_id.pop(request.id, None)

    def _expire(self, now: float) -> None:
        for request in [one for one in self._requests.values() if one.expires <= now]:
            self._drop(request)
