"""The tables of `lockgate.toml`, as types. What a value may be is checked in `checks`, what a key may be in `keys`."""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

from lockgate.contract.bounds import Bounds
from lockgate.contract.rungs import RUNGS, GvisorChoices, MicrovmChoices, Reaches, RungChoice, WasmChoices, Weakness
from lockgate.policy.egress_spec import EgressSpec

__all__ = ["RUNGS", "Audit", "Backend", "Broker", "Config", "Execution", "Render", "Secret", "Table"]
_KEY_REF: Final = re.compile(r"\Asecret ([A-Za-z][A-Za-z0-9_-]{0,63})\Z")


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every table of the file."""


class Audit(Table, frozen=True, kw_only=True):
    """`[audit]`. `path`: the database, absolute once loaded."""

    path: str = "audit.db"


class Execution(Table, frozen=True, kw_only=True):
    """`[execution]`: what a run gets when the call does not say.

    Attributes:
        rung: the isolation rung; "auto" = one that is strong enough for a model's code, of those that run here (X2).
        reaches: what an escape would reach, for "auto".
        accept_shared_kernel: whether hostile code may run on a rung that shares the host's kernel (X3).
        accept_weaker: weaknesses of other rungs on this host that are accepted (X3).
        memory: "cgroup", or "rlimit" to accept the weaker fallback on hosts without a memory cgroup (X6).
        env: name of the package set, or None for the standard library alone.
        pool: warm slots to keep.
        env_store: directory of package sets, absolute once loaded; None = the user's data directory.
        cgroup: a delegated cgroup v2 directory for runs, absolute once loaded; None = look for one.
        bounds: ceilings of every run under this configuration.
        gvisor, microvm, wasm: what only the rung of that name has.

    """

    rung: RungChoice = "container"
    reaches: Reaches = "user"
    accept_shared_kernel: bool = False
    accept_weaker: tuple[Weakness, ...] = ()
    memory: Literal["cgroup", "rlimit"] = "cgroup"
    env: str | None = None
    pool: int = 4
    env_store: str | None = None
    cgroup: str | None = None
    bounds: Bounds = Bounds()
    gvisor: GvisorChoices = GvisorChoices()
    microvm: MicrovmChoices = MicrovmChoices()
    wasm: WasmChoices = WasmChoices()


class Secret(Table, frozen=True, kw_only=True):
    """`[secrets.NAME]`. `ref`: where the broker finds it, never the value."""

    ref: str


class Backend(Table, frozen=True, kw_only=True):
    """`[backends.NAME]`: a service that operations call, and how tokens for it are minted.

    Attributes:
        minter: the kind of minter, None = this backend needs no token. "jwt" signs one per call; "key" lends a stored
            key of the service itself for one call, for services that know nothing shorter-lived.
        key: `secret NAME`, the signing key, or the key that is lent.
        header: the field that carries a lent key bare, such as "x-api-key"; None = as a bearer token.
        issuer: the `iss` claim. audience: the `aud` claim.
        ttl: lifetime of one token in seconds, at most 60.
        url: where the service listens.

    """

    minter: Literal["jwt", "key"] | None = None
    key: str | None = None
    header: str | None = None
    issuer: str | None = None
    audience: str | None = None
    ttl: float = 30.0
    url: str | None = None

    @property
    def key_name(self) -> str | None:
        """The NAME in `key = "secret NAME"`."""
        found = _KEY_REF.match(self.key or "")
        return found[1] if found else None


class Broker(Table, frozen=True, kw_only=True):
    """`[broker]`.

    Attributes:
        user: the user it becomes when started as root, None = stay. Secrets' files must then be that user's.
        approval_wait: seconds a call waits for a person before it is told `approval_required`.

    """

    user: str | None = None
    approval_wait: float = 10.0


class Render(Table, frozen=True, kw_only=True):
    """`[render]`: which URL may be live in what a person is shown (E5), and the caps of one message.

    Attributes:
        links: prefix rules for links, such as "https://docs.example.com/*".
        images: prefix rules for images, without a query.
        exact: URLs that may live as they are, "mailto:help@example.com" too.
        canaries: planted values; a message that holds one is withheld and its run is closed.
        max_images: live images of one message.
        max_urls: distinct live URLs of one message.
        max_run_urls: distinct live URLs of all messages of one run.
        max_bytes: bytes of one message; what is beyond is dropped with a marker.
        check_every: the self-check runs on every n-th message; 1 is every one, 0 is never.

    """

    links: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    canaries: tuple[str, ...] = ()
    max_images: int = 3
    max_urls: int = 10
    max_run_urls: int = 64
    max_bytes: int = 262144
    check_every: int = 1


class AlertSink(Table, frozen=True, kw_only=True):
    """`[alerts.sinks.NAME]`: where alerts go.

    Attributes:
        kind: "file", "webhook", "slack", "pagerduty" or "otlp".
        url: an https URL, or `secret NAME` where the URL itself is one; slack and pagerduty know theirs.
        key: `secret NAME`, which signs a webhook, routes PagerDuty, or is the bearer token of Slack and OTLP.
        path: of a file sink, absolute once loaded.
        channel: of a slack sink with a token.
        format: of a file sink, "ocsf" (JSON lines, OCSF 1.8) or "cef" (CEF in RFC 5424).
        at_least: the lowest severity that it gets.
        every: each denial, and not the first and then counts.
        ca: file of certificates to trust for its URL instead of the system's, absolute once loaded.
        loopback_http: let a plain http URL name this machine's loopback.
        private: let the URL lead to a private address.

    """

    kind: Literal["file", "webhook", "slack", "pagerduty", "otlp"]
    url: str | None = None
    key: str | None = None
    path: str | None = None
    channel: str | None = None
    format: Literal["ocsf", "cef"] = "ocsf"
    at_least: Literal["medium", "critical"] = "medium"
    every: bool = False
    ca: str | None = None
    loopback_http: bool = False
    private: bool = False

    def secret_name(self, key: str) -> str | None:
        """The NAME when the value of `key` is `secret NAME`."""
        found = _KEY_REF.match(getattr(self, key) or "")
        return found[1] if found else None


class Alerts(Table, frozen=True, kw_only=True):
    """`[alerts]`: what becomes of denials (E4). Without a sink, a textfile and metrics nothing is started.

    Attributes:
        sinks: by name.
        window: seconds in which what was alerted once is only counted.
        escalate: denials of one run that raise one critical alert more.
        queue: alerts that may wait for one sink.
        timeout: seconds that one delivery may take.
        textfile: a file for Prometheus' textfile collector, absolute once loaded.
        metrics: address and port where Prometheus is answered, such as "127.0.0.1:9464".

    """

    sinks: dict[str, AlertSink] = {}
    window: float = 300.0
    escalate: int = 5
    queue: int = 10_000
    timeout: float = 10.0
    textfile: str | None = None
    metrics: str | None = None

    @property
    def wanted(self) -> bool:
        """Whether anything is to be done with denials."""
        return bool(self.sinks or self.textfile or self.metrics)


class Config(Table, frozen=True, kw_only=True):
    """The whole configuration. `base` is the absolute directory that relative paths were resolved against.

    Attributes:
        operations: `module:attribute` of the sealed registry, imported by the broker alone, from `base`.
        egress: where processes that need hosts may connect to; empty denies all.

    """

    operations: str | None = None
    audit: Audit = Audit()
    execution: Execution = Execution()
    broker: Broker = Broker()
    secrets: dict[str, Secret] = {}
    backends: dict[str, Backend] = {}
    render: Render = Render()
    alerts: Alerts = Alerts()
    egress: EgressSpec = EgressSpec()
    base: str = "/"

    def to_json(self) -> bytes:
        """Return the validated configuration as JSON that `load` takes back unchanged."""
        return msgspec.json.encode(self)
