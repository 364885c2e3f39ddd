"""`Host`, `Endpoint` and the address table: canonical or refused (E2)."""

from __future__ import annotations

import copy
import ipaddress
import pickle  # noqa: TID251 -- to see that it fails
import socket
from urllib.parse import urlsplit

import ada_url
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockgate.policy import addresses
from lockgate.policy.host import Endpoint, Host, Refusal, ipv6_text


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"API.Partner.Example", "api.partner.example"),
        (b"api.partner.example.", "api.partner.example"),
        (b"_dmarc.partner.example", "_dmarc.partner.example"),
        (b"localhost", "localhost"),
        (b"203.0.113.7", "203.0.113.7"),
        (b"[2001:DB8:0:0:1::1]", "[2001:db8::1:0:0:1]"),
        (b"[::FFFF:1.2.3.4]", "[::ffff:102:304]"),
        (b"[::]", "[::]"),
        (b"xn--bcher-kva.example", "xn--bcher-kva.example"),
        (b"xn--strae-oqa.example", "xn--strae-oqa.example"),  # RFC 5892 section 2.6: valid though folding changes it
        (b"xn--nxasmm1c.example", "xn--nxasmm1c.example"),
        (b"3com.example", "3com.example"),
        (b"a" * 63 + b".example", "a" * 63 + ".example"),
    ],
)
def test_a_good_host_is_canonical(raw: bytes, text: str) -> None:
    host = Host.parse(raw)
    assert isinstance(host, Host)
    assert host.text == text
    assert Host.parse(host.text.encode()) == host


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "bad_host"),
        (b"a.example\x00.b.example", "bad_host"),
        (b"a.example\r\nX: y", "bad_host"),
        (b" a.example", "bad_host"),
        ("\u0430pi.example".encode(), "bad_host"),
        (b"a..example", "bad_host"),
        (b".example", "bad_host"),
        (b"a.example..", "bad_host"),
        (b"-a.example", "bad_host"),
        (b"a-.example", "bad_host"),
        (b"a%2eexample", "bad_host"),
        (b"user@a.example", "bad_host"),
        (b"a.example:443", "bad_host"),
        (b"a.example\\b", "bad_host"),
        (b"a" * 64 + b".example", "bad_host"),
        (b"a." * 127 + b"aa", "bad_host"),
        (b"::1", "bad_host"),
        (b"[fe80::1%eth0]", "bad_host"),
        (b"[127.0.0.1]", "bad_host"),
        (b"[a.example]", "bad_host"),
        (b"[::1", "bad_host"),
        (b"127.1", "ip_literal_or_ambiguous"),
        (b"2130706433", "ip_literal_or_ambiguous"),
        (b"0x7f.1", "ip_literal_or_ambiguous"),
        (b"0x7f000001", "ip_literal_or_ambiguous"),
        (b"0177.0.0.1", "ip_literal_or_ambiguous"),
        (b"127.0.0.01", "ip_literal_or_ambiguous"),
        (b"1.2.3.4.5", "ip_literal_or_ambiguous"),
        (b"256.1.1.1", "ip_literal_or_ambiguous"),
        (b"a.example.0x", "ip_literal_or_ambiguous"),
        (b"xn--.example", "bad_host"),
        (b"xn--a-.example", "bad_host"),
        (b"xn--example-.example", "bad_host"),
    ],
)
def test_a_doubtful_host_is_refused_with_its_reason(raw: bytes, reason: str) -> None:
    refusal = Host.parse(raw)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == reason
    with pytest.raises(TypeError):
        bool(refusal)


def test_there_is_no_other_way_to_a_host() -> None:
    host = Host.parse(b"a.example")
    assert isinstance(host, Host)
    with pytest.raises(TypeError):
        Host("a.example")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Endpoint(host, 443)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        pickle.dumps(host)
    with pytest.raises(AttributeError):
        host.text = "b.example"
    with pytest.raises(AttributeError):
        del host.text
    assert copy.deepcopy(host) is host
    assert copy.copy(host) is host
    with pytest.raises(TypeError):
        Endpoint.of("a.example", 443)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="port"):
        Endpoint.of(host, 0)


@pytest.mark.parametrize(
    "port", [b"+443", b" 443", b"4_43", b"0443", b"65536", b"0", b"", b"443 ", "\uff14\uff14\uff13".encode()]
)
def test_a_port_is_plain_decimal(port: bytes) -> None:
    assert isinstance(Endpoint.parse(b"a.example:" + port), Refusal)


def test_an_endpoint_is_canonical() -> None:
    assert str(Endpoint.parse(b"A.Example.:8443")) == "a.example:8443"
    assert str(Endpoint.parse(b"[::1]:80")) == "[::1]:80"
    for raw in (b"a.example", b"[::1]", b":443", b"a:b:443", b"https://a.example:443"):
        assert isinstance(Endpoint.parse(raw), Refusal), raw


_pieces = st.sampled_from(
    [
        "a",
        "xn--",
        "bcher-kva",
        "127",
        "0x7f",
        "1",
        "01",
        ".",
        "..",
        "-",
        "_",
        "[",
        "]",
        "::1",
        "::ffff:",
        "%25",
        "@",
        "\\",
        ":",
        "0",
        "256",
        "e",
        "example",
        "localhost",
        "\t",
        "\x00",
        "。",
        "x",
        "08",
        "0x",
        "A",
        "Z",
        "#",
        "?",
        "/",
    ]
)
_hosts = st.one_of(
    st.lists(_pieces, min_size=1, max_size=7).map(lambda parts: "".join(parts).encode()),
    st.binary(min_size=1, max_size=24),
    st.from_regex(r"[a-zA-Z0-9_.x-]{1,30}", fullmatch=True).map(str.encode),
)


@given(_hosts)
@example(b"0x7f.1")
@example(b"1.1")
@example(b"a.0x1")
@settings(max_examples=1500, deadline=None)
def test_no_accepted_name_means_another_place_to_another_parser(raw: bytes) -> None:
    """E2: urllib and ada-url read the same host; the C library reads no address out of a name."""
    host = Host.parse(raw)
    if not isinstance(host, Host):
        return
    text = host.text
    assert Host.parse(text.encode()) == host
    if host.kind == "ipv6":
        assert ada_url.URL(f"https://{text}/").hostname == text
        assert socket.inet_pton(socket.AF_INET6, text[1:-1]) == host.packed
        return
    assert urlsplit(f"https://{text}/").hostname == text
    try:
        seen = ada_url.URL(f"https://{text}/").hostname
    except ValueError:
        seen = None  # refusing is not another destination
    assert seen in {None, text}
    if host.kind == "ipv4":
        assert socket.inet_aton(text) == host.packed
        return
    with pytest.raises(OSError, match="illegal IP address"):
        socket.inet_aton(text)
    with pytest.raises(socket.gaierror):
        socket.getaddrinfo(text, None, flags=socket.AI_NUMERICHOST)


@given(st.integers(min_value=0, max_value=2**128 - 1))
@settings(max_examples=500, deadline=None)
def test_ipv6_text_is_read_back_by_all(value: int) -> None:
    text = ipv6_text(value)
    assert int(ipaddress.IPv6Address(text)) == value
    assert ada_url.URL(f"https://[{text}]/").hostname == f"[{text}]"


@pytest.mark.parametrize(
    "text",
    [
        "0.0.0.0",
        "127.0.0.1",
        "10.1.2.3",
        "172.31.255.255",
        "192.168.0.1",
        "100.100.100.200",
        "169.254.169.254",
        "224.0.0.1",
        "168.63.129.16",
        "192.0.0.192",
        "198.18.0.1",
        "255.255.255.255",
        "192.88.99.1",
        "::",
        "::1",
        "::ffff:8.8.8.8",
        "::127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b:1::a9fe:a9fe",
        "2002:a9fe:a9fe::",
        "2001::1",
        "fe80::1",
        "fec0::1",
        "fd00:ec2::254",
        "ff02::1",
        "5f00::1",
        "3fff::1",
        "100::1",
        "::ffff:0:7f00:1",
        "4000::1",
        "2620:4f:8000::1",
    ],
)
def test_an_address_that_is_not_public_is_refused(text: str) -> None:
    assert addresses.refused(ipaddress.ip_address(text).packed), text


@pytest.mark.parametrize(
    "text", ["8.8.8.8", "1.1.1.1", "172.32.0.0", "2606:4700::1111", "2001:200::1", "2400::1", "168.63.129.17"]
)
def test_a_public_address_passes(text: str) -> None:
    assert addresses.refused(ipaddress.ip_address(text).packed) is None


def test_metadata_is_marked_and_odd_lengths_are_errors() -> None:
    found = addresses.refused(bytes([169, 254, 169, 254]))
    assert found is not None
    assert found.metadata
    plain = addresses.refused(bytes([10, 0, 0, 1]))
    assert plain is not None
    assert not plain.metadata
    with pytest.raises(ValueError, match="4 or 16"):
        addresses.refused(b"abc")


@given(st.one_of(st.binary(min_size=4, max_size=4), st.binary(min_size=16, max_size=16)))
@settings(max_examples=800, deadline=None)
def test_bisection_agrees_with_a_loop_over_networks(packed: bytes) -> None:
    rows = addresses._V4 if len(packed) == 4 else addresses._V6
    slow = any(ipaddress.ip_address(packed) in ipaddress.ip_network(net) for net, _ in rows)
    assert (addresses.refused(packed) is not None) == slow


@pytest.mark.parametrize("length", [32, 40, 48, 56, 64, 96])
def test_nat64_extraction(length: int) -> None:
    """RFC 6052 section 2.4, table of examples, with 192.0.2.33."""
    text = {32: "2001:db8:c000:221::", 40: "2001:db8:1c0:2:21::", 48: "2001:db8:122:c000:2:2100::"}
    text |= {56: "2001:db8:122:3c0:0:221::", 64: "2001:db8:122:344:c0:2:2100::", 96: "2001:db8:122:344::192.0.2.33"}
    prefix = ipaddress.ip_network((text[length], length), strict=False).network_address.packed
    assert addresses.nat64_embedded(ipaddress.ip_address(text[length]).packed, prefix, length) == bytes([192, 0, 2, 33])
    assert addresses.nat64_embedded(ipaddress.ip_address("2400::1").packed, prefix, length) is None
