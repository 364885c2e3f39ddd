"""What a client is told: one form for every refusal.

Rule 1: status, reason, rule and fixed sentences; nothing of the request, of the audit log or of the network is in it.
Rule 2: a refused connection is not read any further, so the answer always closes it.
"""

from __future__ import annotations

from typing import Final, cast

import msgspec

from lockgate.policy.egress import Verdict
from lockgate.policy.egress_reasons import SENTENCES, EgressReason
from lockgate.policy.host import Refusal

ESTABLISHED: Final = b"HTTP/1.1 200 Connection established\r\n\r\n"
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
ANSWER_SECONDS: Final = 10.0
# Not refusals of a policy: the destination did not answer, or the gateway itself cannot go on.
_STATUS: Final = {
    "dial_failed": b"502 Bad Gateway",
    "tls_failed": b"502 Bad Gateway",
    "gateway_failed": b"503 Service Unavailable",
}
_json: Final = msgspec.json.Encoder()


def verdict_of(refusal: Refusal, rule: str | None = None) -> Verdict:
    """Return the denial that a refusal means; a metadata address is told by its fixed sentence."""
    return Verdict(
        allow=False,
        reason=cast("EgressReason", refusal.reason),
        rule=rule,
        detail=refusal.detail,
        metadata="metadata" in refusal.detail,
    )


def refusal_answer(verdict: Verdict) -> bytes:
    """Return the whole response: 403 (or 502, 503), JSON, `x-lockgate-reason`."""
    sentence, following = SENTENCES[verdict.reason]
    body = _json.encode(
        {"error": sentence, "reason": verdict.reason, "rule": verdict.rule, "retry": False, "next": following}
    )
    status = _STATUS.get(verdict.reason, b"403 Forbidden")
    return (
        b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nx-lockgate-reason: %b\r\n"
        b"cache-control: no-store\r\nconnection: close\r\n\r\n%b"
        % (status, len(body), verdict.reason.encode("ascii"), body)
    )
