"""Cases about destinations, and about what a client says to the gateway.

Rule 1: the objects that run here are those of the gateway process: `Front`, `Reader`, `resolve`, `judge`. What is made
        up is the other side: bytes of a client, answers of a nameserver, a clock.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from lockgate.corpus import tls
from lockgate.corpus.case import Got, bytes_of, got, raw_of, text_of, unescaped, unrunnable
from lockgate.egress import client_hello, http_front
from lockgate.policy.egress import Ask, EgressPolicy
from lockgate.policy.egress_endpoint import Intercepted, judge
from lockgate.policy.host import Endpoint, Host, Refusal, parse_port

_PACE: Final = re.compile(r"(\d+)\s*bytes?\s*(?:per|every|each)\s*([\d.]+)?\s*(ms|s)")
_HELLO_FACTS: Final = frozenset(
    ("connect", "sni", "extensions", "fragments", "size", "padding", "length", "bytes_total", "alpn", "note", "mode")
)
_PSEUDO: Final = re.compile(r":([a-z]+)=(\S*)")


def endpoint_of(given: dict[str, Any]) -> Endpoint | Refusal:
    """Return the destination of an input that has host and port, through the parsers that the gateway uses."""
    raw = raw_of(given, "host")
    if raw is None:
        unrunnable("input has no host")
    if "port" not in given:
        return Endpoint.parse(raw)
    host = Host.parse(raw)
    if isinstance(host, Refusal):
        return host
    port = given["port"]
    number = parse_port(str(port).encode("utf-8", "replace") if not isinstance(port, str) else bytes_of(port))
    return number if isinstance(number, Refusal) else Endpoint.of(host, number)


def connect(policy: EgressPolicy, given: dict[str, Any]) -> Got:
    """CONNECT to a host, as bytes, and a port."""
    endpoint = endpoint_of(given)
    if isinstance(endpoint, Refusal):
        return got(endpoint)
    verdict = policy.decide(Ask(endpoint))
    asked = b"CONNECT %b HTTP/1.1\r\nHost: %b\r\n\r\n"
    raw = (raw_of(given, "host") or b"") + b":%d" % endpoint.port
    if b":" in raw[:-1] and _front(policy, asked % (raw, raw)).verdict != ("allow" if verdict.allow else "deny"):
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
            judged = None if asked is None or policy.rules_for(asked.connect) is None else judge(policy, asked)
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
    data = raw_of(given, "bytes")
    if data is None:
        unrunnable("input has no bytes")
    return _front(policy, data)


def relayed(policy: EgressPolicy, given: dict[str, Any]) -> Got:
    """What comes to the gateway through somebody else inside the namespace: the same bytes, the same verdict."""
    flow = text_of(given, "flow")
    found = re.search(r"CONNECT\s+(\S+)", flow)
    if found is not None:
        target = bytes_of(found[1])
        return _front(policy, b"CONNECT %b HTTP/1.1\r\nHost: %b\r\n\r\n" % (target, target))
    found = re.search(r"\b([A-Z]+)\s+(http://([^/\s]+)\S*)", flow)
    if found is None:
        unrunnable("input.flow names no request")
    parts = (bytes_of(found[1]), bytes_of(found[2]), bytes_of(found[3]))
    return _front(policy, b"%b %b HTTP/1.1\r\nHost: %b\r\n\r\n" % parts)


def tls_client_hello(policy: EgressPolicy, given: dict[str, Any]) -> Got:
    """The first bytes inside a tunnel, with their pace."""
    del policy
    connect_to = Endpoint.parse(bytes_of(given.get("connect"), "input.connect"))
    if isinstance(connect_to, Refusal):
        return got(connect_to)
    chunks, pause = _hello_chunks(given)
    reader = client_hello.Reader(connect_to, 0.0, intercepted=bool(given.get("intercepted")))
    now = 0.0
    for chunk in chunks:
        now += pause
        answer = reader.feed(chunk, now)
        if answer is not None:
            return got(answer if isinstance(answer, Refusal) else None)
    late = reader.tick(reader.deadline)  # nothing more comes
    return got(late)


def _hello_chunks(given: dict[str, Any]) -> tuple[list[bytes], float]:
    data = None
    for key, value in given.items():
        name = re.sub(r"_(?:hex|b64|base64)\Z", "", key)
        if name not in _HELLO_FACTS and isinstance(value, str):
            data = raw_of(given, name)  # whatever it is called: the first bytes that the client sends
    fragments = str(given.get("fragments", ""))
    pace = _PACE.search(fragments)
    pause = 0.0
    if pace is not None:
        pause = float(pace[2] or 1) / (1000 if pace[3] == "ms" else 1)
    if data is None:
        names = given.get("sni")
        listed = names if isinstance(names, list) else [names]  # pyright: ignore[reportUnknownVariableType]
        snis = None if names is None else [bytes_of(unescaped(str(one))) for one in listed]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        extensions: Any = given.get("extensions", [])
        size = _size(given)
        message = tls.client_hello(snis, extensions if isinstance(extensions, list) else [extensions], padding=size)  # pyright: ignore[reportUnknownArgumentType]
        # "split over records": one handshake byte in each
        data = b"".join(tls.records(message, 1 if "record" in fragments else 2**14))
    step = int(pace[1]) if pace is not None else len(data) or 1
    return [data[at : at + step] for at in range(0, len(data), step)], pause


def _size(given: dict[str, Any]) -> int:
    for name in ("size", "bytes_total", "padding", "length"):
        value = given.get(name)
        found = re.match(r"(\d+)\s*(KiB|KB|k)?", str(value)) if value is not None else None
        if found is not None:
            return int(found[1]) * (1024 if found[2] else 1)
    return 0


def intercepted_request(policy: EgressPolicy, given: dict[str, Any]) -> Got:
    """A request inside a tunnel that is opened at the gateway."""
    connect_to = Endpoint.parse(bytes_of(given.get("connect"), "input.connect"))
    if isinstance(connect_to, Refusal):
        return got(connect_to)
    if any(name in given and not given[name] for name in ("caller", "token", "run")):
        return Got("deny", "caller_unauthenticated")  # no token, no run: nothing that it sends is looked at
    decided = policy.decide(Ask(connect_to))
    if not decided.allow:
        return got(decided)
    sni: Host | Refusal | None = connect_to.host
    if "sni" in given:
        sni = None if given["sni"] is None else Host.parse(bytes_of(given["sni"], "input.sni"))
    if isinstance(sni, Refusal):
        return Got("deny", "bad_sni")
    requests: Any = given.get("requests", [given.get("request", raw_of(given, "bytes"))])
    answer = Got("deny", "bad_request")
    for one in requests if isinstance(requests, list) else [requests]:  # pyright: ignore[reportUnknownVariableType]
        text = one if isinstance(one, str) else bytes_of(one).decode("latin-1") if isinstance(one, bytes) else ""
        if text.lstrip().startswith(":"):
            answer = _second_version(policy, connect_to, sni, text, given)
        else:
            answer = _first_version(policy, connect_to, sni, bytes_of(text))
        if answer.verdict == "deny":
            return answer
    return answer


def _first_version(policy: EgressPolicy, connect_to: Endpoint, sni: Host | None, data: bytes) -> Got:
    head_end = data.find(b"\r\n\r\n") + 4
    body = data[head_end:] if head_end > 3 else b""
    named = re.search(rb"(?im)^(?:content-length|transfer-encoding)[ \t]*:", data[:head_end])
    if body and named is None and not re.match(rb"[A-Z]+ \S+ HTTP/1\.1\r\n", body):
        # The cases leave the length of a body out; the bytes behind the head are it.
        data = data[: head_end - 2] + b"Content-Length: %d\r\n\r\n" % len(body) + body
    front = http_front.Front(form="tunnel")
    held: http_front.Head | None = None
    received = bytearray()
    result = Got("deny", "head_timeout")
    for event in front.feed(data):
        if isinstance(event, http_front.Refused):
            return got(event.verdict)
        if isinstance(event, http_front.Request):
            held = event.head
            received.clear()
        elif isinstance(event, http_front.Body):
            received += event.data
        elif held is not None:
            result = _judged(policy, connect_to, sni, held, bytes(received))
            if result.verdict == "deny":
                return result
    return result


def _judged(policy: EgressPolicy, connect_to: Endpoint, sni: Host | None, head: http_front.Head, body: bytes) -> Got:
    asked = Intercepted(
        connect=connect_to, sni=sni, authority=head.value(b"host"), method=head.method, target=head.target,
        fields=head.fields, body=body,
    )  # fmt: skip
    return got(judge(policy, asked))


def _second_version(
    policy: EgressPolicy, connect_to: Endpoint, sni: Host | None, text: str, given: dict[str, Any]
) -> Got:
    """Judge a request of HTTP/2, written as `:name=value` words and `name: value` lines."""
    pseudo = dict(_PSEUDO.findall(text))
    lines = re.findall(r"(?m)^([A-Za-z][\w-]*):\s*(.*)$", text)
    fields = [(bytes_of(name.lower()), bytes_of(value.strip())) for name, value in lines]
    if "protocol" in pseudo:
        fields.append((b":protocol", bytes_of(pseudo["protocol"])))
    body = given.get("body", "")
    asked = Intercepted(
        connect=connect_to,
        sni=sni,
        authority=bytes_of(pseudo.get("authority", connect_to.host.text)),
        method=str(pseudo.get("method", "GET")),
        target=bytes_of(pseudo.get("path", "/")),
        fields=tuple(fields),
        body=bytes_of(body if isinstance(body, str) else json.dumps(body)),
        http="2",
    )
    return got(judge(policy, asked))
