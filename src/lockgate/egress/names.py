"""Answers the questions for names of a run's namespace, from outside it.

Rule 1: a question that is refused is audited first and answered then; what cannot be audited is not answered (E4).
Rule 2: everything is bounded: connections, questions that wait, seconds, rows. What is over a bound is dropped, not
        queued.
Rule 3: nobody else is asked: the only sockets here are the two of the namespace and its connections (E3).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import msgspec

from lockgate.egress.dns import MESSAGE_BYTES, Answered, Responder
from lockgate.egress.namespace import Served
from lockgate.policy.canary import Watch

DNS_IDLE_SECONDS: Final = 10.0
DNS_CONNECTIONS: Final = 16
_CHUNK: Final = 65_536
_WAITING_QUESTIONS: Final = 64 * 1024  # bytes of the socket's queue: some hundred questions
_RAW_BYTES: Final = 256


class Recorder(Protocol):
    """The gateway's end for what is refused out here; `lockgate.egress.client.Control` is one."""

    def denied(
        self,
        *,
        kind: str,
        reason: str,
        rule: str | None,
        destination: str | None,
        raw: bytes,
        report: bool,
        **more: str,
    ) -> str:
        """Make the denial durable, then return the id of its row."""
        ...


class Names(threading.Thread):
    """Answers the questions of a namespace until it is stopped.

    Args:
        served: the sockets of kind "dns-udp" and "dns-tcp".
        responder: judges.
        recorder: makes denials durable.
        watch: finds planted values in names.
        refusals: how many questions of the run are refused with a row; what is behind them gets no answer and no row.
        alarm: called once with a reason when the run must end: "canary", or "gateway_failed".
        events: a descriptor, and what to call when it is readable.

    Attributes:
        questions: how many were judged, by reason.

    """

    def __init__(
        self,
        served: Iterable[Served],
        responder: Responder,
        recorder: Recorder,
        alarm: Callable[[str], None],
        *,
        refusals: int,
        watch: Watch | None = None,
        events: tuple[int, Callable[[], None]] | None = None,
    ) -> None:
        super().__init__(name="egress-names", daemon=True)
        self.questions: Counter[str] = Counter()
        self._udp = [one.sock for one in served if one.kind == "dns-udp"]
        self._tcp = [one.sock for one in served if one.kind == "dns-tcp"]
        self._responder = responder
        self._recorder = recorder
        self._alarm = alarm
        self._left = refusals
        self._watch = watch
        self._events = events
        self._bell = os.eventfd(0, os.EFD_CLOEXEC)
        self._open: dict[socket.socket, _Stream] = {}

    def run(self) -> None:
        """Answer; what nobody thought of ends the run."""
        try:
            self._serve()
        except Exception:  # noqa: BLE001 - a run whose names are gone must not seem to run
            self._alarm("gateway_failed")

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell, selectors.EVENT_READ)
            for sock in (*self._udp, *self._tcp):
                sock.setblocking(False)
                selector.register(sock, selectors.EVENT_READ, sock)
            for sock in self._udp:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _WAITING_QUESTIONS)
            if self._events is not None:
                selector.register(self._events[0], selectors.EVENT_READ, self._events[1])
            try:
                while self._round(selector):
                    pass
            finally:
                for sock in self._open:
                    sock.close()

    def stop(self) -> None:
        """End, and wait for it."""
        os.eventfd_write(self._bell, 1)
        self.join()
        os.close(self._bell)

    def _round(self, selector: selectors.BaseSelector) -> bool:
        for key, _ in selector.select(1.0 if self._open else None):
            if key.data is None:
                return False
            if callable(key.data):
                key.data()
            elif key.data in self._udp:
                self._datagram(key.data)
            elif key.data in self._tcp:
                self._accept(key.data, selector)
            elif not self._stream(key.data):
                self._drop(key.data, selector)
        now = time.monotonic()
        for sock in [sock for sock, stream in self._open.items() if now > stream.deadline]:
            self._drop(sock, selector)
        return True

    def _datagram(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            data, address = sock.recvfrom(_CHUNK)
            reply = self._answer(data)
            if reply is not None:
                sock.sendto(reply, address)

    def _accept(self, sock: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            client, _ = sock.accept()
        except OSError:
            return
        if len(self._open) >= DNS_CONNECTIONS:
            client.close()
            return
        client.setblocking(False)
        self._open[client] = _Stream()
        selector.register(client, selectors.EVENT_READ, client)

    def _stream(self, sock: socket.socket) -> bool:
        """Answer whole questions of a connection (RFC 7766); False: it is over."""
        stream = self._open[sock]
        try:
            data = sock.recv(_CHUNK)
            if not data:
                return False
            stream.data += data
            while (question := stream.next()) is not None:
                if len(question) > MESSAGE_BYTES:
                    return False
                reply = self._answer(question)
                if reply is not None:
                    # At most 512 bytes into an empty queue; a client that does not read loses its connection.
                    framed = len(reply).to_bytes(2) + reply
                    if sock.send(framed) != len(framed):
                        return False
        except OSError:
            return False
        return len(stream.data) <= MESSAGE_BYTES + 2

    def _drop(self, sock: socket.socket, selector: selectors.BaseSelector) -> None:
        selector.unregister(sock)
        self._open.pop(sock, None)
        sock.close()

    def _answer(self, question: bytes) -> bytes | None:
        """Judge a question; a denial is durable before this returns an answer."""
        judged = self._responder.answer(question)
        planted = self._watch is not None and self._watch.feed(judged.name)
        self.questions["canary" if planted else judged.reason] += 1
        if planted:
            judged = Answered(reply=None, allow=False, reason="canary", host=judged.host, qtype=judged.qtype)
        if judged.allow and not judged.reported:
            return judged.reply
        if self._left <= 0 and not planted:
            if self._left < 0:
                return None
            judged = msgspec.structs.replace(judged, reply=None, allow=False, reported=False, reason="request_budget")
        self._left -= 1
        try:
            self._recorder.denied(
                kind="dns",
                reason=judged.reason,
                rule=judged.rule,
                destination=judged.host.text if judged.host is not None else None,
                raw=question[:_RAW_BYTES],
                report=judged.reported,
                qtype=str(judged.qtype),
            )
        except Exception:  # noqa: BLE001 - whatever it is: no row, no answer, no run (E4)
            self._alarm("gateway_failed")
            return None
        if planted:
            self._alarm("canary")
        if self._events is not None:
            self._events[1]()  # what came beside the answer makes no descriptor readable
        return judged.reply


class _Stream:
    """What came on one connection; its deadline does not move with single bytes."""

    def __init__(self) -> None:
        self.data = b""
        self.deadline = time.monotonic() + DNS_IDLE_SECONDS

    def next(self) -> bytes | None:
        """Return the next whole question."""
        if len(self.data) < 2:
            return None
        length = int.from_bytes(self.data[:2])
        if len(self.data) < 2 + length:
            return None
        question, self.data = self.data[2 : 2 + length], self.data[2 + length :]
        self.deadline = time.monotonic() + DNS_IDLE_SECONDS
        return question
