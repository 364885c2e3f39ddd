"""Values of the public API that belong to the agent's side alone."""

from __future__ import annotations

from typing import Any

import msgspec


class Decision(msgspec.Struct, frozen=True):
    """A person's answer. `approver`: who it was, for the audit row."""

    grant: bool
    approver: str


class Approval(msgspec.Struct, frozen=True, kw_only=True):
    """A call that waits for a person, handed to `on_approval`.

    Attributes:
        request: names this one question. run: the run it came from. operation: what is asked for.
        arguments: the typed arguments; a grant holds for exactly these, once.
        expires_in: seconds until the question is void.

    """

    request: str
    run: str
    operation: str
    arguments: Any
    expires_in: float

    def grant(self, approver: str) -> Decision:
        """Say yes in the name of `approver`."""
        return Decision(grant=True, approver=approver)

    def decline(self, approver: str) -> Decision:
        """Say no in the name of `approver`."""
        return Decision(grant=False, approver=approver)


class CallOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one call, as a value: for a tool dispatcher that must not end the agent by an exception.

    Attributes:
        value: the decoded result; None when there is a `reason`.
        reason: why there is no result, a member of `Reason`, or None when the call succeeded.
        text: the fixed sentence and next step that code and model may see.
        audit_id: names the row.

    """

    operation: str
    value: Any = None
    reason: str | None = None
    text: str = ""
    audit_id: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the call succeeded."""
        return self.reason is None
