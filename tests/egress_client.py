"""What the gateway's tests say to it: connections, requests, handshakes."""

from __future__ import annotations

import json
import os
import socket
import ssl
import struct
from pathlib import Path
from typing import Any

from lockgate.audit import reader
from lockgate.audit.rows import StoredRow
from lockgate.contract.errors import LockgateError
from lockgate.egress.client import Control
from lockgate.egress.preface import preface

WAIT = 30.0


def dial(data: str, token: str) -> socket.socket:
    """Connect to a gateway's data socket as a run."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(WAIT)
    sock.connect(data)
    sock.sendall(preface(token))
    return sock


def drain(sock: socket.socket) -> bytes:
    """Read to the end; a reset behind the last byte is an end, too: it is what closing with unread bytes gives."""
    out = b""
    while True:
        try:
            data = sock.recv(65536)
        except ConnectionResetError:
            return out
        if not data:
            return out
        out += data


def ask(data: str, token: str, raw: bytes) -> bytes:
    """Send bytes as a run and read what comes until the end."""
    with dial(data, token) as sock:
        sock.sendall(raw)
        return drain(sock)


def reason(answer: bytes) -> str:
    """The reason of a refusal, whose header and body must agree; "ok" for a 200; "" for silence."""
    if not answer:
        return ""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    fields = {line.partition(":")[0]: line.partition(":")[2].strip() for line in lines[1:]}
    if "x-lockgate-reason" not in fields:
        return "ok" if " 200 " in lines[0] else lines[0]
    told: dict[str, Any] = json.loads(body)
    assert set(told) == {"error", "reason", "rule", "retry", "next"}
    assert told["retry"] is False
    assert told["reason"] == fields["x-lockgate-reason"]
    assert lines[0].split(" ")[1] in {"403", "502", "503"}
    return told["reason"]


def connect(host: str, port: int = 443) -> bytes:
    """The head of a CONNECT."""
    return f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()


def get(url: str, *fields: str, host: str = "plain.example", method: str = "GET") -> bytes:
    """The head of an absolute-form request."""
    return "\r\n".join([f"{method} {url} HTTP/1.1", f"Host: {host}", *fields, "", ""]).encode()


def tunnel(data: str, token: str, host: str, port: int = 443) -> socket.socket:
    """Open a tunnel; what comes first must be the plain 200."""
    sock = dial(data, token)
    sock.sendall(connect(host, port))
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        part = sock.recv(1)
        assert part, head
        head += part
    assert head.startswith(b"HTTP/1.1 200 "), head
    return sock


def hello(name: str) -> bytes:
    """A ClientHello for `name`: enough for whoever only reads it."""

    def vector(data: bytes, size: int) -> bytes:
        return len(data).to_bytes(size) + data

    server_name = struct.pack("!H", 0) + vector(vector(b"\0" + vector(name.encode(), 2), 2), 2)
    body = b"\x03\x03" + os.urandom(32) + vector(b"", 1) + vector(b"\x13\x01", 2) + b"\x01\x00" + vector(server_name, 2)
    return b"\x16\x03\x01" + vector(b"\x01" + vector(body, 3), 2)


def client_context(ca: str) -> ssl.SSLContext:
    """A client that trusts one authority alone."""
    return ssl.create_default_context(cafile=ca)


def over_tls(sock: socket.socket, context: ssl.SSLContext, name: str, raw: bytes) -> bytes:
    """Handshake on an open tunnel, send, read to the end."""
    with context.wrap_socket(sock, server_hostname=name) as inside:
        inside.sendall(raw)
        return drain(inside)


def rows_until_now(control: str, audit: Path) -> list[StoredRow]:
    """All rows of a gateway up to now: what it allowed is sent and not waited for, and a denial behind it is durable.

    Of a gateway that no longer takes or stores any: those that there are.
    """
    flusher = "flusher"
    try:
        link = Control(control)
        try:
            link.open(user=flusher, agent=flusher, run=flusher)
            link.denied(kind="dns", reason="not_allowed", destination="flush.test")
        finally:
            link.close()
    except (LockgateError, OSError):
        pass
    return [row for row in reader.tail(audit, 10_000) if row.run != flusher]
