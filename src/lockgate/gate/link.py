"""One agent-side end of a stream to a child: non-blocking, framed, one send a message.

Rule 1: nothing here waits. The pump (asyncio or blocking) calls `receive` and `flush` when the kernel says so.
Rule 2: a link that broke stays broken; what was queued is dropped and said so by `send` returning False.
Rule 3: several threads may send (the sync twin); frames never interleave.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Final

from lockgate.contract import frames
from lockgate.contract.errors import GuestProtocolError
from lockgate.contract.wire import LINK_BYTES

_CHUNK: Final = 64 * 1024


class Link:
    """A framed stream over `sock`, which it owns.

    Args:
        sock: a connected stream socket; made non-blocking.

    Attributes:
        want_write: called with True when the kernel's buffer is full, with False when all is out.

    """

    __slots__ = ("_decoder", "_lock", "_out", "_sock", "open", "want_write")

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder = frames.Decoder(cap=LINK_BYTES)
        self._out = bytearray()
        self._lock = threading.Lock()
        self.open = True
        self.want_write: Callable[[bool], None] = _ignore

    def fileno(self) -> int:
        """The descriptor to poll, -1 once closed."""
        return self._sock.fileno()

    def send(self, body: bytes) -> bool:
        """Send one message or queue what the kernel does not take now; False when the link is gone."""
        frame = frames.HEADER.pack(len(body)) + body
        with self._lock:
            if not self.open:
                return False
            if self._out:
                self._out += frame
                return True
            try:
                sent = self._sock.send(frame)
            except BlockingIOError:
                sent = 0
            except OSError:
                self.open = False
                return False
            if sent < len(frame):
                self._out += frame[sent:]
                self.want_write(True)
            return True

    def flush(self) -> None:
        """Continue what `send` queued."""
        with self._lock:
            try:
                while self._out:
                    del self._out[: self._sock.send(self._out[: 16 * _CHUNK])]
            except BlockingIOError:
                return
            except OSError:
                self.open = False
                self._out.clear()
            self.want_write(False)

    def receive(self) -> list[bytes] | None:
        """Return the messages that are complete now; None when the other end is gone or broke the framing."""
        try:
            data = self._sock.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        try:
            return self._decoder.feed(data) if data else None
        except GuestProtocolError:
            return None

    def close(self) -> None:
        """Close the socket; idempotent. The child sees EOF and ends itself."""
        with self._lock:
            self.open = False
            self._out.clear()
            self._sock.close()


def _ignore(_wanted: bool) -> None:
    """Stand in until a pump watches this link."""
