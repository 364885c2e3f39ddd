"""Cases about requests inside a tunnel that is opened at the gateway, of HTTP/1.1 and of HTTP/2.

Rule 1: `Front` and `judge` are those of the gateway process. A request of HTTP/2 is judged as its fields say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final, cast

from lockgate.corpus.case import Got, bytes_of, got, listed, raw_of, unrunnable
from lockgate.corpus.network import endpoint_of
from lockgate.egress import http_front
from lockgate.policy.egress import Ask, EgressPolicy
from lockgate.policy.egress_endpoint import Intercepted, judge
from lockgate.policy.host import Endpoint, Host, Refusal

_PSEUDO: Final = re.compile(r"(?<!\S):([a-z]+)(?:=|:[ \t]*)(\S*)")
_FIRST: Final = re.compile(r"\s*\S+ \S+ HTTP/[01]")
_NEXT: Final = re.compile(r"(?i)stream|;|,|\bthen\b|\||\n[ \t\r]*\n")


def intercepted_request(policy: EgressPolicy, given: dict[str, Any]) -> Got:
    """A request inside a tunnel that is opened at the gateway."""
    connect_to = endpoint_of(given)
    if isinstance(connect_to, Refusal):
        return got(connect_to)
    if any(name in given and not given[name] for name in ("caller", "token", "run")):
        return Got("deny", "caller_unauthenticated")  # no token, no run: nothing that it sends is looked at
    decided = policy.decide(Ask(connect_to))
    if not decided.allow:
        return got(decided)
    sni: Host | Refusal = connect_to.host
    if "sni" in given:
        if given["sni"] is None:
            return Got("deny", "sni_missing")
        sni = Host.parse(bytes_of(given["sni"], "input.sni"))
    if isinstance(sni, Refusal):
        return Got("deny", "bad_sni")
    requests: Any = given.get("requests", given.get("streams", given.get("request")))
    answer = Got("deny", "bad_request")
    for one in listed(raw_of(given, "bytes", "raw", "request") if requests is None else requests):
        data: Any = _spelled(one, given) if isinstance(one, str | dict) else one  # pyright: ignore[reportUnknownArgumentType]
        if not isinstance(data, str | bytes):
            unrunnable("input.request is no text")
        text = data.decode("latin-1") if isinstance(data, bytes) else data
        if _PSEUDO.search(text) is not None and _FIRST.match(text) is None:
            answer = _second_version(policy, connect_to, sni, text, given)
        else:
            answer = _first_version(policy, connect_to, sni, bytes_of(text))
        if answer.verdict == "deny":
            return answer
    return answer


def _spelled(one: str | dict[str, Any], given: dict[str, Any]) -> str:
    """Return the text of a request that is a table, or whose body stands beside it."""
    body: Any = given.get("body")
    if isinstance(one, dict):
        fields = cast("dict[str, Any]", one.get("headers", one.get("fields", {})))
        lines = [f"{name}: {value}" for name, value in fields.items()] if isinstance(fields, dict) else []  # pyright: ignore[reportUnnecessaryIsInstance]
        target = str(one.get("target", one.get("path", "/")))
        body = one.get("body", body)
        one = "\r\n".join([f"{one.get('method', 'GET')} {target} HTTP/1.1", *lines, "", ""])
    if body is None or not one.endswith("\r\n\r\n"):
        return one
    return one + (body if isinstance(body, str) else json.dumps(body))


def _first_version(policy: EgressPolicy, connect_to: Endpoint, sni: Host, data: bytes) -> Got:
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


def _judged(policy: EgressPolicy, connect_to: Endpoint, sni: Host, head: http_front.Head, body: bytes) -> Got:
    asked = Intercepted(
        connect=connect_to, sni=sni, authority=head.value(b"host"), method=head.method, target=head.target,
        fields=head.fields, body=body,
    )  # fmt: skip
    return got(judge(policy, asked))


def _second_version(policy: EgressPolicy, connect_to: Endpoint, sni: Host, text: str, given: dict[str, Any]) -> Got:
    """Judge requests of HTTP/2, written as `:name=value` or `:name: value` and `name: value` lines."""
    lines = re.findall(r"(?m)^([A-Za-z][\w-]*):[ \t]*(.*)$", text)
    fields = [(bytes_of(name.lower()), bytes_of(value.strip())) for name, value in lines]
    body = given.get("body", "")
    answer = Got("deny", "bad_request")
    for stream in _streams(text):
        if any(len(values) > 1 for name, values in stream.items() if name != "authority"):
            return Got("deny", "bad_request")  # each pseudo-header stands once (RFC 9113 section 8.3)
        first = {name: values[0] for name, values in stream.items()}
        extra = [(b":protocol", bytes_of(first["protocol"]))] if "protocol" in first else []
        extra += [(b"host", bytes_of(one)) for one in stream.get("authority", [])[1:]]
        asked = Intercepted(
            connect=connect_to,
            sni=sni,
            authority=bytes_of(first.get("authority", connect_to.host.text)),
            method=first.get("method", "GET"),
            target=bytes_of(first.get("path", "/")),
            fields=(*fields, *extra),
            body=bytes_of(body if isinstance(body, str) else json.dumps(body)),
            http="2",
        )
        answer = got(judge(policy, asked))
        if answer.verdict == "deny":
            break
    return answer


def _streams(text: str) -> Iterator[dict[str, list[str]]]:
    """Yield the pseudo-headers of each stream: a new one begins where a name comes again behind a word for "next"."""
    stream: dict[str, list[str]] = {}
    end = 0
    for found in _PSEUDO.finditer(text):
        name, value = found[1], found[2].rstrip(";,") if text[found.end() :].strip() else found[2]
        if name in stream and _NEXT.search(text[end - 1 : found.start()]):
            yield stream
            stream = {}
        stream.setdefault(name, []).append(value)
        end = found.end()
    if stream:
        yield stream
