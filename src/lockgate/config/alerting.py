"""What the values of `[alerts]` must be.

Rule 1: where alerts go is the operator's: a URL is checked as every other destination is, and what is a key, or a URL
        that is one, is named and never written here.
Rule 2: no error carries a value: it could be a secret that stands in the wrong place.
"""

from __future__ import annotations

import re
from typing import Final

from lockgate.config.places import Where
from lockgate.config.tables import Alerts, AlertSink, Config
from lockgate.contract.errors import ConfigError
from lockgate.policy.addresses import refused
from lockgate.policy.host import Endpoint, Refusal
from lockgate.policy.url import Url, canonical_path

SLACK_URL: Final = "https://slack.com/api/chat.postMessage"
PAGERDUTY_URL: Final = "https://events.pagerduty.com/v2/enqueue"
_NEEDS: Final[dict[str, tuple[str, ...]]] = {
    "file": ("path",),
    "webhook": ("url", "key"),
    "slack": (),
    "pagerduty": ("key",),
    "otlp": ("url",),
}
_TAKES: Final[dict[str, tuple[str, ...]]] = {
    "file": ("path", "format"),
    "webhook": ("url", "key"),
    "slack": ("url", "key", "channel"),
    "pagerduty": ("url", "key"),
    "otlp": ("url", "key"),
}
_CHANNEL: Final = re.compile(r"\A[A-Z0-9#][A-Za-z0-9_-]{1,79}\Z")
_RANGES: Final = {"window": (1.0, 86_400.0), "timeout": (0.1, 60.0), "escalate": (1, 10_000), "queue": (10, 1_000_000)}


def check_alerts(config: Config, place: Where) -> None:
    """Raise ConfigError for the first value of `[alerts]` that cannot be meant."""
    alerts = config.alerts
    for key, (least, most) in _RANGES.items():
        if not least <= getattr(alerts, key) <= most:
            raise ConfigError(f"{place(f'alerts.{key}')}: {key} is outside {least:g}..{most:g}", next_step="correct it")
    if alerts.metrics is not None:
        _check_metrics(alerts, place)
    for name, sink in alerts.sinks.items():
        _check_sink(f"alerts.sinks.{name}", sink, config, place)


def _check_metrics(alerts: Alerts, place: Where) -> None:
    endpoint = Endpoint.parse((alerts.metrics or "").encode("utf-8", "replace"))
    if isinstance(endpoint, Refusal) or endpoint.host.packed is None:
        raise ConfigError(
            f"{place('alerts.metrics')}: metrics is not address:port", next_step='write metrics = "127.0.0.1:9464"'
        )


def _check_sink(path: str, sink: AlertSink, config: Config, place: Where) -> None:
    for key in ("url", "key", "path", "channel"):
        value = getattr(sink, key)
        if value is None and key in _NEEDS[sink.kind]:
            raise ConfigError(f"{place(path)}: a {sink.kind} sink needs {key}", next_step=f"set {path}.{key}")
        if value is not None and key not in _TAKES[sink.kind]:
            raise ConfigError(
                f"{place(f'{path}.{key}')}: a {sink.kind} sink takes no {key}",
                next_step="it takes " + ", ".join(_TAKES[sink.kind]),
            )
    for key in ("url", "key"):
        name = sink.secret_name(key)
        if name is not None and name not in config.secrets:
            raise ConfigError(
                f"{place(f'{path}.{key}')}: {path}.{key} names no entry of [secrets]",
                next_step=f"add [secrets.{name}]",
            )
    if sink.key is not None and sink.secret_name("key") is None:
        raise ConfigError(
            f"{place(f'{path}.key')}: {path}.key is not a reference (literal keys are refused)",
            next_step='write key = "secret NAME" and a table [secrets.NAME]',
        )
    if sink.channel is not None and not _CHANNEL.match(sink.channel):
        raise ConfigError(f"{place(f'{path}.channel')}: {path}.channel is no channel", next_step='write "C0123456789"')
    if sink.kind == "slack":
        _check_slack(path, sink, place)
    if sink.url is not None and sink.secret_name("url") is None:
        problem = url_problem(sink.url.encode("utf-8", "replace"), sink)
        if problem is not None:
            raise ConfigError(f"{place(f'{path}.url')}: {path}.url {problem[0]}", next_step=problem[1])


def _check_slack(path: str, sink: AlertSink, place: Where) -> None:
    if (sink.key is None) != (sink.channel is None):
        raise ConfigError(f"{place(path)}: {path} has a bot's key without channel, or the other way", next_step="give "
                          "both, or the URL of an incoming webhook alone")  # fmt: skip
    if sink.key is None and sink.secret_name("url") is None:
        raise ConfigError(
            f"{place(path)}: the URL of an incoming webhook is a secret",
            next_step='write url = "secret NAME" and a table [secrets.NAME]',
        )


def url_problem(raw: bytes, sink: AlertSink) -> tuple[str, str] | None:
    """Return what is wrong with the URL of a sink and the next step, or None. Never a part of the URL."""
    url = Url.parse(raw, ("https", "http") if sink.loopback_http else ("https",))
    if isinstance(url, Refusal):
        if url.reason == "bad_scheme":
            return "is not https", "use https; plain http needs loopback_http = true and a loopback address"
        return f"is refused ({url.reason})", "write https://host/path, without user, fragment and odd characters"
    if url.fragment is not None or url.query is not None or not canonical_path(url.path):
        return "has a query, a fragment or a path that can be read in two ways", "write https://host/path"
    packed = url.host.packed
    if url.scheme == "http" and (packed is None or not is_loopback(packed)):
        return "is plain http to another place than loopback", "use https, or http://127.0.0.1:PORT/path"
    if packed is not None and not may_dial(packed, sink):
        return "is an address that may not be dialled", "use a name; a private address needs private = true"
    return None


def is_loopback(packed: bytes) -> bool:
    """Whether an address is this machine's own (127.0.0.0/8 or ::1)."""
    return packed[0] == 127 if len(packed) == 4 else packed == bytes(15) + b"\x01"


def may_dial(packed: bytes, sink: AlertSink) -> bool:
    """Whether a sink's name may lead to an address: public, or loopback and private where the sink says so.

    Link-local, metadata, multicast and translated addresses are never dialled.
    """
    found = refused(packed)
    if found is None:
        return True
    if is_loopback(packed):
        return sink.loopback_http or sink.private
    if not sink.private or found.metadata:
        return False
    return found.why == "private" if len(packed) == 4 else packed[0] & 0xFE == 0xFC
