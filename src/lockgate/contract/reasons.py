"""The closed list of reasons that code, model and agent may see (C8).

Rule 1: one fixed sentence and one next step per reason; nothing is interpolated but the operation's name that the
        caller itself used.
Rule 2: "unknown" and "not in scope" are the same reason, `not_available`.
"""

from __future__ import annotations

from typing import Final, Literal

Reason = Literal[
    "not_available",
    "argument_not_allowed",
    "budget_exhausted",
    "approval_required",
    "approval_denied",
    "expired",
    "latched",
    "busy",
    "conflict",
    "bad_request",
    "result_too_large",
    "result_blocked",
    "backend_failed",
    "backend_timeout",
    "outcome_unknown",
    "unavailable",
]

SENTENCES: Final[dict[Reason, tuple[str, str]]] = {
    "not_available": ("This operation is not available in this run", "call host.operations() to see what is"),
    "argument_not_allowed": ("An argument is outside what this run may ask for", "use values that the task gave you"),
    "budget_exhausted": (
        "The budget of this operation is spent or would be exceeded",
        "ask for less, or stop here and report",
    ),
    "approval_required": (
        "A person must approve this exact call first",
        "report what you want to do and wait for approval",
    ),
    "approval_denied": ("A person declined this exact call", "do not repeat it; report that it was declined"),
    "expired": ("The scope of this run has expired", "stop here; a new run is needed"),
    "latched": (
        "This run has read data that may not leave by this operation",
        "report the result instead of sending it",
    ),
    "busy": (
        "Too many calls are in flight, or this same call is still running",
        "wait for the earlier answers, then call again",
    ),
    "conflict": ("The same request was made before with other arguments", "do not repeat it with changed values"),
    "bad_request": ("The arguments do not have the declared types", "call host.operations() to see names and types"),
    "result_too_large": ("The result is larger than this operation may return", "ask for less"),
    "result_blocked": (
        "The result was withheld because it held something that must not leave",
        "report this to the operator",
    ),
    "backend_failed": (
        "The service behind this operation refused or failed; nothing was changed",
        "report the failure",
    ),
    "backend_timeout": (
        "The service behind this operation did not answer in time; nothing was changed",
        "report the failure",
    ),
    "outcome_unknown": (
        "It is unknown whether this took effect",
        "do not repeat it; report that the outcome is unknown",
    ),
    "unavailable": ("The broker cannot take calls now; nothing was done", "report that the system is unavailable"),
}
