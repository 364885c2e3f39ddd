"""Backends of the configuration, with what mints their tokens."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

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
        ConfigError: a key has no reference, or what a backend needs is not installed.
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
                _need("joserfc", "jwt", f"backends.{name} mints tokens")
                minter = JwtMinter(
                    issuer=entry.issuer, audience=entry.audience, ttl=entry.ttl, key_ref=secret.ref, store=store
                )
        if entry.url is not None:
            _need("httpx", "http", f"backends.{name} has a url")
        found[name] = Backend(name, entry.url, minter, entry.ttl, entry.header)
    _warm(found)
    return found


def _need(module: str, extra: str, why: str) -> None:
    """Refuse at the start what would otherwise fail inside a call, where a write's outcome would be unknown."""
    if find_spec(module) is None:
        raise ConfigError(f"{why}, and {module} is not installed", next_step=f"pip install 'lockgate[{extra}]'")


def _warm(found: dict[str, Backend]) -> None:
    """Load what the first call would otherwise load within its own deadline."""
    if any(isinstance(one.minter, JwtMinter) for one in found.values()):
        importlib.import_module("joserfc.jwt")
        importlib.import_module("joserfc.jwk")
    for one in found.values():
        if one.url is not None:
            http.client(one.name)
