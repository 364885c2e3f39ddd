"""Cases about destinations, and about what a client says to the gateway.

Rule 1: the objects that run here are those of the gateway process: `Front`, `judge`. What is made up is the other side.
"""

from __future__ import annotations

import re
from typing import Any, Final

from lockgate.corpus.case import Got, bytes_of, got, raw_of, text_of, unescaped, unrunnable
from lockgate.egress import http_front
from lockgate.policy.egress import Ask, EgressPolicy
from lockgate.policy.egress_endpoint import Intercepted, judge
from lockgate.policy.host import Endpoint, Host, Refusal, parse_port

_ASKED: Final = re.compile(r"\b(CONNECT)\s+(\S+)|\b([A-Z]{3,})\s+(https?://[^/\s]+\S*)")


def endpoint_of(given: dict[str, Any]) -> Endpoint | Refusal:
    """Return the destination of an input that has host and port, through the parsers that the gateway uses."""
    raw = place_of(given)
    if "port" not in given and re.search(rb":[^\]]*\Z", raw):
        return Endpoint.parse(raw)
    host = Host.parse(raw)
    if isinstance(host, Refusal):
        return host
    port = given.get("port", 443)
    number = parse_port(str(port).encode("utf-8", "replace") if not isinstance(port, str) else bytes_of(port))
    return number if isinstance(number, Refusal) else Endpoint.of(host, number)


def place_of(given: dict[str, Any]) -> bytes:
    """Return the bytes of the destination, under whichever name the case has it."""
    raw = raw_of(given, "host", "connect", "target", "authority", "endpoint", "destination", "dst")
    if raw is None:
        unrunnable("input has no host")
    return raw


def connect(policy: EgressPolicy, given: dict[str, Any]) -> Got:
    """CONNECT to a host, as bytes, and a port."""
    endpoint = endpoint_of(given)
    if isinstance(endpoint, Refusal):
        return got(endpoint)
    verdict = policy.decide(Ask(endpoint))
    asked = b"CONNECT %b HTTP/1.1\r\nHost: %b\r\n\r\n"
    raw = place_of(given)
    raw = raw if "port" not in given and b":" in raw.rpartition(b"]")[2] else raw + b":%d" % endpoint.port
    if _front(policy, asked % (raw, raw)).verdict != ("allow" if verdict.allow else "deny"):
        unrunnable("the policy and the gateway's front do not agree")
    return got(verdict)


def _front(policy: EgressPolicy, data: bytes) -> Got:
    front = http_front.Front(policy.decide)
    verdicts: list[str] = []
    result: Got | None = None
    for event in front.feed(data):
        if isinstance(event, http_front.Request) and event.verdict is not None:
            verdicts.append("allow")
            asked = _plain(event.head)
            judged = None if asked is None else judge(policy, asked)
            if judged is not None and not judged.allow:
                verdicts[-1] = "deny"
                result = got(judged)
                break
        elif isinstance(event, http_front.Refused):
            verdicts.append("deny")
            result = got(event.verdict)
            break
    if result is None:
        # An incomplete head waits until its ten seconds are over.
        result = Got("allow", "ok") if verdicts and (front.closed or front.idle) else Got("deny", "head_timeout")
    names = ("first", "second", "third", "fourth")
    facts = {
        "connection_closed": front.closed or result.verdict == "deny",
        "requests_processed": len(verdicts),
        **dict(zip(names, verdicts, strict=False)),
    }
    return Got(result.verdict, result.reason, facts)


def _plain(head: http_front.Head) -> Intercepted | None:
    if head.how != "http" or head.endpoint is None:
        return None
    return Intercepted(
        connect=head.endpoint, sni=None, authority=head.value(b"host"), method=head.method, target=head.target,
        fields=head.fields,
    )  # fmt: skip


def raw_proxy_request(policy: EgressPolicy, given: dict[str, Any]) -> Got:
    """Bytes that a client sends to the proxy."""
    data = raw_of(given, "bytes", "raw", "request", "data", "head", "segments", "chunks")
    if data is None:
        unrunnable("input has no bytes")
    if b"\n" not in data and b"\\r\\n" in data:
        data = bytes_of(unescaped(data.decode("latin-1")))  # written out, as some write it
    return _front(policy, data)


def relayed(policy: EgressPolicy, given: dict[str, Any]) -> Got:
    """What comes to the gateway through somebody else inside the namespace: the same bytes, the same verdict."""
    flow = text_of(given, "flow")
    answer: Got | None = None
    for found in _ASKED.finditer(flow):
        method, target = bytes_of(found[1] or found[3]), bytes_of((found[2] or found[4]).rstrip(",;."))
        host = target if method == b"CONNECT" else target.split(b"/")[2]
        answer = _front(policy, b"%b %b HTTP/1.1\r\nHost: %b\r\n\r\n" % (method, target, host))
        if answer.verdict == "deny":
            break
    if answer is None:
        unrunnable("input.flow names no request")
    return answer
