"""The broker's end of the audit link.

Rule 1: a row gets its number under the same lock that sends it, so numbers on the wire rise without a hole and a row
        that was lost with the writer is a hole that `verify` names.
Rule 2: an intent of a write is never merely appended: `append` refuses it, `intent` waits until it is durable.
Rule 3: no wait without a deadline, and a full pipe is a wait: a flood of rows slows its sender, it buys no memory.
Rule 4: when the writer is gone every method raises `AuditUnavailable` from then on; while it cannot store, `append`
        does so too, and whoever waits is told by the writer.

Threads: any number may call at once; see `inbox` for how they share the answers.
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
from lockgate.audit.chain import Head
from lockgate.audit.inbox import Inbox
from lockgate.audit.rows import Row
from lockgate.audit.wire import Existing
from lockgate.contract.errors import AuditUnavailable, HostFault

__all__ = ["AuditClient", "Existing"]

_PIPE_BYTES: Final = 1024 * 1024

_pack: Final = msgspec.msgpack.Encoder().encode


class AuditClient:
    """Sends rows to the writer process.

    Args:
        sock: a connected SOCK_STREAM unix socket; this object owns it. No other process may keep a copy of it, or the
            writer will not see the broker's end.
        timeout: seconds after which a wait gives up with `AuditUnavailable`.

    Attributes:
        source: names this client's rows: audit ids are `SOURCE-N`.

    """

    def __init__(self, sock: socket.socket, *, timeout: float = 5.0) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PIPE_BYTES)
        self.source = os.urandom(wire.SOURCE_CHARS // 2).hex()
        self._sock = sock
        self._timeout = timeout
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._n = 0
        self._begun = False
        self._ids = count(1)
        self._sending = threading.Lock()
        self._beginning = threading.Lock()
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)
        self._inbox = Inbox(sock)
        self._ready = self._inbox.expect(0)
        name = self.source.encode()
        try:
            socket.send_fds(sock, [wire.HEADER.pack(len(name), wire.HELLO, 0, 0) + name], [self._bell])
        except OSError:
            self._inbox.look(time.monotonic())  # a writer that could not start said why before it ended
            self._inbox.fail("the audit writer is gone")

    @property
    def available(self) -> bool:
        """Whether rows are being stored, as far as is known."""
        return self._inbox.down is None and self._inbox.sick is None

    @property
    def head(self) -> Head:
        """The end of the chain as the writer last told it."""
        return self._inbox.head

    def ready(self, timeout: float = 15.0) -> wire.Ready:
        """Wait until the writer has opened the database; says where the chain ends and what it had to repair.

        Raises:
            AuditUnavailable: it could not, with the writer's own words, or did not within `timeout` seconds.

        """
        deadline = time.monotonic() + timeout
        if not self._beginning.acquire(timeout=timeout):
            raise self._inbox.error(f"the audit writer was not ready within {timeout:g} s")
        try:
            reply = self._ready.reply or self._inbox.wait(0, self._ready, deadline)
        finally:
            self._beginning.release()
        if isinstance(reply, wire.Ready):
            self._begun = True
            return reply
        raise self._inbox.error(f"the audit writer was not ready within {timeout:g} s")

    def append(self, row: Row) -> str:
        """Send `row` and return its audit id without waiting; for rows of reads and of runs.

        Raises:
            AuditUnavailable: the writer is gone, cannot store, or has not taken rows for the timeout.
            ValueError: it is the intent of a write.

        """
        if row.effect == "write" and row.phase == "intent":
            raise ValueError("the intent of a write must be durable; use intent()")
        return self.append_encoded(rows.encode(row))

    def append_encoded(self, body: bytes) -> str:
        """Do as `append` for a row that `rows.encode` made, or one put together from pieces of such rows.

        Args:
            body: the row; its `user`, `agent` and `run` are set, and it is no intent of a write.

        Raises:
            AuditUnavailable: as `append`.

        """
        mono = time.monotonic()
        inbox = self._inbox
        if mono >= inbox.look_at:
            inbox.look(mono)
        sick = inbox.sick
        if sick is not None:
            raise AuditUnavailable(sick[0], next_step=sick[1])
        return self._send(wire.APPEND, 0, body, mono)

    def commit(self, row: Row) -> str:
        """Send `row` and wait until it is durable; returns its audit id. For denials.

        Raises:
            AuditUnavailable: it is not durable, or nobody said so in time.
            ValueError: it is the intent of a write.

        """
        if row.effect == "write" and row.phase == "intent":
            raise ValueError("the intent of a write claims its key; use intent()")
        audit_id, reply = self._request(wire.COMMIT, rows.encode(row))
        self._stored(reply)
        return audit_id

    def intent(self, row: Row, idempotency_key: str | None, grant_id: str | None = None) -> str | Existing:
        """Claim a key and a grant for the call that `row` announces; returns its audit id once that is durable.

        Args:
            row: phase "intent"; of a write, or of a read that uses a grant.
            idempotency_key: at most one intent holds it, until it is released; None = every call is a new one.
            grant_id: used once for ever; None = no approval was needed.

        Returns:
            The audit id; or the earlier intent that holds key or grant: then nothing was claimed, nothing may run,
            and the attempt stands in the log as a row of phase "refused" (`Existing.audit_id`).

        Raises:
            AuditUnavailable: nothing was claimed, or nobody said so in time (then the claim is given up by a second
                message, should the first arrive). The write must not run.
            ValueError: the row is no intent.

        """
        if row.phase != "intent":
            raise ValueError(f"intent() takes a row of phase 'intent', not {row.phase!r}")
        if row.idempotency_key != idempotency_key or row.grant_id != grant_id:
            row = msgspec.structs.replace(row, idempotency_key=idempotency_key, grant_id=grant_id)
        head = _pack(wire.IntentHead(idempotency_key, grant_id))
        audit_id, reply = self._request(wire.INTENT, rows.encode(row), head)
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
        reply = self._exchange(wire.LOOKUP, idempotency_key.encode())
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
            AuditUnavailable: it is not durable, or nobody said so in time. Without an outcome the intent ends as
                "unknown" when this client or its writer ends.
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
        return self._stored(self._exchange(wire.FLUSH, b""))

    def close(self) -> None:
        """Say that no row follows, and wait (bounded) until the writer has stored all; idempotent, never raises."""
        with self._sending:
            self._inbox.fail("the audit client is closed", "open a new gate")
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)
        self._inbox.drain(self._timeout)
        with self._sending:
            self._sock.close()
            if self._bell >= 0:
                os.close(self._bell)
                self._bell = -1

    # ---- sending --------------------------------------------------------------------------------------------
    def _send(self, kind: int, request: int, body: bytes, mono: float, head: bytes = b"") -> str:
        """Number the row, stamp it with id and clocks, send it; returns the id."""
        if not (self._begun and self._sending.acquire(blocking=False)):
            self._lock_sending()
        try:
            n = self._n + 1
            audit_id = f"{self.source}-{n}"
            stored = rows.stamp(body, audit_id, time.time(), mono)
            frame = wire.HEADER.pack(len(head) + len(stored), kind, request, n) + head + stored
            self._push(frame, mono + self._timeout)
            self._n = n
            if request:
                self._ring()
        finally:
            self._sending.release()
        return audit_id

    def _lock_sending(self) -> None:
        if not self._begun:
            self.ready(self._timeout)  # before the writer has noted this source, a lost row would leave no hole
        if not self._sending.acquire(timeout=self._timeout):
            raise self._late()

    def _push(self, frame: bytes, deadline: float) -> None:
        """Send one frame, holding the send lock. A frame of which a part went out goes out whole, or it is the end."""
        down = self._inbox.down
        if down is not None:
            raise AuditUnavailable(down[0], next_step=down[1])
        sent = 0
        try:
            sent = self._sock.send(frame)
            if sent == len(frame):
                return
        except BlockingIOError:
            pass
        except OSError:
            raise self._gone() from None
        rest = memoryview(frame)[sent:]
        while rest:
            self._ring()
            left = deadline - time.monotonic()
            if left <= 0 or not self._writable.poll(left * 1000):
                if len(rest) < len(frame):
                    self._inbox.fail("the audit writer stopped in the middle of a row")
                raise self._late()
            try:
                rest = rest[self._sock.send(rest) :]
            except BlockingIOError:
                continue
            except OSError:
                raise self._gone() from None

    def _ring(self) -> None:
        """Tell the writer that somebody waits, so that it does not nap for more rows. Holds the send lock."""
        with contextlib.suppress(OSError):  # the counter is full (it is ringing already), or the client is closed
            os.eventfd_write(self._bell, 1)

    def _request(self, kind: int, body: bytes, head: bytes | None = None) -> tuple[str, wire.Reply | None]:
        """Send a row and wait for the answer about it; None = no answer in time."""
        prefix = b"" if head is None else wire.LENGTH.pack(len(head)) + head
        mono = time.monotonic()
        request = next(self._ids)
        waiter = self._inbox.expect(request)
        try:
            audit_id = self._send(kind, request, body, mono, prefix)
        except BaseException:
            self._inbox.forget(request)
            raise
        return audit_id, self._inbox.wait(request, waiter, mono + self._timeout)

    def _exchange(self, kind: int, payload: bytes) -> wire.Reply | None:
        """Send a request without a row and wait for its answer; None = no answer in time."""
        deadline = time.monotonic() + self._timeout
        request = next(self._ids)
        waiter = self._inbox.expect(request)
        try:
            self._lock_sending()
            try:
                self._push(wire.HEADER.pack(len(payload), kind, request, 0) + payload, deadline)
                self._ring()
            finally:
                self._sending.release()
        except BaseException:
            self._inbox.forget(request)
            raise
        return self._inbox.wait(request, waiter, deadline)

    def _abandon(self, row: Row, intent_id: str) -> None:
        """Give up a claim that nobody confirmed in time: behind it on the stream, so it cannot come first."""
        ended = msgspec.structs.replace(row, phase="outcome", ref=intent_id, status="abandoned")
        head = _pack(wire.OutcomeHead(intent_id, release=True, status="abandoned", result=None))
        with contextlib.suppress(AuditUnavailable):  # then the intent ends as "unknown" when the writer does
            prefix = wire.LENGTH.pack(len(head)) + head
            self._send(wire.OUTCOME, 0, rows.encode(ended), time.monotonic(), prefix)

    # ---- failures -------------------------------------------------------------------------------------------
    def _stored(self, reply: wire.Reply | None) -> Head:
        if isinstance(reply, wire.Stored):
            return Head(reply.seq, reply.hash)
        raise self._failure(reply)

    def _failure(self, reply: wire.Reply | None) -> HostFault:
        if isinstance(reply, wire.Rejected):
            kind = AuditUnavailable if reply.transient else HostFault
            return kind(reply.message, next_step=reply.next_step)
        return self._inbox.error(f"the audit writer did not answer within {self._timeout:g} s")

    def _late(self) -> AuditUnavailable:
        return self._inbox.error(f"the audit writer has taken no row for {self._timeout:g} s")

    def _gone(self) -> AuditUnavailable:
        """The socket failed; the writer's last words, if it left any, say why."""
        self._inbox.drain(0.05)
        self._inbox.fail("the audit writer is gone")
        return self._inbox.error("the audit writer is gone")
