"""Where alerts go.

Rule 1: a sink says one of three things: it has it ("delivered"), it will never take it ("rejected"), or not now, and
        then the spool keeps it.
Rule 2: a key is read when it is used, from its store, and stays in this process.
Rule 3: a wrong key or address is "not now": the operator can correct it, and nothing is lost meanwhile.
"""

from __future__ import annotations

import abc
import os
import socket
import time
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec

from lockgate.alerts import formats, sign, words
from lockgate.alerts.dedupe import Alert
from lockgate.alerts.post import Posted, PostFailed, post
from lockgate.config import AlertSink, Secret
from lockgate.config.alerting import PAGERDUTY_URL, SLACK_URL, url_problem
from lockgate.policy.host import Refusal
from lockgate.policy.url import Url
from lockgate.secrets import SecretUnavailable, Store, open_store

_NEVER: Final = frozenset({400, 413, 422})
_SLACK_NEVER: Final = frozenset({"invalid_blocks", "invalid_arguments", "msg_too_long", "no_text", "invalid_payload"})


class Outcome(NamedTuple):
    """What became of one delivery; `problem` is fixed text, `wait` seconds that the other side asked for."""

    result: Literal["delivered", "rejected", "later"]
    problem: str = ""
    wait: float | None = None


class Sink(Protocol):
    """One place."""

    @property
    def table(self) -> AlertSink:
        """Its configuration."""
        ...

    def send(self, alert: Alert) -> Outcome:
        """Deliver one alert; raises nothing."""
        ...


class FileSink:
    """A line for each alert: OCSF JSON, or CEF."""

    def __init__(self, table: AlertSink) -> None:
        self.table = table

    def send(self, alert: Alert) -> Outcome:
        """Append one line and flush it to the disk."""
        if self.table.format == "cef":
            text = formats.cef(alert, socket.gethostname()).encode()
        else:
            text = formats.encode(formats.ocsf(alert))
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = os.open(self.table.path or "", flags, 0o600)
            try:
                if os.write(fd, text + b"\n") != len(text) + 1:
                    return Outcome("later", "the file took a part of a line")
                os.fdatasync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            return Outcome("later", f"the file cannot be written ({error.strerror})")
        return Outcome("delivered")


class HttpSink(abc.ABC):
    """A place that takes POSTs.

    Args:
        table: its configuration. secrets: references by name. timeout: seconds for one delivery.

    """

    def __init__(self, table: AlertSink, secrets: Mapping[str, Secret], *, timeout: float) -> None:
        self.table = table
        self._timeout = timeout
        self._refs = {key: secrets[name].ref for key in ("url", "key") if (name := table.secret_name(key)) is not None}
        self._stores: dict[str, Store] = {key: open_store(ref) for key, ref in self._refs.items()}

    def send(self, alert: Alert) -> Outcome:
        """POST one alert."""
        try:
            url = self._url()
            body, fields = self._request(alert, self._secret("key"))
            posted = post(url, body, fields, sink=self.table, timeout=self._timeout)
        except SecretUnavailable as error:
            return Outcome("later", error.message[:120])
        except PostFailed as error:
            return Outcome("later", error.why)
        return self._judge(posted)

    @abc.abstractmethod
    def _request(self, alert: Alert, key: str) -> tuple[bytes, dict[str, str]]:
        """Return body and fields of the request that tells `alert`."""

    def _url(self) -> Url:
        text = self._secret("url") if "url" in self._refs else self.table.url or self._default()
        raw = text.encode("utf-8", "replace")
        if url_problem(raw, self.table) is not None:
            raise PostFailed("its URL is refused")
        url = Url.parse(raw, ("https", "http"))
        if isinstance(url, Refusal):
            raise PostFailed("its URL is refused")
        return url

    def _default(self) -> str:
        return ""

    def _secret(self, key: str) -> str:
        ref = self._refs.get(key)
        if ref is None:
            return ""
        with self._stores[key].get(ref, purpose=f"alerts {self.table.kind} {key}") as lease:
            return lease.value.reveal().strip()

    def _judge(self, posted: Posted) -> Outcome:
        if 200 <= posted.status < 300:
            return Outcome("delivered")
        if posted.status in _NEVER:
            return Outcome("rejected", f"answered {posted.status}")
        return Outcome("later", f"answered {posted.status}", posted.retry_after)


class Webhook(HttpSink):
    """Our own format, signed."""

    def _request(self, alert: Alert, key: str) -> tuple[bytes, dict[str, str]]:
        body = formats.encode(formats.webhook(alert))
        signed = sign.sign(key.encode(), body, time.time())
        return body, {"Content-Type": "application/json", sign.UID: alert.uid, **signed}


class Slack(HttpSink):
    """An incoming webhook, or a bot with a channel."""

    def _default(self) -> str:
        return SLACK_URL

    def _request(self, alert: Alert, key: str) -> tuple[bytes, dict[str, str]]:
        message: dict[str, Any] = words.slack(alert)
        fields = {"Content-Type": "application/json; charset=utf-8"}
        if key:
            message["channel"] = self.table.channel
            fields["Authorization"] = f"Bearer {key}"
        return formats.encode(message), fields

    def _judge(self, posted: Posted) -> Outcome:
        if not 200 <= posted.status < 300 or self.table.key is None:
            return super()._judge(posted)
        try:
            answer = msgspec.json.decode(posted.body, type=_SlackAnswer)
        except msgspec.DecodeError:
            return Outcome("later", "answered no JSON")
        if answer.ok:
            return Outcome("delivered")
        return Outcome("rejected" if answer.error in _SLACK_NEVER else "later", "Slack refused the message")


class _SlackAnswer(msgspec.Struct):
    ok: bool = False
    error: str = ""


class PagerDuty(HttpSink):
    """Events API v2."""

    def _default(self) -> str:
        return PAGERDUTY_URL

    def _request(self, alert: Alert, key: str) -> tuple[bytes, dict[str, str]]:
        return formats.encode(formats.pagerduty(alert, key)), {"Content-Type": "application/json"}


class Otlp(HttpSink):
    """OpenTelemetry logs, OTLP/HTTP with JSON."""

    def _request(self, alert: Alert, key: str) -> tuple[bytes, dict[str, str]]:
        fields = {"Content-Type": "application/json"}
        if key:
            fields["Authorization"] = f"Bearer {key}"
        return formats.encode(formats.otlp(alert)), fields


_HTTP: Final[dict[str, type[HttpSink]]] = {
    "webhook": Webhook,
    "slack": Slack,
    "pagerduty": PagerDuty,
    "otlp": Otlp,
}


def build(sinks: Mapping[str, AlertSink], secrets: Mapping[str, Secret], *, timeout: float) -> dict[str, Sink]:
    """Return the sinks of a configuration by name.

    Raises:
        SecretUnavailable: there is no store for a reference's scheme.

    """
    return {
        name: FileSink(table) if table.kind == "file" else _HTTP[table.kind](table, secrets, timeout=timeout)
        for name, table in sinks.items()
    }
