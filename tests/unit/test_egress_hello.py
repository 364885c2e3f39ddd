"""The ClientHello: one server name that equals the CONNECT host, or nothing goes upstream (E1, E2)."""

from __future__ import annotations

import random
import ssl
import struct

import pytest

from lockgate.egress.client_hello import HELLO_BYTES, HELLO_SECONDS, Hello, Reader, check, parse
from lockgate.policy.host import Endpoint, Refusal

HOST = "api.allowed.example"


def endpoint(text: str = f"{HOST}:443") -> Endpoint:
    found = Endpoint.parse(text.encode())
    assert isinstance(found, Endpoint)
    return found


def vector(data: bytes, size: int) -> bytes:
    return len(data).to_bytes(size) + data


def extension(kind: int, data: bytes) -> bytes:
    return struct.pack("!H", kind) + vector(data, 2)


def server_name(*names: bytes, kind: int = 0) -> bytes:
    return extension(0, vector(b"".join(bytes((kind,)) + vector(name, 2) for name in names), 2))


def body(
    *extensions: bytes, version: bytes = b"\x03\x03", session: bytes = b"s" * 32, suites: bytes = b"\x13\x01"
) -> bytes:
    return (
        version
        + bytes(range(32))  # the same in every worker: it stands in the names of tests
        + vector(session, 1)
        + vector(suites, 2)
        + b"\x01\x00"
        + vector(b"".join(extensions), 2)
    )


def message(inside: bytes) -> bytes:
    return b"\x01" + vector(inside, 3)


def records(data: bytes, size: int = 16384, kind: int = 0x16) -> bytes:
    return b"".join(bytes((kind, 3, 1)) + vector(data[at : at + size], 2) for at in range(0, len(data), size))


def real(name: str | None) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname = name is not None
    context.set_alpn_protocols(["h2", "http/1.1"])
    out = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return out.read()


def judged(data: bytes, connect: Endpoint | None = None, *, intercepted: bool = False) -> str | None:
    found = parse(data)
    if isinstance(found, Hello):
        found = check(found, connect or endpoint(), intercepted=intercepted)
        return "ok" if found is None else found.reason
    return None if found is None else found.reason


def test_a_real_hello_is_read() -> None:
    """E1: what OpenSSL sends is understood, its protocols too."""
    found = parse(real(HOST))
    assert isinstance(found, Hello)
    assert found.sni is not None
    assert found.sni.text == HOST
    assert found.alpn == (b"h2", b"http/1.1")
    assert judged(real(HOST)) == "ok"
    assert judged(real("other.example")) == "sni_mismatch"
    assert judged(real(None)) == "sni_missing"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100, 511, 16384])
def test_fragments_make_no_difference(size: int) -> None:
    """E2: the verdict is the same for one record, for many, and for every split on the way."""
    for name, expected in ((HOST, None), ("evil.test", "sni_mismatch")):
        data = records(real(name)[5:], size)
        for step in (1, 4096):
            reader = Reader(endpoint(), 0.0)
            found: Hello | Refusal | None = None
            fed = 0
            while found is None:
                assert fed < len(data)
                found = reader.feed(data[fed : fed + step], 1.0)
                fed += step
            assert isinstance(found, Hello) if expected is None else found.reason == expected  # type: ignore[union-attr]
            assert bytes(reader.data) == data[: min(fed, len(data))]


NAME = server_name(HOST.encode())
CASES = [
    (body(NAME), "ok"),
    (body(server_name(HOST.upper().encode())), "ok"),
    (body(server_name(HOST.encode() + b".")), "ok"),
    (body(), "sni_missing"),
    (body(server_name(b"evil.test")), "sni_mismatch"),
    (body(server_name(b"sub." + HOST.encode())), "sni_mismatch"),
    (body(server_name(b"allowed.example")), "sni_mismatch"),
    (body(server_name(HOST.encode() + b"\0.evil.test")), "bad_sni"),
    (body(server_name(HOST.encode() + b"\0")), "bad_sni"),
    (body(server_name(b"")), "bad_sni"),
    (body(server_name(b"..")), "bad_sni"),
    (body(server_name(b"127.0.0.1")), "bad_sni"),
    (body(server_name(b"[::1]")), "bad_sni"),
    (body(server_name(HOST.encode() + b":443")), "bad_sni"),
    (body(server_name("api\u3002allowed.example".encode())), "bad_sni"),
    (body(server_name(HOST.encode(), b"evil.test")), "bad_sni"),
    (body(server_name(HOST.encode(), HOST.encode())), "bad_sni"),
    (body(server_name(HOST.encode(), kind=1)), "bad_sni"),
    (body(extension(0, b"")), "bad_sni"),
    (body(extension(0, b"\0\0")), "bad_sni"),
    (body(extension(0, vector(b"\0" + vector(HOST.encode(), 2), 2) + b"x")), "bad_sni"),
    (body(NAME, NAME), "bad_sni"),
    (body(NAME, server_name(b"evil.test")), "bad_sni"),
    (body(NAME, extension(21, b""), extension(21, b"")), "bad_sni"),
    (body(NAME, extension(0xFE0D, b"\0" * 40)), "ech_present"),
    (body(NAME, extension(0xFFCE, b"\0" * 40)), "ech_present"),
    (body(extension(0xFFCE, b"\0" * 40)), "ech_present"),
    (body(server_name(b"public.example"), extension(0xFE0D, b"\0" * 40)), "ech_present"),
    (body(NAME, version=b"\x02\x00"), "not_tls"),
    (body(NAME, session=b"s" * 33), "not_tls"),
    (body(NAME, suites=b""), "not_tls"),
    (body(NAME, suites=b"\x13"), "not_tls"),
    (body(NAME) + b"x", "not_tls"),
    (body(NAME)[:-1], "not_tls"),
    (body(NAME)[:40], "not_tls"),
]  # fmt: skip


@pytest.mark.parametrize(("inside", "expected"), CASES)
def test_each_kind_of_hello_has_its_reason(inside: bytes, expected: str) -> None:
    """E2: names, duplicates, hidden hellos and malformed ones."""
    assert judged(records(message(inside))) == expected
    assert judged(records(message(inside), 7)) == expected


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x16\x02\x00\x00\x05hello",
        b"\x80\x2e\x01\x03\x01",  # SSLv2
        b"\x15\x03\x01\x00\x02\x02\x28",
        b"\x17\x03\x03\x00\x05hello",
        b"\x16\x03\x01\x00\x00",
        b"\x16\x03\x01\x41\x00",
        records(b"\x02" + vector(b"x" * 50, 3)),
        records(message(body(NAME)) + b"\x01"),
        records(message(body(NAME))[:20]) + records(b"x", kind=0x14),
    ],
)
def test_what_is_no_hello_is_told_at_once(data: bytes) -> None:
    """E1: raw protocols and broken records inside a CONNECT are refused without waiting for more."""
    assert judged(data) == "not_tls"


def test_the_caps_hold() -> None:
    """E1: 16 KiB and 5 seconds over all records, and one byte in each record buys nothing."""
    assert judged(records(message(body(NAME, extension(21, b"\0" * 17000))))) == "hello_too_large"
    assert judged(records(b"\x01\xff\xff\xff")) == "hello_too_large"
    just = message(body(NAME, extension(21, b"\0" * 12000)))
    assert judged(records(just)) == "ok"
    assert judged(records(just, 1)) == "hello_too_large"
    reader = Reader(endpoint(), 100.0)
    data = records(message(body(NAME)))
    assert reader.feed(data[:10], 100.0) is None
    assert reader.tick(100.0 + HELLO_SECONDS - 0.01) is None
    late = reader.feed(data[10:], 100.0 + HELLO_SECONDS)
    assert isinstance(late, Refusal)
    assert late.reason == "sni_timeout"
    reader = Reader(endpoint(), 0.0)
    fed = 0
    while (found := reader.feed(b"\x16\x03\x01\x00\x01\x01" if not fed else b"\x16\x03\x01\x00\x01\x00", 0.0)) is None:
        fed += 6
    assert isinstance(found, Refusal)
    assert fed <= HELLO_BYTES


def test_an_address_has_no_server_name() -> None:
    """E2: behind a private address entry the SNI must be absent."""
    private = endpoint("10.0.0.6:8443")
    assert judged(records(message(body())), private) == "ok"
    assert judged(records(message(body(NAME))), private) == "bad_sni"


def test_interception_ends_what_is_hidden() -> None:
    """E2: where the handshake ends at the gateway, GREASE ECH is no obstacle; another name still is."""
    grease = body(NAME, extension(0xFE0D, b"\0" * 40))
    assert judged(records(message(grease)), intercepted=True) == "ok"
    wrong = body(server_name(b"evil.test"), extension(0xFE0D, b"\0" * 40))
    assert judged(records(message(wrong)), intercepted=True) == "sni_mismatch"


def test_mutations_never_pass_as_another_name() -> None:
    """E2: whatever is changed in a hello, it is refused, incomplete, or still names the CONNECT host."""
    rng = random.Random(3)
    seed = records(message(body(NAME, extension(16, b"\0\x03\x02h2"))))
    ended: set[str | None] = set()
    for _ in range(8000):
        data = bytearray(seed)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        found = parse(bytes(data))
        ended.add(judged(bytes(data)))
        if isinstance(found, Hello) and check(found, endpoint()) is None:
            assert HOST.encode() in bytes(data).lower()
    assert len(ended) >= 5, ended
