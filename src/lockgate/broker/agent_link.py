"""The broker's end of the agent's link: frames of `contract.wire`, one `sendall` a message.

Rule 1: any thread may send; frames never interleave.
Rule 2: an agent that does not read is gone: a send that takes longer than `SEND_SECONDS` ends the link.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Final

import msgspec

from lockgate.contract import frames, wire
from lockgate.contract.errors import GuestProtocolError, LockgateError

SEND_SECONDS: Final = 30
_RECV_BYTES: Final = 256 * 1024
_decode: Final = msgspec.json.Decoder(wire.AgentToBroker).decode
_encode: Final = msgspec.json.Encoder().encode


class AgentLink:
    """Reads requests, sends answers. `sock`: SOCK_STREAM, owned from here on."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", SEND_SECONDS, 0))
        self._sock = sock
        self._sending = threading.Lock()
        self._open = True

    def send(self, message: wire.BrokerToAgent) -> bool:
        """Send one message; False when the agent is gone."""
        body = _encode(message)
        frame = frames.HEADER.pack(len(body)) + body
        with self._sending:
            if not self._open:
                return False
            try:
                self._sock.sendall(frame)
            except OSError:
                self._open = False  # a part of the frame may be out: nothing can follow it
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
            return self._open

    def refuse(self, ident: int, error: LockgateError) -> None:
        """Answer request `ident` with a typed error."""
        self.send(wire.Refused(id=ident, fault=fault(error)))

    def messages(self) -> Iterator[wire.AgentToBroker]:
        """Yield requests until the agent is gone or breaks the framing."""
        decoder = frames.Decoder(cap=wire.LINK_BYTES)
        while True:
            try:
                data = self._sock.recv(_RECV_BYTES)
                bodies = decoder.feed(data) if data else None
            except (OSError, GuestProtocolError):
                return
            if bodies is None:
                return
            for body in bodies:
                try:
                    message = _decode(body)
                except msgspec.DecodeError:
                    if not self._misread(body):
                        return
                    continue
                yield message

    def _misread(self, body: bytes) -> bool:
        """Answer a message that has an id and is none of ours; False when it has not even that."""
        try:
            ident = msgspec.json.decode(body, type=_Identified).id
        except msgspec.DecodeError:
            return False
        unreadable = wire.Fault(
            code="config", message="the broker cannot read this request", next_step="use the fields of contract.wire"
        )
        return self.send(wire.Refused(id=ident, fault=unreadable))


class _Identified(msgspec.Struct):
    id: int


def fault(error: LockgateError) -> wire.Fault:
    """Return a typed error as it travels."""
    return wire.Fault(code=error.code, message=error.message, next_step=error.next_step)
