"""A real HTTP receiver for alerts, on loopback, and the configuration of an alerter that tells it."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

HMAC_KEY = "synthetic-hmac-key-for-alert-tests"
ROUTING_KEY = "synthetic0routing0key0000000000f"
SLACK_TOKEN = "xoxb-synthetic-0000"
DEADLINE = 60.0


class Request(NamedTuple):
    """One request as it came."""

    path: str
    fields: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Receiver:
    """Takes POSTs and keeps them; `answer` decides what it says: (status, body, fields)."""

    def __init__(self, context: ssl.SSLContext | None = None, port: int = 0) -> None:
        self.requests: list[Request] = []
        self.answer: Callable[[Request], tuple[int, bytes, dict[str, str]]] = lambda _: (200, b"ok", {})
        self._changed = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 30

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                request = Request(self.path, {k.lower(): v for k, v in self.headers.items()}, body)
                status, said, fields = receiver.answer(request)
                with receiver._changed:
                    receiver.requests.append(request)
                    receiver._changed.notify_all()
                self.send_response(status)
                for name, value in fields.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # a client that was killed is no error here
        if context is not None:
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]
        self.scheme = "http" if context is None else "https"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def url(self, path: str = "/hook") -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}{path}"

    def wait(self, ready: Callable[[list[Request]], bool], what: str = "requests") -> list[Request]:
        """Wait until what came satisfies `ready`; fails after a long while."""
        deadline = time.monotonic() + DEADLINE
        with self._changed:
            while not ready(self.requests):
                left = deadline - time.monotonic()
                assert left > 0, f"no {what}: {[(one.path, one.body[:200]) for one in self.requests]}"
                self._changed.wait(left)
            return list(self.requests)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def until(ready: Callable[[], Any], what: str) -> Any:
    """Wait until `ready()` is true and return it; fails after a long while."""
    deadline = time.monotonic() + DEADLINE
    while not (found := ready()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)
    return found


def alerts_config(home: Path, sinks: str, **options: Any) -> Path:
    """Write a configuration with these sinks (TOML) and the keys that tests use; returns its path."""
    secrets = home / "alert-keys.toml"
    secrets.write_text(f'hmac = "{HMAC_KEY}"\nrouting = "{ROUTING_KEY}"\nslack = "{SLACK_TOKEN}"\n')
    secrets.chmod(0o600)
    table = "\n".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
    path = home / "lockgate.toml"
    path.write_text(
        f"""
[audit]
path = "audit.db"

[alerts]
{table}

{sinks}

[secrets.hmac]
ref = "file:alert-keys.toml#hmac"

[secrets.routing]
ref = "file:alert-keys.toml#routing"

[secrets.slack]
ref = "file:alert-keys.toml#slack"
"""
    )
    return path


def webhook_sink(receiver: Receiver, name: str = "hook", **options: Any) -> str:
    """Return the table of a signed webhook to `receiver`."""
    more = "\n".join(f"{key} = {json.dumps(value)}" for key, value in options.items())
    return f"""
[alerts.sinks.{name}]
kind = "webhook"
url = "{receiver.url()}"
key = "secret hmac"
loopback_http = true
{more}
"""
