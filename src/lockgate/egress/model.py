"""Where intercepted requests to a model vendor go: to the broker, as a call of the run.

Rule 1: the gateway holds no credential and opens no connection to the vendor. The broker's operation does, after its
        own authorize(), with a key that is leased for that call.
Rule 2: without a link to the broker there is nobody who may call, and the request is refused; it is never sent on
        as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from lockgate.egress.denied import Denied
from lockgate.egress.duplex import Duplex
from lockgate.egress.http_front import Head
from lockgate.policy.egress import Verdict
from lockgate.policy.host import Endpoint

if TYPE_CHECKING:
    from lockgate.egress.session import Session

_UNKNOWN: Final = "no broker link names the run that calls"


class ModelRequest(msgspec.Struct, frozen=True):
    """One judged request to a model vendor."""

    endpoint: Endpoint
    verdict: Verdict
    head: Head
    body: bytes


class ModelLink(Protocol):
    """Answers one judged request."""

    async def answer(self, asked: ModelRequest, session: Session, client: Duplex) -> bool:
        """Write the whole response to `client`; returns whether another request may follow.

        Raises:
            Denied: the call is refused.

        """
        ...


class NoBroker:
    """The link of a gateway that stands alone."""

    async def answer(self, asked: ModelRequest, session: Session, client: Duplex) -> bool:
        """Refuse: there is no identity to call with.

        Raises:
            Denied: always.

        """
        del session, client
        refusal = Verdict(False, "caller_unauthenticated", asked.verdict.rule, _UNKNOWN)
        raise Denied("intercept", refusal, asked.endpoint)
