"""C5: kill -9 at random points loses no acknowledged row and leaves `unknown` for the writes in flight."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import time
from pathlib import Path

from audit_fixtures import AuditNursery
from lockgate.audit import reader
from lockgate.audit.rows import StoredRow

CLIENT_KILLS = 200
WRITER_KILLS = 60
SECONDS = 55.0


class Session:
    """One forked writer with one forked client, and the pipe on which the client acknowledges."""

    def __init__(self, nursery: AuditNursery, path: Path, seed: str) -> None:
        ours, theirs = socket.socketpair()
        self.acks, told = os.pipe()
        self.alive, life = os.pipe()
        self.writer = nursery.fork("writer", str(path), theirs.fileno(), life)
        self.client = nursery.fork("client", seed, ours.fileno(), told)
        for fd in (told, life):
            os.close(fd)
        ours.close()
        theirs.close()
        self._heard = b""

    def listen(self, seconds: float, *, until: bytes = b"") -> None:
        """Collect acknowledgements for some time, or until something was said."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not (until and until in self._heard):
            if select.select([self.acks], [], [], left)[0]:
                data = os.read(self.acks, 65536)
                if not data:
                    return
                self._heard += data

    def end(self) -> list[list[str]]:
        """Collect the rest, wait for the end of both processes; returns the acknowledgements."""
        self.listen(20, until=b"\0")
        assert select.select([self.alive], [], [], 20)[0], "the writer did not end"
        assert os.read(self.alive, 1) == b""
        os.close(self.acks)
        os.close(self.alive)
        return [line.split() for line in self._heard.decode().splitlines()]


def judge(rows: list[StoredRow], acks: list[list[str]], *, writer_died: bool) -> tuple[int, int]:
    """Check the rows of one session; returns how many acknowledgements and unknown outcomes there were."""
    by_id = {row.id: row for row in rows}
    assert len(by_id) == len(rows)
    for kind, audit_id, of in acks:
        if kind == "intent":
            assert by_id[audit_id].idempotency_key == of
        elif kind == "outcome":
            assert (by_id[audit_id].phase, by_id[audit_id].ref) == ("outcome", of)
        elif kind == "append":
            # It was not waited for: it outlives its sender, but not the writer.
            assert writer_died or audit_id in by_id
        else:
            assert writer_died, (kind, audit_id)
    intents = {row.id for row in rows if row.phase == "intent"}
    outcomes = {row.ref for row in rows if row.phase == "outcome"}
    unknown = [row for row in rows if row.phase == "unknown"]
    assert {row.ref for row in unknown} == intents - outcomes, "every write ends, as what it was or as unknown"
    assert all(row.user and row.agent and row.run for row in rows)
    return len(acks), len(unknown)


def rows_after(path: Path, seq: int) -> list[StoredRow]:
    with reader._opened(path) as db:
        return list(reader._after(db, seq))


def test_killing_the_client_200_times(tmp_path: Path, audit_nursery: AuditNursery) -> None:
    """What the broker does to its writer when it is killed; the broker's own test kills the broker."""
    path = tmp_path / "audit.db"
    dice = random.Random(20261129)
    started = time.monotonic()
    seq = acknowledged = unknown = rounds = 0
    for number in range(CLIENT_KILLS):
        session = Session(audit_nursery, path, str(number))
        session.listen(20, until=b"intent" if number % 2 else b"append")
        session.listen(dice.uniform(0, 0.03))
        os.kill(session.client, signal.SIGKILL)
        acks = session.end()
        rows = rows_after(path, seq)
        seq += len(rows)
        told, unsure = judge(rows, acks, writer_died=False)
        acknowledged += told
        unknown += unsure
        rounds += 1
        if time.monotonic() - started > SECONDS:
            break
    assert rounds == CLIENT_KILLS or rounds > 50, "a very slow machine still kills often"
    report = reader.verify(path)
    assert (report.findings, report.open, report.gaps) == ((), 0, ())
    assert report.unknown == unknown
    assert acknowledged > 2 * rounds
    assert unknown > rounds // 10, "the kills did not meet writes in flight: the test would show nothing"


def test_killing_the_writer(tmp_path: Path, audit_nursery: AuditNursery) -> None:
    path = tmp_path / "audit.db"
    dice = random.Random(7)
    started = time.monotonic()
    told: list[list[list[str]]] = []
    for number in range(WRITER_KILLS):
        session = Session(audit_nursery, path, str(number))
        session.listen(20, until=b"append")
        session.listen(dice.uniform(0, 0.03))
        os.kill(session.writer, signal.SIGKILL)
        told.append(session.end())
        errors = [name for kind, name, _ in told[-1] if kind == "error"]
        assert errors == ["AuditUnavailable"] * 4, "each channel got a typed error at once"
        if time.monotonic() - started > SECONDS:
            break
    last = Session(audit_nursery, path, "last")
    last.listen(20, until=b"outcome")
    os.kill(last.client, signal.SIGKILL)
    told.append(last.end())
    rows = rows_after(path, 0)
    judge(rows, [ack for acks in told for ack in acks], writer_died=True)
    report = reader.verify(path)
    assert (report.findings, report.open) == ((), 0)
    assert len(report.gaps) == len(told) - 1, "each kill is stated, because rows may have been lost with it"
