"""The payments service takes a short-lived token for exactly this call, once, and nothing else (C4)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import os
import sqlite3
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from joserfc import jwt
from joserfc.jwk import OKPKey

ATLAS = Path(__file__).parents[2] / "examples" / "atlas"
ORDER, AMOUNT = "ord_4417", 49_00


class Service:
    """A running payments service and the keys that an attacker may or may not have."""

    def __init__(self, folder: Path) -> None:
        state = folder / "state"
        state.mkdir()
        subprocess.run([sys.executable, ATLAS / "seed.py", state], check=True, timeout=30)
        public = state / "keys" / "public.json"
        self.public = json.loads(public.read_text())
        signing = tomllib.loads((state / "keys" / "signing.toml").read_text())["payments"]
        self.key = OKPKey.import_key(json.loads(signing))
        self.ledger = folder / "ledger.db"
        self.process = subprocess.Popen(
            [sys.executable, ATLAS / "payments.py", "--public-key", public, "--ledger", self.ledger],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={},
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate(timeout=10)

    def claims(self, **changes: Any) -> dict[str, Any]:
        now = int(time.time())
        identifiers = {"order_id": ORDER, "amount": AMOUNT}
        detail = {"type": "lockgate_call", "op": "refund", "call": "c-1", "identifiers": identifiers}
        claims = {
            "iss": "atlas-broker",
            "sub": "dana",
            "aud": "payments",
            "iat": now,
            "exp": now + 20,
            "jti": os.urandom(8).hex(),
            "client_id": "atlas",
            "act": {"sub": "atlas", "run": "run-1"},
            "scope": "refund:create",
            "authorization_details": [detail],
        }
        return {**claims, **changes}

    def token(self, key: Any = None, alg: str = "Ed25519", typ: str = "at+jwt", **changes: Any) -> str:
        return jwt.encode({"alg": alg, "typ": typ}, self.claims(**changes), key or self.key, algorithms=[alg])

    def post(self, token: str | None, *, body: Any = None, key: str | None = None, path: str = "/v1/refunds") -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        headers = {"Idempotency-Key": key or os.urandom(16).hex()}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        sent = {"order_id": ORDER, "amount": AMOUNT} if body is None else body
        try:
            connection.request("POST", path, sent if isinstance(sent, bytes) else json.dumps(sent), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with sqlite3.connect(f"{self.ledger.as_uri()}?mode=ro", uri=True) as db:
            return db.execute(query).fetchall()

    def refusals(self) -> list[str]:
        return [row[0] for row in self.rows("SELECT why FROM refused ORDER BY id")]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    running = Service(tmp_path_factory.mktemp("payments"))
    yield running
    running.close()
    assert running.process.returncode == 0


def b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def refused(service: Service, token: str | None, why: str, **more: Any) -> None:
    """The caller learns `unauthorized` and no more; the ledger names the kind and books nothing."""
    before = service.rows("SELECT * FROM refunds")
    assert service.post(token, **more) == (401, {"error": "unauthorized"})
    assert service.refusals()[-1] == why
    assert service.rows("SELECT * FROM refunds") == before


def test_a_token_for_exactly_this_call_is_taken(service: Service) -> None:
    """The control for every refusal below: the same request with nothing changed books a refund."""
    status, answer = service.post(service.token())
    assert (status, answer["order_id"], answer["amount"]) == (201, ORDER, AMOUNT)
    last = service.rows("SELECT order_id, amount, user, agent, run FROM refunds ORDER BY id DESC LIMIT 1")
    assert last == [(ORDER, AMOUNT, "dana", "atlas", "run-1")]


def test_no_token(service: Service) -> None:
    refused(service, None, "missing")


def test_expired(service: Service) -> None:
    now = int(time.time())
    refused(service, service.token(iat=now - 60, exp=now - 30), "expired")


def test_not_short_lived(service: Service) -> None:
    now = int(time.time())
    refused(service, service.token(iat=now, exp=now + 3600), "too_long")


def test_other_audience(service: Service) -> None:
    refused(service, service.token(aud="ledger"), "audience")


def test_other_issuer(service: Service) -> None:
    refused(service, service.token(iss="somebody"), "issuer")


def test_other_scope(service: Service) -> None:
    refused(service, service.token(scope="refund:read"), "scope")


@pytest.mark.parametrize(
    "changed",
    [
        {"op": "get_order"},
        {"identifiers": {"order_id": ORDER, "amount": AMOUNT - 1}},
        {"identifiers": {"order_id": "ord_1", "amount": AMOUNT}},
        {"identifiers": {"order_id": ORDER}},
        {"identifiers": {"order_id": ORDER, "amount": str(AMOUNT)}},
        {"type": "something_else"},
    ],
    ids=["operation", "amount", "order", "amount-missing", "amount-as-text", "type"],
)
def test_token_for_another_call(service: Service, changed: dict[str, Any]) -> None:
    detail = {**service.claims()["authorization_details"][0], **changed}
    refused(service, service.token(authorization_details=[detail]), "call")


def test_token_spent_twice(service: Service) -> None:
    """Also with the same idempotency key: a token is for one request, not for one effect."""
    token, key, before = service.token(), "ab" * 16, len(service.rows("SELECT * FROM refunds"))
    assert service.post(token, key=key)[0] == 201
    assert service.post(token, key=key) == (401, {"error": "unauthorized"})
    assert service.post(token) == (401, {"error": "unauthorized"})
    assert service.refusals()[-2:] == ["replayed", "replayed"]
    assert len(service.rows("SELECT * FROM refunds")) == before + 1


def test_algorithm_none(service: Service) -> None:
    head = b64(json.dumps({"alg": "none", "typ": "at+jwt"}).encode())
    body = b64(json.dumps(service.claims()).encode())
    refused(service, f"{head}.{body}.", "signature")


def test_hs256_with_the_public_key_as_its_secret(service: Service) -> None:
    """Each form of the public key that an attacker could feed to HMAC."""
    head = b64(json.dumps({"alg": "HS256", "typ": "at+jwt"}).encode())
    body = b64(json.dumps(service.claims()).encode())
    signed = f"{head}.{body}".encode()
    pem = OKPKey.import_key(service.public).as_pem(private=False)
    for secret in (pem, json.dumps(service.public).encode(), base64.urlsafe_b64decode(service.public["x"] + "=")):
        refused(service, f"{signed.decode()}.{b64(hmac.digest(secret, signed, hashlib.sha256))}", "signature")


def test_signed_by_another_key(service: Service) -> None:
    refused(service, service.token(OKPKey.generate_key("Ed25519")), "signature")


def test_not_an_access_token(service: Service) -> None:
    refused(service, service.token(typ="JWT"), "type")


def test_the_key_binds_the_refund(service: Service) -> None:
    """A repeat with the same key gets the stored receipt, another amount under it a conflict; neither pays again."""
    key, before = "cd" * 16, len(service.rows("SELECT * FROM refunds"))
    first = service.post(service.token(), key=key)
    again = service.post(service.token(), key=key)
    assert (first[0], again[0], again[1]["id"]) == (201, 200, first[1]["id"])
    less = {"order_id": ORDER, "amount": 1}
    detail = {**service.claims()["authorization_details"][0], "identifiers": less}
    assert service.post(service.token(authorization_details=[detail]), key=key, body=less)[0] == 409
    assert len(service.rows("SELECT * FROM refunds")) == before + 1


BAD_BODIES: list[Any] = [
    b"",
    b"{",
    b"[]",
    b"x" * 5000,
    {"order_id": ORDER},
    {"order_id": ORDER, "amount": 4900.0},
    {"order_id": ORDER, "amount": True},
    {"order_id": ORDER, "amount": -1},
    {"order_id": 7, "amount": 1},
    {"order_id": ORDER, "amount": 1, "tenant": "globex"},
]


@pytest.mark.parametrize("body", BAD_BODIES)
def test_malformed_bodies(service: Service, body: Any) -> None:
    before = service.rows("SELECT * FROM spent")
    assert service.post(service.token(), body=body) == (400, {"error": "bad_request"})
    assert service.rows("SELECT * FROM spent") == before


def test_other_paths(service: Service) -> None:
    assert service.post(service.token(), path="/v1/refunds/all")[0] == 400


def test_it_ends_with_whoever_started_it(tmp_path: Path) -> None:
    running = Service(tmp_path)
    running.close()
    assert running.process.returncode == 0
