"""Counters for Prometheus, in its text format 0.0.4.

Rule 1: no label holds a destination, an operation or a name: how many series there are is not an attacker's choice.
Rule 2: counters live in the alerter's state, so they go on over its restarts.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Final

from lockgate.alerts.state import State
from lockgate.contract.errors import HostFault
from lockgate.policy.host import Endpoint, Refusal

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
RULES: Final = "lockgate.rules.yml"


def exposition(state: State, *, source: str, now: float) -> str:
    """Return every metric. `source`: names this log where one Prometheus sees several."""
    label = f'log="{_value(source)}"'
    denied = state.denied()
    lines = [
        "# HELP lockgate_denied_total Denials, of every path.",
        "# TYPE lockgate_denied_total counter",
        *(
            f'lockgate_denied_total{{reason="{_value(reason)}",rule="{_value(rule)}",{label}}} {count}'
            for reason, rule, count, _ in denied
        ),
        "# HELP lockgate_denied_critical_total Denials that are never suppressed.",
        "# TYPE lockgate_denied_critical_total counter",
        f"lockgate_denied_critical_total{{{label}}} {sum(one[3] for one in denied)}",
        "# HELP lockgate_alerter_heartbeat_seconds When the alerter last looked at its log, since the epoch.",
        "# TYPE lockgate_alerter_heartbeat_seconds gauge",
        f"lockgate_alerter_heartbeat_seconds{{{label}}} {now:.3f}",
    ]
    tallies = state.tallies()
    for name, kind, text in (
        ("waiting", "gauge", "Alerts that a sink has not taken yet."),
        ("delivered", "counter", "Alerts that a sink took."),
        ("rejected", "counter", "Alerts that a sink will never take."),
        ("dropped", "counter", "Alerts that were dropped because too many waited."),
        ("failed", "counter", "Deliveries that failed and are tried again."),
    ):
        full = f"lockgate_alerts_{name}" + ("_total" if kind == "counter" else "")
        lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
        lines += [f'{full}{{sink="{_value(one.name)}",{label}}} {getattr(one, name)}' for one in tallies]
    return "\n".join(lines) + "\n"


def write_textfile(path: Path, text: str) -> None:
    """Replace a file for the textfile collector at once, as its documentation asks; a failure waits for the next time.

    Source: github.com/prometheus/node_exporter, "Textfile Collector".
    """
    with contextlib.suppress(OSError):
        fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(text)
                os.fchmod(file.fileno(), 0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


class Endpoints:
    """Answers `GET /metrics`.

    Args:
        address: "address:port". state: what is told. source: as `exposition`.

    Raises:
        HostFault: the address cannot be bound.

    """

    def __init__(self, address: str, state: State, *, source: str) -> None:
        endpoint = Endpoint.parse(address.encode())
        if isinstance(endpoint, Refusal):
            raise HostFault("metrics is no address:port", next_step='write metrics = "127.0.0.1:9464"')
        handler = type("Handler", (_Handler,), {"state": state, "source": source})
        family = ThreadingHTTPServer.address_family if endpoint.host.kind == "ipv4" else 10
        server = type("Server", (ThreadingHTTPServer,), {"address_family": family, "daemon_threads": True})
        try:
            self._server: ThreadingHTTPServer = server((endpoint.host.text.strip("[]"), endpoint.port), handler)
        except OSError as error:
            raise HostFault(
                f"metrics cannot listen on {endpoint} ({error.strerror})", next_step="choose another port"
            ) from None
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    state: State
    source: str
    timeout = 5
    server_version = "lockgate"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path != "/metrics":
            self.send_error(404)
            return
        body = exposition(self.state, source=self.source, now=time.time()).encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the base class names it
        """Print nothing: a log line would hold the path, which a stranger chose."""


def rules() -> str:
    """Return the shipped alerting rules for Prometheus."""
    return resources.files("lockgate.alerts").joinpath(RULES).read_text("utf-8")


def _value(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
