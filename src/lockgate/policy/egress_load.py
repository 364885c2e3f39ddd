"""Turns the `[egress]` table into rules, or says why not.

Rule 1: behind what `egress_entry` reads, the checks are: single label, suffix, registry, address, in this order.
Rule 2: what would let out more than a person can see in the entry is an error at load, not a rule.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import tomllib
from typing import Final, NoReturn

import msgspec

from lockgate.policy.egress import HTTP_PORT, Compiled, EndpointRules, LoadWarning, Verdict
from lockgate.policy.egress_entry import (
    PRIVATE_TLDS,
    EgressConfigError,
    Entry,
    check_listable,
    check_public,
    parse_entry,
    pin,
    quoted,
    refuse,
    under,
)
from lockgate.policy.egress_spec import EgressSpec, EndpointSpec, ModelSpec, PrivateSpec, RuleSpec
from lockgate.policy.registries import registry, registry_under
from lockgate.policy.suffixes import suffix_section, wildcard_section
from lockgate.policy.tenants import tenant_suffix, tenant_suffix_under, tenants_of, tenants_under
from lockgate.policy.url import canonical_path

__all__ = ["EgressConfigError", "compile_spec", "spec_of_data", "spec_of_text"]

_METHOD: Final = re.compile(r"[A-Z]{1,16}\Z")
_NEVER_METHODS: Final = frozenset({"CONNECT", "TRACE", "TRACK"})
_READS: Final = ("GET", "HEAD")


def spec_of_text(text: str) -> EgressSpec:
    """Return the `[egress]` table of a TOML text.

    Raises:
        EgressConfigError: it is not TOML, or has no such table.

    """
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        refuse("bad_config", f"the policy is not valid TOML: {error}", "correct that place")
    if "egress" not in data:
        refuse("bad_config", "the policy has no table [egress]", 'write [egress] with allow = ["host:port"]')
    return spec_of_data(data["egress"])


def spec_of_data(data: object) -> EgressSpec:
    """Return the table that `data` holds.

    Raises:
        EgressConfigError: a key is unknown, or a value has another type.

    """
    try:
        return msgspec.convert(data, EgressSpec)
    except msgspec.ValidationError as error:
        refuse("bad_config", f"[egress]: {error}", "allow is a list of host:port; see the reference of [egress]")
    except UnicodeEncodeError:
        _no_text()


def _no_text() -> NoReturn:
    refuse("bad_config", "[egress] holds half of a surrogate pair, which is no text", "write the table as UTF-8")


def compile_spec(spec: EgressSpec) -> Compiled:
    """Check a table and make it ready for decisions.

    Raises:
        EgressConfigError: the first entry that fails.

    """
    try:
        canonical = _canonical(spec)
    except UnicodeEncodeError:
        _no_text()
    load = _Load(spec)
    for text in spec.allow:
        load.allow(text)
    for private in spec.private:
        load.private(private)
    for model in spec.model:
        load.model(model)
    for text in spec.deny:
        load.deny(text)
    for endpoint in spec.endpoint:
        load.endpoint(endpoint)
    load.warn_tenants()
    _check_limits(spec)
    return Compiled(
        exact=load.exact,
        wild=load.wild,
        denied=load.denied,
        denied_wild=load.denied_wild,
        pinned=load.pinned,
        endpoints=load.endpoints,
        wild_endpoints=load.wild_endpoints,
        nat64=_nat64(spec.nat64_prefix),
        warnings=tuple(load.warnings),
        hash=hashlib.sha256(b"lockgate/egress/1\0" + canonical).hexdigest(),
    )


_canonical: Final = msgspec.json.Encoder(order="deterministic").encode


class _Load:
    """The tables as they grow."""

    def __init__(self, spec: EgressSpec) -> None:
        self.spec = spec
        self.exact: dict[tuple[str, int], Verdict] = {}
        self.wild: dict[tuple[str, int], Verdict] = {}
        self.denied: dict[tuple[str, int], Verdict] = {}
        self.denied_wild: dict[tuple[str, int], Verdict] = {}
        self.pinned: dict[tuple[str, int], frozenset[bytes]] = {}
        self.endpoints: dict[tuple[str, int], EndpointRules] = {}
        self.wild_endpoints: dict[tuple[str, int], EndpointRules] = {}
        self.warnings: list[LoadWarning] = []
        self._entries: list[Entry] = []
        self._ruled: set[tuple[bool, str, int]] = set()

    def allow(self, text: str) -> None:
        entry = parse_entry(text)
        if entry.host is None:
            self._check_wildcard(entry)
            self._check_registry(text, registry_under(entry.parent) or registry(f"x.{entry.parent}"), wildcard=True)
            self.wild.setdefault((entry.parent, entry.port), Verdict(True, "ok", f"allow {text}"))
        else:
            host = entry.host
            if host.kind == "name" and "." not in host.text:
                refuse(
                    "too_broad", f"{quoted(text)} is a single label: resolvers complete it", "write the full name", text
                )
            check_listable(text, host)
            kind = registry(host.text)
            self._check_registry(text, kind, wildcard=False)
            check_public(text, host)
            key = (host.text, entry.port)
            self.exact.setdefault(key, Verdict(True, "ok", f"allow {text}"))
            if kind is not None:
                self.endpoints[key] = _read_only(text)
        self._entries.append(entry)

    def _check_wildcard(self, entry: Entry) -> None:
        parent, text = entry.parent, entry.text
        if "." not in parent and (parent in PRIVATE_TLDS or parent == "localhost"):
            refuse("too_broad", f"{quoted(text)} takes in a whole private domain", "name the hosts", text)
        section = wildcard_section(parent)
        if section == "icann":
            refuse("too_broad", f"{quoted(text)} takes in every name under a public suffix", "name the hosts", text)
        if section == "private" or tenant_suffix(parent) is not None or tenant_suffix_under(parent) is not None:
            refuse(
                "multi_tenant_suffix",
                f"{quoted(text)} takes in names that belong to any customer of that service",
                "name the one host that is yours",
                text,
            )
        if under(parent, PRIVATE_TLDS):
            refuse(
                "private_needs_flag", f"{quoted(text)} is under a private domain", "list each host under private", text
            )

    def _check_registry(self, text: str, kind: str | None, *, wildcard: bool) -> None:
        if kind is None:
            return
        if self.spec.profile != "build":
            refuse(
                "registry_at_runtime",
                f"{quoted(text)} takes in a package registry ({kind}): it brings code in and takes uploads at run time",
                'build packages ahead of time (lockgate env build), or use profile = "build" for the build alone',
                text,
            )
        if wildcard:
            refuse(
                "too_broad", f"{quoted(text)} takes in a package registry ({kind})", "name the registry's host", text
            )

    def private(self, spec: PrivateSpec) -> None:
        text = spec.host
        entry = parse_entry(text)
        host = entry.host
        if host is None:
            refuse("too_broad", f"{quoted(text)}: a private entry names one host", "name the hosts", text)
        check_listable(text, host)
        self._check_registry(text, registry(host.text), wildcard=False)
        packed = host.packed
        given = spec.addresses if packed is None else (host.text.strip("[]"), *spec.addresses)
        if not given:
            refuse(
                "private_needs_flag",
                f"{quoted(text)} pins no address",
                'give its addresses: addresses = ["10.0.0.5"]',
                text,
            )
        pins = frozenset(pin(text, one) for one in given)
        if packed is not None and pins != frozenset((packed,)):
            refuse("bad_config", f"{quoted(text)} is an address and pins another one", "leave addresses out", text)
        key = (host.text, entry.port)
        if self.pinned.get(key, pins) != pins:
            refuse("bad_config", f"{quoted(text)} is private twice, with other addresses", "write one entry", text)
        self.exact[key] = Verdict(True, "ok", f"private {text}")
        self.pinned[key] = pins
        if registry(host.text) is not None:
            self.endpoints[key] = _read_only(text)
        self._entries.append(entry)

    def model(self, spec: ModelSpec) -> None:
        entry = parse_entry(spec.host)
        host = entry.host
        if host is None or host.kind != "name" or "." not in host.text:
            refuse("too_broad", f"{quoted(spec.host)}: a model entry names one host", "name the host", spec.host)
        if entry.port == HTTP_PORT:
            refuse("bad_port", f"{quoted(spec.host)}: a model is asked over TLS", "write port 443", spec.host)
        key = (host.text, entry.port)
        known = self.endpoints.get(key)
        made = EndpointRules(spec.host, (), spec.api, spec.operation)
        if known is not None and known.model and (known.model, known.operation) != (made.model, made.operation):
            refuse("bad_config", f"{quoted(spec.host)} is a model twice, each of its own kind", "write one", spec.host)
        self.exact[key] = Verdict(True, "ok", f"model {spec.host}")
        self.endpoints[key] = made

    def deny(self, text: str) -> None:
        entry = parse_entry(text, port_needed=False)
        verdict = Verdict(False, "not_allowed", f"deny {text}", "an entry denies it")
        if entry.host is None:
            self.denied_wild[entry.parent, entry.port] = verdict
        else:
            self.denied[entry.host.text, entry.port] = verdict

    def endpoint(self, spec: EndpointSpec) -> None:
        entry = parse_entry(spec.host)
        key = (entry.parent if entry.host is None else entry.host.text, entry.port)
        if key not in (self.wild if entry.host is None else self.exact):
            refuse(
                "endpoint_without_entry",
                f"the rules of {quoted(spec.host)} have no entry",
                f'add "{spec.host}" to allow, written the same',
                spec.host,
            )
        table = self.wild_endpoints if entry.host is None else self.endpoints
        known = table.get(key)
        if known is not None and known.model is not None:
            refuse("bad_endpoint_rule", f"{quoted(spec.host)} is a model endpoint", "leave its rules out", spec.host)
        if not spec.rules:
            refuse(
                "bad_endpoint_rule", f"{quoted(spec.host)} has no rules", "write one rule, or leave it out", spec.host
            )
        if (entry.host is None, *key) in self._ruled:
            refuse(
                "bad_endpoint_rule",
                f"{quoted(spec.host)} has two tables of rules: one of them would not count",
                "put all its rules into one",
                spec.host,
            )
        self._ruled.add((entry.host is None, *key))
        for rule in spec.rules:
            _check_rule(spec.host, rule)
            if entry.host is not None and registry(entry.host.text) is not None and set(rule.method) - set(_READS):
                refuse(
                    "registry_get_only",
                    f"{quoted(spec.host)} is a package registry",
                    "allow GET and HEAD alone",
                    spec.host,
                )
        table[key] = EndpointRules(spec.host, spec.rules)

    def warn_tenants(self) -> None:
        for entry in self._entries:
            if entry.host is None:
                found = tenants_under(entry.parent)
                kind = found and f"{found[1]}, such as {found[0]}"
                ruled = (entry.parent, entry.port) in self.wild_endpoints
            else:
                name = entry.host.text
                kind = tenants_of(name) or ("customers' names" if suffix_section(name) == "private" else None)
                ruled = (name, entry.port) in self.endpoints
            if kind is None or ruled:
                continue
            text = f"{quoted(entry.text)} is shared with strangers ({kind}): their part of it can receive what is sent"
            if self.spec.strict:
                refuse("multi_tenant_host", text, "add endpoint rules with methods and paths", entry.text)
            self.warnings.append(LoadWarning("multi_tenant_host", entry.text, text))


def _read_only(entry: str) -> EndpointRules:
    return EndpointRules(entry, (RuleSpec(method=_READS, path="/*", query=("*",)),))


def _check_rule(entry: str, rule: RuleSpec) -> None:
    bad = [one for one in rule.method if not _METHOD.match(one) or one in _NEVER_METHODS]
    if bad or not rule.method:
        refuse("bad_endpoint_rule", f"{quoted(entry)}: a rule has no plain methods", 'write method = ["GET"]', entry)
    path = rule.path.removesuffix("*")
    starred = path != rule.path
    if not path.startswith("/") or "*" in path or (starred and not path.endswith("/")) or not path.isascii():
        refuse(
            "bad_endpoint_rule", f"{quoted(entry)}: {quoted(rule.path)} is no path", 'write "/v1/*" or "/v1/x"', entry
        )
    if not canonical_path(path) or re.search(r"[?#\s]", path):
        refuse(
            "bad_endpoint_rule",
            f"{quoted(entry)}: {quoted(rule.path)} can be read in two ways",
            "write it plainly",
            entry,
        )
    if rule.websocket and "GET" not in rule.method:
        refuse("bad_endpoint_rule", f"{quoted(entry)}: a WebSocket begins with GET", "allow GET in that rule", entry)


def _check_limits(spec: EgressSpec) -> None:
    for name in spec.limits.__struct_fields__:
        if not 0 <= getattr(spec.limits, name) <= 2**50:
            refuse("bad_config", f"limits.{name} is out of range", "give a count of 0 or more")
    if not 0 <= spec.wildcard_dns <= 4096:
        refuse("bad_config", "wildcard_dns is outside 0..4096", "give a count of names")


def _nat64(text: str | None) -> tuple[bytes, int] | None:
    if text is None:
        return None
    try:
        net = ipaddress.IPv6Network(text)
    except ValueError:
        net = None
    if net is None or net.prefixlen not in {32, 40, 48, 56, 64, 96}:
        refuse("bad_config", f"nat64_prefix {quoted(text)} is none (RFC 6052)", 'write "64:ff9b::/96"')
    return net.network_address.packed, net.prefixlen
