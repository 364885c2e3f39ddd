"""One call on its way through the edge, and the answer it ends in.

Rule 1: rows are made here alone, complete on every path: who, whose data, which run, which operation, which arguments.
Rule 2: `origin` is copied into them and read for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from lockgate.audit.rows import Phase, Row, encode
from lockgate.broker.approvals import Grant
from lockgate.broker.call import Call
from lockgate.broker.runs import Origin, Run
from lockgate.broker.threads import Claim
from lockgate.contract.reasons import Reason
from lockgate.contract.run import CallRecord
from lockgate.policy import Operation, Reservation, Verdict


class Reply(msgspec.Struct, frozen=True):
    """The answer of the edge: exactly one of `ok` (JSON) and `reason` is set."""

    operation: str
    audit_id: str
    ok: bytes | None = None
    reason: Reason | None = None
    verdict: Literal["allow", "deny"] = "deny"
    rule: str | None = None
    status: str = "denied"

    @property
    def record(self) -> CallRecord:
        """The same, as it stands in a run's result."""
        return CallRecord(self.operation, self.verdict, self.rule, self.reason, self.status, self.audit_id)


class Work:
    """One call on its way through the edge."""

    __slots__ = (
        "args",
        "args_hash",
        "call",
        "canonical",
        "claim",
        "grant",
        "intent_id",
        "key",
        "late",
        "name",
        "operation",
        "origin",
        "reservation",
        "run",
        "started",
        "verdict",
    )

    def __init__(self, run: Run, origin: Origin, name: str, late: Callable[[Reply], None], started: float) -> None:
        self.run = run
        self.origin = origin
        self.name = name
        self.late = late
        self.started = started
        self.operation: Operation | None = None
        self.args: Any = None
        self.args_hash = ""
        self.canonical = b""
        self.verdict: Verdict | None = None
        self.key: str | None = None
        self.grant: Grant | None = None
        self.reservation: Reservation | None = None
        self.intent_id = ""
        self.call: Call | None = None
        self.claim = Claim()

    @property
    def effect(self) -> Literal["read", "write"]:
        """Of the operation; "write" when it is not known, which is the careful answer."""
        return "write" if self.operation is None or self.operation.effect == "write" else "read"

    @property
    def claims(self) -> bool:
        """Whether it claims a key or a grant, and so needs a durable intent: writes, and whatever a person allowed."""
        return self.grant is not None or self.effect == "write"

    def prepare(self) -> tuple[bytes, bytes]:
        """Encode what the intent rows, and the outcome rows, of an allowed read have in common, up to the hash."""
        held, self.args_hash = self.args_hash, ""
        pair = encode(self.row("intent"))[:-1], encode(self.row("outcome", status="ok"))[:-1]
        self.args_hash = held
        self.origin.prefixes[self.name] = pair
        return pair

    def row(self, phase: Phase, **more: Any) -> Row:
        """A row about this call, complete on every path (user, agent, run, operation, argument hash)."""
        run, origin, verdict = self.run, self.origin, self.verdict
        who = run.principal
        if verdict is not None:
            more.setdefault("verdict", verdict.effect)
            more.setdefault("rule", verdict.rule)
        return Row(
            phase=phase,
            user=who.user,
            agent=who.agent,
            run=run.id,
            tenant=who.tenant,
            via=origin.via,
            rung=origin.rung,
            shared_kernel=origin.shared_kernel,
            weakness=origin.weakness,
            operation=self.name,
            effect=None if self.operation is None else self.effect,
            scope_hash=run.scope.hash,
            args_hash=self.args_hash,
            idempotency_key=self.key,
            grant_id=None if self.grant is None else self.grant.id,
            approver=None if self.grant is None else self.grant.approver,
            **more,
        )
