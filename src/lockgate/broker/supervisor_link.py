"""Packets to and from the supervisor: channels come in, orders to kill go out.

Rule 1: a channel comes with exactly one descriptor, a unix stream socket, and a ticket that was not used before;
        everything else is closed and answered with `ok=False`, and then no code may be sent.
Rule 2: the row that code is about to run stands before the answer: no audit, no code.
Rule 3: the supervisor is trusted not to lie about its machines and not with anything else: it names no run and no
        user, and what it cannot name it cannot change.

Source: unix(7) for SOCK_SEQPACKET, SCM_RIGHTS and MSG_CTRUNC.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable
from typing import Final

import msgspec

from lockgate.broker.attachment import Attachment
from lockgate.broker.channel import Channel
from lockgate.broker.runs import Runs
from lockgate.contract import wire

PACKET_BYTES: Final = 64 * 1024
_MAX_FDS: Final = 8
_decode: Final = msgspec.json.Decoder(wire.SupervisorToBroker).decode
_encode: Final = msgspec.json.Encoder().encode


class SupervisorLink:
    """The broker's end.

    Args:
        sock: SOCK_SEQPACKET, owned from here on.
        runs: redeems tickets.
        attached: writes the first row and makes the channel of an attachment; raises when it may not start.
        serve: runs a channel on a thread.
        detached: called when a run is over and its channel had ended before.
        settle: waits for the call in flight of a run that is over, on a thread.
        void: has all waits for people look whether somebody still wants them.

    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        runs: Runs,
        attached: Callable[[socket.socket, Attachment], Channel],
        serve: Callable[[Channel], None],
        detached: Callable[[Attachment, wire.Detach], None],
        settle: Callable[[Attachment], None],
        void: Callable[[], None],
    ) -> None:
        self._sock = sock
        self._runs = runs
        self._attached = attached
        self._serve = serve
        self._detached = detached
        self._settle = settle
        self._void = void
        self._sending = threading.Lock()
        self._live: dict[str, tuple[Attachment, Channel]] = {}

    def serve(self) -> None:
        """Take packets until the supervisor is gone, then end every channel; the body of the link's thread."""
        while True:
            try:
                packet, fds, flags, _ = socket.recv_fds(self._sock, PACKET_BYTES, _MAX_FDS)
            except OSError:
                break
            if not packet:
                _close(fds)
                break
            if not self._take(packet, fds, whole=not flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC)):
                break
        for attachment, channel in list(self._live.values()):
            attachment.origin.over = True
            channel.shut()
        self._void()

    def kill(self, message: wire.Kill) -> None:
        """Order the end of a run that broke the protocol."""
        self._send(message)

    def shut_run(self, run_ids: set[str]) -> None:
        """End the channels of runs that were closed, and order the end of their code."""
        for attachment, channel in list(self._live.values()):
            if attachment.run.id in run_ids:
                attachment.origin.over = True
                channel.shut()
                self._send(wire.Kill(ticket=attachment.ticket))

    def _take(self, packet: bytes, fds: list[int], *, whole: bool) -> bool:
        """Handle one packet; False when the link cannot be trusted to be in step any more."""
        try:
            message = _decode(packet) if whole else None
        except msgspec.DecodeError:
            message = None
        if isinstance(message, wire.Attach):
            ok = self._attach(message, fds)
            if not ok:
                self._send(wire.Attached(ticket=message.ticket, ok=False))
            return True
        _close(fds)
        if message is None or fds:
            return False
        self._detach(message)
        return True

    def _attach(self, message: wire.Attach, fds: list[int]) -> bool:
        sock = _stream(fds[0]) if len(fds) == 1 else None
        if sock is None:
            _close(fds)
            return False
        ticket = self._runs.redeem(message.ticket)
        if ticket is None:
            sock.close()
            return False
        attachment = Attachment(ticket, message)
        try:
            channel = self._attached(sock, attachment)
        except Exception:  # noqa: BLE001 - whatever failed, code that has no row must not start
            sock.close()
            return False
        self._live[message.ticket] = (attachment, channel)
        self._send(wire.Attached(ticket=message.ticket, ok=True))
        self._serve(channel)
        return True

    def _detach(self, message: wire.Detach) -> None:
        found = self._live.pop(message.ticket, None)
        if found is None:
            return
        attachment, channel = found
        ended = attachment.detached(message)
        if ended:  # the usual run: nobody is inside, so its end is told before its thread is woken to learn of it
            self._detached(attachment, message)
        channel.shut()
        self._void()
        if not ended and attachment.running:
            self._settle(attachment)

    def _send(self, message: wire.BrokerToSupervisor) -> None:
        with self._sending, contextlib.suppress(OSError):  # gone: the receiving thread sees it too and ends all
            self._sock.send(_encode(message))


def _stream(fd: int) -> socket.socket | None:
    """Own `fd` as a unix stream socket; None when it is anything else, which could block or name what it must not."""
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=fd)  # said, not asked for: checked below
    domain = sock.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN)
    if domain == socket.AF_UNIX and sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM:
        return sock
    sock.detach()
    return None


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
