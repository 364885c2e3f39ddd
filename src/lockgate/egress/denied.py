"""A refusal on its way to its row and its answer."""

from __future__ import annotations

from typing import Final

from lockgate.audit.denials import Kind
from lockgate.audit.rows import Value
from lockgate.policy.egress import Verdict
from lockgate.policy.host import Endpoint

LOST: Final = Verdict(False, "gateway_failed", None, "rows cannot be stored")


class Denied(Exception):
    """This request is refused.

    Args:
        kind: which part refused. verdict: why. endpoint: where it would have led, where that could be read.
        facts: more for the row.

    """

    def __init__(self, kind: Kind, verdict: Verdict, endpoint: Endpoint | None = None, **facts: Value) -> None:
        super().__init__(verdict.reason)
        self.kind: Kind = kind
        self.verdict = verdict
        self.endpoint = endpoint
        self.facts = facts
