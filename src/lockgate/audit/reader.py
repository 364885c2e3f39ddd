"""Reading and checking an audit file, also while a writer is at work on it.

Rule 1: the file is opened read-only; nothing here can change a row.
Rule 2: one snapshot never lasts longer than `CHUNK` rows, so a long check does not make the write-ahead log grow.
Rule 3: a finding names the row where it shows. Whoever owns the machine can write a whole new chain: only a head that
        was kept elsewhere (`expect`) finds that.
"""

from __future__ import annotations

import sqlite3
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import msgspec

from lockgate.audit import rows
from lockgate.audit.chain import Head
from lockgate.audit.check import CHUNK, Check, Finding, Report
from lockgate.audit.rows import StoredRow
from lockgate.contract.errors import ConfigError

__all__ = ["Finding", "Head", "Report", "every", "tail", "verify"]

MAX_TAIL: Final = 2**31 - 1
"""Rows that one look back can mean; more is every row."""
_APPLICATION_ID: Final = 0x6C676174
_NO_TABLE: Final = (
    "SELECT count(*) FROM sqlite_schema WHERE lower(name) IN ('rows', 'head', 'intents', 'outcomes', 'sources')"
    " AND (type <> 'table' OR sql LIKE 'CREATE VIRTUAL%')"
)


def tail(
    path: str | Path,
    n: int = 20,
    *,
    follow: bool = False,
    run: str | None = None,
    poll: float = 0.2,
    stop: Callable[[], bool] | None = None,
) -> Iterator[StoredRow]:
    """Yield the last `n` rows, oldest first; with `follow`, then every new one until `stop()` or for ever.

    Args:
        path: the database file.
        n: how many old rows.
        follow: go on with new rows.
        run: only rows of this run.
        poll: seconds between two looks.
        stop: asked between two looks.

    Raises:
        ConfigError: there is no audit file there, or it is unreadable.

    """
    path = Path(path)
    with _opened(path) as db:
        last = 0
        kept: deque[StoredRow] = deque(maxlen=min(max(n, 0), MAX_TAIL))
        if run is None:
            query = "SELECT * FROM (SELECT seq, body FROM rows WHERE seq > 0 ORDER BY seq DESC LIMIT ?) ORDER BY seq"
            for seq, body in db.execute(query, (kept.maxlen,)):
                last = seq
                kept.append(_row(seq, body))
            last = max(last, db.execute("SELECT coalesce(max(seq), 0) FROM rows").fetchone()[0] if n <= 0 else last)
        else:
            for row in _after(db, 0):
                last = row.seq
                if row.run == run:
                    kept.append(row)
        yield from kept
        while follow and not (stop is not None and stop()):
            fresh = False
            for row in _after(db, last):
                last, fresh = row.seq, True
                if run is None or row.run == run:
                    yield row
            if not fresh:
                time.sleep(poll)


def every(path: str | Path) -> Iterator[StoredRow]:
    """Yield all rows that exist now, oldest first, without holding them.

    Raises:
        ConfigError: there is no audit file there, or it is unreadable.

    """
    with _opened(Path(path)) as db:
        yield from _after(db, 0)


def verify(path: str | Path, expect: Head | None = None) -> Report:
    """Check every row, every link, the numbering of every source and every index of an audit file.

    Args:
        path: the database file.
        expect: a head that was kept elsewhere; the chain must go through it.

    Raises:
        ConfigError: there is no audit file there.

    """
    with _opened(Path(path)) as db:
        return Check(expect).run(db)


def _after(db: sqlite3.Connection, last: int) -> Iterator[StoredRow]:
    """Yield the rows behind `last` that exist now, each chunk in a snapshot of its own."""
    while batch := db.execute(
        "SELECT seq, body FROM rows WHERE seq > ? ORDER BY seq LIMIT ?", (last, CHUNK)
    ).fetchall():
        for seq, body in batch:
            yield _row(seq, body)
        last = batch[-1][0]


def _row(seq: int, body: bytes) -> StoredRow:
    try:
        return msgspec.structs.replace(rows.decode(bytes(body)), seq=seq)
    except (msgspec.MsgspecError, ValueError):
        raise ConfigError(f"row {seq} is unreadable", next_step="run `lockgate audit verify`") from None


@contextmanager
def _opened(path: Path) -> Generator[sqlite3.Connection]:
    """Open the database for reading only."""
    if not path.is_file():
        raise ConfigError(f"there is no audit file at {path}", next_step="give the path that [audit] path names")
    uri = path.absolute().as_uri()
    try:
        with closing(sqlite3.connect(f"{uri}?mode=ro", uri=True, isolation_level=None, timeout=2.0)) as db:
            db.execute("PRAGMA query_only=ON")
            db.execute("PRAGMA trusted_schema=OFF")
            (application,) = db.execute("PRAGMA application_id").fetchone()
            if application != _APPLICATION_ID:
                raise ConfigError(f"{path} is not an audit file", next_step="give the path that [audit] path names")
            # A view in the place of a table can say anything, and never come to an end.
            if db.execute(_NO_TABLE).fetchone()[0]:
                raise ConfigError(
                    f"{path} is not an audit file any more: something else stands for one of its tables",
                    next_step="keep it as evidence, and find out who changed it",
                )
            yield db
    except sqlite3.Error as error:
        raise ConfigError(
            f"{path} cannot be read ({error})", next_step="read it as its owner, on a disk that is not read-only"
        ) from None
