"""What one run may still use, counted on the way out.

Rule 1: what is taken is not given back, but for connections that end.
Rule 2: a budget says no before it is exceeded, never after.
Rule 3: bytes are counted per registrable domain, so that a thousand names of one owner are one account.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, final

from lockgate.policy.egress import Verdict
from lockgate.policy.egress_spec import Limits
from lockgate.policy.host import Host, Refusal
from lockgate.policy.suffixes import registrable

_CONNECTIONS: Final = Refusal("connection_budget", "too many connections at one time")
_REQUESTS: Final = Refusal("request_budget", "the requests of this run are used up")
_NAMES: Final = Refusal("name_budget", "the names of this run are used up")
_LABELS: Final = Refusal("label_budget", "the names under this wildcard are used up")
_BYTES: Final = Refusal("byte_budget", "the bytes for this domain are used up")


@final
class RunBudget:
    """The budgets of one run. Not thread-safe: the caller holds its lock."""

    __slots__ = ("_bytes", "_connections", "_domains", "_limits", "_names", "_requests", "_under")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._connections = 0
        self._requests = 0
        self._names: set[str] = set()
        self._under: dict[str, set[str]] = {}
        self._bytes: Counter[str] = Counter()
        self._domains: dict[str, str] = {}

    def take_connection(self) -> Refusal | None:
        """Take one connection."""
        if self._connections >= self._limits.connections:
            return _CONNECTIONS
        self._connections += 1
        return None

    def drop_connection(self) -> None:
        """Give one connection back."""
        self._connections = max(self._connections - 1, 0)

    def take_request(self) -> Refusal | None:
        """Take one request, or one tunnel."""
        if self._requests >= self._limits.requests:
            return _REQUESTS
        self._requests += 1
        return None

    def take_name(self, verdict: Verdict, host: Host) -> Refusal | None:
        """Take one name; a name that was used before costs nothing. `verdict`: what allowed it."""
        rule = verdict.rule or ""
        under = self._under.get(rule)
        if rule.startswith("allow *."):
            under = self._under.setdefault(rule, set())
        if under is not None and host.text not in under and len(under) >= self._limits.names_per_wildcard:
            return _LABELS
        if host.text not in self._names and len(self._names) >= self._limits.names:
            return _NAMES
        self._names.add(host.text)
        if under is not None:
            under.add(host.text)
        return None

    def take_bytes(self, host: Host, count: int) -> Refusal | None:
        """Take `count` bytes that are about to be sent towards `host`."""
        domain = self._domains.get(host.text)
        if domain is None:
            domain = registrable(host.text) if host.kind == "name" else host.text
            if len(self._domains) < self._limits.names:
                self._domains[host.text] = domain
        if self._bytes[domain] + count > self._limits.bytes_out:
            return _BYTES
        self._bytes[domain] += count
        return None

    @property
    def used(self) -> dict[str, int]:
        """Bytes sent so far, by registrable domain."""
        return dict(self._bytes)
