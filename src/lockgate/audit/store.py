"""The audit database: one SQLite file in WAL mode, one writer.

Rule 1: a transaction takes rows, claims and the head record together or not at all; memory follows only after COMMIT.
Rule 2: the writer keeps the head in memory: a row that somebody else put in, took out or moved while the writer
        lives is a conflict at the next row, never a chain that silently goes on from it.
Rule 3: only `rows` is chained. `intents`, `outcomes`, `sources` and `head` are indexes over it, and `verify` checks
        them against it.
Rule 4: a file that was replaced under the writer, or does not end where it says, is never written on.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from lockgate.audit import rows
from lockgate.audit.chain import EMPTY, Head, link
from lockgate.audit.place import claim_file, explain, unusable
from lockgate.audit.wire import Existing, State

APPLICATION_ID: Final = 0x6C676174  # "lgat"
SCHEMA_VERSION: Final = 1
_WAL_PAGES: Final = 2000

_SCHEMA: Final = """
BEGIN IMMEDIATE;
CREATE TABLE rows (seq INTEGER PRIMARY KEY, body BLOB NOT NULL, hash BLOB NOT NULL) STRICT;
CREATE TABLE intents (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, key TEXT, grant_id TEXT UNIQUE,
    state TEXT NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'done', 'unknown', 'released'))) STRICT;
CREATE UNIQUE INDEX intents_key ON intents (key) WHERE key IS NOT NULL AND state <> 'released';
CREATE INDEX intents_open ON intents (seq) WHERE state = 'open';
CREATE TABLE outcomes (
    intent TEXT PRIMARY KEY, seq INTEGER NOT NULL, status TEXT NOT NULL, result BLOB) STRICT, WITHOUT ROWID;
CREATE TABLE sources (id TEXT PRIMARY KEY, first INTEGER NOT NULL, last INTEGER) STRICT, WITHOUT ROWID;
CREATE TABLE head (one INTEGER PRIMARY KEY CHECK (one = 1), seq INTEGER NOT NULL, hash BLOB NOT NULL) STRICT;
INSERT INTO head VALUES (1, 0, zeroblob(32));
CREATE VIEW audit AS
    SELECT seq, j ->> 'id' AS id, datetime(j ->> 'at', 'unixepoch') AS at, j ->> 'phase' AS phase, j ->> 'user' AS user,
           j ->> 'agent' AS agent, j ->> 'tenant' AS tenant, j ->> 'run' AS run, j ->> 'via' AS via,
           j ->> 'operation' AS operation, j ->> 'verdict' AS verdict, j ->> 'rule' AS rule, j ->> 'status' AS status
    FROM (SELECT seq, CAST(body AS TEXT) AS j FROM rows);
PRAGMA application_id = 1818714484;
PRAGMA user_version = 1;
COMMIT;
"""


class Store:
    """The open database.

    Args:
        path: the file; made with mode 0600 when it is not there. Its directory is made with 0700 when only that one is
            missing.

    Attributes:
        head: the end of the chain as it is on the disk.

    Raises:
        AuditUnavailable: the place is not safe, is not an audit file, is in use, or does not end where it says.

    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head = EMPTY
        self._pending: list[tuple[int, bytes, bytes]] = []
        self._at = EMPTY
        self._full: bool | None = None
        self._guard, self._inode = claim_file(path)
        try:
            self._db = sqlite3.connect(
                _uri(path), uri=True, isolation_level=None, timeout=2.0, cached_statements=64, check_same_thread=False
            )
            self._prepare()
        except sqlite3.Error as error:
            os.close(self._guard)
            raise explain(error, path) from None
        except BaseException:
            os.close(self._guard)
            raise

    def _prepare(self) -> None:
        db = self._db
        for pragma in (
            "trusted_schema=OFF",
            "journal_mode=WAL",
            f"wal_autocheckpoint={_WAL_PAGES}",
            "temp_store=MEMORY",
        ):
            db.execute(f"PRAGMA {pragma}").fetchall()
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if application == 0 and tables == 0:
            db.executescript(_SCHEMA)
        elif application != APPLICATION_ID:
            raise unusable(f"{self.path} is a database, but not an audit file", "give [audit] path another name")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version != SCHEMA_VERSION:
            raise unusable(
                f"{self.path} has audit schema {version}, this program writes {SCHEMA_VERSION}",
                "use the program that wrote it, or move the file aside",
            )
        seq, digest = db.execute("SELECT seq, hash FROM head").fetchone() or (-1, b"")
        last = db.execute("SELECT seq, body, hash FROM rows ORDER BY seq DESC LIMIT 2").fetchall()
        self.head = Head(seq, digest)
        if self.head != (Head(last[0][0], last[0][2]) if last else EMPTY) or (
            len(last) == 2 and link(last[1][2], last[0][0], last[0][1]) != last[0][2]
        ):
            raise unusable(
                f"the end of {self.path} was changed or cut off",
                "run `lockgate audit verify`, keep the file as evidence and move it aside to begin a new chain",
            )

    @contextmanager
    def transaction(self, *, durable: bool) -> Generator[None]:
        """Hold one transaction; `durable` makes its COMMIT wait for the disk.

        Raises:
            AuditUnavailable: nothing of it was stored.

        """
        try:
            self._same_file()
            if durable is not self._full:
                self._db.execute("PRAGMA synchronous=FULL" if durable else "PRAGMA synchronous=NORMAL")
                self._full = durable
            self._db.execute("BEGIN IMMEDIATE")
            self._at = self.head
            yield
            self._write_rows()
            if self._at != self.head:
                self._db.execute("UPDATE head SET seq = ?, hash = ?", (self._at.seq, self._at.hash))
            self._db.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            self._roll_back()
            raise explain(error, self.path) from None
        except BaseException:
            self._roll_back()
            raise
        self.head = self._at

    # ---- inside a transaction -------------------------------------------------------------------------------
    def add(self, body: bytes) -> int:
        """Chain one row; returns its place."""
        seq = self._at.seq + 1
        digest = link(self._at.hash, seq, body)
        self._pending.append((seq, body, digest))
        self._at = Head(seq, digest)
        return seq

    def claim(self, audit_id: str, key: str | None, grant: str | None, body: bytes) -> Existing | None:
        """Store an intent and its claims; or return the earlier intent that holds one of them, storing nothing."""
        existing = self.held("grant", grant) or self.held("key", key)
        if existing is None:
            seq = self.add(body)
            self._db.execute(
                "INSERT INTO intents (seq, id, key, grant_id) VALUES (?, ?, ?, ?)", (seq, audit_id, key, grant)
            )
        return existing

    def held(self, by: str, value: str | None) -> Existing | None:
        """Return the intent that holds a key ("key") or that used a grant ("grant")."""
        if value is None:
            return None
        where = "grant_id = ?" if by == "grant" else "key = ? AND state <> 'released'"
        found: tuple[int, str, State] | None = self._db.execute(
            f"SELECT seq, id, state FROM intents WHERE {where}",  # noqa: S608 - one of two constants
            (value,),
        ).fetchone()
        if found is None:
            return None
        seq, audit_id, state = found
        row = self.row(seq)
        ended = self._db.execute("SELECT status, result FROM outcomes WHERE intent = ?", (audit_id,)).fetchone()
        status, result = ended or ("", None)
        return Existing(state, "grant" if by == "grant" else "key", audit_id, row.run, row.args_hash, status, result)

    def settle(self, intent: str, state: State, status: str, result: bytes | None, body: bytes) -> State | None:
        """Store an outcome; or return the state that forbids it ("released" also when there is no such intent)."""
        found = self._db.execute("SELECT state FROM intents WHERE id = ?", (intent,)).fetchone()
        present: State = found[0] if found else "released"
        if present not in {"open", "unknown"}:
            return present
        seq = self.add(body)
        self._db.execute("UPDATE intents SET state = ? WHERE id = ?", (state, intent))
        self._db.execute("INSERT OR REPLACE INTO outcomes VALUES (?, ?, ?, ?)", (intent, seq, status, result))
        return None

    def open_intents(self) -> list[tuple[str, rows.StoredRow]]:
        """Return audit id and row of every intent without an outcome."""
        found = self._db.execute("SELECT seq, id FROM intents WHERE state = 'open' ORDER BY seq").fetchall()
        return [(audit_id, self.row(seq)) for seq, audit_id in found]

    def row(self, seq: int) -> rows.StoredRow:
        """Return one stored row."""
        self._write_rows()
        (body,) = self._db.execute("SELECT body FROM rows WHERE seq = ?", (seq,)).fetchone()
        try:
            return rows.decode(body)
        except ValueError:  # msgspec's errors are ValueErrors
            raise unusable(f"row {seq} of {self.path} is unreadable", "run `lockgate audit verify`") from None

    def open_source(self, source: str) -> None:
        """Note that a client begins to number rows."""
        self._db.execute("INSERT INTO sources (id, first) VALUES (?, ?)", (source, self._at.seq + 1))

    def close_source(self, source: str, last: int) -> None:
        """Note the number of the last row that a client sent."""
        self._db.execute("UPDATE sources SET last = ? WHERE id = ?", (last, source))

    def lost_sources(self) -> list[tuple[str, int]]:
        """Return each client whose writer died before it closed, with the number of its last stored row."""
        found = self._db.execute("SELECT id, first FROM sources WHERE last IS NULL ORDER BY first").fetchall()
        out: list[tuple[str, int]] = []
        for source, first in found:
            prefix = f'{{"id":"{source}-'.encode()
            last = 0
            for (body,) in self._db.execute("SELECT body FROM rows WHERE seq >= ? ORDER BY seq DESC", (first,)):
                number = body[len(prefix) :].partition(b'"')[0]
                if body.startswith(prefix) and number.isdigit():
                    last = int(number)
                    break
            out.append((source, last))
        return out

    # ---- the rest -------------------------------------------------------------------------------------------
    def checkpoint(self) -> None:
        """Move what is in the write-ahead log into the file; for idle moments. Failing here is no failure to store."""
        with suppress(sqlite3.Error):
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def close(self) -> None:
        """Close the database and give the lock back; idempotent."""
        with suppress(sqlite3.Error):
            self._db.close()
        if self._guard >= 0:
            os.close(self._guard)
            self._guard = -1

    def _write_rows(self) -> None:
        if self._pending:
            self._db.executemany("INSERT INTO rows VALUES (?, ?, ?)", self._pending)
            self._pending.clear()

    def _roll_back(self) -> None:
        self._pending.clear()
        self._at = self.head
        with suppress(sqlite3.Error):
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _same_file(self) -> None:
        """Refuse to store into a file that was removed or replaced under us."""
        found = self.path.lstat()
        if (found.st_dev, found.st_ino) != self._inode:
            raise unusable(
                f"{self.path} was replaced while it was written",
                "find out by whom; move the new file aside and restart the gate",
            )


def ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return rising `numbers` as inclusive ranges."""
    out: list[tuple[int, int]] = []
    for number in numbers:
        if out and number == out[-1][1] + 1:
            out[-1] = (out[-1][0], number)
        else:
            out.append((number, number))
    return out


def _uri(path: Path) -> str:
    return f"{path.absolute().as_uri()}?mode=rw"
