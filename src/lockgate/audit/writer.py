"""The audit writer process: `python -I -m lockgate.audit.writer --fd N --path FILE`.

Rule 1: nothing is acknowledged before its transaction is committed to the disk.
Rule 2: when the store fails, whoever waits is told at once, rows that nobody waits for are kept (bounded) and tried
        again, and until one transaction succeeds nothing is acknowledged: no audit, no write.
Rule 3: a number that was sent and not stored is stated in the chain by a row of phase "gap".
Rule 4: rows outlive the broker: the end of the stream is handled after everything in it. Then, and at the next start
        for a writer that was killed, every intent without an outcome gets a row of phase "unknown".
Rule 5: this process holds the database and nothing else: it spawns nothing, connects to nothing, knows no secret.

Batching: the writer naps for `NAP_MS` when rows come that nobody waits for, and takes them all at once; the client
rings a bell (an eventfd) when somebody waits, which ends the nap.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from lockgate.audit import rows, wire
from lockgate.audit.store import Store, ranges
from lockgate.contract.errors import AuditUnavailable

NAP_MS: Final = 2
RETRY_MS: Final = 250
IDLE_MS: Final = 1000
LAST_TRY_SECONDS: Final = 5.0
BATCH_BYTES: Final = 1024 * 1024
RETAIN_BYTES: Final = 8 * 1024 * 1024
_RANGES_A_ROW: Final = 200
_CHUNK: Final = 256 * 1024


class _Who(msgspec.Struct):
    """What the writer checks of every row before it takes it; the broker made it, but this is another process."""

    id: str
    user: str
    agent: str
    run: str
    phase: rows.Phase


class _Frame(msgspec.Struct):
    kind: int
    request: int
    n: int
    head: bytes
    body: bytes


class _Broken(Exception):
    """The stream is none of an `AuditClient`."""


_who: Final = msgspec.json.Decoder(_Who)
_intent: Final = msgspec.msgpack.Decoder(wire.IntentHead)
_outcome: Final = msgspec.msgpack.Decoder(wire.OutcomeHead)
_json: Final = msgspec.json.Encoder()


class Writer:
    """One client, one database.

    Args:
        sock: the client's stream.
        store: the open database.

    """

    def __init__(self, sock: socket.socket, store: Store) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._store = store
        self._buffer = bytearray()
        self._bell = -1
        self._source = ""
        self._last = 0
        self._ended = False
        self._failing: AuditUnavailable | None = None
        self._retained: list[_Frame] = []
        self._retained_bytes = 0
        self._refused: list[int] = []
        self._self = os.urandom(wire.SOURCE_CHARS // 2).hex()
        self._own = 0
        self._dirty = False
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._bell_poll = select.poll()

    def repair(self) -> wire.Ready:
        """State what earlier writers left open: intents without outcome, clients whose last rows may be missing."""
        own = self._own
        try:
            with self._store.transaction(durable=True):
                unknown = self._end_intents("the writer of this intent ended before its outcome came")
                lost = self._store.lost_sources()
                for source, last in lost:
                    self._state_gap(source, f"{last + 1}-", "the writer was killed; later rows of this source are lost")
                    self._store.close_source(source, last)
        except AuditUnavailable:
            self._own = own
            raise
        head = self._store.head
        return wire.Ready(os.getpid(), head.seq, head.hash, unknown, len(lost))

    def serve(self) -> int:
        """Store what comes until the client is gone; returns the exit code."""
        while not self._ended:
            rang = self._wait()
            try:
                frames = self._read()
            except _Broken as broken:
                self._store_batch([])
                self._send(wire.encode_reply(wire.Failed(f"the audit writer was sent {broken}", "restart the gate")))
                return self._finish() or 1
            if frames or self._failing is not None:
                self._store_batch(frames)
            elif not rang and self._dirty and not self._ended:
                self._store.checkpoint()
                self._dirty = False
        return self._finish()

    # ---- reading --------------------------------------------------------------------------------------------
    def _wait(self) -> bool:
        """Wait for rows; returns whether there was any event."""
        events = self._poll.poll(RETRY_MS if self._failing is not None else IDLE_MS)
        if self._bell >= 0 and events:
            if all(fd != self._bell for fd, _ in events):
                events += self._bell_poll.poll(NAP_MS)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
        return bool(events)

    def _read(self) -> list[_Frame]:
        """Take what is there, up to `BATCH_BYTES`, and return its whole frames."""
        buffer = self._buffer
        while len(buffer) < BATCH_BYTES or not _whole(buffer):
            try:
                data = self._sock.recv(_CHUNK) if self._source else self._hello()
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._ended = True
                break
            buffer += data
        frames: list[_Frame] = []
        at = 0
        with memoryview(buffer) as view:
            while len(view) - at >= wire.HEADER.size:
                length, kind, request, n = wire.HEADER.unpack_from(view, at)
                if length > wire.PAYLOAD_BYTES:
                    raise _Broken(f"a frame of {length} bytes")
                begin = at + wire.HEADER.size
                if len(view) - begin < length:
                    break
                at = begin + length
                if kind != wire.HELLO:
                    frames.append(self._frame(kind, request, n, bytes(view[begin:at])))
                elif self._source:
                    raise _Broken("a second greeting")
                else:
                    self._greet(bytes(view[begin:at]))
        del buffer[:at]
        return frames

    def _hello(self) -> bytes:
        """Read the first bytes, which carry the bell."""
        data, fds, _, _ = socket.recv_fds(self._sock, _CHUNK, 1)
        for fd in fds:
            self._bell = fd
            self._poll.register(fd, select.POLLIN)
            self._bell_poll.register(fd, select.POLLIN)
        return data

    def _greet(self, payload: bytes) -> None:
        source = payload.decode("ascii", "replace")
        if self._bell < 0 or len(source) != wire.SOURCE_CHARS or not source.isalnum():
            raise _Broken("a greeting without a name or a bell")
        try:
            with self._store.transaction(durable=False):
                self._store.open_source(source)
        except AuditUnavailable as error:
            raise _Broken(f"a greeting that could not be stored: {error.message}") from None
        self._source = source

    def _frame(self, kind: int, request: int, n: int, payload: bytes) -> _Frame:
        if not self._source:
            raise _Broken("a row before the greeting")
        head = b""
        if kind in {wire.INTENT, wire.OUTCOME}:
            (length,) = wire.LENGTH.unpack_from(payload) if len(payload) >= wire.LENGTH.size else (len(payload),)
            head, payload = payload[wire.LENGTH.size :][:length], payload[wire.LENGTH.size + length :]
        if kind not in {wire.LOOKUP, wire.FLUSH}:
            try:
                who = _who.decode(payload)
            except ValueError:
                raise _Broken("what is no row") from None
            if not (who.user and who.agent and who.run):
                raise _Broken("a row that names nobody")
            if n != self._last + 1 or who.id != f"{self._source}-{n}":
                raise _Broken(f"row {who.id!r} where number {self._last + 1} was due")
            self._last = n
        return _Frame(kind, request, n, head, payload)

    # ---- storing --------------------------------------------------------------------------------------------
    def _store_batch(self, frames: list[_Frame]) -> None:
        """Store one batch and answer it; on failure answer it too, and keep what nobody waits for."""
        durable = any(frame.kind != wire.APPEND for frame in frames)
        own = self._own
        try:
            with self._store.transaction(durable=durable):
                for frame in self._retained:
                    self._store.add(frame.body)
                self._state_refused()
                answers = [self._take(frame) for frame in frames]
        except AuditUnavailable as error:
            self._own = own
            self._fail(frames, error)
            return
        self._dirty = True
        self._retained.clear()
        self._retained_bytes = 0
        self._refused.clear()
        head = self._store.head
        out = bytearray()
        if self._failing is not None:
            self._failing = None
            out += wire.encode_reply(wire.Health(ok=True, message="", next_step=""))
        for frame, answer in zip(frames, answers, strict=True):
            if frame.request:
                out += wire.encode_reply(answer or wire.Stored(frame.request, head.seq, head.hash))
        self._send(out)

    def _take(self, frame: _Frame) -> wire.Reply | None:
        """Put one frame into the open transaction; returns its answer unless that is plainly `Stored`."""
        store = self._store
        if frame.kind in {wire.APPEND, wire.COMMIT}:
            store.add(frame.body)
        elif frame.kind == wire.INTENT:
            claim = _intent.decode(frame.head)
            existing = store.claim(f"{self._source}-{frame.n}", claim.key, claim.grant, frame.body)
            if existing is not None:
                audit_id = self._refuse(frame.body, existing.intent_id, f"{existing.by}_{existing.state}")
                return wire.Taken(frame.request, msgspec.structs.replace(existing, audit_id=audit_id))
        elif frame.kind == wire.OUTCOME:
            end = _outcome.decode(frame.head)
            state: wire.State = "released" if end.release else "unknown" if end.status == "unknown" else "done"
            forbidden = store.settle(end.intent, state, end.status, end.result, frame.body)
            if forbidden is not None:
                self._refuse(frame.body, end.intent, f"intent_{forbidden}")
                return wire.Rejected(
                    frame.request,
                    transient=False,
                    message=f"the intent {end.intent} is not open (it is {forbidden})",
                    next_step="look at its rows with `lockgate audit tail`",
                )
        elif frame.kind == wire.LOOKUP:
            return wire.Found(frame.request, store.held("key", frame.body.decode("utf-8", "replace")))
        return None

    def _refuse(self, body: bytes, ref: str, status: str) -> str:
        """Store a row whose claim was not taken, as that and under its own number."""
        row = msgspec.structs.replace(rows.decode(body), phase="refused", ref=ref, status=status)
        self._store.add(_json.encode(row))
        return row.id

    def _fail(self, frames: list[_Frame], error: AuditUnavailable) -> None:
        """Answer a batch that was not stored."""
        out = bytearray()
        if self._failing is None or self._failing.message != error.message:
            out += wire.encode_reply(wire.Health(ok=False, message=error.message, next_step=error.next_step))
        self._failing = error
        for frame in frames:
            if frame.kind == wire.APPEND and self._retained_bytes + len(frame.body) <= RETAIN_BYTES:
                self._retained.append(frame)
                self._retained_bytes += len(frame.body)
            elif frame.n:
                self._refused.append(frame.n)
            if frame.request:
                out += wire.encode_reply(
                    wire.Rejected(frame.request, transient=True, message=error.message, next_step=error.next_step)
                )
        self._send(out)

    def _state_refused(self) -> None:
        spans = [f"{first}-{last}" for first, last in ranges(self._refused)]
        why = self._failing.message if self._failing is not None else ""
        for at in range(0, len(spans), _RANGES_A_ROW):
            self._state_gap(self._source, ",".join(spans[at : at + _RANGES_A_ROW]), why)

    def _state_gap(self, source: str, numbers: str, why: str) -> None:
        self._state(
            rows.Row(
                phase="gap",
                user="lockgate",
                agent="audit-writer",
                run=source,
                detail={"source": source, "numbers": numbers, "why": rows.clip(why)},
            )
        )

    def _end_intents(self, why: str) -> int:
        """Close every open intent as `unknown`; returns how many there were."""
        intents = self._store.open_intents()
        for audit_id, row in intents:
            fields = {name: getattr(row, name) for name in rows.Row.__struct_fields__}
            fields |= {"phase": "unknown", "ref": audit_id, "status": "unknown", "detail": {"why": why}}
            self._own += 1
            self._store.settle(audit_id, "unknown", "unknown", None, self._stamped(rows.Row(**fields)))
        return len(intents)

    def _state(self, row: rows.Row) -> None:
        self._own += 1
        self._store.add(self._stamped(row))

    def _stamped(self, row: rows.Row) -> bytes:
        stamp = f'{{"id":"{self._self}-{self._own}","at":{time.time():.6f},"mono":{time.monotonic():.6f},'
        return stamp.encode() + rows.encode(row)[1:]

    # ---- the end --------------------------------------------------------------------------------------------
    def _finish(self) -> int:
        """Store what is left, close the client's intents and its source; bounded when the disk stays full."""
        deadline = time.monotonic() + LAST_TRY_SECONDS
        while self._source:
            own = self._own
            try:
                if self._failing is not None:
                    self._store_batch([])
                if self._failing is None:
                    with self._store.transaction(durable=True):
                        self._end_intents("the broker ended before the outcome came")
                        self._store.close_source(self._source, self._last)
                    break
            except AuditUnavailable as error:
                self._own = own
                self._failing = error
            if time.monotonic() > deadline:
                return 1
            time.sleep(RETRY_MS / 1000)
        self._store.checkpoint()
        self._store.close()
        return 0

    def _send(self, data: bytes | bytearray) -> None:
        """Answer the client; one that does not read for `LAST_TRY_SECONDS` is treated as gone."""
        rest = memoryview(bytes(data))
        deadline = time.monotonic() + LAST_TRY_SECONDS
        writable = select.poll()
        writable.register(self._sock, select.POLLOUT)
        while rest:
            try:
                rest = rest[self._sock.send(rest, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0 or not writable.poll(left * 1000):
                    self._ended = True
                    return
            except OSError:
                return  # it is gone; what it sent is still read to its end


def _whole(buffer: bytearray) -> bool:
    return len(buffer) >= wire.HEADER.size and len(buffer) - wire.HEADER.size >= wire.HEADER.unpack_from(buffer)[0]


def main(argv: list[str] | None = None) -> int:
    """Run the process; returns its exit code."""
    parser = argparse.ArgumentParser(prog="lockgate-audit-writer", description="Store audit rows of one broker.")
    parser.add_argument("--fd", type=int, required=True, help="number of the inherited socket")
    parser.add_argument("--path", type=Path, required=True, help="the database file")
    options = parser.parse_args(argv)
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A Ctrl-C or a service stop reaches the whole group; this process ends when its broker has, and not before.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=options.fd)
    os.set_inheritable(options.fd, False)
    try:
        writer = Writer(sock, Store(options.path.absolute()))
        ready: wire.Ready | wire.Failed = writer.repair()
    except AuditUnavailable as error:
        sock.sendall(wire.encode_reply(wire.Failed(error.message, error.next_step)))
        return 1
    writer._send(wire.encode_reply(ready))  # noqa: SLF001 - the same file
    return writer.serve()


if __name__ == "__main__":
    sys.exit(main())
