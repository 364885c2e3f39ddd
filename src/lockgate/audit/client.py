"""The broker's end of the audit link.

Rule 1: a row gets its number under the same lock that sends it, so numbers on the wire rise without a hole and a row
        that was lost with the writer is a hole that `verify` names.
Rule 2: an intent of a write is never merely appended: `append` refuses it, `intent` waits until it is durable.
Rule 3: no wait without a deadline, and a full pipe is a wait: a flood of rows slows its sender, it buys no memory.
Rule 4: when the writer is gone, or says that it cannot store, every method raises `AuditUnavailable` from then on.

Threads: any number may call at once. A thread that waits for its answer reads the socket itself; when several wait,
one reads for all and hands the reading on when it has its own answer. There is no reader thread, hence no hand-off
in the common case.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from hashlib import sha256
from itertools import count
from typing import Final

import msgspec

from lockgate.audit import rows, wire
from lockgate.audit.chain import EMPTY, Head
from lockgate.audit.rows import Row
from lockgate.audit.wire import Existing
from lockgate.contract.errors import AuditUnavailable, HostFault

__all__ = ["AuditClient", "Existing"]

_HEALTH_SECONDS: Final = 0.05
_PIPE_BYTES: Final = 1024 * 1024
_RESTART: Final = "restart the gate; no write runs without its audit row"

_pack: Final = msgspec.msgpack.Encoder().encode


class _Waiter:
    """One waiting request: `wake` is held until there is a reply, or the reading is handed to this waiter."""

    __slots__ = ("reply", "wake")

    def __init__(self) -> None:
        self.reply: wire.Reply | None = None
        self.wake = threading.Lock()
        self.wake.acquire()

    def rouse(self) -> None:
        try:
            self.wake.release()
        except RuntimeError:  # roused already and not yet running
            return


class AuditClient:
    """Sends rows to the writer process.

    Args:
        sock: a connected SOCK_STREAM unix socket; this object owns it. No other process may keep a copy of it, or the
            writer will not see the broker's end.
        timeout: seconds after which a wait gives up with `AuditUnavailable`.

    Attributes:
        source: names this client's rows: audit ids are `SOURCE-N`.
        head: the end of the chain as the writer last told it.

    """

    def __init__(self, sock: socket.socket, *, timeout: float = 5.0) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PIPE_BYTES)
        self.source = os.urandom(wire.SOURCE_CHARS // 2).hex()
        self.head = EMPTY
        self._sock = sock
        self._timeout = timeout
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._n = 0
        self._ids = count(1)
        self._sending = threading.Lock()
        self._reading = threading.Lock()
        self._waiters: dict[int, _Waiter] = {}
        self._replies = wire.Replies()
        self._ready = self._waiters[0] = _Waiter()
        self._down: tuple[str, str] | None = None
        self._sick: tuple[str, str] | None = None
        self._looked = time.monotonic()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)
        name = self.source.encode()
        try:
            socket.send_fds(sock, [wire.HEADER.pack(len(name), wire.HELLO, 0, 0) + name], [self._bell])
        except OSError:
            self._fail("the audit writer is gone", _RESTART)

    @property
    def available(self) -> bool:
        """Whether rows are being stored, as far as is known."""
        return self._down is None and self._sick is None

    def ready(self, timeout: float = 15.0) -> wire.Ready:
        """Wait until the writer has opened the database; says where the chain ends and what it had to repair.

        Raises:
            AuditUnavailable: it could not, with the writer's own words, or did not within `timeout` seconds.

        """
        reply = self._wait(0, self._ready, time.monotonic() + timeout)
        if isinstance(reply, wire.Ready):
            return reply
        raise self._error(f"the audit writer was not ready within {timeout:g} s")

    def append(self, row: Row) -> str:
        """Send `row` and return its audit id without waiting; for rows of reads and of runs.

        Raises:
            AuditUnavailable: the writer is gone, cannot store, or has not taken rows for the timeout.
            ValueError: it is the intent of a write.

        """
        if row.effect == "write" and row.phase == "intent":
            raise ValueError("the intent of a write must be durable; use intent()")
        body = rows.encode(row)
        mono = time.monotonic()
        if mono - self._looked > _HEALTH_SECONDS:
            self._look(mono)
        if self._sick is not None:
            raise AuditUnavailable(self._sick[0], next_step=self._sick[1])
        return self._send(wire.APPEND, 0, body, mono)

    def commit(self, row: Row) -> str:
        """Send `row` and wait until it is durable; for denials.

        Raises:
            AuditUnavailable: it is not durable, or nobody said so in time.

        """
        if row.effect == "write" and row.phase == "intent":
            raise ValueError("the intent of a write claims its key; use intent()")
        audit_id, reply = self._request(wire.COMMIT, rows.encode(row))
        self._stored(reply)
        return audit_id

    def intent(self, row: Row, idempotency_key: str | None, grant_id: str | None = None) -> str | Existing:
        """Claim a key and a grant for the write that `row` announces; returns its audit id once that is durable.

        Args:
            row: phase "intent".
            idempotency_key: at most one intent holds it, until it is released; None = every call is a new one.
            grant_id: used once for ever; None = no approval was needed.

        Returns:
            The audit id; or the earlier intent that holds key or grant: then nothing was claimed, nothing may run,
            and the attempt stands in the log as a row of phase "refused" (`Existing.audit_id`).

        Raises:
            AuditUnavailable: nothing was claimed, or nobody said so in time (then the claim is given up by a second
                message, should the first arrive). The write must not run.

        """
        if row.phase != "intent":
            raise ValueError(f"intent() takes a row of phase 'intent', not {row.phase!r}")
        if row.idempotency_key != idempotency_key or row.grant_id != grant_id:
            row = msgspec.structs.replace(row, idempotency_key=idempotency_key, grant_id=grant_id)
        audit_id, reply = self._request(
            wire.INTENT, rows.encode(row), _pack(wire.IntentHead(idempotency_key, grant_id))
        )
        if isinstance(reply, wire.Taken):
            return reply.existing
        if reply is None:
            self._abandon(row, audit_id)
        self._stored(reply)
        return audit_id

    def lookup(self, idempotency_key: str) -> Existing | None:
        """Return the intent that holds the key, if any.

        Raises:
            AuditUnavailable: nobody said in time.

        """
        deadline = time.monotonic() + self._timeout
        key = idempotency_key.encode()
        reply = self._exchange(wire.LOOKUP, key, deadline)
        if isinstance(reply, wire.Found):
            return reply.existing
        raise self._failure(reply)

    def outcome(self, row: Row, intent_id: str, result: bytes | None = None, *, release: bool = False) -> str:
        """Record how a write ended, with the result that repeats are answered with; returns when durable.

        Args:
            row: phase "outcome"; its `status` is stored with the result. Phase "unknown" records that nobody knows.
            intent_id: what `intent()` returned.
            result: the encoded result, at most `wire.RESULT_BYTES`.
            release: the write surely did not happen, so its key may be claimed again (a grant stays used).

        Raises:
            AuditUnavailable: it is not durable, or nobody said so in time. The intent then ends as `unknown`.
            HostFault: there is no such open intent.
            ValueError: the result is too large, or the phase is neither.

        """
        if row.phase not in {"outcome", "unknown"}:
            raise ValueError(f"outcome() takes a row of phase 'outcome' or 'unknown', not {row.phase!r}")
        if result is not None and len(result) > wire.RESULT_BYTES:
            raise ValueError(f"a stored result holds at most {wire.RESULT_BYTES} bytes, not {len(result)}")
        if row.ref != intent_id:
            row = msgspec.structs.replace(row, ref=intent_id)
        body = rows.encode(row)
        if result is not None:
            body = b'{"result_sha256":"%s",' % sha256(result).hexdigest().encode() + body[1:]
        status = "unknown" if row.phase == "unknown" else row.status
        audit_id, reply = self._request(wire.OUTCOME, body, _pack(wire.OutcomeHead(intent_id, release, status, result)))
        self._stored(reply)
        return audit_id

    def flush(self) -> Head:
        """Wait until every row sent so far is durable; returns the end of the chain, worth keeping elsewhere.

        Raises:
            AuditUnavailable: they are not, or nobody said so in time.

        """
        reply = self._exchange(wire.FLUSH, b"", time.monotonic() + self._timeout)
        return self._stored(reply)

    def close(self) -> None:
        """Say that no row follows, and wait (bounded) until the writer has stored all; idempotent, never raises."""
        deadline = time.monotonic() + self._timeout
        with self._sending:
            self._down = self._down or ("the audit client is closed", "open a new gate")
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)
        if self._reading.acquire(timeout=self._timeout):
            try:
                while (left := deadline - time.monotonic()) > 0 and self._readable.poll(left * 1000):
                    if not self._sock.recv(65536):
                        break
            except (OSError, ValueError):
                pass
            finally:
                self._reading.release()
        for waiter in list(self._waiters.values()):
            waiter.rouse()
        with self._sending:
            self._sock.close()
            if self._bell >= 0:
                os.close(self._bell)
                self._bell = -1

    # ---- sending --------------------------------------------------------------------------------------------
    def _send(self, kind: int, request: int, body: bytes, mono: float, head: bytes = b"") -> str:
        """Number the row, stamp it with id and clocks, send it; returns the id."""
        if not self._sending.acquire(blocking=False) and not self._sending.acquire(timeout=self._timeout):
            raise self._error("the audit writer has taken no rows in time")
        try:
            n = self._n + 1
            audit_id = f"{self.source}-{n}"
            stamp = f'{{"id":"{audit_id}","at":{time.time():.6f},"mono":{mono:.6f},'.encode()
            size = len(head) + len(stamp) + len(body) - 1
            self._push(
                b"".join((wire.HEADER.pack(size, kind, request, n), head, stamp, memoryview(body)[1:])),
                mono + self._timeout,
            )
            self._n = n
            if request:
                self._ring()
        finally:
            self._sending.release()
        return audit_id

    def _push(self, frame: bytes, deadline: float) -> None:
        """Send one frame while holding the send lock. A frame of which a part went out goes out whole or is the end."""
        if self._down is not None:
            raise AuditUnavailable(self._down[0], next_step=self._down[1])
        try:
            sent = self._sock.send(frame)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._fail("the audit writer is gone", _RESTART)
            raise self._error() from None
        if sent == len(frame):
            return
        rest = memoryview(frame)[sent:]
        while rest:
            self._ring()
            left = deadline - time.monotonic()
            if left <= 0 or not self._writable.poll(left * 1000):
                if len(rest) == len(frame):
                    raise AuditUnavailable(
                        "the audit writer has taken no rows in time",
                        next_step="look at the disk under the audit file; reads and writes are refused meanwhile",
                    )
                self._fail("the audit writer stopped in the middle of a row", _RESTART)
                raise self._error()
            try:
                rest = rest[self._sock.send(rest) :]
            except BlockingIOError:
                continue
            except OSError:
                self._fail("the audit writer is gone", _RESTART)
                raise self._error() from None

    def _ring(self) -> None:
        """Tell the writer that somebody waits, so that it does not nap for more rows. Holds the send lock."""
        try:
            os.eventfd_write(self._bell, 1)
        except OSError:  # the counter is full (it is ringing already), or the client is closed
            return

    def _request(self, kind: int, body: bytes, head: bytes | None = None) -> tuple[str, wire.Reply | None]:
        """Send a row and wait for the answer about it; None = no answer in time."""
        prefix = b"" if head is None else wire.LENGTH.pack(len(head)) + head
        mono = time.monotonic()
        request = next(self._ids)
        waiter = self._waiters[request] = _Waiter()
        try:
            audit_id = self._send(kind, request, body, mono, prefix)
        except BaseException:
            self._waiters.pop(request, None)
            raise
        return audit_id, self._wait(request, waiter, mono + self._timeout)

    def _exchange(self, kind: int, payload: bytes, deadline: float) -> wire.Reply | None:
        """Send a request without a row and wait for its answer."""
        if not self._sending.acquire(timeout=self._timeout):
            raise self._error("the audit writer has taken no rows in time")
        request = next(self._ids)
        waiter = self._waiters[request] = _Waiter()
        try:
            self._push(wire.HEADER.pack(len(payload), kind, request, 0) + payload, deadline)
            self._ring()
        except BaseException:
            self._waiters.pop(request, None)
            raise
        finally:
            self._sending.release()
        return self._wait(request, waiter, deadline)

    def _abandon(self, row: Row, intent_id: str) -> None:
        """Give up a claim that nobody confirmed in time: behind it on the stream, so it cannot come first."""
        ended = msgspec.structs.replace(row, phase="outcome", ref=intent_id, status="abandoned")
        head = _pack(wire.OutcomeHead(intent_id, release=True, status="abandoned", result=None))
        try:
            self._send(wire.OUTCOME, 0, rows.encode(ended), time.monotonic(), wire.LENGTH.pack(len(head)) + head)
        except AuditUnavailable:
            return  # the intent ends as `unknown` when the writer restarts

    # ---- answers --------------------------------------------------------------------------------------------
    def _wait(self, request: int, waiter: _Waiter, deadline: float) -> wire.Reply | None:
        """Wait for the reply of `waiter`, reading the socket unless another thread does; None = too late or gone."""
        while waiter.reply is None and self._down is None:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            if not self._reading.acquire(blocking=False):
                waiter.wake.acquire(timeout=left)
                continue
            try:
                while waiter.reply is None and self._down is None:
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

    def _hand_on(self) -> None:
        """Rouse one thread that still waits, so that somebody reads."""
        if self._reading.locked():
            return
        for waiter in list(self._waiters.values()):
            if waiter.reply is None:
                waiter.rouse()
                if waiter is not self._ready:
                    return

    def _look(self, mono: float) -> None:
        """Read what the writer may have said, without waiting; only appending would never notice a full disk."""
        self._looked = mono
        if not self._reading.acquire(blocking=False):
            return
        try:
            self._receive()
        finally:
            self._reading.release()
        self._hand_on()

    def _receive(self) -> None:
        """Read once and deliver; the caller holds the reading lock."""
        try:
            data = self._sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._fail("the audit writer is gone", _RESTART)
            return
        try:
            replies = self._replies.feed(data)
        except AuditUnavailable as broken:
            self._fail(broken.message, broken.next_step)
            return
        for reply in replies:
            self._deliver(reply)

    def _deliver(self, reply: wire.Reply) -> None:
        if isinstance(reply, wire.Health):
            self._sick = None if reply.ok else (reply.message, reply.next_step)
            return
        if isinstance(reply, wire.Failed):
            self._fail(reply.message, reply.next_step)
            return
        if isinstance(reply, wire.Ready | wire.Stored):
            self.head = Head(reply.seq, reply.hash)
        waiter = self._waiters.pop(0 if isinstance(reply, wire.Ready) else reply.id, None)
        if waiter is not None:
            waiter.reply = reply
            waiter.rouse()

    def _fail(self, message: str, next_step: str) -> None:
        """The link is over: the first cause stays, everybody who waits learns of it."""
        self._down = self._down or (message, next_step)
        for waiter in list(self._waiters.values()):
            waiter.rouse()

    def _stored(self, reply: wire.Reply | None) -> Head:
        if isinstance(reply, wire.Stored):
            return Head(reply.seq, reply.hash)
        raise self._failure(reply)

    def _failure(self, reply: wire.Reply | None) -> HostFault:
        if isinstance(reply, wire.Rejected):
            kind = AuditUnavailable if reply.transient else HostFault
            return kind(reply.message, next_step=reply.next_step)
        return self._error(f"the audit writer did not answer within {self._timeout:g} s")

    def _error(self, otherwise: str = "the audit writer is gone") -> AuditUnavailable:
        message, next_step = self._down or (otherwise, "look at the disk under the audit file, then restart the gate")
        return AuditUnavailable(message, next_step=next_step)
