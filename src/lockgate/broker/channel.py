"""The sandbox's channel: one socket, one run, one blocking thread.

Rule 1: the channel is the identity. No message names a run, a user or a tenant; nothing read here could change one.
Rule 2: the length is checked before the body is kept; a frame has 5 s from its first byte to its last, a reply 5 s to
        be taken. Between frames nothing is waited for but the next one, and the end of the run ends that wait.
Rule 3: the first violation is the last thing read: it is audited, the channel is shut, the run is killed. Nothing
        is answered and nothing is resynchronised.
Rule 4: a request that is well formed and not allowed is an answer, not a violation.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from lockgate.audit.client import AuditClient
from lockgate.broker import exports, quiet
from lockgate.broker.attachment import Attachment, Closed
from lockgate.broker.edge import Abandoned, Edge
from lockgate.broker.work import Reply
from lockgate.contract import wire
from lockgate.contract.bounds import FRAME_BYTES, FRAME_SECONDS
from lockgate.contract.errors import AuditUnavailable, GuestProtocolError, HostFault
from lockgate.contract.reasons import SENTENCES, Reason
from lockgate.contract.run import CallRecord
from lockgate.contract.strictjson import decode_request
from lockgate.policy import Operations

BUFFER_BYTES: Final = 64 * 1024
FREE_BYTES: Final = 64 * 1024 * 1024
"""Bytes a run may send beside its exports (which count as twice their bound, for base64 and its frames)."""
EXTRA_REFUSALS: Final = 100
"""Calls over the bound that are still answered; then it is a flood."""
LIST: Final = "host.operations"
PIPELINED: Final = 8
"""Requests that may wait for their answers at once: one is executed, the rest stand in the buffer."""
_HEADER: Final = struct.Struct(">I")
_HEAD: Final = 4
_TIMEVAL: Final = struct.Struct("@ll")  # struct timeval, socket(7) SO_RCVTIMEO
_FOREVER: Final = _TIMEVAL.pack(0, 0)
_encode: Final = msgspec.json.Encoder().encode


class _Ended(Exception):
    """The other end is closed, or was shut by us."""


def _violation(message: str) -> GuestProtocolError:
    return GuestProtocolError(message, next_step="the run is killed; see its audit rows")


class Channel:
    """Reads requests of one execution and answers them.

    Args:
        sock: the host end; owned from here on.
        attachment: what it belongs to. edge: executes. operations: for `host.operations`. audit: for violations.
        kill: tells the supervisor that the run broke the protocol.
        closed: called once when channel and run have both ended.

    """

    def __init__(
        self,
        sock: socket.socket,
        attachment: Attachment,
        *,
        edge: Edge,
        operations: Operations,
        audit: AuditClient,
        kill: Callable[[wire.Kill], None],
        closed: Closed,
    ) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(FRAME_SECONDS))
        self._sock = sock
        self._attachment = attachment
        self._edge = edge
        self._operations = operations
        self._audit = audit
        self._kill = kill
        self._closed = closed
        self._view = memoryview(b"")  # made by the serving thread: the supervisor waits for our constructor
        self._start = 0  # of what was received and not yet taken
        self._end = 0
        self._closing = threading.Lock()
        self._last_id = 0
        self._asked = 0
        self._received = 0
        self._most = FREE_BYTES + 2 * attachment.bounds.export

    # ---- the thread -----------------------------------------------------------------------------------------
    def serve(self) -> None:
        """Answer until the channel ends; the body of the channel's thread."""
        self._loop(None)

    def _late(self, reply: Reply) -> None:
        """Go on in this thread: the one that served got stuck in the call that `reply` answers."""
        self._loop((self._last_id, reply))

    def _loop(self, late: tuple[int, Reply] | None) -> None:
        """Serve; `late` is an answer that another thread left behind when it got stuck."""
        try:
            attachment = self._attachment
            if late is None:
                self._view = memoryview(bytearray(BUFFER_BYTES))
            else:
                self._answer(*late)
                attachment.leave()
            while True:
                body = self._frame()
                if not attachment.enter():
                    break
                self._one(body)
                attachment.leave()
        except Abandoned:
            return  # the channel went on in another thread
        except _Ended:
            pass
        except GuestProtocolError as broken:
            self._violated(broken.message)
        except Exception as error:  # noqa: BLE001 - ours; the run must not go on with a channel that nobody serves
            quiet.tell(error)
            self._violated(f"the broker failed on this channel ({type(error).__name__})")
        self._over()

    def _one(self, body: bytes) -> None:
        ident, name, raw = decode_request(body)
        if ident <= self._last_id:
            raise _violation("a request's id does not rise")
        self._last_id = ident
        self._asked += 1
        if self._asked > self._attachment.bounds.calls:
            self._over_bound(ident, name)
        elif name == exports.OPERATION:
            self._export(ident, raw)
        elif name == LIST:
            self._list(ident, raw)
        else:
            attachment = self._attachment
            attachment.running = name
            if attachment.origin.over:  # `Detach` sets that first and then looks at `running`: one of us sees the other
                raise _Ended
            self._answer(ident, self._edge.call(attachment.run, attachment.origin, name, raw, self._late))

    def _answer(self, ident: int, reply: Reply) -> None:
        self._attachment.running = ""
        self._attachment.calls.append(reply.record)
        if reply.ok is not None:
            operation = self._operations.get(reply.operation)
            if operation is not None and operation.vouches:
                self._attachment.learn(operation.safe_urls(reply.ok))
            self._send(b'{"id":%d,"ok":%b}' % (ident, reply.ok))
        else:
            self._refuse(ident, reply.operation, reply.reason or "unavailable")

    def _refuse(self, ident: int, operation: str, reason: Reason) -> None:
        sentence, step = SENTENCES[reason]
        error = {"reason": reason, "operation": operation, "message": f"{sentence}. Next step: {step}"}
        self._send(_encode({"id": ident, "error": error}))

    # ---- reserved operations --------------------------------------------------------------------------------
    def _note(self, operation: str, reason: Reason | None, status: str, audit_id: str, rule: str | None) -> None:
        record = CallRecord(operation, "allow" if reason is None else "deny", rule, reason, status, audit_id)
        self._attachment.calls.append(record)

    def _over_bound(self, ident: int, name: str) -> None:
        bound = self._attachment.bounds.calls
        if self._asked > bound + EXTRA_REFUSALS:
            raise _violation(f"more than {bound} calls, and it goes on")
        row = self._attachment.row(
            "denied", name[:64], verdict="deny", rule="bound.calls", visible="budget_exhausted", status="denied"
        )
        self._note(name[:64], "budget_exhausted", "denied", self._audit.commit(row), "bound.calls")
        self._refuse(ident, name[:64], "budget_exhausted")

    def _list(self, ident: int, raw: bytes) -> None:
        if raw != b"{}":
            audit_id = self._audit.commit(
                self._attachment.row("denied", LIST, verdict="deny", visible="bad_request", status="denied")
            )
            self._note(LIST, "bad_request", "denied", audit_id, None)
            self._refuse(ident, LIST, "bad_request")
            return
        listed = _encode(self._operations.describe(self._attachment.run.scope))
        row = self._attachment.row(
            "outcome", LIST, verdict="allow", rule=LIST, status="ok", effect="read", result_bytes=len(listed)
        )
        self._note(LIST, None, "ok", self._audit.append(row), LIST)
        self._send(b'{"id":%d,"ok":%b}' % (ident, listed))

    def _export(self, ident: int, raw: bytes) -> None:
        """Take one piece of a file. The row of its last piece is durable before the code learns that it is kept."""
        name = ""
        reason: Reason
        try:
            args = exports.decode(raw)
            name = args.name
            info = self._attachment.spool.take(args)
        except exports.Refusal as refusal:
            reason = "result_too_large" if refusal.too_large else "argument_not_allowed"
            why = refusal.why
        except HostFault as fault:
            reason, why = "unavailable", fault.message
        else:
            if info is not None and self._attachment.carries(info.name):
                self._planted(ident, info.name)
                return
            if info is not None:
                row = self._attachment.row(
                    "outcome",
                    exports.OPERATION,
                    verdict="allow",
                    rule=exports.OPERATION,
                    status="ok",
                    effect="write",
                    detail={"name": info.name, "size": info.size, "sha256": info.sha256},
                )
                self._note(exports.OPERATION, None, "ok", self._audit.commit(row), exports.OPERATION)
            self._send(b'{"id":%d,"ok":null}' % ident)
            return
        row = self._attachment.row(
            "denied",
            exports.OPERATION,
            verdict="deny",
            rule=exports.OPERATION,
            reason=why,
            visible=reason,
            status="denied",
            detail={"name": name},
        )
        self._note(exports.OPERATION, reason, "denied", self._audit.commit(row), exports.OPERATION)
        self._refuse(ident, exports.OPERATION, reason)

    def _planted(self, ident: int, name: str) -> None:
        """Keep no file that holds a planted value, and end the run; its row is durable first (E7)."""
        self._attachment.spool.drop(name)
        why = "canary: a planted value is in an export"
        row = self._attachment.row(
            "denied", exports.OPERATION, verdict="deny", rule="canary", reason=why, visible="expired", status="denied"
        )
        self._note(exports.OPERATION, "expired", "denied", self._audit.commit(row), "canary")
        self._edge.watcher.end(self._attachment.run)
        self._refuse(ident, exports.OPERATION, "expired")

    # ---- frames ---------------------------------------------------------------------------------------------
    def _frame(self) -> bytes:
        """Return the next body; waits for ever for its first byte, at most `FRAME_SECONDS` for the rest."""
        start, end = self._start, self._end
        if start == end:
            start = self._start = 0
            end = self._end = self._receive(0)
        if end - start >= _HEAD:
            (size,) = _HEADER.unpack_from(self._view, start)
            start += _HEAD
            if size and start + size <= end:
                self._start = start + size
                if self._start < end:
                    self._count_waiting()
                return bytes(self._view[start : start + size])
        return self._slowly(time.monotonic() + FRAME_SECONDS)

    def _slowly(self, deadline: float) -> bytes:
        """The frame did not come in one piece: collect it against its deadline."""
        begun = bytes(self._view[self._start : self._end])
        self._view[: len(begun)] = begun
        self._start, self._end = 0, len(begun)
        try:
            while self._end < _HEAD:
                self._more(deadline)
            (size,) = _HEADER.unpack_from(self._view)
            if not 0 < size <= FRAME_BYTES:
                raise _violation(f"a frame announces {size} bytes, outside 1..{FRAME_BYTES}")
            whole = _HEAD + size
            if whole > BUFFER_BYTES:  # room for exactly this frame, and for this one only
                view = memoryview(bytearray(whole))
                view[: self._end] = self._view[: self._end]
                self._view = view
            while self._end < whole:
                self._more(deadline)
        finally:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _FOREVER)
        body = bytes(self._view[_HEAD:whole])
        self._start = whole
        if whole > BUFFER_BYTES:
            self._view = memoryview(bytearray(BUFFER_BYTES))
            self._start = self._end = 0
        if self._start < self._end:
            self._count_waiting()
        return body

    def _more(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise _violation(f"a frame was not complete {FRAME_SECONDS:g} s after its first byte")
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(left))
        self._end += self._receive(self._end)

    def _receive(self, at: int) -> int:
        try:
            count = self._sock.recv_into(self._view[at:] if at else self._view)
        except BlockingIOError:  # SO_RCVTIMEO passed
            return 0
        except OSError:
            raise _Ended from None
        if not count:
            raise _Ended
        self._received += count
        if self._received > self._most:
            raise _violation(f"more than {self._most} bytes were sent")
        return count

    def _count_waiting(self) -> None:
        """Refuse more requests without waiting for an answer than may be in flight."""
        at, waiting = self._start, 1
        while self._end - at >= _HEAD:
            (size,) = _HEADER.unpack_from(self._view, at)
            if not 0 < size <= FRAME_BYTES:
                raise _violation(f"a frame announces {size} bytes, outside 1..{FRAME_BYTES}")
            at += _HEAD + size
            if at > self._end:
                return
            waiting += 1
            if waiting > PIPELINED:
                raise _violation(f"more than {PIPELINED} calls in flight")

    def _send(self, body: bytes) -> None:
        frame = _HEADER.pack(len(body)) + body
        try:
            sent = self._sock.send(frame)
            if sent == len(frame):
                return
            deadline = time.monotonic() + FRAME_SECONDS
            rest = memoryview(frame)[sent:]
            while rest:
                if time.monotonic() > deadline:
                    raise BlockingIOError  # noqa: TRY301 - the same end as SO_SNDTIMEO passing inside send
                rest = rest[self._sock.send(rest) :]
        except BlockingIOError:
            raise _violation(f"a reply was not taken within {FRAME_SECONDS:g} s") from None
        except OSError:
            raise _Ended from None

    # ---- the end --------------------------------------------------------------------------------------------
    def _violated(self, message: str) -> None:
        attachment = self._attachment
        if attachment.origin.over:
            return  # the run has ended: what a dying process left half written says nothing
        attachment.violation = message
        row = attachment.row(
            "denied",
            None,
            verdict="deny",
            rule="protocol",
            reason=message,
            status="killed",
            detail={"killed_by": "protocol"},
        )
        with contextlib.suppress(AuditUnavailable):  # the kill does not wait for a store that is gone
            attachment.calls.append(Reply("", self._audit.commit(row), rule="protocol", status="killed").record)
        # In this order: code that sees its channel end and ends too is still reported as what it is.
        self._kill(wire.Kill(ticket=attachment.ticket))
        self.shut()

    def shut(self) -> None:
        """End the channel from any thread: reads and writes on it return at once."""
        with self._closing, contextlib.suppress(OSError):  # closed already, or the other end is
            self._sock.shutdown(socket.SHUT_RDWR)

    def _over(self) -> None:
        self.shut()
        with self._closing:  # or a late `shut` could hit a descriptor that is somebody else's by then
            self._sock.close()
        detach = self._attachment.channel_ended()
        if detach is not None:
            self._closed(self._attachment, detach)


def _timeval(seconds: float) -> bytes:
    return _TIMEVAL.pack(int(seconds), max(int(seconds % 1 * 1e6), 1))
