"""Backends of the configuration, with what mints their tokens."""

from __future__ import annotations

import contextlib
import importlib

import msgspec

from lockgate.broker import http
from lockgate.config import Config
from lockgate.contract.errors import ConfigError
from lockgate.secrets import Store, open_store
from lockgate.secrets.minters import JwtMinter, KeyMinter, Minter


class Backend(msgspec.Struct, frozen=True):
    """One backend: its name, where it listens, what mints its tokens, their longest life in seconds, their field."""

    name: str
    url: str | None
    minter: Minter | None
    ttl: float
    header: str | None = None


def build(config: Config) -> dict[str, Backend]:
    """Return the backends by name. No secret is read before a call needs it.

    Raises:
        ConfigError: a key has no reference.
        SecretUnavailable: there is no store for a reference's scheme.

    """
    stores: dict[str, Store] = {}
    found: dict[str, Backend] = {}
    for name, entry in config.backends.items():
        minter: Minter | None = None
        if entry.minter is not None:
            secret = config.secrets.get(entry.key_name or "")
            if secret is None:
                raise ConfigError(f"backends.{name} mints tokens without key", next_step="name one: key = secret NAME")
            scheme = secret.ref.partition(":")[0]
            store = stores.get(scheme) or stores.setdefault(scheme, open_store(secret.ref))
            if entry.minter == "key":
                minter = KeyMinter(key_ref=secret.ref, store=store)
            elif entry.issuer is None or entry.audience is None:
                raise ConfigError(f"backends.{name} mints tokens without issuer or audience", next_step="give both")
            else:
                minter = JwtMinter(
                    issuer=entry.issuer, audience=entry.audience, ttl=entry.ttl, key_ref=secret.ref, store=store
                )
        found[name] = Backend(name, entry.url, minter, entry.ttl, entry.header)
    _warm(found)
    return found


def _warm(found: dict[str, Backend]) -> None:
    """Load what the first call would otherwise load within its own deadline; both are extras and may be missing."""
    with contextlib.suppress(ImportError):
        if any(isinstance(one.minter, JwtMinter) for one in found.values()):
            importlib.import_module("joserfc.jwt")
            importlib.import_module("joserfc.jwk")
    with contextlib.suppress(ImportError):
        for one in found.values():
            if one.url is not None:
                http.client(one.name)
