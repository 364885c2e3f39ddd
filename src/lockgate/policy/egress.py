"""The egress policy: one decision for each destination (E1).

Rule 1: default deny. An entry is an exact `host:port`, or `*.host:port` for exactly one label; an empty list denies
        all.
Rule 2: a decision is a lookup of canonical values; deny beats allow, and every verdict names the rule that decided.
Rule 3: port 80 means absolute-form HTTP and is never CONNECTED; every other port means CONNECT and TLS.
Rule 4: report mode softens one reason alone, `not_allowed` for want of an entry. Addresses, ambiguous names, denied
        entries, what a name leads to and what a tunnel carries are refused in both modes.
Rule 5: pure. Nothing is resolved here; the caller asks before any packet leaves.
"""

from __future__ import annotations

from typing import Any, Final, final

import msgspec

from lockgate.policy.addresses import METADATA_NAMES, is_metadata
from lockgate.policy.egress_spec import EgressSpec, Limits, Mode, ModelApi, Profile
from lockgate.policy.egress_values import HTTP_PORT, Ask, Compiled, EndpointRules, How, LoadWarning, Verdict
from lockgate.policy.host import Endpoint, Host

__all__ = ["HTTP_PORT", "Ask", "Compiled", "EgressPolicy", "EndpointRules", "How", "LoadWarning", "Verdict"]

_MISSING: Final = Verdict(False, "not_allowed", None, "no entry of the list names it")
_REPORTED: Final = Verdict(True, "not_allowed", None, "no entry of the list names it", reported=True)
_LITERAL: Final = Verdict(
    False, "ip_literal_or_ambiguous", None, "an address is no destination without a private entry"
)
_METADATA: Final = msgspec.structs.replace(_MISSING, metadata=True)
_METADATA_LITERAL: Final = msgspec.structs.replace(_LITERAL, metadata=True)
_WILDCARD_DNS: Final = "names under a wildcard are not answered"


@final
class EgressPolicy:
    """A list that was loaded without errors.

    Attributes:
        spec: the table it was made of.
        mode: "enforce" or "report".
        profile: "runtime" or "build".
        hash: SHA-256 of the canonical table, hexadecimal: what rows name.
        warnings: to print and to audit at each start.
        limits: budgets of one run.
        nat64: the operator's NAT64 prefix and its length in bits, or None.
        wildcard_dns: how many names under wildcards the synthetic DNS answers in one run.

    """

    __slots__ = (
        "_made",
        "_names",
        "_parents",
        "hash",
        "limits",
        "mode",
        "nat64",
        "profile",
        "spec",
        "warnings",
        "wildcard_dns",
    )

    def __init__(self, spec: EgressSpec, made: Compiled) -> None:
        self.spec = spec
        self._made = made
        self.mode: Mode = spec.mode
        self.profile: Profile = spec.profile
        self.hash = made.hash
        self.warnings = made.warnings
        self.limits: Limits = spec.limits
        self.nat64 = made.nat64
        self.wildcard_dns = spec.wildcard_dns
        self._names = {host: one.rule or "" for (host, _), one in made.exact.items() if _is_name(host)}
        self._parents = {parent: one.rule or "" for (parent, _), one in made.wild.items()}

    @classmethod
    def of(cls, spec: EgressSpec) -> EgressPolicy:
        """Make a policy of a table.

        Raises:
            EgressConfigError: an entry is wrong or too broad; its `reason` says which way.

        """
        from lockgate.policy.egress_load import compile_spec  # noqa: PLC0415 - it imports this file

        return cls(spec, compile_spec(spec))

    @classmethod
    def load(cls, text: str) -> EgressPolicy:
        """Read the `[egress]` table of a TOML text; other tables are left alone.

        Raises:
            EgressConfigError: it is not TOML, has no such table, or as `of`.

        """
        from lockgate.policy.egress_load import spec_of_text  # noqa: PLC0415 - it imports this file

        return cls.of(spec_of_text(text))

    @classmethod
    def from_data(cls, data: object) -> EgressPolicy:
        """Make a policy of what the table holds, as TOML or JSON decodes it.

        Raises:
            EgressConfigError: as `of`.

        """
        from lockgate.policy.egress_load import spec_of_data  # noqa: PLC0415 - it imports this file

        return cls.of(spec_of_data(data))

    def decide(self, ask: Ask) -> Verdict:
        """Decide on one destination, for each request anew. Pure: nothing is resolved."""
        made = self._made
        endpoint = ask.endpoint
        host, port = endpoint.host, endpoint.port
        key = (host.text, port)
        parent = ""
        if made.denied or made.denied_wild:
            parent = host.text.partition(".")[2] if host.kind == "name" else ""
            found = (
                made.denied.get(key)
                or made.denied.get((host.text, 0))
                or made.denied_wild.get((parent, port))
                or made.denied_wild.get((parent, 0))
            )
            if found is not None:
                return found
        found = made.exact.get(key)
        if found is None:
            if host.kind != "name":
                return _literal(host)
            if made.wild:
                label, _, parent = host.text.partition(".")
                if not label.startswith("xn--"):
                    found = made.wild.get((parent, port))
            if found is None:
                return self._unlisted(host)
        if (port == HTTP_PORT) is not (ask.how == "http"):
            return _WRONG_FORM[ask.how]
        return found

    def dns(self, host: Host) -> Verdict:
        """Decide whether the synthetic DNS may answer an address question about `host`, on whatever port.

        A name under a wildcard is `wildcard_dns_budget` with its rule: the caller may answer `wildcard_dns` of them.
        """
        made = self._made
        if host.kind != "name":
            return _literal(host)
        label, _, parent = host.text.partition(".")
        denied = made.denied.get((host.text, 0)) or made.denied_wild.get((parent, 0))
        if denied is not None:
            return denied
        rule = self._names.get(host.text)
        if rule is not None:
            return Verdict(True, "synthetic_answer", rule)
        rule = None if label.startswith("xn--") else self._parents.get(parent)
        if rule is not None:
            return Verdict(False, "wildcard_dns_budget", rule, _WILDCARD_DNS)
        return self._unlisted(host)

    def _unlisted(self, host: Host) -> Verdict:
        """Return the verdict of a name without an entry; never let through: this machine's own."""
        if host.text in METADATA_NAMES:
            return _METADATA
        own = "." not in host.text or host.text.endswith(".localhost")
        return _REPORTED if self.mode == "report" and not own else _MISSING

    def ports(self, host: Host) -> tuple[int, ...]:
        """Return the ports on which some entry allows `host`, in order."""
        made = self._made
        parent = host.text.partition(".")[2] if host.kind == "name" else ""
        found = {port for name, port in made.exact if name == host.text}
        found |= {port for name, port in made.wild if name == parent}
        how: dict[bool, How] = {True: "http", False: "connect"}
        asks = [Ask(Endpoint.of(host, port), how[port == HTTP_PORT]) for port in sorted(found)]
        return tuple(ask.endpoint.port for ask in asks if (verdict := self.decide(ask)).allow and not verdict.reported)

    @property
    def names(self) -> frozenset[str]:
        """The names of exact entries: what the synthetic DNS answers."""
        return frozenset(self._names)

    @property
    def rules(self) -> tuple[str, ...]:
        """All rules, as verdicts name them, in their order."""
        made = self._made
        groups: tuple[dict[Any, Verdict], ...] = (made.denied, made.denied_wild, made.exact, made.wild)
        return tuple(dict.fromkeys(one.rule for group in groups for one in group.values() if one.rule))

    def pinned(self, endpoint: Endpoint) -> frozenset[bytes] | None:
        """Return the packed addresses that a private entry may lead to, or None when it must lead to public ones."""
        return self._made.pinned.get((endpoint.host.text, endpoint.port))

    def rules_for(self, endpoint: Endpoint) -> EndpointRules | None:
        """Return the rules each request to `endpoint` must fit; TLS to it is opened at the gateway. None = a tunnel."""
        made = self._made
        found = made.endpoints.get((endpoint.host.text, endpoint.port))
        if found is None and made.wild_endpoints and endpoint.host.kind == "name":
            found = made.wild_endpoints.get((endpoint.host.text.partition(".")[2], endpoint.port))
        return found

    def intercepts(self, endpoint: Endpoint) -> EndpointRules | None:
        """Return the same as `rules_for`."""
        return self.rules_for(endpoint)

    @property
    def intercepted(self) -> frozenset[str]:
        """The hosts whose TLS is opened at the gateway; for a wildcard its parent, which stands for the names below."""
        return frozenset(host for host, _ in (*self._made.endpoints, *self._made.wild_endpoints))

    def model(self, endpoint: Endpoint) -> ModelApi | None:
        """Return the wire format of a model endpoint, or None."""
        found = self.rules_for(endpoint)
        return None if found is None else found.model

    def __repr__(self) -> str:
        return f"<egress policy {self.hash[:12]}: {len(self._made.exact) + len(self._made.wild)} entries, {self.mode}>"


def _is_name(text: str) -> bool:
    return text[0] != "[" and not text.rpartition(".")[2].isdigit()


def _literal(host: Host) -> Verdict:
    return _METADATA_LITERAL if is_metadata(host.packed or b"") else _LITERAL


_WRONG_FORM: Final[dict[str, Verdict]] = {
    "connect": Verdict(False, "not_allowed", "port 80 is not CONNECTED", "plain HTTP is asked for in absolute form"),
    "http": Verdict(False, "not_allowed", "only port 80 is plain HTTP", "other ports are CONNECTED and speak TLS"),
}
