"""Requests inside TLS: the method, the path, the Host and the body are judged, or nothing leaves (E1, E2, E4, E7)."""

from __future__ import annotations

import base64
import json
import os
import ssl
import time
from collections.abc import Iterator
from typing import Any

import pytest

from egress_client import client_context, drain, hello, reason, tunnel
from egress_net import OTHER, PUBLIC, World
from lockgate.egress.client import Control

WAIT = 30.0
HOST = "api.allowed.example"
CANARY = "Qm7dT2xVw9KpLr4sYz8NfHc3JbGa6ReU"
POLICY = """[egress]
allow = ["api.allowed.example:443", "wrong.allowed.example:443", "plain.example:80"]
endpoint = [
  { host = "api.allowed.example:443", rules = [
    { method = ["GET", "POST"], path = "/v1/*", query = ["q"] },
    { method = ["POST"], path = "/json", fields = ["name"] },
    { method = ["GET"], path = "/ws", websocket = true },
  ] },
  { host = "wrong.allowed.example:443", rules = [{ method = ["GET"], path = "/*" }] },
]
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    answers = {HOST: [PUBLIC], "wrong.allowed.example": [OTHER], "plain.example": [PUBLIC]}
    with World(tmp_path_factory.mktemp("world"), POLICY, answers) as made:
        yield made


class Inside:
    """One run that trusts its own authority."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.control = Control(world.control)
        self.opened = self.control.open(user="u1", agent="atlas", run=name, canaries=[CANARY])
        assert self.opened.ca_pem is not None
        self.context = ssl.create_default_context(cadata=self.opened.ca_pem)
        self.context.set_alpn_protocols(["h2", "http/1.1"])

    def open(self, host: str = HOST) -> ssl.SSLSocket:
        return self.context.wrap_socket(tunnel(self.world.data, self.opened.token, host), server_hostname=host)

    def ask(self, raw: bytes, host: str = HOST) -> bytes:
        with self.open(host) as sock:
            sock.sendall(raw)
            return drain(sock)

    def rows(self) -> list[Any]:
        return [row for row in self.world.rows() if row.run == self.name]


@pytest.fixture
def inside(world: World) -> Iterator[Inside]:
    made = Inside(world, f"run-{os.urandom(6).hex()}")
    yield made
    made.control.close()


def head(line: str, *fields: str, host: str = HOST) -> bytes:
    return "\r\n".join([f"{line} HTTP/1.1", f"Host: {host}", *fields, "", ""]).encode("latin-1")


def post(path: str, body: bytes, *fields: str) -> bytes:
    return head(f"POST {path}", f"Content-Length: {len(body)}", "Connection: close", *fields) + body


def test_what_fits_a_rule_passes_and_is_verified_upstream(inside: Inside) -> None:
    """E1: HTTP/1.1 is agreed on, several requests share a tunnel, each has its row with method and path."""
    with inside.open() as sock:
        assert sock.selected_alpn_protocol() == "http/1.1"
        sock.sendall(head("GET /v1/a?q=secret") + head("GET /v1/chunked", "Connection: close"))
        answer = drain(sock)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert [row.detail["path"] for row in inside.rows()] == ["/v1/a", "/v1/chunked"]
    assert all(row.verdict == "allow" and row.detail["method"] == "GET" for row in inside.rows())
    assert reason(inside.ask(post("/json", b'{"name": "x"}'))) == "ok"


REFUSED = [
    (head("GET /v2/x"), "path_not_allowed"),
    (head("GET /v1x"), "path_not_allowed"),
    (head("DELETE /v1/x"), "path_not_allowed"),
    (head("GET /v1/x?other=1"), "path_not_allowed"),
    (head("GET /v1/../v2/x"), "path_not_canonical"),
    (head("GET /v1/%2e%2e/v2"), "path_not_canonical"),
    (head("GET /v1/a%2fb"), "path_not_canonical"),
    (head("GET /v1//x"), "path_not_canonical"),
    (head("GET /v1/a%255c"), "path_not_canonical"),
    (head("GET /v1/x", host="other-tenant.example"), "host_mismatch"),
    (head("GET /v1/x", host="api.allowed.example:8443"), "host_mismatch"),
    (head("GET /v1/x", "Host: api.allowed.example"), "duplicate_host"),
    (head("GET https://api.allowed.example/v1/x"), "absolute_form_in_tunnel"),
    (head("GET http://evil.test/v1/x"), "absolute_form_in_tunnel"),
    (b"CONNECT evil.test:443 HTTP/1.1\r\nHost: evil.test:443\r\n\r\n", "upgrade_denied"),
    (head("GET /v1/x", "Upgrade: websocket", "Connection: Upgrade"), "upgrade_denied"),
    (head("GET /ws", "Upgrade: h2c", "Connection: Upgrade"), "upgrade_denied"),
    (head("GET /v1/x", "X-HTTP-Method-Override: DELETE"), "forbidden_header"),
    (head("POST /v1/x", "Content-Length: 1", "Transfer-Encoding: chunked"), "smuggling"),
    (post("/v1/x", b"\x1f\x8b", "Content-Encoding: gzip"), "opaque_body"),
    (post("/json", b'{"name": "x", "other": 1}'), "field_not_declared"),
    (post("/json", b'{"name": "x", "name": "y"}'), "opaque_body"),
    (post("/json", b"not json"), "opaque_body"),
]


@pytest.mark.parametrize(("raw", "expected"), REFUSED)
def test_what_fits_no_rule_leaves_nothing(world: World, inside: Inside, raw: bytes, expected: str) -> None:
    """E1, E2: the refusal comes through the tunnel with its row before it; no name is asked for, nothing is dialled."""
    questions, got = len(world.questions()), world.got("https")["requests"]
    assert reason(inside.ask(raw)) == expected
    rows = inside.rows()
    assert [(row.verdict, row.reason) for row in rows] == [("deny", expected)]
    assert rows[0].detail["destination"] == f"{HOST}:443"
    assert len(world.questions()) == questions
    assert world.got("https")["requests"] == got


def test_the_second_request_of_a_tunnel_is_judged(world: World, inside: Inside) -> None:
    """E2: a good request first changes nothing for the lying Host behind it."""
    with inside.open() as sock:
        sock.sendall(head("GET /v1/first"))
        got = sock.recv(65536)
        while b"/v1/first" not in got:
            got += sock.recv(65536)
        sock.sendall(head("GET /v1/second", host="other.example"))
        assert reason(drain(sock)) == "host_mismatch"
    assert not any("/v1/second" in seen for seen in world.ask(op="seen", place="https"))


def test_a_declared_upgrade_passes_bytes_both_ways(inside: Inside) -> None:
    """E1: a WebSocket on its declared path; a canary inside it still ends the run."""
    with inside.open() as sock:
        key = base64.b64encode(os.urandom(16)).decode()
        sock.sendall(head("GET /ws", "Upgrade: websocket", "Connection: Upgrade", f"Sec-WebSocket-Key: {key}"))
        got = sock.recv(65536)
        assert got.startswith(b"HTTP/1.1 101 ")
        for word in (b"one", b"two" * 1000):
            sock.sendall(word)
            echo = b""
            while len(echo) < len(word):
                echo += sock.recv(65536)
            assert echo == word
        sock.sendall(b"\x81\x20" + CANARY.encode())
        assert CANARY.encode() not in drain(sock)
    assert inside.rows()[-1].reason == "canary"


@pytest.mark.parametrize(
    "raw",
    [
        post("/v1/x", CANARY.encode()),
        post("/v1/x", json.dumps({"a": CANARY.encode().hex()}).encode()),
        post("/v1/x", base64.b64encode(b"x" + CANARY.encode())),
        post("/v1/x", CANARY[::-1].encode()),
        head(f"GET /v1/{CANARY}"),
        head(f"GET /v1/x?q={CANARY[:16]}.{CANARY[16:]}"),
        head("GET /v1/x", f"X-Note: {CANARY}"),
        head("POST /v1/x", "Transfer-Encoding: chunked")
        + b"10\r\n%b\r\n10\r\n%b\r\n0\r\n\r\n" % (CANARY[:16].encode(), CANARY[16:].encode()),
    ],
)
def test_a_planted_value_ends_the_run(world: World, inside: Inside, raw: bytes) -> None:
    """E7: wherever it stands and however it is written: blocked, the run killed, its launcher told."""
    got = world.got("https")["requests"]
    assert reason(inside.ask(raw)) == "canary"
    assert world.got("https")["requests"] == got
    assert inside.rows()[-1].reason == "canary"
    assert "raw" not in inside.rows()[-1].detail
    deadline = time.monotonic() + WAIT
    event = None
    while event is None and time.monotonic() < deadline:
        event = inside.control.poll()
        time.sleep(0.01)
    assert event == {"event": "kill", "reason": "canary"}
    from egress_client import ask, connect

    assert reason(ask(world.data, inside.opened.token, connect(HOST))) == "caller_unauthenticated"


def test_a_planted_value_in_plain_http_and_in_a_name_ends_the_run(world: World) -> None:
    """E7: the absolute form is searched too."""
    run = Inside(world, "plain-canary")
    from egress_client import ask, get

    raw = get(f"http://plain.example/?{CANARY}")
    assert reason(ask(world.data, run.opened.token, raw)) == "canary"
    run.control.close()


def test_the_authority_is_good_for_these_names_alone(world: World, inside: Inside) -> None:
    """E2: it is the run's own, is constrained, signs no authority, and another run does not trust it."""
    from cryptography import x509

    assert inside.opened.ca_pem is not None
    certificate = x509.load_pem_x509_certificate(inside.opened.ca_pem.encode())
    constraints = certificate.extensions.get_extension_for_class(x509.NameConstraints)
    assert constraints.critical
    assert {name.value for name in constraints.value.permitted_subtrees or ()} == {HOST, "wrong.allowed.example"}
    basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert basic.value.path_length == 0
    other = Inside(world, "other-authority")
    assert other.opened.ca_pem != inside.opened.ca_pem
    with pytest.raises(ssl.SSLCertVerificationError):
        other.context.wrap_socket(tunnel(world.data, inside.opened.token, HOST), server_hostname=HOST)
    other.control.close()
    with pytest.raises(ssl.SSLCertVerificationError):  # the world's own authority did not sign it
        client_context(str(world.ca)).wrap_socket(tunnel(world.data, inside.opened.token, HOST), server_hostname=HOST)


def test_a_destination_with_a_wrong_certificate_gets_nothing(world: World, inside: Inside) -> None:
    """E2: upstream is verified for the CONNECT host; the request does not leave."""
    answer = inside.ask(head("GET /x", host="wrong.allowed.example"), "wrong.allowed.example")
    assert reason(answer) == "tls_failed"
    assert world.got("other")["requests"] == 0
    assert inside.rows()[-1].reason == "tls_failed"


def test_a_hello_with_another_name_is_refused_here_too(world: World, inside: Inside) -> None:
    """E2: interception does not excuse another SNI."""
    with tunnel(world.data, inside.opened.token, HOST) as sock:
        sock.sendall(hello("evil.test"))
        assert drain(sock) == b"\x15\x03\x03\x00\x02\x02\x31"
    assert inside.rows()[-1].reason == "sni_mismatch"
