"""From codes and reasons on the wire to typed errors."""

from __future__ import annotations

from typing import Final

from lockgate.contract import errors, wire
from lockgate.contract.errors import CallFailed, Denied, LockgateError, OutcomeUnknown, ProcessDied, ResultWithheld
from lockgate.contract.reasons import SENTENCES, Reason

_BY_CODE: Final[dict[str, type[LockgateError]]] = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, LockgateError) and not issubclass(kind, Denied | CallFailed)
}
_DENIED: Final[frozenset[Reason]] = frozenset(
    {
        "not_available",
        "argument_not_allowed",
        "budget_exhausted",
        "approval_required",
        "approval_denied",
        "expired",
        "latched",
        "bad_request",
        "conflict",
    }
)
_WITHHELD: Final[frozenset[Reason]] = frozenset({"result_too_large", "result_blocked"})


def from_fault(fault: wire.Fault) -> LockgateError:
    """Return the error a child reported; an unknown code is our own fault."""
    return _BY_CODE.get(fault.code, errors.HostFault)(fault.message, next_step=fault.next_step)


def died(process: str, message: str | None = None) -> ProcessDied:
    """Return a fresh error for a process that is gone (one per waiter: tracebacks are not shared)."""
    step = "open a new Gate; calls that were in flight are in the audit log, writes among them as unknown"
    if process == "supervisor":
        step = "open a new Gate; the runs that were in flight are dead"
    return ProcessDied(message or f"the {process} is gone", next_step=step, process=process)


def sentence(reason: str) -> tuple[Reason, str, str]:
    """Return the reason, its fixed sentence and its next step; a reason off the list counts as `unavailable`."""
    known: Reason = reason if reason in SENTENCES else "unavailable"
    return known, *SENTENCES[known]


def from_reason(operation: str, reason: str, audit_id: str | None) -> Denied | CallFailed:
    """Return the error for a call that has no result."""
    known, message, step = sentence(reason)
    text = f"{operation}: {message}"
    if known in _DENIED:
        return Denied(text, next_step=step, operation=operation, reason=known, audit_id=audit_id)
    kind = OutcomeUnknown if known == "outcome_unknown" else ResultWithheld if known in _WITHHELD else CallFailed
    return kind(text, next_step=step, operation=operation, reason=known, audit_id=audit_id)
