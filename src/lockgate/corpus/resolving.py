"""Cases about what a name leads to, and where a connection really ends.

Rule 1: the resolver is the gateway's; the nameserver is made up here, in the format of the wire.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from typing import Any, Final, cast

from lockgate.corpus.case import Got, bytes_of, got, listed, unrunnable
from lockgate.corpus.network import endpoint_of
from lockgate.egress import dial, dnswire, resolver
from lockgate.policy.egress import Ask, EgressPolicy
from lockgate.policy.host import Host, Refusal

_ADDRESS: Final = re.compile(r"[0-9a-fA-F]*:[0-9a-fA-F:]*|\d+\.\d+\.\d+\.\d+")


def resolve(policy: EgressPolicy, given: dict[str, Any]) -> Got:
    """A name, and what the nameserver answers, question after question."""
    endpoint = endpoint_of({"port": 443, **given})
    if isinstance(endpoint, Refusal):
        return got(endpoint)
    verdict = policy.decide(Ask(endpoint, "http" if endpoint.port == 80 else "connect"))
    if not verdict.allow:
        return got(verdict)
    server = _Server(_answers(given), given)
    answer = asyncio.run(resolver.resolve(endpoint, policy, server.exchange))
    facts: dict[str, Any] = {"dns_queries": server.rounds, "qname_on_wire": server.name, "search_suffix_used": False}
    if isinstance(answer, Refusal):
        return got(answer, **facts)
    return Got("allow", "ok", {**facts, "connect_ip": str(ipaddress.ip_address(answer[0]))})


def _answers(given: dict[str, Any]) -> Any:
    for name in ("dns_answers", "answers", "records", "addresses", "ips", "resolved"):
        if name in given:
            return given[name]
    return {name: value for name, value in given.items() if name.upper() in {"A", "AAAA"}}


def resolve_wire(policy: EgressPolicy, given: dict[str, Any]) -> Got:
    """The question as it stands on the wire, whatever the system's resolver is told."""
    found = resolve(policy, {"dns_answers": [["93.184.216.34"]], **given})
    host = Host.parse(bytes_of(given.get("host"), "input.host"))
    plain = "" if isinstance(host, Refusal) else f"{host.text}."
    asked = found.facts.get("qname_on_wire")  # nothing is asked about a name that was refused
    return Got(found.verdict, found.reason, {**found.facts, "search_suffix_used": asked not in {None, plain}})


class _Server:
    """A nameserver that answers from a list, in the format of the wire."""

    def __init__(self, answers: Any, given: dict[str, Any]) -> None:
        # One set, not in a list of sets: the same each time.
        sets: Any = answers if isinstance(answers, list) else [answers] if isinstance(answers, dict | str) else []  # pyright: ignore[reportUnknownVariableType]
        if sets and not isinstance(sets[0], list | dict):
            sets = [sets]  # pyright: ignore[reportUnknownVariableType]
        self._sets: list[list[str]] = [_words(part) for part in sets]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        aliases: Any = given.get("cname", given.get("cnames", []))
        self._aliases = [str(one) for one in (aliases if isinstance(aliases, list) else [aliases])]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        self._asked = {1: 0, 28: 0}
        self.name = ""

    @property
    def rounds(self) -> int:
        """How many times each family was asked for."""
        return max(self._asked.values())

    async def exchange(self, query: bytes, tcp: bool) -> bytes | None:
        """Answer one question; see `resolver.resolve`."""
        del tcp
        labels: list[str] = []
        at = 12
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode("latin-1"))
            at += query[at] + 1
        self.name = ".".join(labels) + "."
        kind = int.from_bytes(query[at + 1 : at + 3])
        number = self._asked[kind]
        self._asked[kind] += 1
        words = self._sets[min(number, len(self._sets) - 1)] if self._sets else ["timeout"]
        codes = {"nxdomain": 3, "servfail": 2, "refused": 5}
        code = next((codes[word.lower()] for word in words if word.lower() in codes), 0)
        if any(word.lower() in {"timeout", "no answer"} for word in words):
            return None
        head = query[:2] + (0x8180 | code).to_bytes(2) + b"\0\1"
        records = self._records(words, kind)
        return head + len(records).to_bytes(2) + bytes(4) + query[12:] + b"".join(records)

    def _records(self, words: list[str], kind: int) -> list[bytes]:
        owner = b"\xc0\x0c"
        made: list[bytes] = []
        for word in (*self._aliases, *words):
            text = re.sub(r"(?i)^(?:cname|a|aaaa)[\s:=]+(?=\S)", "", word)
            try:
                packed = ipaddress.ip_address(text).packed
            except ValueError:
                target = _wire_name(text)
                if target is not None:
                    made.append(owner + b"\0\5\0\1\0\0\0\x3c" + len(target).to_bytes(2) + target)
                    owner = target
                continue
            if (len(packed) == 4) == (kind == 1):
                made.append(owner + kind.to_bytes(2) + b"\0\1\0\0\0\x3c" + len(packed).to_bytes(2) + packed)
        return made


def _words(part: Any) -> list[str]:
    """Return the addresses, aliases and codes of one answer, in order; an alias may be written `a -> b -> address`."""
    if isinstance(part, dict):
        table = cast("dict[str, Any]", part)
        part = [table[name] for name in ("data", "address", "value", "rdata") if name in table] or list(table.values())
    if isinstance(part, list):
        return [word for one in listed(part) for word in _words(one)]
    return [word.strip() for word in re.split(r"->|,", str(part)) if word.strip()]


def _wire_name(text: str) -> bytes | None:
    host = Host.parse(bytes_of(text))
    if isinstance(host, Refusal) or host.kind != "name":
        return None
    return dnswire.encode_query(host, 1, 0)[12:-4]


def connect_verify(policy: EgressPolicy, given: dict[str, Any]) -> Got:
    """The address that was dialled, and the one the kernel says the connection leads to."""
    del policy
    peer = given.get("getpeername", given.get("peer"))
    dialled = _place(given.get("dialled"), given)
    if not isinstance(peer, list) and not _ADDRESS.search(str(peer)):
        return got(dial.check_peer(dialled, (b"", 0)))  # the kernel names no peer: an error, or another family
    return got(dial.check_peer(dialled, _place(peer, given)))


def _place(value: Any, given: dict[str, Any]) -> tuple[bytes, int]:
    text, port = str(value), given.get("port", 443)
    pair = listed(value)
    if len(pair) == 2:
        text, port = str(pair[0]), pair[1]
    found = re.fullmatch(r"\[(.*)\]:(\d+)|([\d.]+):(\d+)", text)
    if found is not None:
        text, port = found[1] or found[3], int(found[2] or found[4])
    try:
        return ipaddress.ip_address(text.strip("[]").partition("%")[0]).packed, int(port)
    except ValueError:
        unrunnable("input.dialled and input.getpeername are addresses")
