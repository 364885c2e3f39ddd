"""A server on loopback that speaks the wire formats of two model vendors, and can misbehave.

test_model_operation.py asks it with the vendors' own clients first: what they understand is the format.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ANTHROPIC_KEY = "sk-synthetic-anthropic-0123456789"
OPENAI_KEY = "sk-synthetic-openai-0123456789ab"
WORDS = ["The", " capital", " is", " Paris", "."]


class Asked:
    """One request as it came."""

    def __init__(self, path: str, fields: dict[str, str], body: bytes) -> None:
        self.path, self.fields, self.body = path, fields, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def anthropic_message() -> dict[str, Any]:
    return {
        "id": "msg_synthetic",
        "type": "message",
        "role": "assistant",
        "model": "claude-synthetic",
        "content": [{"type": "text", "text": "".join(WORDS)}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 7, "output_tokens": len(WORDS)},
    }


def anthropic_events() -> Iterator[bytes]:
    message = {**anthropic_message(), "content": [], "stop_reason": None}
    yield _event("message_start", {"message": message})
    yield _event("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}})
    yield _event("ping", {})
    for word in WORDS:
        yield _event("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": word}})
    yield _event("content_block_stop", {"index": 0})
    delta = {"stop_reason": "end_turn", "stop_sequence": None}
    yield _event("message_delta", {"delta": delta, "usage": {"output_tokens": len(WORDS)}})
    yield _event("message_stop", {})


def openai_completion() -> dict[str, Any]:
    message = {"role": "assistant", "content": "".join(WORDS), "refusal": None}
    return {
        "id": "chatcmpl-synthetic",
        "object": "chat.completion",
        "created": 1,
        "model": "gpt-synthetic",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12},
    }


def openai_events() -> Iterator[bytes]:
    for number, word in enumerate([*WORDS, ""]):
        last = number == len(WORDS)
        delta = {} if last else {"role": "assistant", "content": word}
        chunk = {
            "id": "chatcmpl-synthetic",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "gpt-synthetic",
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": "stop" if last else None}],
        }
        yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def _event(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n".encode()


class Vendor:
    """Both vendors behind one port.

    Attributes:
        asked: what came. mode: "" or how to misbehave. gate: a stream waits for it before its second half.

    """

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.mode = ""
        self.elsewhere = ""
        self.gate = threading.Event()
        self.gate.set()
        vendor = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 60

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                vendor.asked.append(Asked(self.path, {k.lower(): v for k, v in self.headers.items()}, body))
                vendor._answer(self, body)

            def do_GET(self) -> None:
                vendor.asked.append(Asked(self.path, {}, b""))
                self._say(404, b"{}")

            def _say(self, status: int, body: bytes, **fields: str) -> None:
                self.send_response(status)
                for name, value in fields.items():
                    self.send_header(name, value)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self.gate.set()
        self.server.shutdown()
        self.server.server_close()

    def _answer(self, handler: Any, body: bytes) -> None:
        anthropic = handler.path.startswith("/v1/messages")
        bearer = (handler.headers.get("Authorization") or "").removeprefix("Bearer ")
        key = (handler.headers.get("x-api-key") or bearer) if anthropic else bearer  # the first vendor takes both
        if key != (ANTHROPIC_KEY if anthropic else OPENAI_KEY):
            handler._say(401, b'{"type":"error","error":{"type":"authentication_error","message":"invalid key"}}')
        elif self.mode == "redirect":
            handler._say(307, b"", Location=f"{self.elsewhere}{handler.path}")
        elif self.mode == "refuse":
            handler._say(429, b'{"type":"error","error":{"type":"rate_limit_error","message":"sk-should-not-be-seen"}}')
        elif self.mode == "hang":
            self.gate.wait(60)
            handler.close_connection = True
        elif self.mode == "huge":
            handler._say(200, b'{"x":"' + b"a" * 2_000_000 + b'"}')
        elif self.mode == "echo":
            handler._say(200, json.dumps({"echo": key}).encode())
        elif json.loads(body).get("stream"):
            self._stream(handler, list(anthropic_events() if anthropic else openai_events()))
        else:
            handler._say(200, json.dumps(anthropic_message() if anthropic else openai_completion()).encode())

    def _stream(self, handler: Any, events: list[bytes]) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        if self.mode == "bomb":
            events = [b"data: " + b"a" * 600_000]
        for number, event in enumerate(events):
            if number == len(events) // 2:
                self.gate.wait(60)
            if self.mode == "cut" and number == len(events) - 2:
                handler.close_connection = True
                return
            for piece in (event[:5], event[5:]):  # events never come whole
                handler.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                handler.wfile.flush()
            time.sleep(0.002)
        handler.wfile.write(b"0\r\n\r\n")


OPERATIONS = """
import lockgate as lg
from lockgate.operations import anthropic_messages, openai_chat

ops = lg.Operations()
anthropic_messages(ops, backend="anthropic", timeout=20)
openai_chat(ops, backend="openai", timeout=20)
"""


def model_config(url: str) -> str:
    """Return the part of a configuration that names the two vendors."""
    return f"""
[secrets.anthropic]
ref = "file:model-keys.toml#anthropic"

[secrets.openai]
ref = "file:model-keys.toml#openai"

[backends.anthropic]
url = "{url}"
minter = "key"
key = "secret anthropic"
header = "x-api-key"

[backends.openai]
url = "{url}"
minter = "key"
key = "secret openai"
"""


KEYS = f'anthropic = "{ANTHROPIC_KEY}"\nopenai = "{OPENAI_KEY}"\n'
