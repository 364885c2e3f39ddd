"""Serves the proxy sockets of a run's namespace from outside it: hands connections on to the gateway.

Rule 1: a connection to the proxy is handed to the gateway as the descriptor that was accepted, with the run's token;
        no byte of it is read here.
Rule 2: connections and seconds are bounded. What is over a bound is dropped, not queued.
Rule 3: an address of the pool is turned back into its name here, and the gateway decides about that name as about any
        other: this is a convenience for clients without a proxy setting, not a second way out.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from lockgate.egress.dns import Responder
from lockgate.egress.namespace import Served

HEAD_BYTES: Final = 16_384
HEAD_SECONDS: Final = 10.0
CONNECT_SECONDS: Final = 5.0
ROUTED_CONNECTIONS: Final = 64
HTTP_PORT: Final = 80
_CHUNK: Final = 65_536
_PAUSE: Final = 0.02


class Gateway(Protocol):
    """Where connections go."""

    def open(self, client: socket.socket | None = None) -> socket.socket:
        """Open a connection as this run; with `client`, its descriptor goes along and the conversation is on that."""
        ...


class Proxy(threading.Thread):
    """Hands connections on until it is stopped.

    Args:
        served: the sockets of kind "proxy" and "routed".
        gateway: where to.
        responder: knows which name an address stands for.
        alarm: called with a reason when the run must end.

    """

    def __init__(
        self, served: Iterable[Served], gateway: Gateway, responder: Responder, alarm: Callable[[str], None]
    ) -> None:
        super().__init__(name="egress-proxy", daemon=True)
        self._alarm = alarm
        self._served = [one for one in served if one.kind in ("proxy", "routed")]
        self._gateway = gateway
        self._responder = responder
        self._bell = os.eventfd(0, os.EFD_CLOEXEC)
        self._room = threading.BoundedSemaphore(ROUTED_CONNECTIONS)

    def run(self) -> None:
        """Accept and hand on; what nobody thought of ends the run."""
        try:
            self._serve()
        except Exception:  # noqa: BLE001 - a run whose proxy is gone must not seem to run
            self._alarm("gateway_failed")

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell, selectors.EVENT_READ)
            for one in self._served:
                one.sock.setblocking(False)
                selector.register(one.sock, selectors.EVENT_READ, one)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    self._accept(key.data)

    def stop(self) -> None:
        """End, and wait for it."""
        os.eventfd_write(self._bell, 1)
        self.join()
        os.close(self._bell)

    def _accept(self, one: Served) -> None:
        try:
            client, _ = one.sock.accept()
        except OSError:
            time.sleep(_PAUSE)  # gone again, or no descriptor left: the backlog waits
            return
        if one.kind == "routed" and self._room.acquire(blocking=False):
            threading.Thread(target=self._routed, args=(client, one), daemon=True).start()
            return
        with client:
            if one.kind == "proxy":
                with contextlib.suppress(OSError):
                    self._gateway.open(client).close()

    def _routed(self, client: socket.socket, one: Served) -> None:
        """Be a proxy-aware client for one that is not."""
        try:
            with client, contextlib.suppress(OSError, ValueError):
                family = socket.AF_INET6 if ":" in one.address else socket.AF_INET
                host = self._responder.reverse(socket.inet_pton(family, one.address))
                if host is None:
                    return
                client.settimeout(HEAD_SECONDS)
                first = _absolute(client, host.text) if one.port == HTTP_PORT else _connect(host.text, one.port)
                with self._gateway.open() as upstream:
                    upstream.settimeout(HEAD_SECONDS)
                    upstream.sendall(first)
                    if one.port != HTTP_PORT:
                        rest = _opened(upstream)
                        client.sendall(rest)
                    _relay(client, upstream)
        finally:
            self._room.release()


def _connect(host: str, port: int) -> bytes:
    return f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()


def _opened(upstream: socket.socket) -> bytes:
    """Read the answer to a CONNECT; returns what stands behind its head.

    Raises:
        ValueError: it was refused.

    """
    head, rest = _head(upstream)
    if not head.startswith(b"HTTP/1.1 200 "):
        raise ValueError("the gateway refused")
    return rest


def _absolute(client: socket.socket, host: str) -> bytes:
    """Read a request head in origin form and return it as a proxy wants it, for one request on this connection.

    Raises:
        ValueError: it is not in origin form; the gateway looks at everything else.

    """
    head, rest = _head(client)
    line, *fields = head.split(b"\r\n")
    words = line.split(b" ")
    if len(words) != 3 or not words[1].startswith(b"/"):
        raise ValueError("no origin form")
    line = b" ".join((words[0], b"http://" + host.encode() + words[1], words[2]))
    kept = [one for one in fields if not one.lower().startswith((b"connection:", b"keep-alive:", b"proxy-connection:"))]
    return b"\r\n".join((line, *kept, b"Connection: close")) + b"\r\n\r\n" + rest


def _head(sock: socket.socket) -> tuple[bytes, bytes]:
    """Read to the empty line; returns (head without it, what came behind).

    Raises:
        ValueError: there is none within the bounds. OSError: the other end is gone or too slow.

    """
    deadline = time.monotonic() + HEAD_SECONDS
    data = b""
    while b"\r\n\r\n" not in data:
        left = deadline - time.monotonic()
        if len(data) > HEAD_BYTES or left <= 0:
            raise ValueError("no head in time")
        sock.settimeout(left)
        more = sock.recv(_CHUNK)
        if not more:
            raise ValueError("no head")
        data += more
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def _relay(one: socket.socket, other: socket.socket) -> None:
    """Copy both ways until both ends have closed or one has failed."""
    one.settimeout(None)
    other.settimeout(None)
    back = threading.Thread(target=_copy, args=(other, one), daemon=True)
    back.start()
    _copy(one, other)
    back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(_CHUNK):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, target):  # the other direction must end too
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
