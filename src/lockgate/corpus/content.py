"""Cases about what would leave inside an allowed request: planted values, budgets, and what a run has read.

Rule 1: the planted values are known before the case runs, as they are in a run; they are collected from the whole file.
Rule 2: a request is looked at as the gateway looks at it: host, path, fields and body go through one `Watch`.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable
from typing import Any, Final, cast

import msgspec

from lockgate.corpus import calls
from lockgate.corpus.case import Got, bytes_of, got, listed, raw_of, texts_of, unrunnable
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
_MOST: Final = 100_000
_SPAN: Final = re.compile(r"\{(\d{1,6})(?:\.\.|-)(\d{1,6})\}")
_SAID: Final = re.compile(r"(?i)\A\s*(\d+(?:\.\d+)?\s*(?:bytes|[kmg]i?b))(?:\s+of\b.*|\s*)\Z")
_FACTS: Final = frozenset(("to", "host", "path", "body", "method", "budget", "note", "sink", "tool", "policy"))
_ELLIPSIS: Final = re.compile(r"\A(?:\.\.\.|\u2026)")


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


def _hit() -> Got:
    return Got("deny", "canary", dict.fromkeys(("killed", "run_killed", "kill_run", "run_ended", "blocked"), True))


class Content:
    """Runs the cases of one file. `canaries`: what was planted."""

    def __init__(self, canaries: tuple[str, ...]) -> None:
        self._needles = Needles.of(canaries)

    def run(self, policy: EgressPolicy, given: dict[str, Any]) -> Got:
        """Run one case, by what its input holds."""
        if "host_sequence" in given or "hosts" in given:
            return self._hosts(policy, given)
        if not given.keys().isdisjoint(calls.LABELS) or (
            "to" not in given and not given.keys().isdisjoint(calls.CALLS)
        ):
            return self._call(given)
        size = _size_of(given)
        if size is not None:
            return _bytes(policy, given, size)
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
        body = given.get("body")
        bodies = [_json(body) if isinstance(body, dict | list) else raw_of(given, "body") or b""]
        if isinstance(pieces, list):
            bodies = [_json(one) if isinstance(one, dict | list) else bytes_of(one, "input.chunks") for one in pieces]  # pyright: ignore[reportUnknownVariableType]
        path = raw_of(given, "path") or b"/v1/x"
        place = str(given.get("to", given.get("host", "api.allowed.example")))
        endpoint = Endpoint.parse(bytes_of(place if re.search(r":\d+\Z", place) else f"{place}:443"))
        pairs = tuple(_fields(given.get("headers", given.get("fields", {}))))
        parts = [bytes_of(place), path, *(part for field in pairs for part in field), *bodies]
        # Whatever else it is called, a text of a request leaves with it.
        parts += [bytes_of(text) for name, one in given.items() if name not in _FACTS for text in texts_of(one)]
        if any(watch.feed(one) for one in parts if one):
            return _hit()
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
        if any(self._needles.hit(one) for one in texts_of(given)):
            return _hit()
        return calls.call(given)

    def _hosts(self, policy: EgressPolicy, given: dict[str, Any]) -> Got:
        named = [str(one) for one in listed(given.get("host_sequence", given.get("hosts"))) if one]
        if not named:
            unrunnable("input.host_sequence is no list of names")
        allowed = _MANY.search(str(given.get("budget", "")))
        limits = policy.limits
        if allowed is not None:
            limits = msgspec.structs.replace(limits, names_per_wildcard=int(allowed[1]))
        budget = RunBudget(limits)
        watch = Watch(self._needles)
        for name in _spelled_out(named):
            host = Host.parse(bytes_of(re.sub(r":\d+\Z", "", name), "input.host_sequence"))
            if isinstance(host, Refusal):
                return got(host)
            if watch.feed(host.text.encode()):
                return _hit()
            verdict = policy.decide(Ask(Endpoint.of(host, 443)))
            if not verdict.allow:
                return got(verdict)
            refused = budget.take_request()
            if refused is None:
                refused = budget.take_name(verdict, host)
            if refused is not None:
                return got(refused)
        return Got("allow", "ok")


def _spelled_out(names: list[str]) -> Iterable[str]:
    """Yield the names; "... 33 distinct" stands for as many as it takes to have that many, "a{0..9}." for ten."""
    real: list[str] = []
    for text in names:
        span = _SPAN.search(text)
        if span is not None:
            last = min(int(span[2]), int(span[1]) + _MOST)
            real += [f"{text[: span.start()]}{n}{text[span.end() :]}" for n in range(int(span[1]), last + 1)]
        elif not _ELLIPSIS.match(text) and not _MANY.match(text):
            real.append(text)
    yield from real
    for text in names:
        found = _MANY.search(text) if _ELLIPSIS.match(text) or _MANY.match(text) else None
        if found is not None and real:
            parent = real[-1].partition(".")[2]
            for number in range(min(int(found[1]), _MOST) - len(real)):
                yield f"n{number:06d}.{parent}"


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _fields(value: Any) -> Iterable[tuple[bytes, bytes]]:
    """Yield the fields of a request: a table, pairs, or lines."""
    rows = [list(one) for one in cast("dict[str, Any]", value).items()] if isinstance(value, dict) else listed(value)
    for row in rows:
        name, _, text = str(row).partition(":")
        pair: list[Any] = [name, text.strip()] if isinstance(row, str) else listed(row)
        if len(pair) != 2:
            unrunnable("input.headers is no table, no list of pairs and no list of lines")
        yield bytes_of(str(pair[0])).lower(), bytes_of(str(pair[1]))


def _size_of(given: dict[str, Any]) -> int | None:
    """Return how many bytes a case says are sent, when it says that instead of sending them."""
    repeat = _number(given.get("repeat"))
    if repeat is not None:
        return len(str(given.get("body", "x"))) * repeat
    for name, value in given.items():
        if _SIZED.search(name) and name != "path":
            size = _number(value)
            if size is not None:
                return size
    found = _SAID.match(str(given.get("body", "")))
    return _number(found[1]) if found is not None else None


def _number(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    found = _SIZE.search(value) if isinstance(value, str) else None
    if found is not None:
        return int(float(found[1]) * _SIZES[found[2].lower()])
    if isinstance(value, int):
        return value
    return int(value) if re.fullmatch(r"[0-9]{1,15}", value) else None


def _bytes(policy: EgressPolicy, given: dict[str, Any], size: int) -> Got:
    if size < 0:
        unrunnable("a size is 0 or more")
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
