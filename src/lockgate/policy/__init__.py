"""Decisions: typed operations, scope as data, one `authorize()`. Pure: no clock, no I/O."""

from __future__ import annotations

from lockgate.policy.approvals import ApprovalKey, approval_key, canonical_args
from lockgate.policy.authorize import CallRequest, authorize, request
from lockgate.policy.compile import CompiledScope
from lockgate.policy.constraints import (
    Budget,
    Constraint,
    When,
    Where,
    at_least,
    at_most,
    budget,
    length,
    less_than,
    matches,
    minutes,
    more_than,
    one_of,
    when,
    where,
)
from lockgate.policy.ledger import Ledger, Reservation
from lockgate.policy.registry import Operation, Operations
from lockgate.policy.scope import Scope
from lockgate.policy.types import (
    ArgCheck,
    Args,
    BadArguments,
    Call,
    Cents,
    Decoy,
    Id,
    Int,
    ListOf,
    PathBeneath,
    Result,
    SafeUrl,
    Text,
    Token,
)
from lockgate.policy.types import UrlArg as Url
from lockgate.policy.verdict import Charge, Obligations, Verdict

__all__ = [
    "ApprovalKey",
    "ArgCheck",
    "Args",
    "BadArguments",
    "Budget",
    "Call",
    "CallRequest",
    "Cents",
    "Charge",
    "CompiledScope",
    "Constraint",
    "Decoy",
    "Id",
    "Int",
    "Ledger",
    "ListOf",
    "Obligations",
    "Operation",
    "Operations",
    "PathBeneath",
    "Reservation",
    "Result",
    "SafeUrl",
    "Scope",
    "Text",
    "Token",
    "Url",
    "Verdict",
    "When",
    "Where",
    "approval_key",
    "at_least",
    "at_most",
    "authorize",
    "budget",
    "canonical_args",
    "length",
    "less_than",
    "matches",
    "minutes",
    "more_than",
    "one_of",
    "request",
    "when",
    "where",
]
