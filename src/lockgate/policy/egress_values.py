"""What the egress policy is asked, what it answers, and what it is made of.

Rule 1: a verdict names its reason, of the closed list, and the entry that decided. It holds nothing of the request.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from lockgate.policy.egress_reasons import EgressReason, LoadReason, severity
from lockgate.policy.egress_spec import ModelApi, RuleSpec
from lockgate.policy.host import Endpoint

How = Literal["connect", "http"]
HTTP_PORT: Final = 80


class Ask(msgspec.Struct, frozen=True, gc=False):
    """One question: may a caller reach `endpoint`, by CONNECT (and TLS) or by an absolute-form http request."""

    endpoint: Endpoint
    how: How = "connect"


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """The decision about one request.

    Attributes:
        allow: whether it may go on.
        reason: of the closed list; "ok" when it is allowed.
        rule: the entry that decided, as written; None when nothing matched.
        detail: a fixed sentence for the audit row, without the input.
        reported: report mode let through what `reason` would have denied.
        metadata: the destination is a cloud's metadata service.

    """

    allow: bool
    reason: EgressReason
    rule: str | None = None
    detail: str = ""
    reported: bool = False
    metadata: bool = False

    @property
    def severity(self) -> Literal[3, 5]:
        """The OCSF severity of a denial."""
        return severity(self.reason, metadata=self.metadata)

    @property
    def critical(self) -> bool:
        """Whether its alert is never suppressed."""
        return self.severity == 5


class LoadWarning(msgspec.Struct, frozen=True):
    """What is allowed and should be looked at again: an error under `strict = true`."""

    reason: LoadReason
    entry: str
    text: str


class EndpointRules(msgspec.Struct, frozen=True):
    """What may be asked of one host whose TLS is opened here.

    Attributes:
        entry: the `endpoint` or `model` entry, as written.
        rules: a request must fit one of them.
        model: the vendor's wire format, when this is a model endpoint.
        operation: the broker operation that sends it on.

    """

    entry: str
    rules: tuple[RuleSpec, ...]
    model: ModelApi | None = None
    operation: str | None = None


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """What `egress_load` makes of a table; keys are canonical text and port.

    Attributes:
        exact: verdicts by host and port.
        wild: verdicts by parent and port.
        denied: by host and port; port 0 = every port.
        denied_wild: by parent and port.
        pinned: packed addresses of private entries.
        endpoints: rules by host and port.
        wild_endpoints: rules by parent and port.
        nat64: 16 bytes of the prefix, and its length in bits.

    """

    exact: dict[tuple[str, int], Verdict]
    wild: dict[tuple[str, int], Verdict]
    denied: dict[tuple[str, int], Verdict]
    denied_wild: dict[tuple[str, int], Verdict]
    pinned: dict[tuple[str, int], frozenset[bytes]]
    endpoints: dict[tuple[str, int], EndpointRules]
    wild_endpoints: dict[tuple[str, int], EndpointRules]
    nat64: tuple[bytes, int] | None
    warnings: tuple[LoadWarning, ...]
    hash: str
