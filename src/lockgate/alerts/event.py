"""Which audit rows are denials, and what is said of one.

Rule 1: this is the only place that decides it, and it looks at rows alone: a path that denies without a row does not
        exist, so none denies without an alert.
Rule 2: a reason is one of a closed vocabulary, never a sentence: sentences may hold values.
Rule 3: pure and total: a row of an unknown kind that says "deny" is an alert of an unknown kind.
"""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

from lockgate.audit.rows import StoredRow, Value
from lockgate.contract.reasons import SENTENCES as CALL_REASONS
from lockgate.policy.egress_reasons import CRITICAL as EGRESS_CRITICAL
from lockgate.policy.egress_reasons import SENTENCES as EGRESS_REASONS

Kind = Literal["operation", "network", "http", "dns", "render", "export", "rung", "run", "finding", "audit"]
Severity = Literal[3, 5]
MEDIUM: Final[Severity] = 3
CRITICAL: Final[Severity] = 5

OWN_CRITICAL: Final = frozenset(
    {"self_check", "protocol_violation", "audit_gap", "audit_replaced", "escalation", "overflow"}
)
CRITICAL_REASONS: Final = EGRESS_CRITICAL | OWN_CRITICAL
FINDINGS: Final = frozenset({"canary", "foreign_credential", "trifecta", "tainted_arg", "self_check"})
"""Reasons that are about what was found, and not about where it was found."""
_EGRESS_KINDS: Final[dict[str, Kind]] = {"http": "http", "intercept": "http", "dns": "dns", "canary": "finding"}
_WORD: Final = re.compile(r"([a-z][a-z0-9_]{1,63})(?=:|\Z)")
_UNBROKEN: Final = str.maketrans("", "", "[]")


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One denial.

    Attributes:
        audit_id: of its row. seq: the row's place in the chain. at: wall clock, seconds since the epoch.
        kind: which path denied. reason: of a closed vocabulary. rule: what decided. severity: OCSF's, 3 or 5.
        user, agent, run, tenant, tool, via, rung: from the row. operation: as asked for, hostile text.
        effect: of the operation.
        host: canonical, "" where none was parsed. port: 0 where none.
        method, path (without query), qtype: of a request.
        policy: hash of what decided. count: how often it happened at once.

    """

    audit_id: str
    seq: int
    at: float
    kind: Kind
    reason: str
    rule: str = ""
    severity: Severity = MEDIUM
    user: str = ""
    agent: str = ""
    run: str = ""
    tenant: str = ""
    tool: str = ""
    via: str = ""
    rung: str = ""
    operation: str = ""
    effect: str = ""
    host: str = ""
    port: int = 0
    method: str = ""
    path: str = ""
    qtype: str = ""
    policy: str = ""
    count: int = 1

    @property
    def critical(self) -> bool:
        """Whether it is told whatever was told before."""
        return self.severity == CRITICAL


def classify(row: StoredRow) -> Event | None:
    """Return the denial that `row` is, or None when it is none."""
    if row.phase == "gap":
        return _event(row, "audit", "audit_gap")
    if row.phase == "run":
        killed = row.detail.get("killed_by")
        # A broken protocol has a denial row of its own, which says what was broken.
        return _event(row, "run", f"killed_{killed}") if killed and killed != "protocol" else None
    if row.phase == "bound":
        return _event(row, "run", _word(row.reason) or _last(row.rule) or "bound")
    if row.verdict not in {"deny", "needs_approval"} or row.phase not in {"denied", "render", "egress"}:
        return None
    reason = _reason(row)
    if row.phase == "render":
        return _event(row, "finding" if reason in FINDINGS else "render", reason)
    if row.phase == "egress":
        kind = _EGRESS_KINDS.get(_text(row, "kind"), "network")
        return _event(row, "finding" if reason in FINDINGS else kind, reason)
    if row.rule == "protocol":
        return _event(row, "finding", "protocol_violation")
    if reason in FINDINGS:
        return _event(row, "finding", reason)
    if row.operation == "host.export":
        return _event(row, "export", reason)
    if row.rule is not None and row.rule.startswith("rung."):
        return _event(row, "rung", _last(row.rule))
    return _event(row, "operation", reason)


def _reason(row: StoredRow) -> str:
    """The class of the denial: the row's own where it names one, else what the caller was told."""
    word = _word(row.reason)
    if word is not None and (row.phase in {"render", "egress"} or word in EGRESS_REASONS or word in CALL_REASONS):
        return word
    return row.visible or "denied"


def _word(text: str | None) -> str | None:
    found = _WORD.match(text or "")
    return found[1] if found else None


def _last(rule: str | None) -> str:
    return (rule or "").rpartition(".")[2]


def _text(row: StoredRow, name: str) -> str:
    value: Value = row.detail.get(name)
    return "" if value is None else str(value)


def _event(row: StoredRow, kind: Kind, reason: str) -> Event:
    host, port = _destination(_text(row, "destination"))
    critical = reason in CRITICAL_REASONS or row.detail.get("severity") in {"critical", 5}
    count = row.detail.get("count")
    return Event(
        audit_id=row.id,
        seq=row.seq,
        at=row.at,
        kind=kind,
        reason=reason,
        rule=row.rule or "",
        severity=CRITICAL if critical else MEDIUM,
        user=row.user,
        agent=row.agent,
        run=row.run,
        tenant=row.tenant,
        tool=_text(row, "tool"),
        via=row.via or "",
        rung=row.rung or "",
        operation=row.operation or "",
        effect=row.effect or "",
        host=host,
        port=port,
        method=_text(row, "method"),
        path=_text(row, "path").partition("?")[0],
        qtype=_text(row, "qtype"),
        policy=_text(row, "policy"),
        count=count if type(count) is int and count > 0 else 1,
    )


def _destination(text: str) -> tuple[str, int]:
    """Split what a row says of a destination; rows of the render guard hold it with its dots broken."""
    if "[.]" in text or "[:]" in text:
        text = text.translate(_UNBROKEN)
    head, colon, tail = text.rpartition(":")
    if colon and not text.endswith("]") and tail.isascii() and tail.isdigit() and 0 < len(tail) <= 5:
        return head, int(tail)
    return text, 0
