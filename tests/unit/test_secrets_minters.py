"""One token, one backend, one call, one minute; and the check that a backend makes on it (C4)."""

from __future__ import annotations

import base64
import hmac
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("joserfc")
from joserfc import jwt
from joserfc.jwk import ECKey, OKPKey

from lockgate.contract.run import Principal
from lockgate.secrets import FileStore, Lease, SecretUnavailable, leaks, open_store
from lockgate.secrets.minters import CallFacts, JwtMinter, KeyMinter, MintFailed
from lockgate.verify import TokenRefused, Verifier

WHO = Principal("u1", "support", "t1", "run-1")
FACTS = CallFacts("refund", "call-1", {"order_id": "ord_4417", "amount": 2000})
ISSUER, AUDIENCE = "https://lockgate.example", "payments"
Wanted = dict[str, Any]
WANTED: Wanted = {
    "operation": "refund",
    "scope": "refund:create",
    "identifiers": {"order_id": "ord_4417", "amount": 2000},
}


@pytest.fixture(scope="module")
def key() -> OKPKey:
    return OKPKey.generate_key("Ed25519")


@pytest.fixture
def minter(tmp_path: Path, key: OKPKey) -> JwtMinter:
    path = tmp_path / "key.pem"
    path.write_bytes(key.as_pem(private=True))
    path.chmod(0o600)
    return JwtMinter(issuer=ISSUER, audience=AUDIENCE, ttl=30, key_ref=f"file://{path}", store=FileStore(cache=0.3))


@pytest.fixture
def token(minter: JwtMinter) -> Iterator[Lease]:
    with minter.mint(WHO, FACTS, "payments", ["refund:create"], 10) as lease:
        yield lease


def verifier(key: OKPKey, **more: Any) -> Verifier:
    return Verifier(issuer=ISSUER, audience=AUDIENCE, key=key.as_pem(private=False).decode(), **more)


def test_the_claims_name_the_call(token: Lease, key: OKPKey) -> None:
    claims = verifier(key).check(token.value.reveal(), **WANTED)
    assert (claims.iss, claims.sub, claims.aud, claims.client_id) == (ISSUER, "u1", "payments", "support")
    assert (claims.act.sub, claims.act.run, claims.tenant) == ("support", "run-1", "t1")
    assert claims.exp - claims.iat == 10
    assert claims.jti == token.id
    assert claims.authorization_details[0].identifiers == {"order_id": "ord_4417", "amount": 2000}
    header = msgspec.json.decode(base64.urlsafe_b64decode(token.value.reveal().partition(".")[0] + "=="))
    assert (header["typ"], header["alg"], header["kid"]) == ("at+jwt", "Ed25519", key.thumbprint())


def test_no_token_lives_longer_than_the_operator_and_a_minute_allow(minter: JwtMinter, key: OKPKey) -> None:
    with minter.mint(WHO, FACTS, "payments", ["refund:create"], 3600) as lease:
        claims = verifier(key).check(lease.value.reveal(), **WANTED)
    assert claims.exp - claims.iat == 30


def changed(**more: Any) -> Wanted:
    return {**WANTED, **more}


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        (changed(operation="get_order"), "call"),
        (changed(scope="refund:delete"), "scope"),
        (changed(scope="refund"), "scope"),
        (changed(identifiers={"order_id": "ord_9"}), "call"),
        (changed(identifiers={"order_id": "ord_4417", "amount": 2001}), "call"),
        (changed(identifiers={"order_id": "ord_4417", "amount": "2000"}), "call"),
        (changed(identifiers={"amount": True}), "call"),
        (changed(identifiers={"customer": "c1"}), "call"),
    ],
)
def test_it_is_good_for_nothing_else(token: Lease, key: OKPKey, wanted: Wanted, code: str) -> None:
    with pytest.raises(TokenRefused) as caught:
        verifier(key).check(token.value.reveal(), **wanted)
    assert caught.value.code == code
    verifier(key).check(token.value.reveal(), **WANTED)  # the negative control


def test_it_is_good_once(token: Lease, key: OKPKey) -> None:
    service = verifier(key)
    service.check_header(f"Bearer {token.value.reveal()}", **WANTED)
    with pytest.raises(TokenRefused, match="replayed"):
        service.check_header(f"Bearer {token.value.reveal()}", **WANTED)


def test_it_ends(token: Lease, key: OKPKey) -> None:
    for at, code in ((time.time() + 13, "expired"), (time.time() - 13, "expired")):
        with pytest.raises(TokenRefused, match=code):
            verifier(key, clock=lambda now=at: now).check(token.value.reveal(), **WANTED)
    verifier(key, clock=lambda: time.time() + 11).check(token.value.reveal(), **WANTED)  # within the leeway


def test_it_is_for_one_issuer_and_one_audience(token: Lease, key: OKPKey) -> None:
    pem = key.as_pem(private=False).decode()
    for issuer, audience, code in (("https://other.example", AUDIENCE, "issuer"), (ISSUER, "orders", "audience")):
        with pytest.raises(TokenRefused, match=code):
            Verifier(issuer=issuer, audience=audience, key=pem).check(token.value.reveal(), **WANTED)


def claims_of(**more: Any) -> dict[str, Any]:
    now = int(time.time())
    return {
        "iss": ISSUER, "sub": "u1", "aud": AUDIENCE, "iat": now, "exp": now + 30, "jti": "j", "client_id": "support",
        "act": {"sub": "support", "run": "run-1"}, "scope": "refund:create", "tenant": "t1",
        "authorization_details": [
            {"type": "lockgate_call", "op": "refund", "identifiers": {"order_id": "ord_4417", "amount": 2000}}
        ],
        **more,
    }  # fmt: skip


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def unsigned(key: OKPKey) -> str:
    return f'{b64(b"""{"alg":"none","typ":"at+jwt"}""")}.{b64(msgspec.json.encode(claims_of()))}.'


def hs256(key: OKPKey) -> str:
    text = f'{b64(b"""{"alg":"HS256","typ":"at+jwt"}""")}.{b64(msgspec.json.encode(claims_of()))}'
    return f"{text}.{b64(hmac.digest(key.as_pem(private=False), text.encode(), 'sha256'))}"


def es256(key: OKPKey) -> str:
    return jwt.encode({"alg": "ES256", "typ": "at+jwt"}, claims_of(), ECKey.generate_key("P-256"), algorithms=["ES256"])


def signed(key: OKPKey, header: dict[str, Any] | None = None, **more: Any) -> str:
    return jwt.encode(
        {"alg": "Ed25519", "typ": "at+jwt", **(header or {})}, claims_of(**more), key, algorithms=["Ed25519"]
    )


FORGED: dict[str, tuple[Callable[[OKPKey], str], str]] = {
    "alg none": (unsigned, "signature"),
    "HS256 with the public key": (hs256, "signature"),
    "another algorithm": (es256, "signature"),
    "another key": (lambda _: signed(OKPKey.generate_key("Ed25519")), "signature"),
    "an id token": (lambda key: signed(key, {"typ": "JWT"}), "type"),
    "critical extension": (lambda key: signed(key, {"crit": ["b64"], "b64": True}), "type"),
    "two audiences": (lambda key: signed(key, aud=["payments", "orders"]), "malformed"),
    "a day": (lambda key: signed(key, exp=int(time.time()) + 86400), "too_long"),
    "no call": (lambda key: signed(key, authorization_details=[]), "call"),
    "another type of detail": (
        lambda key: signed(key, authorization_details=[{"type": "payment", "op": "refund", "identifiers": {}}]),
        "call",
    ),
    "empty": (lambda _: "", "malformed"),
    "huge": (lambda key: signed(key, sub="u" * 9000), "malformed"),
    "not ASCII": (lambda key: signed(key) + "é", "malformed"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_forgeries_are_refused(key: OKPKey, kind: str) -> None:
    make, code = FORGED[kind]
    forged = make(key)
    with pytest.raises(TokenRefused) as caught:
        verifier(key).check(forged, **WANTED)
    text = "".join(traceback.format_exception(caught.value))
    assert caught.value.code == code
    assert not forged or forged not in text
    verifier(key).check(signed(key), **WANTED)  # the negative control: such a token is taken when nothing is wrong


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic abc", "bearer x"])
def test_a_header_without_a_bearer_token(key: OKPKey, header: str | None) -> None:
    with pytest.raises(TokenRefused, match="missing"):
        verifier(key).check_header(header, **WANTED)


def test_a_rotated_key_is_taken_up(tmp_path: Path, minter: JwtMinter, key: OKPKey) -> None:
    minter.mint(WHO, FACTS, "payments", ["refund:create"], 10).end()
    fresh = OKPKey.generate_key("Ed25519")
    (tmp_path / "key.pem").write_text(msgspec.json.encode(fresh.as_dict(private=True)).decode())
    time.sleep(0.35)
    with minter.mint(WHO, FACTS, "payments", ["refund:create"], 10) as lease:
        verifier(fresh).check(lease.value.reveal(), **WANTED)


@pytest.mark.parametrize("kind", ["public", "x25519", "text"])
def test_a_key_that_cannot_sign_is_not_quoted(tmp_path: Path, kind: str) -> None:
    pems = {
        "public": OKPKey.generate_key("Ed25519").as_pem(private=False),
        "x25519": OKPKey.generate_key("X25519").as_pem(private=True),
        "text": b"sk-synthetic-not-a-pem-0011",
    }
    path = tmp_path / "bad"
    path.write_bytes(pems[kind])
    path.chmod(0o600)
    minter = JwtMinter(issuer=ISSUER, audience=AUDIENCE, ttl=30, key_ref=f"file://{path}", store=FileStore())
    with pytest.raises(MintFailed, match="no Ed25519 private key") as caught:
        minter.mint(WHO, FACTS, "payments", ["refund:create"], 10)
    text = "".join(traceback.format_exception(caught.value))
    assert not any(line and line in text for line in pems[kind].decode().splitlines() if "-----" not in line)


@pytest.mark.parametrize("scope", [[], [""], ["a b"], ["é"], ["a\n"]])
def test_a_scope_that_is_none_is_refused(minter: JwtMinter, scope: list[str]) -> None:
    with pytest.raises(MintFailed, match="empty or has a part"):
        minter.mint(WHO, FACTS, "payments", scope, 10)


def test_a_stored_key_is_lent_for_one_call(tmp_path: Path) -> None:
    """C4: the key of a service that issues nothing shorter-lived; searched for while it is on loan, forgotten after."""
    path = tmp_path / "keys.toml"
    path.write_text('service = "sk-synthetic-service-0123456789"\n')
    path.chmod(0o600)
    ref = f"file://{path}#service"
    minter = KeyMinter(key_ref=ref, store=open_store(ref))
    lease = minter.mint(Principal("u", "a", "t", "run-1"), CallFacts("ask", "call-1", {}), "model", ["generate"], 5.0)
    assert lease.value.reveal() == "sk-synthetic-service-0123456789"
    assert leaks.scan(b'{"x":"sk-synthetic-service-0123456789"}', [lease])
    lease.end()
    assert not leaks.scan(b'{"x":"sk-synthetic-service-0123456789"}', [lease])
    with pytest.raises(ValueError):
        lease.value.reveal()
    path.chmod(0o644)
    fresh = KeyMinter(key_ref=ref, store=open_store(ref))
    with pytest.raises(SecretUnavailable):
        fresh.mint(Principal("u", "a", "t", "run-1"), CallFacts("ask", "call-2", {}), "model", ["generate"], 5.0)
