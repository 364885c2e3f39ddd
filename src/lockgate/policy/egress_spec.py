"""The `[egress]` table as a person writes it: strings and numbers, not yet judged.

Rule 1: an unknown key is an error. Nothing here has a default that lets anything out.
Rule 2: `egress_load.py` turns it into rules, or says why not; no other code reads these strings.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Profile = Literal["runtime", "build"]
Mode = Literal["enforce", "report"]
ModelApi = Literal["anthropic", "openai"]


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every table."""


class PrivateSpec(_Table, frozen=True, kw_only=True):
    """One entry of `private`: `host` is `host:port`; `addresses` are all that its name may lead to."""

    host: str
    addresses: tuple[str, ...] = ()


class RuleSpec(_Table, frozen=True, kw_only=True):
    """One rule of an endpoint; a request must fit one whole rule.

    Attributes:
        method: methods, in capitals.
        path: exact, or a prefix that ends in `/*`.
        query: names that may stand in the query; `["*"]` = any, none by default.
        fields: names that may stand at the top of a JSON body; None = the body is not looked into.
        websocket: whether this path may be upgraded to a WebSocket (what follows is not looked into).

    """

    method: tuple[str, ...]
    path: str
    query: tuple[str, ...] = ()
    fields: tuple[str, ...] | None = None
    websocket: bool = False


class EndpointSpec(_Table, frozen=True, kw_only=True):
    """Rules for one entry of `allow` or `private`; its TLS is then opened at the gateway."""

    host: str
    rules: tuple[RuleSpec, ...]


class ModelSpec(_Table, frozen=True, kw_only=True):
    """A model vendor: only its generation path, with our credential, added by a broker operation.

    Attributes:
        host: `host:port`.
        api: whose wire format it speaks.
        operation: the broker operation that sends the request on; None = the one of that api.

    """

    host: str
    api: ModelApi
    operation: str | None = None


class Limits(_Table, frozen=True, kw_only=True):
    """`[egress.limits]`: what one run may use up. A caller can only narrow them.

    Attributes:
        bytes_out: bytes sent per registrable domain.
        names_per_wildcard: distinct names under one wildcard.
        names: distinct names.
        requests: requests and tunnels.
        connections: tunnels and connections at one time.

    """

    bytes_out: int = 10 * 1024 * 1024
    names_per_wildcard: int = 32
    names: int = 256
    requests: int = 10_000
    connections: int = 64


class EgressSpec(_Table, frozen=True, kw_only=True):
    """`[egress]`: where processes that need hosts may connect to. Empty denies all.

    Attributes:
        profile: "runtime"; only "build" may name a package registry, and then GET and HEAD only, intercepted.
        mode: "enforce"; "report" lets through what the list alone would deny, and says so, to roll a list out.
        strict: warnings are errors.
        allow: `host:port` or `*.host:port` (one label).
        deny: as `allow`, with or without a port; beats every other entry.
        private: destinations that are no public ones, each with its pinned addresses.
        endpoint: method and path rules (interception).
        model: model vendors.
        nat64_prefix: of a network that has IPv6 alone, such as "64:ff9b::/96".
        wildcard_dns: how many names under wildcards the synthetic DNS answers in one run.
        limits: budgets of one run.

    """

    profile: Profile = "runtime"
    mode: Mode = "enforce"
    strict: bool = False
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    private: tuple[PrivateSpec, ...] = ()
    endpoint: tuple[EndpointSpec, ...] = ()
    model: tuple[ModelSpec, ...] = ()
    nat64_prefix: str | None = None
    wildcard_dns: int = 0
    limits: Limits = Limits()
