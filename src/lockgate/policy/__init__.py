"""Operations, scopes and the one decision about a call. Pure: no clock, no I/O, no knowledge of who carries a call."""

from lockgate.policy.authorize import CallRequest, authorize
from lockgate.policy.compile import CompiledScope
from lockgate.policy.constraints import Constraint, at_least, at_most, length, less_than, matches, more_than, one_of
from lockgate.policy.ledger import Ledger, Reservation
from lockgate.policy.registry import Operation, Operations
from lockgate.policy.scope import Budget, Scope, Where, budget, minutes, when, where
from lockgate.policy.types import (
    Args,
    BadArguments,
    Call,
    Cents,
    Id,
    Int,
    ListOf,
    PathBeneath,
    Result,
    Text,
    Token,
)
from lockgate.policy.types import UrlArg as Url
from lockgate.policy.verdict import Charge, Obligations, Verdict

__all__ = [
    "Args",
    "BadArguments",
    "Budget",
    "Call",
    "CallRequest",
    "Cents",
    "Charge",
    "CompiledScope",
    "Constraint",
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
    "Scope",
    "Text",
    "Token",
    "Url",
    "Verdict",
    "Where",
    "at_least",
    "at_most",
    "authorize",
    "budget",
    "length",
    "less_than",
    "matches",
    "minutes",
    "more_than",
    "one_of",
    "when",
    "where",
]
