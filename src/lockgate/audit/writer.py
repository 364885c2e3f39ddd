"""The audit writer process: `python -I -m lockgate.audit.writer --fd N --path FILE`.

Rule 1: nothing is acknowledged before its transaction is committed to the disk.
Rule 2: when the store fails, whoever waits is told at once, rows that nobody waits for are kept (bounded) and tried
        again, and until one transaction succeeds nothing is acknowledged: no audit, no write.
Rule 3: a number that was sent and not stored is stated in the chain by a row of phase "gap".
Rule 4: rows outlive the broker: the end of the stream is handled after everything in it. Then, and at the next start
        for a writer that was killed, every intent without an outcome gets a row of phase "unknown".
Rule 5: this process holds the database and nothing else: it spawns nothing, connects to nothing, knows no secret.

Batching: what waits goes into one transaction. Rows that nobody waits for are let gather for a moment (`stream`).
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
from lockgate.audit.stream import Frame, Stream
from lockgate.contract.errors import AuditUnavailable
from lockgate.kernel import process_unsafe

RETRY_MS: Final = 250
IDLE_MS: Final = 1000
LAST_TRY_SECONDS: Final = 3.0
RETAIN_BYTES: Final = 8 * 1024 * 1024
_RANGES_A_ROW: Final = 200


class Writer:
    """One client, one database.

    Args:
        sock: the client's stream.
        store: the open database.

    """

    def __init__(self, sock: socket.socket, store: Store) -> None:
        self._sock = sock
        self._stream = Stream(sock)
        self._store = store
        self._opened = False
        self._unknown = 0
        self._gaps = 0
        self._failing: AuditUnavailable | None = None
        self._retained: list[Frame] = []
        self._retained_bytes = 0
        self._refused: list[int] = []
        self._name = os.urandom(wire.SOURCE_CHARS // 2).hex()
        self._own = 0
        self._dirty = False

    def repair(self) -> None:
        """State what earlier writers left open: intents without outcome, clients whose last rows may be missing.

        Raises:
            AuditUnavailable: the store takes no rows.

        """
        with self._store.transaction(durable=True):
            self._unknown = self._end_intents("the writer of this intent ended before its outcome came")
            for source, last in self._store.lost_sources():
                self._state_gap(source, f"{last + 1}-", "the writer was killed; later rows of this source are lost")
                self._store.close_source(source, last)
                self._gaps += 1

    def serve(self) -> int:
        """Store what comes until the client is gone; returns the exit code."""
        stream = self._stream
        while not stream.ended:
            came = stream.wait(RETRY_MS if self._failing is not None else IDLE_MS)
            frames = stream.read() if came else []
            if stream.source and not self._open_source():
                return 1
            if frames or self._failing is not None:
                self._store_batch(frames)
            elif not came and self._dirty:
                self._store.checkpoint()
                self._dirty = False
        if stream.broken is not None:
            failed = wire.Failed(f"the audit writer was sent {stream.broken}", "restart the gate; report this")
            self.send(wire.encode_reply(failed))
            return self._finish() or 1
        return self._finish()

    def _open_source(self) -> bool:
        """Note durably that the client begins, then let it send: a row that is lost can be told from then on."""
        if self._opened:
            return True
        try:
            with self._store.transaction(durable=True):
                self._store.open_source(self._stream.source)
        except AuditUnavailable as error:
            self.send(wire.encode_reply(wire.Failed(error.message, error.next_step)))
            return False
        self._opened = True
        head = self._store.head
        self.send(wire.encode_reply(wire.Ready(os.getpid(), head.seq, head.hash, self._unknown, self._gaps)))
        return True

    # ---- storing --------------------------------------------------------------------------------------------
    def _store_batch(self, frames: list[Frame]) -> None:
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
        self.send(out)

    def _take(self, frame: Frame) -> wire.Reply | None:
        """Put one frame into the open transaction; returns its answer unless that is plainly `Stored`."""
        store = self._store
        if frame.kind in {wire.APPEND, wire.COMMIT}:
            store.add(frame.body)
        elif isinstance(frame.head, wire.IntentHead):
            existing = store.claim(f"{self._stream.source}-{frame.n}", frame.head.key, frame.head.grant, frame.body)
            if existing is not None:
                audit_id = self._refuse(frame.body, existing.intent_id, f"{existing.by}_{existing.state}")
                return wire.Taken(frame.request, msgspec.structs.replace(existing, audit_id=audit_id))
        elif isinstance(frame.head, wire.OutcomeHead):
            end = frame.head
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
        """Store a row whose claim was not taken, as that and under its own number; returns its id."""
        try:
            row = rows.decode(body)
        except ValueError:
            raise AuditUnavailable("a row of the broker is unreadable", next_step="report this") from None
        refused = rows.unstored(row, phase="refused", ref=ref, status=status)
        self._store.add(rows.stamp(rows.encode(refused), row.id, row.at, row.mono))
        return row.id

    def _fail(self, frames: list[Frame], error: AuditUnavailable) -> None:
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
        self.send(out)

    def _state_refused(self) -> None:
        """State which numbers were not stored while the store failed."""
        spans = [f"{first}-{last}" for first, last in ranges(self._refused)]
        why = self._failing.message if self._failing is not None else ""
        for at in range(0, len(spans), _RANGES_A_ROW):
            self._state_gap(self._stream.source, ",".join(spans[at : at + _RANGES_A_ROW]), why)

    def _state_gap(self, source: str, numbers: str, why: str) -> None:
        detail: dict[str, rows.Value] = {"source": source, "numbers": numbers, "why": rows.clip(why)}
        row = rows.Row(phase="gap", user="lockgate", agent="audit-writer", run=source, detail=detail)
        self._store.add(self._stamped(row))

    def _end_intents(self, why: str) -> int:
        """Close every open intent as `unknown`; returns how many there were."""
        intents = self._store.open_intents()
        for audit_id, row in intents:
            end = rows.unstored(row, phase="unknown", ref=audit_id, status="unknown", detail={"why": why})
            self._store.settle(audit_id, "unknown", "unknown", None, self._stamped(end))
        return len(intents)

    def _stamped(self, row: rows.Row) -> bytes:
        """Number a row of the writer itself."""
        self._own += 1
        return rows.stamp(rows.encode(row), f"{self._name}-{self._own}", time.time(), time.monotonic())

    # ---- the end --------------------------------------------------------------------------------------------
    def _finish(self) -> int:
        """Store what is left, close the client's intents and its source; bounded when the disk stays full."""
        deadline = time.monotonic() + LAST_TRY_SECONDS
        while self._opened:
            own = self._own
            try:
                if self._failing is not None:
                    self._store_batch([])
                if self._failing is None:
                    with self._store.transaction(durable=True):
                        self._end_intents("the broker ended before the outcome came")
                        self._store.close_source(self._stream.source, self._stream.last)
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

    def send(self, data: bytes | bytearray) -> None:
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
                    self._stream.ended = True
                    return
            except OSError:
                return  # it is gone; what it sent is still read to its end


def main(argv: list[str] | None = None) -> int:
    """Run the process; returns its exit code."""
    parser = argparse.ArgumentParser(prog="lockgate-audit-writer", description="Store audit rows of one broker.")
    parser.add_argument("--fd", type=int, required=True, help="number of the inherited socket")
    parser.add_argument("--path", type=Path, required=True, help="the database file")
    options = parser.parse_args(argv)
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))  # it spawns nothing (root is not bound by this)
    process_unsafe.no_new_privileges()
    process_unsafe.set_dumpable(0)  # rows are in its memory: no other process of this user may read them there
    # A Ctrl-C or a service stop reaches the whole group; this process ends when its broker has, and not before.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=options.fd)
    os.set_inheritable(options.fd, False)
    try:
        writer = Writer(sock, Store(options.path.absolute()))
        writer.repair()
    except AuditUnavailable as error:
        with contextlib.suppress(OSError):
            sock.send(wire.encode_reply(wire.Failed(error.message, error.next_step)))
        return 1
    return writer.serve()


if __name__ == "__main__":
    sys.exit(main())
