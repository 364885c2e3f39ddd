"""The supervisor's two links: frames to the agent, packets with descriptors to the broker.

Rule 1: nothing here waits. What a peer does not read is queued, and a queue has an end (`LinkFull`).
Rule 2: only these two trusted peers are decoded with the types of `contract.wire`; no byte of a machine comes here.
"""

from __future__ import annotations

import array
import socket
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from lockgate.contract import frames, wire
from lockgate.contract.errors import GuestProtocolError, LockgateError, ProcessDied
from lockgate.supervisor import loop

_QUEUE_BYTES: Final = 64 * 1024 * 1024
_QUEUE_PACKETS: Final = 4096
_PACKET: Final = 64 * 1024
_BUFFER: Final = bytearray(256 * 1024)  # of both links: a buffer of this size is too dear to make anew for a message
_VIEW: Final = memoryview(_BUFFER)

_encoder: Final = msgspec.json.Encoder()
_from_agent: Final = msgspec.json.Decoder(wire.AgentToSupervisor)
_from_broker: Final = msgspec.json.Decoder(wire.BrokerToSupervisor)


def fault_of(err: LockgateError) -> wire.Fault:
    """Return an error as it travels."""
    return wire.Fault(code=err.code, message=err.message, next_step=err.next_step)


class AgentLink:
    """Stream of frames to and from the agent.

    Args:
        on_message: gets each decoded message.
        on_end: called once when the agent is gone or broke the framing.

    """

    def __init__(
        self,
        reactor: loop.Reactor,
        sock: socket.socket,
        on_message: Callable[[wire.AgentToSupervisor], object],
        on_end: Callable[[], object],
    ) -> None:
        sock.setblocking(False)
        self._reactor = reactor
        self._sock = sock
        self._on_message = on_message
        self._on_end = on_end
        self._decoder = frames.Decoder(cap=wire.LINK_BYTES)
        self._queue: deque[memoryview] = deque()
        self.queued = 0
        self.open = True
        reactor.add(sock.fileno(), self._on_event)

    def send(self, message: wire.SupervisorToAgent) -> None:
        """Send without waiting; what does not fit is queued, and an agent that never reads is given up."""
        if not self.open:
            return
        body = _encoder.encode(message)
        data = memoryview(frames.HEADER.pack(len(body)) + body)
        if not self._queue:
            try:
                data = data[self._sock.send(data) :]
            except BlockingIOError:
                pass
            except OSError:
                self._end()
                return
            if not data:
                return
            self._reactor.mask(self._sock.fileno(), loop.IN | loop.OUT)
        self._queue.append(data)
        self.queued += len(data)
        if self.queued > _QUEUE_BYTES:
            self._end()

    def _on_event(self, mask: int) -> None:
        if mask & loop.OUT:
            self._flush()
        if mask & (loop.IN | loop.GONE) and self.open:
            self._read()

    def _flush(self) -> None:
        while self._queue:
            data = self._queue[0]
            try:
                sent = self._sock.send(data)
            except BlockingIOError:
                return
            except OSError:
                self._end()
                return
            self.queued -= sent
            if sent < len(data):
                self._queue[0] = data[sent:]
                return
            self._queue.popleft()
        self._reactor.mask(self._sock.fileno(), loop.IN)

    def _read(self) -> None:
        try:
            got = self._sock.recv_into(_BUFFER)
        except BlockingIOError:
            return
        except OSError:
            got = 0
        if not got:
            self._end()
            return
        try:
            bodies = self._decoder.feed(_VIEW[:got])
        except GuestProtocolError:
            self._end()
            return
        for body in bodies:
            try:
                message = _from_agent.decode(body)
            except msgspec.DecodeError as err:
                self._refuse(body, err)
                continue
            self._on_message(message)

    def _refuse(self, body: bytes, err: msgspec.DecodeError) -> None:
        """Answer a message that has an id and cannot be understood; one without an id ends the link."""
        try:
            ident = msgspec.json.decode(body, type=_Identified).id
        except msgspec.DecodeError:
            self._end()
            return
        fault = wire.Fault(
            code="config", message=f"the request cannot be read: {err}", next_step="use the fields of contract.wire"
        )
        self.send(wire.Refused(id=ident, fault=fault))

    def _end(self) -> None:
        if self.open:
            self.close()
            self._on_end()

    def close(self) -> None:
        """Stop and close the link; idempotent."""
        if self.open:
            self.open = False
            self._reactor.remove(self._sock.fileno())
            self._sock.close()
            self._queue.clear()


class _Identified(msgspec.Struct):
    id: int


class BrokerLink:
    """Packets to and from the broker; the only link that carries descriptors.

    Args:
        on_attached: gets each answer to an `Attach`.
        on_kill: gets each order to end a run.
        on_end: called once when the broker is gone.

    """

    def __init__(
        self,
        reactor: loop.Reactor,
        sock: socket.socket,
        on_attached: Callable[[wire.Attached], object],
        on_kill: Callable[[wire.Kill], object],
        on_end: Callable[[], object],
    ) -> None:
        sock.setblocking(False)
        self._reactor = reactor
        self._sock = sock
        self._on_attached = on_attached
        self._on_kill = on_kill
        self._on_end = on_end
        self._queue: deque[tuple[bytes, socket.socket | None]] = deque()
        self.open = True
        reactor.add(sock.fileno(), self._on_event)

    def attach(self, message: wire.Attach, channel: socket.socket) -> None:
        """Hand a channel over; it is closed here once the kernel has it.

        Raises:
            ProcessDied: the broker is gone.

        """
        if not self.open:
            channel.close()
            raise broker_gone()
        self._send(_encoder.encode(message), channel)

    def detach(self, message: wire.Detach) -> None:
        """Say that a run is over; nothing when the broker is gone."""
        if self.open:
            self._send(_encoder.encode(message), None)

    def _send(self, body: bytes, channel: socket.socket | None) -> None:
        if self._queue or not self._send_now(body, channel):
            self._queue.append((body, channel))
            if self.open:
                self._reactor.mask(self._sock.fileno(), loop.IN | loop.OUT)
            if len(self._queue) > _QUEUE_PACKETS:
                self._end()

    def _send_now(self, body: bytes, channel: socket.socket | None) -> bool:
        try:
            if channel is None:
                self._sock.send(body)
            else:
                rights = array.array("i", [channel.fileno()])
                self._sock.sendmsg([body], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        except BlockingIOError:
            return False
        except OSError:
            self._end()
        if channel is not None:
            channel.close()
        return True

    def _on_event(self, mask: int) -> None:
        if mask & loop.OUT:
            while self._queue and self._send_now(*self._queue[0]):
                if self._queue:  # the end of the link empties it
                    self._queue.popleft()
            if self.open and not self._queue:
                self._reactor.mask(self._sock.fileno(), loop.IN)
        if mask & (loop.IN | loop.GONE) and self.open:
            self._read()

    def drain(self) -> None:
        """Take all that the broker has sent by now."""
        while self.open and self._read():
            pass

    def _read(self) -> bool:
        """Take one packet; False when there is none."""
        try:
            got = self._sock.recv_into(_BUFFER, _PACKET)
        except BlockingIOError:
            return False
        except OSError:
            got = 0
        if not got:
            self._end()
            return False
        try:
            message = _from_broker.decode(_VIEW[:got])
        except msgspec.DecodeError:
            self._end()  # a broker that cannot be understood is as good as gone: fail closed
            return False
        if isinstance(message, wire.Attached):
            self._on_attached(message)
        else:
            self._on_kill(message)
        return True

    def _end(self) -> None:
        if self.open:
            self.close()
            self._on_end()

    def close(self) -> None:
        """Stop and close the link and the channels that wait in it; idempotent."""
        if self.open:
            self.open = False
            self._reactor.remove(self._sock.fileno())
            self._sock.close()
            for _, channel in self._queue:
                if channel is not None:
                    channel.close()
            self._queue.clear()


def broker_gone() -> ProcessDied:
    """Return the error of a run that has no broker."""
    return ProcessDied(
        "the broker process is gone, so no code may run",
        next_step="close this gate and open a new one; the audit log tells what was in flight",
    )
