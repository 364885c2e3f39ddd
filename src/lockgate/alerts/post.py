"""One POST to a place that the operator named.

Rule 1: the name is resolved once, every answer is vetted, and the vetted address is dialled; TLS is for the name.
Rule 2: no redirect is followed, no proxy is asked, no environment is read.
Rule 3: one deadline for all of it, also against a server that sends a byte a second; the answer is read to a cap.
Rule 4: a failure is a word of ours; no word of the other side is kept but its status.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from typing import Final, NamedTuple

from lockgate.config import AlertSink
from lockgate.config.alerting import may_dial
from lockgate.policy.url import Url

ANSWER_BYTES: Final = 64 * 1024
_RETRY_AFTER: Final = 3600.0


class Posted(NamedTuple):
    """What came back: the status and the beginning of the body, and how long to wait if the server said so."""

    status: int
    body: bytes
    retry_after: float | None


class PostFailed(Exception):
    """No answer; `why` is fixed text."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


def post(url: Url, body: bytes, fields: Mapping[str, str], *, sink: AlertSink, timeout: float) -> Posted:
    """POST `body`.

    Args:
        url: checked. fields: of the request, without those that the transfer needs. sink: which addresses may be.
        timeout: seconds for everything.

    Raises:
        PostFailed: no connection, no TLS, no HTTP, or no answer in time.

    """
    deadline = time.monotonic() + timeout
    sock = _dial(url, sink, deadline)
    late = threading.Event()
    watchdog = threading.Timer(max(deadline - time.monotonic(), 0.0), _cut, (sock, late))
    watchdog.daemon = True
    watchdog.start()
    why = "the connection failed"
    try:
        if url.scheme == "https":
            why = "the certificate or the handshake was refused"
            sock = _context(sink).wrap_socket(sock, server_hostname=url.host.text.strip("[]"))
            watchdog.args = (sock, late)
        why = "no HTTP answer in time"
        answer = _exchange(sock, url, body, fields, deadline)
        if late.is_set():  # the parser takes what was cut off for an end
            raise PostFailed(why)
        return answer  # noqa: TRY300 - the finally below ends the transfer in every case
    except (OSError, http.client.HTTPException, ValueError):
        raise PostFailed(why) from None
    finally:
        watchdog.cancel()
        sock.close()


def _dial(url: Url, sink: AlertSink, deadline: float) -> socket.socket:
    packed = url.host.packed
    addresses = [packed] if packed is not None else _resolve(url.host.text, url.port)
    if not addresses:
        raise PostFailed("the name did not resolve")
    if not all(may_dial(address, sink) for address in addresses):
        raise PostFailed("the name leads to an address that may not be dialled")
    for address in addresses:
        family = socket.AF_INET if len(address) == 4 else socket.AF_INET6
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            sock.connect((str(ipaddress.ip_address(address)), url.port))
        except OSError:
            sock.close()
            continue
        return sock
    raise PostFailed("no connection")


def _resolve(name: str, port: int) -> list[bytes]:
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(ipaddress.ip_address(str(one[4][0]).partition("%")[0]).packed for one in found))


def _exchange(sock: socket.socket, url: Url, body: bytes, fields: Mapping[str, str], deadline: float) -> Posted:
    connection = http.client.HTTPConnection(url.host.text, url.port)
    connection.sock = sock
    host = url.host.text if url.port in {80, 443} else f"{url.host.text}:{url.port}"
    connection.putrequest("POST", url.path, skip_host=True, skip_accept_encoding=True)
    for name, value in {"Host": host, "Content-Length": str(len(body)), "Connection": "close", **fields}.items():
        connection.putheader(name, value)
    sock.settimeout(max(deadline - time.monotonic(), 0.001))
    connection.endheaders(body)
    answer = connection.getresponse()
    text = answer.getheader("Retry-After", "")
    wait = float(text) if text.isascii() and text.isdigit() and len(text) < 6 else None
    read = b""
    with contextlib.suppress(OSError, http.client.HTTPException):  # the status is the answer; a body may be cut off
        read = answer.read(ANSWER_BYTES)
    return Posted(answer.status, read, None if wait is None else min(wait, _RETRY_AFTER))


def _context(sink: AlertSink) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=sink.ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _cut(sock: socket.socket, late: threading.Event) -> None:
    late.set()
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
