"""Questions, answers and vetting: names are asked absolutely, and one bad address refuses the set (E1, E2)."""

from __future__ import annotations

import asyncio
import itertools
import random
import struct
from typing import Any

import dns.flags
import dns.message
import dns.name
import dns.rdatatype
import dns.rrset
import pytest

from lockgate.egress import dial, resolver
from lockgate.egress.dnswire import TYPE_A, TYPE_AAAA, decode_reply, encode_query
from lockgate.policy.egress import EgressPolicy
from lockgate.policy.host import Endpoint, Host, Refusal

POLICY = EgressPolicy.load(
    """[egress]
allow = ["api.allowed.example:443", "*.wild.example:443"]
private = [{ host = "git.corp.example:443", addresses = ["10.0.0.5"] }, { host = "10.0.0.6:8443" }]
"""
)
NAT64 = EgressPolicy.load('[egress]\nallow = ["api.allowed.example:443"]\nnat64_prefix = "64:ff9b::/96"\n')


def host(text: str) -> Host:
    found = Host.parse(text.encode())
    assert isinstance(found, Host)
    return found


def endpoint(text: str = "api.allowed.example:443") -> Endpoint:
    found = Endpoint.parse(text.encode())
    assert isinstance(found, Endpoint)
    return found


def packed(text: str) -> bytes:
    import ipaddress

    return ipaddress.ip_address(text).packed


def server(answers: dict[str, list[str]], asked: list[Any] | None = None) -> Any:
    """An exchange that answers as dnspython writes answers."""

    async def exchange(query: bytes, tcp: bool) -> bytes | None:
        question = dns.message.from_wire(query)
        name = question.question[0].name
        kind = dns.rdatatype.to_text(question.question[0].rdtype)
        if asked is not None:
            asked.append((name, kind, tcp))
        reply = dns.message.make_response(question)
        found = answers.get(name.to_text())
        if found is None:
            return None
        chosen = [one for one in found if (":" in one) == (kind == "AAAA")]
        if chosen:
            reply.answer.append(dns.rrset.from_text(name, 60, "IN", kind, *chosen))
        return reply.to_wire()

    return exchange


def resolve(answers: list[str] | None, text: str = "api.allowed.example:443", policy: EgressPolicy = POLICY) -> Any:
    place = endpoint(text)
    known = {} if answers is None else {place.host.text + ".": answers}
    return asyncio.run(resolver.resolve(place, policy, server(known)))


def test_a_question_is_absolute_and_plain() -> None:
    """E3: another implementation reads exactly the name, IN, one type, no option; a random id."""
    for kind in (TYPE_A, TYPE_AAAA):
        message = dns.message.from_wire(encode_query(host("a.wild.example"), kind, 0x1234))
        assert message.id == 0x1234
        assert message.question[0].name == dns.name.from_text("a.wild.example.")
        assert message.question[0].name.is_absolute()
        assert int(message.question[0].rdtype) == kind
        assert message.edns == -1
        assert not message.additional
    with pytest.raises(ValueError, match="not looked up"):
        encode_query(host("10.0.0.1"), TYPE_A, 1)


def test_both_families_are_asked_once_and_make_one_set() -> None:
    """E2: A and AAAA together, each once, with ids of their own."""
    asked: list[Any] = []
    found = asyncio.run(
        resolver.resolve(
            endpoint(), POLICY, server({"api.allowed.example.": ["93.184.216.34", "2606:2800:220:1::1"]}, asked)
        )
    )
    assert found == (packed("93.184.216.34"), packed("2606:2800:220:1::1"))
    assert sorted(kind for _, kind, _ in asked) == ["A", "AAAA"]
    assert all(name.to_text() == "api.allowed.example." for name, _, _ in asked)


BAD = [
    "0.0.0.0", "0.1.2.3", "10.0.0.5", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.255.254", "168.63.129.16",
    "169.254.169.254", "169.254.170.2", "172.16.0.1", "172.31.255.255", "192.0.0.192", "192.0.2.1", "192.88.99.1",
    "192.168.1.1", "198.18.0.7", "198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1", "240.0.0.1",
    "255.255.255.255", "::", "::1", "::127.0.0.1", "::ffff:10.0.0.1", "::ffff:93.184.216.34", "::ffff:0:7f00:1",
    "64:ff9b::7f00:1", "64:ff9b:1::a9fe:a9fe", "100::1", "2001::1", "2001:db8::1", "2002:a9fe:a9fe::", "3fff::1",
    "5f00::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fec0::1", "ff02::1",
]  # fmt: skip

# Alone, or inside an address that leads to it.
CLOUD = {
    "169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254",
    "64:ff9b:1::a9fe:a9fe", "2002:a9fe:a9fe::",
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_one_bad_address_refuses_the_set(bad: str) -> None:
    """E2: alone, first, last or in the other family."""
    for answers in ([bad], ["93.184.216.34", bad], [bad, "93.184.216.34"], ["2606:2800:220:1::1", bad]):
        found = resolve(answers)
        assert isinstance(found, Refusal), answers
        assert found.reason == "resolved_non_public", answers
    assert ("metadata" in resolve([bad]).detail) == (bad in CLOUD)


def test_empty_or_failed_is_refused() -> None:
    """E2: no answer, an empty answer, SERVFAIL, one family that failed."""
    for answers in (None, []):
        found = resolve(answers)
        assert isinstance(found, Refusal)
        assert found.reason == "resolve_failed"

    async def half(query: bytes, tcp: bool) -> bytes | None:
        if query[-4:-2] == struct.pack("!H", TYPE_AAAA):
            return None
        return await server({"api.allowed.example.": ["93.184.216.34"]})(query, tcp)

    found = asyncio.run(resolver.resolve(endpoint(), POLICY, half))
    assert isinstance(found, Refusal)
    assert found.reason == "resolve_failed"


def test_private_entries_are_pinned() -> None:
    """E2: the answers must be a subset of what the operator wrote, and nothing makes loopback a destination."""
    assert resolve(["10.0.0.5"], "git.corp.example:443") == (packed("10.0.0.5"),)
    for answers in (["10.0.0.6"], ["10.0.0.5", "10.0.0.6"], ["93.184.216.34"], ["10.0.0.5", "127.0.0.1"]):
        found = resolve(answers, "git.corp.example:443")
        assert isinstance(found, Refusal)
        assert found.reason == "resolved_non_public"
    asked: list[Any] = []
    exchange = server({}, asked)
    assert asyncio.run(resolver.resolve(endpoint("10.0.0.6:8443"), POLICY, exchange)) == (packed("10.0.0.6"),)
    assert asked == [], "an address was looked up"
    found = asyncio.run(resolver.resolve(endpoint("10.0.0.6:443"), POLICY, exchange))
    assert isinstance(found, Refusal)


def test_a_declared_nat64_prefix_is_looked_through() -> None:
    """E2: the embedded address is what is vetted, only below the declared prefix."""
    assert resolve(["64:ff9b::5db8:d822"], policy=NAT64) == (packed("64:ff9b::5db8:d822"),)
    for bad in ("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::5db8:d822"):
        assert isinstance(resolve([bad], policy=NAT64), Refusal)
    assert isinstance(resolve(["64:ff9b::5db8:d822"]), Refusal)


def reply_to(query: bytes, change: Any = None) -> bytes:
    message = dns.message.make_response(dns.message.from_wire(query))
    if change is not None:
        change(message)
    return message.to_wire(max_size=65535)


def chain(length: int, last: str = "93.184.216.34", *, loop: bool = False) -> Any:
    def change(message: Any) -> None:
        names = ["api.allowed.example.", *(f"hop{number}.example." for number in range(length))]
        for owner, target in itertools.pairwise(names):
            message.answer.append(dns.rrset.from_text(owner, 60, "IN", "CNAME", target))
        if loop:
            message.answer.append(dns.rrset.from_text(names[-1], 60, "IN", "CNAME", names[0]))
        else:
            message.answer.append(dns.rrset.from_text(names[-1], 60, "IN", "A", last))

    return change


def test_aliases_count_inside_the_answer_alone() -> None:
    """E2: up to eight, no loop, no address of another name, none of the other sections."""
    query = encode_query(host("api.allowed.example"), TYPE_A, 7)
    for length in (0, 1, 8):
        found = decode_reply(query, reply_to(query, chain(length)))
        assert found is not None
        assert found.addresses == (packed("93.184.216.34"),), length
    for change in (chain(9), chain(3, loop=True)):
        found = decode_reply(query, reply_to(query, change))
        assert found is not None
        assert found.failed
    stray = dns.rrset.from_text("other.example.", 60, "IN", "A", "93.184.216.34")
    for section in ("answer", "authority", "additional"):
        found = decode_reply(query, reply_to(query, lambda message, at=section: getattr(message, at).append(stray)))
        assert found is not None
        assert found.addresses == (), section


def test_a_reply_to_something_else_is_nobodys() -> None:
    """E2: another id, another name, another type, a question in place of an answer, trailing or broken bytes."""
    query = encode_query(host("api.allowed.example"), TYPE_A, 7)
    good = reply_to(query, chain(0))
    assert decode_reply(query, good) is not None
    assert decode_reply(encode_query(host("api.allowed.example"), TYPE_A, 8), good) is None
    assert decode_reply(encode_query(host("api.allowed.examplf"), TYPE_A, 7), good) is None
    assert decode_reply(encode_query(host("api.allowed.example"), TYPE_AAAA, 7), good) is None
    assert decode_reply(query, query) is None
    for size in range(len(good)):
        found = decode_reply(query, good[:size])
        assert found is None, size

    def truncated(message: Any) -> None:
        message.flags |= dns.flags.TC

    found = decode_reply(query, reply_to(query, truncated))
    assert found is not None
    assert found.truncated


def test_mutated_replies_give_no_address_that_was_not_sent() -> None:
    """E2: bytes are changed at random; nothing raises, and compression cannot loop."""
    rng = random.Random(5)
    query = encode_query(host("api.allowed.example"), TYPE_A, 7)
    good = reply_to(query, chain(4))
    for _ in range(20_000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        found = decode_reply(query, bytes(data))
        for address in () if found is None else found.addresses:
            assert address in bytes(data)


def test_the_peer_is_what_was_dialled() -> None:
    """E2: another address or another port is refused."""
    dialled = (packed("93.184.216.34"), 443)
    assert dial.check_peer(dialled, dialled) is None
    for other in ((packed("10.0.0.5"), 443), (packed("93.184.216.34"), 80), (packed("::ffff:93.184.216.34"), 443)):
        found = dial.check_peer(dialled, other)
        assert isinstance(found, Refusal)
        assert found.reason == "peer_mismatch"


def test_nameservers_are_addresses() -> None:
    """E3: the search list and options of the system are not read; a name is no nameserver."""
    assert resolver.parse_nameserver("127.0.0.1@5300") == (packed("127.0.0.1"), 5300)
    assert resolver.parse_nameserver("::1") == (packed("::1"), 53)
    for bad in ("ns.example", "127.0.0.1@x", "127.1", "", "127.0.0.1@99999"):
        with pytest.raises(Exception, match="nameserver"):
            resolver.parse_nameserver(bad)


def test_the_systems_file_gives_nameservers_alone(tmp_path: Any) -> None:
    """E3: search domains, options, comments and zoned addresses are left out."""
    file = tmp_path / "resolv.conf"
    file.write_text(
        "# x\nsearch evil.test\noptions ndots:9\nnameserver 192.0.2.53\nnameserver fe80::1%eth0\nnameserver ::1\n"
    )
    assert resolver.system_nameservers(file) == ("192.0.2.53", "::1")
    assert resolver.system_nameservers(tmp_path / "missing") == ()
