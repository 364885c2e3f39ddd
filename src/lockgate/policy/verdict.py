"""A decision is a value with a reason.

Rule 1: `reason` is for the audit row and may hold values; `visible` is all that code, model and agent may learn.
Rule 2: a verdict changes nothing. What must happen because of it stands in its obligations, for the edge to do.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from lockgate.contract.reasons import Reason

Effect = Literal["allow", "deny", "needs_approval"]


class Charge(msgspec.Struct, frozen=True, gc=False):
    """What one call takes from one budget.

    Attributes:
        key: the budget: level of the scope, operation, "calls" or the field that is summed.
        amount: how much this call takes (1 for "calls").
        limit: the budget; the sum of all reservations never exceeds it.

    """

    key: tuple[str, str, str]
    amount: int
    limit: int


class Obligations(msgspec.Struct, frozen=True, gc=False):
    """What the edge owes before and after an allowed call.

    Attributes:
        charges: budgets to reserve before the call, all or none.
        approval: a person must grant these exact arguments first.
        labels: what the operation declared of its data and its destination, for the latch (E7).

    """

    charges: tuple[Charge, ...] = ()
    approval: bool = False
    labels: tuple[str, ...] = ()


NONE: Final = Obligations()


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """The decision about one call.

    Attributes:
        effect: allow, deny, or allow once a person agrees.
        rule: the rule that decided ("refund.amount.at_most"), None when nothing allowed it.
        path: JSON pointer to the argument that decided, or None.
        reason: for the audit row only; may hold values.
        visible: for code and model; the same for "unknown" and "not in scope" (C8). None when allowed.
        obligations: what the edge has to do.

    """

    effect: Effect
    rule: str | None = None
    path: str | None = None
    reason: str = ""
    visible: Reason | None = None
    obligations: Obligations = NONE
