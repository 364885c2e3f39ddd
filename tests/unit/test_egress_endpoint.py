"""Requests inside a tunnel, one pure rule (E1)."""

from __future__ import annotations

from typing import Any

import pytest

from lockgate.policy.egress import EgressPolicy
from lockgate.policy.egress_endpoint import Intercepted, judge, needs_body
from lockgate.policy.host import Endpoint, Host

RULES: list[dict[str, Any]] = [
    {"method": ["GET"], "path": "/v1/*", "query": ["page", "size"]},
    {"method": ["POST"], "path": "/v1/items", "fields": ["name", "count"]},
    {"method": ["GET"], "path": "/ws", "websocket": True},
    {"method": ["GET"], "path": "/any/*", "query": ["*"]},
]
POLICY = EgressPolicy.from_data(
    {
        "allow": [
            "api.partner.example:443",
            "open.partner.example:443",
            "plain.partner.example:80",
            "alt.partner.example:8443",
        ],
        "endpoint": [
            {"host": "api.partner.example:443", "rules": RULES},
            {"host": "plain.partner.example:80", "rules": [{"method": ["GET"], "path": "/pub/*"}]},
            {"host": "alt.partner.example:8443", "rules": [{"method": ["GET"], "path": "/*"}]},
        ],
        "model": [{"host": "api.anthropic.com:443", "api": "anthropic"}],
    }
)


def place(text: str) -> Endpoint:
    found = Endpoint.parse(text.encode())
    assert isinstance(found, Endpoint)
    return found


def ask(
    method: str = "GET", target: str = "/v1/x", *, to: str = "api.partner.example:443", authority: str | None = None,
    fields: tuple[tuple[bytes, bytes], ...] = (), body: bytes | None = b"", http: Any = "1.1", sni: Host | None = None,
) -> tuple[bool, str]:  # fmt: skip
    connect = place(to)
    named = connect.host.text if authority is None else authority
    asked = Intercepted(
        connect=connect, sni=sni or (None if connect.port == 80 else connect.host), authority=named.encode(),
        method=method, target=target.encode("latin-1"), fields=fields, body=body, http=http,
    )  # fmt: skip
    verdict = judge(POLICY, asked)
    return verdict.allow, verdict.reason


def test_what_a_rule_lets_through() -> None:
    assert ask() == (True, "ok")
    assert ask(target="/v1") == (True, "ok")
    assert ask(target="/v1/x?page=2&size=10") == (True, "ok")
    assert ask("POST", "/v1/items", body=b'{"name": "a"}') == (True, "ok")
    assert ask(target="/any/x?whatever=1&z") == (True, "ok")
    assert ask(to="open.partner.example:443", target="/x?y=1") == (True, "ok")
    assert ask(to="plain.partner.example:80", target="/pub/a") == (True, "ok")
    assert ask(to="alt.partner.example:8443", authority="alt.partner.example:8443") == (True, "ok")


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("DELETE", "/v1/x"),
        ("POST", "/v1/x"),
        ("GET", "/v1x"),
        ("GET", "/v1/x?secret=1"),
        ("GET", "/v1/x?page=1&secret=1"),
        ("GET", "/v1/x?pa%67e=1"),
        ("GET", "/v1/x?page=1;secret=2"),
        ("GET", "/v1/x?"),
        ("GET", "/V1/x"),
        ("GET", "/v1/items2/../items"),
    ],
)
def test_what_it_does_not(method: str, target: str) -> None:
    allow, reason = ask(method, target)
    assert not allow
    assert reason in {"path_not_allowed", "path_not_canonical"}


def test_fields_of_a_body() -> None:
    for body, reason in (
        (b'{"name": "a", "webhook": "x"}', "field_not_declared"),
        (b'{"name": "a", "name": "b"}', "opaque_body"),
        (b"name=a", "opaque_body"),
        (b'["name"]', "opaque_body"),
        (b"\xff", "opaque_body"),
        (None, "opaque_body"),
        (b"[" * 20_000, "opaque_body"),
    ):
        assert ask("POST", "/v1/items", body=body) == (False, reason), body
    assert needs_body(POLICY, place("api.partner.example:443"))
    assert not needs_body(POLICY, place("open.partner.example:443"))
    assert needs_body(POLICY, place("api.anthropic.com:443"))


def test_the_authority_is_that_of_the_tunnel() -> None:
    for named in (
        "evil.test",
        "api.partner.example:8443",
        "API.partner.example.evil.test",
        "a b",
        "api.partner.example:",
    ):
        assert ask(authority=named) == (False, "host_mismatch"), named
    assert ask(authority="API.PARTNER.EXAMPLE:443") == (True, "ok")
    assert ask(authority="", http="1.1") == (False, "duplicate_host")
    assert ask(to="alt.partner.example:8443", authority="alt.partner.example") == (False, "host_mismatch")
    two = ((b"host", b"api.partner.example"), (b"host", b"evil.test"))
    assert ask(fields=two) == (False, "duplicate_host")
    # A Host field beside :authority must say the same (RFC 9113 section 8.3.1).
    assert ask(fields=((b"host", b"evil.test"),), http="2") == (False, "host_mismatch")
    other = Host.parse(b"evil.test")
    assert isinstance(other, Host)
    assert ask(sni=other) == (False, "sni_mismatch")


def test_upgrades() -> None:
    upgrade = ((b"connection", b"Upgrade"), (b"upgrade", b"websocket"))
    assert ask(target="/ws", fields=upgrade) == (True, "ok")
    assert ask(target="/v1/x", fields=upgrade) == (False, "upgrade_denied")
    assert ask(target="/ws", fields=((b"connection", b"upgrade"), (b"upgrade", b"h2c"))) == (False, "upgrade_denied")
    assert ask(target="/ws", fields=(*upgrade, (b"http2-settings", b"x"))) == (False, "upgrade_denied")
    h2c = ((b"connection", b"upgrade, http2-settings"), (b"upgrade", b"websocket"))
    assert ask(target="/ws", fields=h2c) == (False, "upgrade_denied")
    assert ask(target="/v1/x", fields=((b"connection", b"HTTP2-Settings"),)) == (False, "upgrade_denied")
    assert ask("CONNECT", "evil.test:443") == (False, "upgrade_denied")
    assert ask(to="open.partner.example:443", target="/x", fields=upgrade) == (False, "upgrade_denied")


def test_a_path_need_not_be_canonical_where_no_rule_is_about_paths() -> None:
    """E1: mirrors and old servers have such paths; where every path is allowed, two readings are both allowed."""
    for target in ("/debian//dists", "/a;v=1/b", "/x/%2e%2e/y", "/a%2fb"):
        assert ask(to="open.partner.example:443", target=target) == (True, "ok"), target
        assert ask(to="plain.partner.example:80", target=f"/pub{target}") == (False, "path_not_canonical"), target


def test_fields_that_steer_are_refused_in_each_version() -> None:
    """E2: a request of HTTP/2 is not read by the front that knows them."""
    for name in (b"x-unix-socket", b"x-forwarded-host", b"x_original_url", b"forwarded", b"x-lockgate-run"):
        assert ask(fields=((name, b"x"),), http="2") == (False, "forbidden_header"), name


def test_what_no_rule_can_let_through() -> None:
    assert ask(target="https://evil.test/x") == (False, "absolute_form_in_tunnel")
    assert ask(target="x") == (False, "bad_request")
    assert ask(fields=((b"content-encoding", b"gzip"),)) == (False, "opaque_body")
    assert ask(fields=((b"content-encoding", b"identity"),)) == (True, "ok")
    assert ask(fields=((b"x-http-method-override", b"DELETE"),)) == (False, "forbidden_header")
    assert ask(fields=((b"x-original-url", b"/admin"),), to="open.partner.example:443") == (False, "forbidden_header")
    for target in (
        "/v1/%2e%2e/x",
        "/v1/a%2fb",
        "/v1/a%5cb",
        "/v1/%252e",
        "/v1//x",
        "/v1/a\\b",
        "/v1/a\xffb",
        "/v1/a b",
    ):
        assert ask(target=target) == (False, "path_not_canonical"), target


def test_a_model_endpoint_has_one_path() -> None:
    to = "api.anthropic.com:443"
    assert ask("POST", "/v1/messages", to=to, body=b"{}") == (True, "ok")
    assert ask("POST", "/v1/files", to=to) == (False, "path_not_allowed")
    key = ((b"x-api-key", b"sk-synthetic-other"),)
    assert ask("POST", "/v1/messages", to=to, fields=key) == (False, "foreign_credential")
    assert ask("POST", "/v1/messages", to=to, fields=((b"upgrade", b"websocket"),)) == (False, "upgrade_denied")
