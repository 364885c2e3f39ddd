"""Reads an audit log as it grows.

Rule 1: the file is opened read-only, and a look costs one `PRAGMA data_version` while nothing was written.
Rule 2: the log is what it was: a row at the cursor that is another one, or a file that was replaced, is said.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from lockgate.audit import rows
from lockgate.audit.chain import EMPTY
from lockgate.audit.rows import StoredRow

BATCH: Final = 256


class Read(NamedTuple):
    """One row: its place, its hash in the chain, and itself; None where its bytes are no row."""

    seq: int
    hash: bytes
    row: StoredRow | None


class Follower:
    """The reading end of one log.

    Args:
        path: the audit file; it need not be there yet.

    Attributes:
        opened: how often a file was opened at the path: when it rises, the cursor must be checked again.

    """

    def __init__(self, path: Path) -> None:
        self.opened: int = 0
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._held = -1
        self._version = -1

    def end(self) -> tuple[int, bytes]:
        """Return place and hash of the last row; of an empty chain when there is none."""
        with _quiet():
            db = self._opened()
            if db is not None:
                found = db.execute("SELECT seq, hash FROM rows ORDER BY seq DESC LIMIT 1").fetchone()
                if found is not None:
                    return found[0], found[1]
        return EMPTY.seq, EMPTY.hash

    def holds(self, seq: int, digest: bytes) -> bool:
        """Whether the row at `seq` is the one with this hash. A log that is not there (yet) says nothing else."""
        if seq == 0:
            return True
        with _quiet():
            db = self._opened()
            if db is None:
                return True
            found = db.execute("SELECT hash FROM rows WHERE seq = ?", (seq,)).fetchone()
            return found is not None and found[0] == digest
        return True

    def changed(self) -> bool:
        """Whether something may have been written since the last `after` that found nothing."""
        with _quiet():
            db = self._opened()
            if db is None:
                return False
            (version,) = db.execute("PRAGMA data_version").fetchone()
            if version == self._version:
                return False
            self._version = version
            return True
        return False

    def after(self, seq: int) -> list[Read] | None:
        """Return at most `BATCH` rows behind `seq`, in their order; None when the log could not be read just now."""
        with _quiet():
            db = self._opened()
            if db is None:
                return []
            found = db.execute(
                "SELECT seq, hash, body FROM rows WHERE seq > ? ORDER BY seq LIMIT ?", (seq, BATCH)
            ).fetchall()
            return [Read(number, digest, _row(number, body)) for number, digest, body in found]
        return None

    def replaced(self) -> bool:
        """Whether the path names another file than the one that is read."""
        if self._db is None:
            return False
        with suppress(OSError):
            if os.path.samestat(self._path.stat(), os.fstat(self._held)):
                return False
            self.close()
            return True
        return False  # nothing is there now: what is read was removed, and may still come back

    def close(self) -> None:
        """Let go of the file; the next look opens it again."""
        if self._db is not None:
            with suppress(sqlite3.Error):
                self._db.close()
        if self._held >= 0:
            os.close(self._held)
        self._db = None
        self._held = -1
        self._version = -1

    def _opened(self) -> sqlite3.Connection | None:
        if self._db is not None:
            return self._db
        try:
            # Holds the inode, so that its number is not given to the next file. O_PATH: closing it drops no lock.
            held = os.open(self._path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return None
        db = sqlite3.connect(
            f"{self._path.absolute().as_uri()}?mode=ro",
            uri=True,
            isolation_level=None,
            timeout=2.0,
            check_same_thread=False,
        )
        try:
            db.execute("PRAGMA query_only=ON")
            db.execute("PRAGMA trusted_schema=OFF")
            if db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'rows'").fetchone() is None:
                db.close()  # it is being made
                os.close(held)
                return None
        except sqlite3.Error:
            db.close()
            os.close(held)
            raise
        self._db, self._held = db, held
        self.opened += 1
        return db


def _row(seq: int, body: bytes) -> StoredRow | None:
    try:
        return msgspec.structs.replace(rows.decode(bytes(body)), seq=seq)
    except (msgspec.MsgspecError, ValueError):
        return None


@contextmanager
def _quiet() -> Generator[None]:
    """A log that cannot be read at this moment is looked at again at the next one."""
    with suppress(sqlite3.Error):
        yield
