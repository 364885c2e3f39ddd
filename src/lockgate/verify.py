"""The check that a backend makes on the tokens of lockgate's broker. Import this in the service; it holds no secret.

Rule 1: algorithm and type are pinned here; the token's header chooses neither (no `none`, no HS256 confusion).
Rule 2: claims alone stop nothing: the operation and its identifiers are compared with what the service is about to do.
Rule 3: an error is a closed code. It never carries the token or a claim.

Sources: RFC 9068 section 4, RFC 8725 (best current practice), RFC 9396, RFC 9864.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, Literal

import msgspec

from lockgate.contract.errors import ConfigError

MAX_TOKEN_BYTES: Final = 8 * 1024
MAX_LIFE: Final = 60
_ALGORITHM: Final = "Ed25519"
_TYPES: Final = ("at+jwt", "application/at+jwt")

Refusal = Literal[
    "missing",
    "malformed",
    "signature",
    "type",
    "issuer",
    "audience",
    "expired",
    "too_long",
    "scope",
    "call",
    "replayed",
]


class TokenRefused(Exception):
    """The token does not allow this. `code` says which check failed; answer 401 and nothing more."""

    def __init__(self, code: Refusal) -> None:
        super().__init__(f"the token is refused ({code}). Next step: have the broker mint one for this very call")
        self.code: Refusal = code


class Detail(msgspec.Struct, frozen=True):
    """The call that a token is for (an entry of `authorization_details`)."""

    type: str
    op: str
    identifiers: dict[str, str | int]
    call: str = ""


class Actor(msgspec.Struct, frozen=True):
    """The agent that acts, and its run."""

    sub: str
    run: str


class Claims(msgspec.Struct, frozen=True):
    """What a checked token says. `sub` is the user, `act` the agent and run, `exp`/`iat` seconds since the epoch."""

    iss: str
    sub: str
    aud: str
    iat: int
    exp: int
    jti: str
    client_id: str
    act: Actor
    scope: str
    authorization_details: tuple[Detail, ...]
    tenant: str = ""


class Verifier:
    """Checks tokens for one service.

    Args:
        issuer: the only `iss` taken. audience: the only `aud` taken, this service.
        key: the broker's Ed25519 public key, PEM or JWK (a dict).
        leeway: seconds by which the clocks may differ.
        one_use: refuse a `jti` that was accepted before (remembered until it expires; one process only).
        clock: seconds since the epoch.

    Raises:
        ValueError: `key` is no Ed25519 public key. ConfigError: the extra is not installed.

    """

    def __init__(
        self,
        *,
        issuer: str,
        audience: str,
        key: str | Mapping[str, str],
        leeway: int = 2,
        one_use: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        try:
            from joserfc.jwk import OKPKey  # noqa: PLC0415 - an extra: importing this module must not need it
        except ModuleNotFoundError:
            raise ConfigError(
                "tokens are checked with joserfc, which is not installed", next_step="pip install 'lockgate[jwt]'"
            ) from None

        self._key = OKPKey.import_key(key if isinstance(key, str) else dict(key))
        if self._key.curve_name != "Ed25519":
            raise ValueError("the key is no Ed25519 key; give the broker's public key as PEM or JWK")
        self._issuer = issuer
        self._audience = audience
        self._leeway = leeway
        self._clock = clock
        self._seen: set[str] | None = set() if one_use else None
        self._forget: list[tuple[float, str]] = []
        self._lock = threading.Lock()

    def check_header(
        self, authorization: str | None, *, operation: str, scope: str, identifiers: Mapping[str, str | int]
    ) -> Claims:
        """Check the value of an `Authorization` header; see `check`."""
        kind, _, token = (authorization or "").partition(" ")
        if kind != "Bearer" or not token:
            raise TokenRefused("missing")
        return self.check(token, operation=operation, scope=scope, identifiers=identifiers)

    def check(self, token: str, *, operation: str, scope: str, identifiers: Mapping[str, str | int]) -> Claims:
        """Return the claims of `token` when it allows exactly this.

        Args:
            token: the compact JWS.
            operation: the operation of lockgate's registry that this request serves.
            scope: what the request needs, one word.
            identifiers: what the request is about; each must stand in the token with the same value and type.

        Raises:
            TokenRefused: any check failed.

        """
        claims = self._signed(token)
        now = self._clock()
        if claims.iss != self._issuer:
            raise TokenRefused("issuer")
        if claims.aud != self._audience:
            raise TokenRefused("audience")
        if not claims.iat - self._leeway <= now < claims.exp + self._leeway:
            raise TokenRefused("expired")
        if claims.exp - claims.iat > MAX_LIFE:
            raise TokenRefused("too_long")
        if scope not in claims.scope.split(" "):
            raise TokenRefused("scope")
        if not any(_names(detail, operation, identifiers) for detail in claims.authorization_details):
            raise TokenRefused("call")
        self._use_once(claims, now)
        return claims

    def _signed(self, token: str) -> Claims:
        from joserfc import jwt  # noqa: PLC0415 - see __init__
        from joserfc.errors import JoseError  # noqa: PLC0415

        if not token.isascii() or len(token) > MAX_TOKEN_BYTES or token.count(".") != 2:
            raise TokenRefused("malformed")
        try:
            decoded = jwt.decode(token, self._key, algorithms=[_ALGORITHM])
        except (JoseError, ValueError, TypeError, KeyError):
            raise TokenRefused("signature") from None
        if (
            "crit" in decoded.header
            or decoded.header.get("typ") not in _TYPES
            or decoded.header.get("alg") != _ALGORITHM
        ):
            raise TokenRefused("type")
        try:
            return msgspec.convert(decoded.claims, Claims)
        except msgspec.ValidationError:
            raise TokenRefused("malformed") from None

    def _use_once(self, claims: Claims, now: float) -> None:
        if self._seen is None:
            return
        with self._lock:
            while self._forget and self._forget[0][0] < now:
                self._seen.discard(heapq.heappop(self._forget)[1])
            if claims.jti in self._seen:
                raise TokenRefused("replayed")
            self._seen.add(claims.jti)
            heapq.heappush(self._forget, (claims.exp + self._leeway, claims.jti))


def _names(detail: Detail, operation: str, identifiers: Mapping[str, str | int]) -> bool:
    return (
        detail.type == "lockgate_call"
        and detail.op == operation
        and all(
            name in detail.identifiers
            and detail.identifiers[name] == value
            and type(detail.identifiers[name]) is type(value)
            for name, value in identifiers.items()
        )
    )
