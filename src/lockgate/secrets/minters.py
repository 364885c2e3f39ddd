"""Minters: one short-lived token for one backend, one scope and one call.

Rule 1: a token is minted after `authorize()` allowed, lives at most 60 s, and names the call in its claims: a backend
        that checks them (`lockgate.verify`) takes it for nothing else.
Rule 2: issuer, audience and lifetime are the operator's; nothing that a backend answers can change them.
Rule 3: the signing key is read again when its lease ends, so a rotated key is taken up without a restart.

Sources: RFC 9068 (at+jwt), RFC 8693 section 4.1 (act), RFC 9396 (authorization_details), RFC 9864 (the name Ed25519).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from lockgate.contract.errors import HostFault
from lockgate.contract.run import Principal
from lockgate.secrets.lease import Lease
from lockgate.secrets.store import Store

if TYPE_CHECKING:
    from joserfc.jwk import OKPKey

MAX_TTL: Final = 60.0
_ALGORITHM: Final = "Ed25519"


class MintFailed(HostFault):
    """No token could be made; the backend was not called."""

    code = "mint_failed"


class CallFacts(msgspec.Struct, frozen=True):
    """What a token says about its call: the operation, the call's id, and the arguments that name things."""

    operation: str
    call_id: str
    identifiers: Mapping[str, str | int]


class Minter(Protocol):
    """Makes tokens for one backend."""

    def mint(self, principal: Principal, call: CallFacts, backend: str, scope: Sequence[str], ttl: float) -> Lease:
        """Return a token for `call` alone; the caller ends the lease.

        Args:
            principal: on whose behalf.
            call: which call.
            backend: name of the backend, for the lease's purpose.
            scope: what the token may be used for at the backend.
            ttl: seconds, cut to what the operator allows.

        Raises:
            MintFailed: the key is not usable, or `scope` is not one.
            SecretUnavailable: the key could not be read.

        """
        ...


class JwtMinter:
    """Signs RFC 9068 access tokens with Ed25519.

    Args:
        issuer: the `iss` claim. audience: the `aud` claim, one string. ttl: longest life in seconds, at most 60.
        key_ref: reference of the private key, PEM (PKCS 8) or JWK. store: where it is.

    """

    def __init__(self, *, issuer: str, audience: str, ttl: float, key_ref: str, store: Store) -> None:
        self._issuer = issuer
        self._audience = audience
        self._ttl = min(ttl, MAX_TTL)
        self._ref = key_ref
        self._store = store
        self._lock = threading.Lock()
        self._key: tuple[OKPKey, str, float] | None = None

    def mint(self, principal: Principal, call: CallFacts, backend: str, scope: Sequence[str], ttl: float) -> Lease:
        """Return a signed token; see the protocol."""
        if not scope or any(not part or not part.isascii() or not part.isprintable() or " " in part for part in scope):
            raise MintFailed(
                f"the token scope for {backend!r} is empty or has a part that is none",
                next_step='give scope=["noun:verb"] in the operation',
            )
        from joserfc import jwt  # noqa: PLC0415 - an extra, and slow to import: only a broker that mints pays for it
        from joserfc.errors import JoseError  # noqa: PLC0415

        key, kid = self._signing_key(backend)
        now = int(time.time())
        life = min(self._ttl, ttl)
        jti = os.urandom(16).hex()
        claims: dict[str, object] = {
            "iss": self._issuer,
            "sub": principal.user,
            "aud": self._audience,
            "iat": now,
            "exp": now + max(int(life), 1),
            "jti": jti,
            "client_id": principal.agent,
            "act": {"sub": principal.agent, "run": principal.run},
            "tenant": principal.tenant,
            "scope": " ".join(scope),
            "authorization_details": [
                {
                    "type": "lockgate_call",
                    "op": call.operation,
                    "call": call.call_id,
                    "identifiers": dict(call.identifiers),
                }
            ],
        }
        token: str | None = None
        # The error is raised below, outside the block and so without a cause: the cause's frames hold the key.
        with contextlib.suppress(JoseError, ValueError, TypeError):
            token = jwt.encode({"alg": _ALGORITHM, "typ": "at+jwt", "kid": kid}, claims, key, algorithms=[_ALGORITHM])
        if token is None:
            raise MintFailed(f"the token for {backend!r} could not be signed", next_step="give an Ed25519 private key")
        return Lease(token, purpose=f"{backend} for {call.operation}", ttl=life, lease_id=jti)

    def _signing_key(self, backend: str) -> tuple[OKPKey, str]:
        with self._lock:
            if self._key is not None and time.monotonic() < self._key[2]:
                return self._key[0], self._key[1]
            with self._store.get(self._ref, purpose=f"sign for {backend}") as lease:
                key = _import(lease.value.reveal())
                expires = lease.expires
            if key is None or not key.is_private or key.curve_name != "Ed25519":
                raise MintFailed(
                    f"the key at {self._ref!r} is no Ed25519 private key", next_step="store a PKCS 8 PEM or a JWK"
                )
            self._key = (key, key.thumbprint(), expires)
            return self._key[0], self._key[1]


class KeyMinter:
    """Lends a stored key of the service itself, for services that issue nothing shorter-lived.

    The key stays good after the call; what ends with the call is our hold of it. The rotation is the operator's.

    Args:
        key_ref: reference of the key. store: where it is.

    """

    def __init__(self, *, key_ref: str, store: Store) -> None:
        self._ref = key_ref
        self._store = store

    def mint(self, principal: Principal, call: CallFacts, backend: str, scope: Sequence[str], ttl: float) -> Lease:
        """Return the key on loan; see the protocol. It says nothing of the call, so `scope` narrows nothing."""
        del principal, scope
        with self._store.get(self._ref, purpose=f"call {backend}") as lease:
            return Lease(lease.value.reveal().strip(), purpose=f"{backend} for {call.operation}", ttl=ttl)


def _import(text: str) -> OKPKey | None:
    try:
        from joserfc.jwk import OKPKey  # noqa: PLC0415 - see above
    except ImportError:
        raise MintFailed(
            "this backend mints jwt tokens, and joserfc is not installed", next_step="pip install 'lockgate[jwt]'"
        ) from None
    try:
        if text.startswith("{"):
            return OKPKey.import_key(msgspec.json.decode(text, type=dict[str, str | list[str]]))
        return OKPKey.import_key(text)
    except Exception:  # noqa: BLE001 - any failure of a parser may quote the key; none of its words leave
        return None
