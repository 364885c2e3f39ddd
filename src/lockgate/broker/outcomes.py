"""How a call ended, and what that means for its budget, its key and its caller.

Rule 1: "nothing was changed" is said only when that is certain: the operation said so in a type of `failures`, or no
        function was entered. Any other failure of a write is `unknown`.
Rule 2: of an exception only its kind and the place in the operation's own file are kept, never its text.
"""

from __future__ import annotations

import traceback
from typing import Final, Literal

import msgspec

from lockgate.audit.rows import Value
from lockgate.broker import failures
from lockgate.contract.errors import ConfigError
from lockgate.contract.reasons import Reason
from lockgate.secrets import SecretUnavailable
from lockgate.secrets.minters import MintFailed

Status = Literal["ok", "refused", "not_sent", "failed", "timeout", "unknown", "result_too_large", "result_blocked"]

REASON_OF: Final[dict[str, Reason]] = {
    "refused": "backend_failed",
    "not_sent": "backend_failed",
    "failed": "backend_failed",
    "timeout": "backend_timeout",
    "unknown": "outcome_unknown",
    "result_too_large": "result_too_large",
    "result_blocked": "result_blocked",
}
SURELY_NOT: Final = frozenset({"refused", "not_sent"})
"""The call surely had no effect: budget and key are given back."""


class Outcome(msgspec.Struct, frozen=True):
    """How the function ended. `detail` goes into the audit row."""

    status: Status
    detail: dict[str, Value] = {}


def of_exception(error: BaseException, *, write: bool, sent: bool, changed: bool) -> Outcome:
    """Return what `error`, raised by an operation's function, means.

    Args:
        write: whether the operation may change something.
        sent: whether an earlier request of this call may have left the process.
        changed: whether the backend confirmed an earlier write of this call.

    """
    detail = _place(error)
    if isinstance(error, failures.BackendError) and error.status is not None:
        detail["http_status"] = error.status
    if isinstance(error, failures.BackendRefused):
        return Outcome("unknown" if write and changed else "refused", detail)
    if isinstance(error, failures.BackendUnreachable | MintFailed | SecretUnavailable | ConfigError):
        return Outcome("unknown" if write and sent else "not_sent", detail)
    if isinstance(error, failures.BackendTooLarge):
        return Outcome("result_too_large", detail)
    if write:
        return Outcome("unknown", detail)
    if isinstance(error, failures.BackendTimedOut | TimeoutError):
        return Outcome("timeout", detail)
    return Outcome("failed", detail)


def of_deadline(*, write: bool) -> Outcome:
    """Return what it means that the function was still running at its deadline."""
    return Outcome("unknown" if write else "timeout", {"error": "deadline"})


def _place(error: BaseException) -> dict[str, Value]:
    kind = type(error)
    known = kind.__module__ == "builtins" or kind.__module__.startswith("lockgate.")
    detail: dict[str, Value] = {"error": kind.__name__ if known else "foreign"}
    frames = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)
    own = [one for one in frames if "/lockgate/" not in one.filename and "site-packages" not in one.filename]
    if own:
        detail["at"] = f"{own[-1].filename.rpartition('/')[2]}:{own[-1].lineno}"
    return detail
