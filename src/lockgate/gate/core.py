"""Who waits for what: matches messages from the two children with those who asked. Does no I/O of its own.

Rule 1: an answer goes to the one who asked by its id, once; what nobody waits for any more is dropped.
Rule 2: when a child dies, everything that needs it is resolved at once with a `ProcessDied` that names it, and every
        later request fails the same way before anything is sent.
Rule 3: errors travel as values, so that one who gave up waiting leaves no exception that nobody took.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

import msgspec

from lockgate.contract import wire
from lockgate.contract.errors import HostFault, LockgateError, ProcessDied
from lockgate.gate.faults import died, from_fault
from lockgate.gate.link import Link

_ENCODE: Final = msgspec.json.Encoder().encode
_FROM_BROKER: Final = msgspec.json.Decoder(wire.BrokerToAgent)
_FROM_SUPERVISOR: Final = msgspec.json.Decoder(wire.SupervisorToAgent)


class Waits(Protocol):
    """What is resolved with an answer: a future, or its blocking twin."""

    def done(self) -> bool:
        """Whether it is resolved or given up."""
        ...

    def set_result(self, value: Any, /) -> None:
        """Resolve it."""
        ...


class Peer:
    """One child as its requester sees it.

    Attributes:
        name: "broker" or "supervisor".
        lost: why it takes no requests any more, or None.
        pending: who waits for which id; the id 0 waits for `Ready`.

    """

    def __init__(self, name: str, link: Link, decoder: msgspec.json.Decoder[Any]) -> None:
        self.name = name
        self.link = link
        self.lost: ProcessDied | None = None
        self.pending: dict[int, Waits] = {}
        self._decode: Callable[[bytes], Any] = decoder.decode

    def ask(self, message: wire.Message, id_: int, waiter: Waits) -> None:
        """Send `message`; its answer resolves `waiter`.

        Raises:
            ProcessDied: the child is gone; nothing was sent.

        """
        if self.lost is None:
            self.pending[id_] = waiter
            if self.link.send(_ENCODE(message)):
                return
            del self.pending[id_]
        raise died(self.name, self.lost.message if self.lost else None)

    def tell(self, message: wire.Message) -> None:
        """Send `message` that has no answer of its own; nothing happens when the child is gone."""
        if self.lost is None:
            self.link.send(_ENCODE(message))

    def take(self) -> list[Any] | None:
        """Return the messages that came; None when the child is gone or does not speak our protocol."""
        bodies = self.link.receive()
        if bodies is None:
            return None
        try:
            return [self._decode(body) for body in bodies]
        except msgspec.DecodeError:
            return None


class Stream:
    """Where a run's output goes while it is written."""

    __slots__ = ("error", "on_bytes")

    def __init__(self, on_bytes: Callable[[str, bytes], object]) -> None:
        self.on_bytes = on_bytes
        self.error: Exception | None = None


class Core:
    """Routes messages. `on_approval` gets each `ApprovalAsked`."""

    def __init__(self, broker: Link, supervisor: Link, on_approval: Callable[[wire.ApprovalAsked], None]) -> None:
        self.broker = Peer("broker", broker, _FROM_BROKER)
        self.supervisor = Peer("supervisor", supervisor, _FROM_SUPERVISOR)
        self.closings: dict[str, Waits] = {}
        self.streams: dict[int, Stream] = {}
        self.latches: dict[str, Callable[[], None]] = {}
        self.next_id = itertools.count(1).__next__
        self._on_approval = on_approval

    def receive(self, peer: Peer) -> bool:
        """Take what `peer` sent; False when it is gone."""
        messages = peer.take()
        if messages is None:
            return False
        for message in messages:
            if isinstance(message, wire.Output):
                self._output(message)
            elif isinstance(message, wire.CodeClosed):
                _resolve(self.closings.pop(message.ticket, None), message)
            elif isinstance(message, wire.ApprovalAsked):
                self._on_approval(message)
            elif isinstance(message, wire.RunLatched):
                self.latches.get(message.run, _nothing)()
            else:
                self._answer(peer, message)
        return True

    def _answer(self, peer: Peer, message: Any) -> None:
        value: Any = message
        id_ = 0
        if isinstance(message, wire.Failed):
            value = from_fault(message.fault)
        elif not isinstance(message, wire.Ready):
            id_ = message.id
            if isinstance(message, wire.Refused):
                value = from_fault(message.fault)
                if isinstance(value, ProcessDied) and peer is self.supervisor:
                    value = died("broker", value.message)  # it saw the end of its link before we saw that of ours
        _resolve(peer.pending.pop(id_, None), value)

    def _output(self, message: wire.Output) -> None:
        stream = self.streams.get(message.id)
        if stream is None or stream.error is not None:
            return
        try:
            stream.on_bytes(message.stream, message.data)
        except Exception as error:  # noqa: BLE001 - the caller's own callback; raised from its `code()` call
            stream.error = error
            self.supervisor.tell(wire.Cancel(id=message.id))

    def lose(self, peer: Peer, error: ProcessDied) -> None:
        """Mark `peer` as gone and resolve everything that needs it; the first cause stays."""
        if peer.lost is not None:
            return
        peer.lost = error
        waiting = list(peer.pending.values())
        peer.pending.clear()
        if peer is self.broker:
            # Nothing the supervisor could still answer has an audit row any more.
            waiting += self.supervisor.pending.values()
            self.supervisor.pending.clear()
        waiting += self.closings.values()
        self.closings.clear()
        for waiter in waiting:
            _resolve(waiter, died(error.process, error.message))


def _resolve(waiter: Waits | None, value: Any) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(value)


T = TypeVar("T")


def unwrap(value: Any, kind: type[T], peer: Peer, seconds: float) -> T:
    """Return the answer, or raise the error it is.

    Raises:
        LockgateError: the answer is an error.
        HostFault: no answer came within `seconds`, or one of another kind.

    """
    if type(value) is kind:
        return value
    if isinstance(value, LockgateError):
        raise value
    what = f"did not answer within {seconds:g} s" if value is None else "answered with a message of another kind"
    raise HostFault(f"the {peer.name} {what}", next_step="end this Gate and open a new one; see: lockgate doctor")


def _nothing() -> None:
    """Stand in for a run that is not open here any more."""
