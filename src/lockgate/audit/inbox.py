"""Replies of the writer, shared by the threads that wait for them.

Rule 1: who waits reads. One waiting thread holds the reading lock and delivers to the others; when it has its own
        reply it rouses one of those that still wait, and that one reads on. There is no reader thread.
Rule 2: a link that failed stays failed, with its first cause, and everybody who waits learns of it at once.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from typing import Final

from lockgate.audit import wire
from lockgate.audit.chain import EMPTY, Head
from lockgate.contract.errors import AuditUnavailable

RESTART: Final = "restart the gate; no write runs without its audit row"
_HEALTH_SECONDS: Final = 0.05


class Waiter:
    """One waiting request: `wake` is held until there is a reply, or the reading is handed to this waiter."""

    __slots__ = ("reply", "wake")

    def __init__(self) -> None:
        self.reply: wire.Reply | None = None
        self.wake = threading.Lock()
        self.wake.acquire()

    def rouse(self) -> None:
        """Let the waiting thread look."""
        try:
            self.wake.release()
        except RuntimeError:  # roused already and not yet running
            return


class Inbox:
    """The receiving side of one link.

    Args:
        sock: a non-blocking stream socket; the caller owns it.

    Attributes:
        down: why the link is over, as (message, next step); None while it stands.
        sick: why the writer cannot store at the moment; None while it can.
        head: the end of the chain as the writer last told it.
        look_at: when a thread that only sends should `look` again (monotonic seconds).

    """

    def __init__(self, sock: socket.socket) -> None:
        self.down: tuple[str, str] | None = None
        self.sick: tuple[str, str] | None = None
        self.head: Head = EMPTY
        self._sock = sock
        self._reading = threading.Lock()
        self._waiters: dict[int, Waiter] = {}
        self._replies = wire.Replies()
        self.look_at = 0.0
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    def expect(self, request: int) -> Waiter:
        """Announce that a reply to `request` will be waited for; before it is sent."""
        waiter = self._waiters[request] = Waiter()
        return waiter

    def forget(self, request: int) -> None:
        """Take an announcement back; the request was not sent."""
        self._waiters.pop(request, None)

    def wait(self, request: int, waiter: Waiter, deadline: float) -> wire.Reply | None:
        """Return the reply, or None when it is not there at `deadline` (monotonic seconds) or the link is over."""
        while waiter.reply is None and self.down is None:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            if not self._reading.acquire(blocking=False):
                waiter.wake.acquire(timeout=left)
                continue
            try:
                while waiter.reply is None and self.down is None:
                    left = deadline - time.monotonic()
                    if left <= 0 or not self._readable.poll(left * 1000):
                        break
                    self._receive()
            finally:
                self._reading.release()
        # First out of the table, then hand on: whoever hands on at the same time then cannot choose this thread.
        self._waiters.pop(request, None)
        self._hand_on()
        return waiter.reply

    def look(self, now: float) -> None:
        """Read what came, without waiting: a thread that only sends must notice a full disk."""
        self.look_at = now + _HEALTH_SECONDS
        if not self._reading.acquire(blocking=False):
            return
        try:
            self._receive()
        finally:
            self._reading.release()
        self._hand_on()

    def fail(self, message: str, next_step: str = RESTART) -> None:
        """The link is over."""
        self.down = self.down or (message, next_step)
        for waiter in self._waiters.copy().values():
            waiter.rouse()

    def drain(self, timeout: float) -> None:
        """Read until the writer has closed its end, at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        if not self._reading.acquire(timeout=timeout):
            return
        try:
            while (left := deadline - time.monotonic()) > 0 and self._readable.poll(left * 1000):
                data = self._sock.recv(65536)
                if not data:
                    return
                for reply in self._replies.feed(data):
                    self._deliver(reply)
        except (OSError, AuditUnavailable):
            return
        finally:
            self._reading.release()

    def error(self, otherwise: str) -> AuditUnavailable:
        """Return why there was no reply."""
        message, next_step = self.down or (otherwise, "look at the disk under the audit file, then restart the gate")
        return AuditUnavailable(message, next_step=next_step)

    def _hand_on(self) -> None:
        """Rouse one thread that still waits, so that somebody reads."""
        if self._reading.locked():
            return
        for request, waiter in self._waiters.copy().items():
            if waiter.reply is None:
                waiter.rouse()
                if request:  # nobody need be waiting for number 0, the greeting
                    return

    def _receive(self) -> None:
        """Read once and deliver; the caller holds the reading lock."""
        try:
            data = self._sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.fail("the audit writer is gone")
            return
        try:
            replies = self._replies.feed(data)
        except AuditUnavailable as broken:
            self.fail(broken.message, broken.next_step)
            return
        for reply in replies:
            self._deliver(reply)

    def _deliver(self, reply: wire.Reply) -> None:
        if isinstance(reply, wire.Health):
            self.sick = None if reply.ok else (reply.message, reply.next_step)
            return
        if isinstance(reply, wire.Failed):
            self.fail(reply.message, reply.next_step)
            return
        if isinstance(reply, wire.Ready | wire.Stored):
            self.head = Head(reply.seq, reply.hash)
        waiter = self._waiters.pop(0 if isinstance(reply, wire.Ready) else reply.id, None)
        if waiter is not None:
            waiter.reply = reply
            waiter.rouse()
