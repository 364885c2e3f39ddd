"""What the alerter must not forget: how far it read, what it counts, what is not delivered yet.

Rule 1: one transaction takes a batch of rows: the cursor, the groups, the counters and the spool move together or not
        at all. A kill at any moment loses nothing and repeats at most what was on its way.
Rule 2: the spool of a sink is bounded. What is dropped is counted, ordinary alerts before critical ones, and the gap is
        told by an alert of its own: the rows stay in the audit log.
Rule 3: one process holds a state at a time; any may read it.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from lockgate.alerts.dedupe import Alert, Memory
from lockgate.alerts.event import CRITICAL, Event
from lockgate.contract.errors import ConfigError, HostFault

SUFFIX: Final = ".alerts"
HISTORY: Final = 1000
SERIES: Final = 1000
"""Different (reason, rule) that are counted on their own; the rest is one."""
_SCHEMA_VERSION: Final = 1
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS place (one INTEGER PRIMARY KEY CHECK (one = 1), seq INTEGER NOT NULL, hash BLOB NOT NULL,
    memory BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS denied (reason TEXT, rule TEXT, n INTEGER NOT NULL, critical INTEGER NOT NULL,
    PRIMARY KEY (reason, rule)) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spool (id INTEGER PRIMARY KEY AUTOINCREMENT, sink TEXT NOT NULL, critical INTEGER NOT NULL,
    body BLOB NOT NULL, tries INTEGER NOT NULL DEFAULT 0, due REAL NOT NULL DEFAULT 0) STRICT;
CREATE INDEX IF NOT EXISTS spool_next ON spool (sink, critical DESC, id);
CREATE TABLE IF NOT EXISTS sinks (name TEXT PRIMARY KEY, delivered INTEGER NOT NULL DEFAULT 0,
    rejected INTEGER NOT NULL DEFAULT 0, dropped INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    problem TEXT NOT NULL DEFAULT '') STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS told (id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, sink TEXT NOT NULL,
    result TEXT NOT NULL, body BLOB NOT NULL) STRICT;
"""
_alert: Final = msgspec.json.Decoder(Alert)
_encode: Final = msgspec.json.Encoder().encode


class Waiting(NamedTuple):
    """One alert that a sink has not taken yet."""

    id: int
    alert: Alert
    tries: int


class Told(NamedTuple):
    """One alert that a sink took or refused: when, which sink, "delivered" or "rejected"."""

    at: float
    sink: str
    result: str
    alert: Alert


class Tally(NamedTuple):
    """How a sink is doing."""

    name: str
    waiting: int
    delivered: int
    rejected: int
    dropped: int
    failed: int
    problem: str


class State:
    """The spool file. Any thread may call.

    Args:
        path: made with mode 0600 when it is not there.
        queue: alerts that may wait for one sink.

    Raises:
        HostFault: it cannot be opened, or another process holds it.

    """

    def __init__(self, path: Path, *, queue: int) -> None:
        self._queue = queue
        self._lock = threading.RLock()
        self._waiting: dict[str, int] = {}  # within one transaction: counting is linear in what waits
        self._guard = _claim(path)
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=5.0, check_same_thread=False)
            for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "trusted_schema=OFF", "temp_store=MEMORY"):
                self._db.execute(f"PRAGMA {pragma}").fetchall()
            _check_version(self._db, path)
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")
        except sqlite3.Error as error:
            os.close(self._guard)
            raise HostFault(
                f"the alerts' spool {path} cannot be used ({error})",
                next_step="look at its disk, or move it aside: alerts begin anew from now on",
            ) from None
        except BaseException:
            os.close(self._guard)
            raise

    @contextmanager
    def transaction(self) -> Generator[None]:
        """Hold one transaction; what is done in it is kept whole or not at all."""
        with self._lock:
            self._waiting.clear()
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    # ---- the follower's side ---------------------------------------------------------------------------------
    def place(self) -> tuple[int, bytes, Memory] | None:
        """Return how far the log was read (seq and hash of a row) and what was remembered; None at the first time."""
        with self._lock:
            found = self._db.execute("SELECT seq, hash, memory FROM place").fetchone()
        if found is None:
            return None
        return found[0], found[1], msgspec.json.decode(found[2], type=Memory)

    def keep(self, seq: int, digest: bytes, memory: bytes) -> None:
        """Note how far the log was read, and the encoded memory; in a transaction."""
        self._db.execute("INSERT OR REPLACE INTO place VALUES (1, ?, ?, ?)", (seq, digest, memory))

    def count(self, event: Event) -> None:
        """Count one denial; in a transaction."""
        reason, rule = event.reason[:64], event.rule[:128]
        known = self._db.execute("SELECT 1 FROM denied WHERE reason = ? AND rule = ?", (reason, rule)).fetchone()
        if known is None and self._db.execute("SELECT count(*) FROM denied").fetchone()[0] >= SERIES:
            reason = rule = "other"
        self._db.execute(
            "INSERT INTO denied VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n, "
            "critical = critical + excluded.critical",
            (reason, rule, event.count, event.count if event.critical else 0),
        )

    def spool(self, sink: str, alert: Alert) -> None:
        """Put an alert before a sink; in a transaction. When there is no room, the oldest ordinary one goes."""
        db = self._db
        db.execute("INSERT OR IGNORE INTO sinks (name) VALUES (?)", (sink,))
        waiting = self._waiting.get(sink)
        if waiting is None:
            (waiting,) = db.execute("SELECT count(*) FROM spool WHERE sink = ?", (sink,)).fetchone()
        self._waiting[sink] = waiting
        if waiting >= self._queue:
            gone = db.execute(
                "SELECT id, critical, body FROM spool WHERE sink = ? ORDER BY critical, id LIMIT 1", (sink,)
            ).fetchone()
            db.execute("UPDATE sinks SET dropped = dropped + 1 WHERE name = ?", (sink,))
            if gone[1] and not alert.critical:
                return
            db.execute("DELETE FROM spool WHERE id = ?", (gone[0],))
            self._waiting[sink] -= 1
            if gone[1]:
                alert = _overflow(_alert.decode(gone[2]), alert)
        db.execute("INSERT INTO spool (sink, critical, body) VALUES (?, ?, ?)", (sink, alert.critical, _encode(alert)))
        self._waiting[sink] += 1

    # ---- the sinks' side -------------------------------------------------------------------------------------
    def next(self, sink: str, now: float) -> Waiting | None:
        """Return what a sink is to be told next: critical ones first, then the oldest."""
        with self._lock:
            found = self._db.execute(
                "SELECT id, body, tries FROM spool WHERE sink = ? AND due <= ? ORDER BY critical DESC, id LIMIT 1",
                (sink, now),
            ).fetchone()
        return None if found is None else Waiting(found[0], _alert.decode(found[1]), found[2])

    def done(self, sink: str, waiting: Waiting, result: str, now: float) -> None:
        """Note that a sink took an alert ("delivered") or will never take it ("rejected")."""
        with self.transaction():
            db = self._db
            db.execute("DELETE FROM spool WHERE id = ?", (waiting.id,))
            column = "delivered" if result == "delivered" else "rejected"
            db.execute(f"UPDATE sinks SET {column} = {column} + 1, problem = '' WHERE name = ?", (sink,))  # noqa: S608
            db.execute(
                "INSERT INTO told (at, sink, result, body) VALUES (?, ?, ?, ?)",
                (now, sink, result, _encode(waiting.alert)),
            )
            db.execute("DELETE FROM told WHERE id <= (SELECT max(id) FROM told) - ?", (HISTORY,))

    def later(self, sink: str, waiting: Waiting, due: float, problem: str) -> None:
        """Note that a delivery failed and when to try again."""
        with self.transaction():
            self._db.execute("UPDATE spool SET tries = tries + 1, due = ? WHERE id = ?", (due, waiting.id))
            # What else waits waits as long: one sink that is down is asked once, not once for each alert.
            self._db.execute("UPDATE spool SET due = max(due, ?) WHERE sink = ?", (due, sink))
            self._db.execute("UPDATE sinks SET failed = failed + 1, problem = ? WHERE name = ?", (problem[:200], sink))

    def earliest(self, sink: str) -> float | None:
        """Return when the sink's next alert is due; None = nothing waits."""
        with self._lock:
            return self._db.execute("SELECT min(due) FROM spool WHERE sink = ?", (sink,)).fetchone()[0]  # type: ignore[no-any-return]

    def waiting(self, sinks: Iterable[str], now: float) -> int:
        """Return how many alerts are due before `now` for these sinks."""
        with self._lock:
            return sum(
                self._db.execute("SELECT count(*) FROM spool WHERE sink = ? AND due <= ?", (sink, now)).fetchone()[0]
                for sink in sinks
            )

    def forget_sinks(self, keep: Iterable[str]) -> None:
        """Drop what waits for sinks that the configuration no longer has."""
        names = set(keep)
        with self.transaction():
            for (name,) in self._db.execute("SELECT DISTINCT sink FROM spool").fetchall():
                if name not in names:
                    self._db.execute("DELETE FROM spool WHERE sink = ?", (name,))

    # ---- looking ---------------------------------------------------------------------------------------------
    def denied(self) -> list[tuple[str, str, int, int]]:
        """Return reason, rule, denials and critical denials."""
        with self._lock:
            return self._db.execute("SELECT reason, rule, n, critical FROM denied ORDER BY reason, rule").fetchall()

    def tallies(self) -> list[Tally]:
        """Return how each sink is doing."""
        with self._lock:
            return _tallies(self._db)

    def close(self) -> None:
        """Close it and let others have it."""
        with self._lock:
            self._db.close()
            os.close(self._guard)


def read(path: Path, count: int) -> tuple[list[Told], list[Tally]]:
    """Return the last `count` alerts that were told, oldest first, and how each sink is doing.

    Raises:
        ConfigError: there is no state at `path`.

    """
    if not path.is_file():
        raise ConfigError(
            f"there is no alerts' spool at {path}",
            next_step="it is made beside the audit file by a Gate whose configuration has [alerts]",
        )
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=2.0)
    try:
        rows = db.execute("SELECT at, sink, result, body FROM told ORDER BY id DESC LIMIT ?", (count,)).fetchall()
        told = [Told(at, sink, result, _alert.decode(body)) for at, sink, result, body in reversed(rows)]
        return told, _tallies(db)
    except (sqlite3.Error, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} cannot be read ({type(error).__name__})", next_step="read it as its owner") from None
    finally:
        db.close()


def _tallies(db: sqlite3.Connection) -> list[Tally]:
    query = (
        "SELECT name, (SELECT count(*) FROM spool WHERE sink = name), delivered, rejected, dropped, failed, problem "
        "FROM sinks ORDER BY name"
    )
    return [Tally(*row) for row in db.execute(query)]


def _overflow(gone: Alert, alert: Alert) -> Alert:
    """Return an alert that says, in the place of two critical ones, which rows must be read in the log."""
    event = msgspec.structs.replace(alert.event, kind="finding", reason="overflow", severity=CRITICAL)
    return Alert(
        uid=f"overflow-{alert.event.audit_id}",
        key=alert.key,
        why="overflow",
        event=event,
        count=gone.count + alert.count,
        since=gone.since or gone.event.at,
        at=alert.at,
    )


def _check_version(db: sqlite3.Connection, path: Path) -> None:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version not in {0, _SCHEMA_VERSION}:
        raise HostFault(
            f"{path} was written by another version", next_step="move it aside: alerts begin anew from now on"
        )


def _claim(path: Path) -> int:
    """Make the file safely and lock it with flock(2), which SQLite does not use; the descriptor stays open."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise HostFault(
            f"the alerts' spool {path} cannot be opened ({error.strerror})", next_step="choose a place you may write"
        ) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise HostFault(
            f"another alerter works with {path}", next_step="stop it, or give this Gate an audit file of its own"
        ) from None
    return fd
