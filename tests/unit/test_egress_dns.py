"""The synthetic responder: names of the list, addresses of the pool, and nothing that is ever forwarded (E2, E3)."""

from __future__ import annotations

import ast
import ipaddress
import struct
from pathlib import Path

import dns.message
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockgate.egress import dns as responder_module
from lockgate.egress.dns import Responder
from lockgate.policy.addresses import refused
from lockgate.policy.egress import EgressPolicy
from lockgate.policy.host import Host

LIST = '["api.allowed.example:443", "*.wild.example:443", "plain.example:80", "xn--bcher-kva.example:443"]'
TYPES = {"A": 1, "NS": 2, "CNAME": 5, "SOA": 6, "NULL": 10, "PTR": 12, "MX": 15, "TXT": 16, "AAAA": 28, "SRV": 33,
         "SVCB": 64, "HTTPS": 65, "ANY": 255, "CAA": 257}  # fmt: skip


def policy(**more: object) -> EgressPolicy:
    lines = [f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}" for key, value in more.items()]
    return EgressPolicy.load("\n".join(["[egress]", f"allow = {LIST}", *lines]))


def wire(name: bytes) -> bytes:
    labels = name.removesuffix(b".").split(b".") if name.strip(b".") else []
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"


def query(
    name: bytes,
    qtype: int = 1,
    *,
    qclass: int = 1,
    flags: int = 0x0100,
    counts: tuple[int, ...] = (1, 0, 0, 0),
    tail: bytes = b"",
) -> bytes:
    return struct.pack("!HHHHHH", 0xBEEF, flags, *counts) + wire(name) + struct.pack("!HH", qtype, qclass) + tail


def read(reply: bytes) -> tuple[int, list[str]]:
    """Return (response code, addresses) as an independent reader sees them."""
    message = dns.message.from_wire(reply)
    return message.rcode(), [str(item) for answer in message.answer for item in answer]


@pytest.mark.parametrize(
    "name", [b"api.allowed.example.", b"API.Allowed.eXample", b"plain.example", b"xn--bcher-kva.example"]
)
@pytest.mark.parametrize("qtype", [1, 28])
def test_a_name_of_the_list_gets_an_address_of_the_pool(name: bytes, qtype: int) -> None:
    """E3: synthetic, stable within the run, never an address that leads outside."""
    responder = Responder(policy())
    first, again = responder.answer(query(name, qtype)), responder.answer(query(name.lower(), qtype))
    assert (first.allow, first.reason) == (True, "synthetic_answer")
    code, found = read(first.reply or b"")
    assert code == 0
    assert [found] == [read(again.reply or b"")[1]]
    address = ipaddress.ip_address(found[0])
    assert address in ipaddress.ip_network("198.18.0.0/15" if qtype == 1 else "fd6c:6f63:6b67::/48")
    assert refused(address.packed) is not None, "the gateway would never dial it"
    back = responder.reverse(address.packed)
    assert back is not None
    assert back.text == name.decode().lower().removesuffix(".")


def test_addresses_are_one_to_one() -> None:
    responder = Responder(policy())
    seen = {
        read(responder.answer(query(name)).reply or b"")[1][0] for name in (b"api.allowed.example", b"plain.example")
    }
    assert len(seen) == 2
    assert responder.reverse(ipaddress.ip_address("198.18.0.200").packed) is None
    assert responder.reverse(ipaddress.ip_address("8.8.8.8").packed) is None
    assert responder.reverse(b"\xc6\x12\0\0") is None, "the pool's own address"
    assert responder.reverse(b"12345") is None


@pytest.mark.parametrize(
    "name",
    [
        b"your-ssh-key.a.evil.com.", b"stuff.wuzzi.net.", b"secret123.api.allowed.example.", b"allowed.example",
        b"169-254-169-254.nip.io", b"1.0.0.127.in-addr.arpa", b"evil-api.allowed.example", b"localhost",
        b"metadata.google.internal", b"printer.local", b"_http._tcp.api.allowed.example", b"wild.example",
        b"a.b.wild.example", b"xn--a-ecp.wild.example", b"api.allowed.example.evil.test", b"com",
    ],
)  # fmt: skip
@pytest.mark.parametrize("qtype", ["A", "AAAA", "TXT", "PTR", "ANY"])
def test_any_other_name_does_not_exist(name: bytes, qtype: str) -> None:
    """E3: subdomains of an exact entry, encodings of addresses and reverse lookups among them."""
    judged = Responder(policy()).answer(query(name, TYPES[qtype]))
    assert not judged.allow
    assert judged.reason in ("not_allowed", "bad_host")
    assert read(judged.reply or b"") == (3, [])


@pytest.mark.parametrize("qtype", sorted(set(TYPES) - {"A", "AAAA"}))
def test_other_types_of_a_listed_name_are_empty(qtype: str) -> None:
    """EG-184 and its kind: TXT and NULL carry text, HTTPS and SVCB carry ECH keys."""
    judged = Responder(policy()).answer(query(b"api.allowed.example", TYPES[qtype]))
    assert (judged.allow, judged.reason, judged.rule) == (False, "qtype_denied", "allow api.allowed.example:443")
    assert read(judged.reply or b"") == (0, [])


def test_wildcards_are_not_answered_by_default() -> None:
    judged = Responder(policy()).answer(query(b"a.wild.example"))
    assert (judged.allow, judged.reason) == (False, "wildcard_dns_budget")
    assert read(judged.reply or b"") == (3, [])


def test_the_operator_may_give_wildcards_a_count() -> None:
    responder = Responder(policy(wildcard_dns=2))
    assert responder.answer(query(b"a.wild.example", TYPES["TXT"])).reason == "qtype_denied"
    got = [responder.answer(query(name)).reason for name in (b"a.wild.example", b"b.wild.example", b"A.wild.example")]
    assert got == ["synthetic_answer"] * 3, "the same name again costs nothing, and neither did the other type"
    assert responder.answer(query(b"c.wild.example")).reason == "wildcard_dns_budget"
    assert responder.answer(query(b"c.wild.example", 28)).reason == "wildcard_dns_budget"
    assert responder.answer(query(b"b.wild.example", 28)).allow


def test_extra_sections_and_options_are_not_read() -> None:
    """EG-190: EDNS options, additional and authority records change nothing and are in no answer."""
    option = struct.pack("!HH", 65001, 200) + b"S" * 200
    edns = b"\0" + struct.pack("!HHIH", 41, 1232, 0, len(option)) + option
    extra = wire(b"x.evil.test") + struct.pack("!HHIH", 16, 1, 0, 4) + b"\x03abc"
    plain = Responder(policy()).answer(query(b"api.allowed.example"))
    judged = Responder(policy()).answer(query(b"api.allowed.example", counts=(1, 0, 1, 2), tail=extra + edns + extra))
    assert judged.allow
    assert judged.reply == plain.reply
    assert b"evil" not in (judged.reply or b"")


def test_the_question_comes_back_letter_for_letter() -> None:
    """Resolvers that vary the case (draft-vixie-dnsext-dns0x20) compare it."""
    judged = Responder(policy()).answer(query(b"aPi.AlloweD.example"))
    assert b"\x03aPi\x07AlloweD" in (judged.reply or b"")


POINTER = struct.pack("!HHHHHH", 7, 0x100, 1, 0, 0, 0) + b"\x03api\xc0\x0c" + struct.pack("!HH", 1, 1)
MALFORMED = {
    "empty": b"",
    "half a head": b"\0" * 11,
    "head only": query(b"api.allowed.example")[:12],
    "no question": query(b"api.allowed.example", counts=(0, 0, 0, 0)),
    "two questions": query(b"api.allowed.example", counts=(2, 0, 0, 0), tail=wire(b"x.evil.test") + b"\0\1\0\1"),
    "an answer in a question": query(b"api.allowed.example", counts=(1, 1, 0, 0)),
    "a response": query(b"api.allowed.example", flags=0x8180),
    "inverse query": query(b"api.allowed.example", flags=0x0900),
    "status": query(b"api.allowed.example", flags=0x1100),
    "notify": query(b"api.allowed.example", flags=0x2100),
    "update": query(b"api.allowed.example", flags=0x2900),
    "chaos class": query(b"version.bind", TYPES["TXT"], qclass=3),
    "any class": query(b"api.allowed.example", qclass=255),
    "pointer": POINTER,
    "extended label": POINTER.replace(b"\xc0", b"\x41"),
    "cut in a label": query(b"api.allowed.example")[:20],
    "cut before the class": query(b"api.allowed.example")[:-1],
    "too long": query(b"api.allowed.example", tail=b"\0" * 512),
    "name over 255 bytes": query(b".".join([b"a" * 63] * 4)),
}


@pytest.mark.parametrize("packet", MALFORMED.values(), ids=MALFORMED.keys())
def test_what_is_not_one_plain_question_is_refused(packet: bytes) -> None:
    judged = Responder(policy()).answer(packet)
    assert (judged.allow, judged.reason) == (False, "bad_query")
    if judged.reply is not None:
        assert len(judged.reply) <= max(12, len(packet))
        assert read(judged.reply)[0] in (1, 4, 5)


@pytest.mark.parametrize("name", [b"a\0b.example", b"a b.example", b"caf\xc3\xa9.example", b"-a.example", b"a-.example",
                                  b"xn--zzzzzz.example", b"a%2eb.example", b"a\\b.example", b"@.example"])  # fmt: skip
def test_an_odd_name_is_no_host(name: bytes) -> None:
    """E2: refused by the same `Host` as everywhere."""
    judged = Responder(policy()).answer(query(name))
    assert (judged.allow, judged.reason, judged.host) == (False, "bad_host", None)


def test_an_address_as_a_name_is_refused() -> None:
    responder = Responder(policy())
    for name in (b"10.0.0.5", b"127.0.0.1", b"0x7f.1", b"1"):
        judged = responder.answer(query(name))
        assert not judged.allow
        assert judged.reason == "ip_literal_or_ambiguous"


def test_a_dot_inside_a_label_is_not_two_labels() -> None:
    """The same text, two names: one of the readings would not have been judged."""
    packet = struct.pack("!HHHHHH", 7, 0x100, 1, 0, 0, 0) + b"\x0bapi.allowed\x07example\0" + struct.pack("!HH", 1, 1)
    judged = Responder(policy()).answer(packet)
    assert (judged.allow, judged.reason) == (False, "bad_host")


def test_report_mode_answers_and_says_so() -> None:
    judged = Responder(policy(mode="report")).answer(query(b"new.partner.example"))
    assert (judged.allow, judged.reported, judged.reason) == (True, True, "not_allowed")
    assert Responder(policy(mode="report")).answer(query(b"a\0.example")).allow is False


def test_without_ipv6_a_listed_name_has_no_such_address() -> None:
    judged = Responder(policy(), ipv6=False).answer(query(b"api.allowed.example", 28))
    assert judged.allow
    assert read(judged.reply or b"") == (0, [])


def test_names_given_before_anybody_asks_are_the_ones_answered() -> None:
    responder = Responder(policy())
    host = Host.parse(b"plain.example")
    assert isinstance(host, Host)
    ((_, four, six),) = responder.give([host])
    assert read(responder.answer(query(b"plain.example")).reply or b"")[1] == [str(ipaddress.ip_address(four))]
    assert read(responder.answer(query(b"plain.example", 28)).reply or b"")[1] == [str(ipaddress.ip_address(six))]


@given(st.binary(max_size=600))
def test_any_bytes_get_a_verdict(packet: bytes) -> None:
    judged = Responder(policy()).answer(packet)
    assert judged.reply is None or (len(judged.reply) <= 512 and judged.reply[:2] == packet[:2])
    assert judged.allow is (judged.reason == "synthetic_answer")


@given(st.lists(st.binary(min_size=1, max_size=63), max_size=6), st.integers(0, 65535))
def test_no_name_but_the_listed_is_answered(labels: list[bytes], qtype: int) -> None:
    packet = struct.pack("!HHHHHH", 7, 0x100, 1, 0, 0, 0) + b"".join(bytes([len(one)]) + one for one in labels)
    judged = Responder(policy()).answer(packet + b"\0" + struct.pack("!HH", qtype, 1))
    text = b".".join(labels).lower()
    if text not in (b"api.allowed.example", b"plain.example", b"xn--bcher-kva.example"):
        assert not judged.allow


def test_the_responder_cannot_ask_anybody() -> None:
    """E3 as a property of the file: it imports nothing that opens a socket."""
    names = {
        alias.name.partition(".")[0] if isinstance(node, ast.Import) else (node.module or "")
        for node in ast.walk(ast.parse(Path(responder_module.__file__).read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert names <= {"__future__", "struct", "collections.abc", "typing", "msgspec", "lockgate.policy.egress",
                     "lockgate.policy.egress_reasons", "lockgate.policy.host"}  # fmt: skip
