"""The writer's end of the audit link: bytes in, checked frames out.

Rule 1: the broker is another process: a frame that is none, a row that names nobody or a number out of turn ends the
        link, it is never skipped.
Rule 2: a nap takes rows that nobody waits for together; the client's bell ends it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from typing import Final

import msgspec

from lockgate.audit import rows, wire

NAP_MS: Final = 2
BATCH_BYTES: Final = 1024 * 1024
_CHUNK: Final = 256 * 1024


class _Who(msgspec.Struct):
    """What the writer checks of every row before it takes it; the broker made it, but this is another process."""

    id: str
    user: str
    agent: str
    run: str
    phase: rows.Phase


class Frame(msgspec.Struct):
    """One message of the client."""

    kind: int
    request: int
    n: int
    head: wire.IntentHead | wire.OutcomeHead | None
    body: bytes


class _Broken(Exception):
    """The stream is none of an `AuditClient`; says what came."""


_who: Final = msgspec.json.Decoder(_Who)
_intent: Final = msgspec.msgpack.Decoder(wire.IntentHead)
_outcome: Final = msgspec.msgpack.Decoder(wire.OutcomeHead)


class Stream:
    """Reads one client.

    Args:
        sock: the client's stream; becomes non-blocking.

    Attributes:
        source: the client's name, "" before its greeting.
        last: number of the last row that came.
        ended: the client is gone, or is to be treated so; everything it sent was returned.
        broken: what came that is none of an `AuditClient`; nothing behind it is read.

    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.source = ""
        self.last = 0
        self.ended = False
        self.broken: str | None = None
        self._sock = sock
        self._buffer = bytearray()
        self._bell = -1
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._bell_poll = select.poll()

    def wait(self, milliseconds: int) -> bool:
        """Wait for something to read; returns whether there was."""
        events = self._poll.poll(milliseconds)
        if self._bell >= 0 and events:
            if all(fd != self._bell for fd, _ in events):
                self._bell_poll.poll(NAP_MS)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
        return bool(events)

    def read(self) -> list[Frame]:
        """Take what is there, about `BATCH_BYTES` at most, and return its whole frames."""
        buffer = self._buffer
        while len(buffer) < BATCH_BYTES or not _whole(buffer):
            try:
                data = self._sock.recv(_CHUNK) if self.source else self._hello()
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.ended = True
                break
            buffer += data
        frames: list[Frame] = []
        at = 0
        try:
            with memoryview(buffer) as view:
                while len(view) - at >= wire.HEADER.size:
                    length, kind, request, n = wire.HEADER.unpack_from(view, at)
                    begin = at + wire.HEADER.size
                    if len(view) - begin < _bounded(length):
                        break
                    at = begin + length
                    payload = bytes(view[begin:at])
                    if kind == wire.HELLO:
                        self._greet(payload)
                    else:
                        frames.append(self._frame(kind, request, n, payload))
        except _Broken as broken:
            self.broken = str(broken)
            self.ended = True
        del buffer[:at]
        return frames

    def _hello(self) -> bytes:
        """Read the first bytes, which carry the bell."""
        data, fds, _, _ = socket.recv_fds(self._sock, _CHUNK, 1)
        for fd in fds:
            os.set_blocking(fd, False)
            self._bell = fd
            self._poll.register(fd, select.POLLIN)
            self._bell_poll.register(fd, select.POLLIN)
        return data

    def _greet(self, payload: bytes) -> None:
        source = payload.decode("ascii", "replace")
        if self.source or self._bell < 0 or len(source) != wire.SOURCE_CHARS or not source.isalnum():
            raise _Broken("a second greeting, or one without a name or a bell")
        self.source = source

    def _frame(self, kind: int, request: int, n: int, payload: bytes) -> Frame:
        if not self.source or not wire.APPEND <= kind <= wire.FLUSH:
            raise _Broken(f"a message of kind {kind}")
        head: wire.IntentHead | wire.OutcomeHead | None = None
        if kind in {wire.LOOKUP, wire.FLUSH}:
            return Frame(kind, request, n, head, payload)
        try:
            if kind in {wire.INTENT, wire.OUTCOME}:
                (length,) = wire.LENGTH.unpack_from(payload)
                end = wire.LENGTH.size + length
                raw, payload = payload[wire.LENGTH.size : end], payload[end:]
                head = _intent.decode(raw) if kind == wire.INTENT else _outcome.decode(raw)
            who = _who.decode(payload)
        except (ValueError, struct.error):
            raise _Broken("what is no row") from None
        if not (who.user and who.agent and who.run):
            raise _Broken("a row that names nobody")
        if n != self.last + 1 or who.id != f"{self.source}-{n}":
            raise _Broken(f"row {n} where number {self.last + 1} was due")
        self.last = n
        return Frame(kind, request, n, head, payload)


def _bounded(length: int) -> int:
    if length > wire.PAYLOAD_BYTES:
        raise _Broken(f"a frame of {length} bytes")
    return length


def _whole(buffer: bytearray) -> bool:
    return len(buffer) >= wire.HEADER.size and len(buffer) - wire.HEADER.size >= wire.HEADER.unpack_from(buffer)[0]
