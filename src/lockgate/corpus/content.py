"""Cases about what would leave inside an allowed request: planted values, budgets, and what a run has read.

Rule 1: the planted values are known before the case runs, as they are in a run; they are collected from the whole file.
Rule 2: a request is looked at as the gateway looks at it: host, path, fields and body go through one `Watch`.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from typing import Annotated, Any, Final

import msgspec

from lockgate.corpus.arguments import WHO, Done
from lockgate.corpus.case import Got, bytes_of, got, raw_of, unrunnable
from lockgate.policy import Args, Call, Operations, Scope, Text, authorize, request
from lockgate.policy.canary import Needles, Watch
from lockgate.policy.egress import Ask, EgressPolicy
from lockgate.policy.egress_budget import RunBudget
from lockgate.policy.egress_endpoint import Intercepted, judge
from lockgate.policy.host import Endpoint, Host, Refusal

KNOWN: Final = "LGCANARY7f3a9c1e5d2b4860"
_CANARY: Final = re.compile(r"LGCANARY[0-9a-f]{16}")
_SIZES: Final = {"b": 1, "bytes": 1, "kb": 1000, "kib": 1024, "mb": 10**6, "mib": 2**20, "gb": 10**9, "gib": 2**30}
_SIZE: Final = re.compile(r"(?i)(\d+(?:\.\d+)?)\s*(bytes|[kmg]i?b|b)\b")
_SIZED: Final = re.compile(r"(?i)bytes|size|total|upload|sent|volume")
_MANY: Final = re.compile(r"(\d+)\s+distinct")
_FACTS: Final = frozenset(("to", "host", "path", "body", "method", "budget", "note", "sink", "tool", "policy"))
_ELLIPSIS: Final = re.compile(r"\A(?:\.\.\.|\u2026)")
_CALL: Final = re.compile(r"\A\s*([A-Za-z_]\w*)\((.*)\)\s*\Z", re.DOTALL)
_PUBLIC: Final = re.compile(r"(?i)search|post|tweet|comment|publish|issue|gist|paste|lookup|browse|fetch")


def planted(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the planted values of a file: those that stand in it, plain, reversed or simply encoded."""
    found = {KNOWN}
    for text in texts:
        for form in (text, text[::-1], *_decoded(text)):
            found.update(_CANARY.findall(form))
    return tuple(sorted(found))


def _decoded(text: str) -> Iterable[str]:
    for word in re.findall(r"[0-9A-Za-z+/=_-]{16,}", text):
        for decode in (bytes.fromhex, base64.urlsafe_b64decode, base64.b64decode, base64.b32decode):
            try:
                yield decode(word).decode("latin-1")
            except (ValueError, binascii.Error):
                continue


class Content:
    """Runs the cases of one file. `canaries`: what was planted."""

    def __init__(self, canaries: tuple[str, ...]) -> None:
        self._needles = Needles.of(canaries)

    def run(self, policy: EgressPolicy, given: dict[str, Any]) -> Got:
        """Run one case, by what its input holds."""
        if "host_sequence" in given or "hosts" in given:
            return self._hosts(policy, given)
        if "to" not in given and ("query" in given or "tool" in given or "call" in given):
            return self._call(given)
        sizes = [name for name, value in given.items() if _SIZED.search(name) and _is_size(value)]
        if sizes:
            return _bytes(policy, given, sizes[0])
        requests: Any = given.get("requests", given.get("sequence", [given]))
        if not isinstance(requests, list):
            unrunnable("input.requests is no list")
        watch = Watch(self._needles)
        answer = Got("allow", "residual")
        for one in requests:  # pyright: ignore[reportUnknownVariableType]
            part: dict[str, Any] = {**given, **one} if isinstance(one, dict) else {**given, "body": one}  # pyright: ignore[reportUnknownArgumentType]
            answer = self._request(policy, part, watch)
            if answer.verdict == "deny":
                break
        return answer

    def _request(self, policy: EgressPolicy, given: dict[str, Any], watch: Watch) -> Got:
        pieces: Any = given.get("chunks", given.get("bodies", given.get("parts")))
        bodies = [raw_of(given, "body") or b""]
        if isinstance(pieces, list):
            bodies = [bytes_of(one, "input.chunks") for one in pieces]  # pyright: ignore[reportUnknownVariableType]
        path = raw_of(given, "path") or b"/v1/x"
        place = str(given.get("to", given.get("host", "api.allowed.example")))
        endpoint = Endpoint.parse(bytes_of(place if re.search(r":\d+\Z", place) else f"{place}:443"))
        fields: Any = given.get("headers", given.get("fields", {}))
        pairs = tuple((bytes_of(str(k)).lower(), bytes_of(str(v))) for k, v in dict(fields).items())
        parts = [bytes_of(place), path, *(value for _, value in pairs), *bodies]
        # Whatever else it is called, a text of a request leaves with it.
        parts += [bytes_of(one) for name, one in given.items() if isinstance(one, str) and name not in _FACTS]
        if any(watch.feed(one) for one in parts if one):
            return Got("deny", "canary", {"killed": True})
        if isinstance(endpoint, Refusal):
            return got(endpoint)
        verdict = policy.decide(Ask(endpoint))
        if not verdict.allow:
            return got(verdict)
        method = str(given.get("method", "POST" if bodies[0] else "GET"))
        asked = Intercepted(
            connect=endpoint, sni=endpoint.host, authority=endpoint.host.text.encode(), method=method, target=path,
            fields=pairs, body=b"".join(bodies),
        )  # fmt: skip
        judged = judge(policy, asked)
        # Nothing in it can be recognised: what is left is the budget.
        return got(judged) if not judged.allow else Got("allow", "residual")

    def _call(self, given: dict[str, Any]) -> Got:
        if any(self._needles.hit(one) for one in given.values() if isinstance(one, str)):
            return Got("deny", "canary", {"killed": True})
        return _call(given)

    def _hosts(self, policy: EgressPolicy, given: dict[str, Any]) -> Got:
        listed: Any = given.get("host_sequence", given.get("hosts"))
        if not isinstance(listed, list) or not listed:
            unrunnable("input.host_sequence is no list of names")
        budget = RunBudget(policy.limits)
        watch = Watch(self._needles)
        for name in _spelled_out([str(one) for one in listed], str(given.get("budget", ""))):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            host = Host.parse(bytes_of(name, "input.host_sequence"))
            if isinstance(host, Refusal):
                return got(host)
            if watch.feed(host.text.encode()):
                return Got("deny", "canary", {"killed": True})
            verdict = policy.decide(Ask(Endpoint.of(host, 443)))
            if not verdict.allow:
                return got(verdict)
            refused = budget.take_request()
            if refused is None:
                refused = budget.take_name(verdict, host)
            if refused is not None:
                return got(refused)
        return Got("allow", "ok")


def _spelled_out(names: list[str], budget: str) -> Iterable[str]:
    """Yield the names; "... 33 distinct" stands for as many as it takes to have that many."""
    del budget
    real = [one for one in names if not _ELLIPSIS.match(one)]
    yield from real
    for text in names:
        found = _MANY.search(text) if _ELLIPSIS.match(text) else None
        if found is not None and real:
            parent = real[-1].partition(".")[2]
            for number in range(int(found[1]) - len(real)):
                yield f"n{number:06d}.{parent}"


def _is_size(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, str) and _SIZE.search(value) is not None
    )


def _bytes(policy: EgressPolicy, given: dict[str, Any], name: str) -> Got:
    value = given[name]
    found = _SIZE.search(str(value))
    size = int(float(found[1]) * _SIZES[found[2].lower()]) if found else value if isinstance(value, int) else -1
    if size < 0:
        unrunnable(f"input.{name} is no size")
    host = Host.parse(bytes_of(str(given.get("to", "api.allowed.example")).partition(":")[0]))
    if isinstance(host, Refusal):
        return got(host)
    budget = RunBudget(policy.limits)
    while size > 0:  # as it leaves: piece by piece
        refused = budget.take_bytes(host, min(size, 65536))
        if refused is not None:
            return got(refused)
        size -= 65536
    return Got("allow", "ok")


class Said(Args):
    """The words that an operation sends."""

    text: Annotated[str, Text(100_000, lines=True)]


def _call(given: dict[str, Any]) -> Got:
    """A call of an operation whose words leave, by a run that has read something."""
    text = str(given.get("query", given.get("call", given.get("args", ""))))
    found = _CALL.match(text)
    name = str(given.get("tool", found[1] if found else "send"))
    labels: Any = given.get("labels", given.get("seen", given.get("run_labels")))
    seen: set[str] = set(map(str, labels)) if isinstance(labels, list) else set()  # pyright: ignore[reportUnknownArgumentType]
    if not isinstance(labels, list):
        seen |= {label for label in ("private", "untrusted") if label in text.lower()}
    sink = str(given.get("sink", "public_sink" if _PUBLIC.search(name) else "sink"))
    if sink not in {"sink", "public_sink", "none"}:
        unrunnable("input.sink is sink, public_sink or none")
    operations = Operations()

    def send(call: Call, args: Said) -> Done:
        return Done(ok=bool(call and args))

    operations.operation(effect="read", max_result=100, labels=() if sink == "none" else (sink,))(send)
    scope = Scope(user="u", agent="a", tenant="t", expires=60.0, allow={"send": {}}).compile(operations.seal(), 0.0)
    asked = request(scope, "send", msgspec.json.encode({"text": text}), 1.0)
    verdict = authorize(WHO, msgspec.structs.replace(asked, seen=frozenset(seen)), scope)
    if verdict.effect == "allow":
        return Got("allow", "ok")
    return Got("deny", verdict.reason.partition(":")[0])
