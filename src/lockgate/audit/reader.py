"""Reading and checking an audit file, also while a writer is at work on it.

Rule 1: the file is opened read-only; nothing here can change a row.
Rule 2: one snapshot never lasts longer than `_CHUNK` rows, so a long check does not make the write-ahead log grow.
Rule 3: a finding names the row where it shows. Whoever owns the machine can write a whole new chain: only a head that
        was kept elsewhere (`expect`) finds that.
"""

from __future__ import annotations

import sqlite3
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Final, Literal

import msgspec

from lockgate.audit import rows
from lockgate.audit.chain import EMPTY, Head, link
from lockgate.audit.rows import StoredRow
from lockgate.contract.errors import ConfigError

_CHUNK: Final = 4096
_APPLICATION_ID: Final = 0x6C676174
MAX_FINDINGS: Final = 1000

Kind = Literal["altered", "dropped", "reordered", "duplicated", "cut", "gap", "unreadable"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is not as it was written.

    Attributes:
        kind: "altered" = bytes, link or index changed; "dropped" = a row is gone; "reordered" = it stood elsewhere;
            "duplicated" = it stands twice; "cut" = the end is gone; "gap" = rows were lost before they were stored;
            "unreadable" = the file is damaged.
        seq: the place in the chain where it shows.
        id: audit id of the row there, "" when it cannot be told.
        detail: one sentence.

    """

    kind: Kind
    seq: int
    id: str = ""
    detail: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `verify` found.

    Attributes:
        rows: rows checked. head: the end of the chain. findings: at most `MAX_FINDINGS`, in the order of the chain.
        unknown: writes whose outcome nobody knows. open: intents without an outcome yet (a live writer's).
        gaps: what the writer itself stated to be missing, as "SOURCE NUMBERS: why"; no finding, but worth reading.

    """

    rows: int
    head: Head
    findings: tuple[Finding, ...] = ()
    unknown: int = 0
    open: int = 0
    gaps: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


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
        kept: deque[StoredRow] = deque(maxlen=max(n, 0))
        if run is None:
            query = "SELECT * FROM (SELECT seq, body FROM rows ORDER BY seq DESC LIMIT ?) ORDER BY seq"
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


def verify(path: str | Path, expect: Head | None = None) -> Report:
    """Check every row, every link, the numbering of every source and every index of an audit file.

    Args:
        path: the database file.
        expect: a head that was kept elsewhere; the chain must go through it.

    Raises:
        ConfigError: there is no audit file there.

    """
    with _opened(Path(path)) as db:
        check = _Check(expect)
        try:
            while check.chunk(db):
                pass
            check.finish(db)
        except sqlite3.DatabaseError as error:
            check.find("unreadable", check.head.seq + 1, "", f"the file is damaged behind this row ({error})")
        return check.report()


class _Source:
    """What was seen of one source's numbers."""

    __slots__ = ("last", "missing", "stated")

    def __init__(self) -> None:
        self.last = 0
        self.missing: list[tuple[int, int, int]] = []  # first, last, place where it showed
        self.stated: list[tuple[int, int]] = []


class _Check:
    """One pass over a chain, in chunks."""

    def __init__(self, expect: Head | None) -> None:
        self.head = EMPTY
        self._expect = expect
        self._count = 0
        self._findings: list[Finding] = []
        self._sources: dict[str, _Source] = {}
        self._flagged = 0  # place of the last row with a wrong link
        self._suspects: list[tuple[int, str]] = []
        self._unknown = 0
        self._open = 0
        self._gaps: list[str] = []
        self._stored_head: Head | None = None

    def chunk(self, db: sqlite3.Connection) -> bool:
        """Check the next rows in one snapshot; False when that was the end."""
        db.execute("BEGIN")
        try:
            after = self.head.seq
            batch = db.execute(
                "SELECT seq, body, hash FROM rows WHERE seq > ? ORDER BY seq LIMIT ?", (after, _CHUNK)
            ).fetchall()
            upto = batch[-1][0] if batch else after
            intents = {
                seq: rest
                for seq, *rest in db.execute(
                    "SELECT i.seq, i.id, i.key, i.grant_id, i.state, o.seq, o.status, o.result FROM intents i"
                    " LEFT JOIN outcomes o ON o.intent = i.id WHERE i.seq > ? AND i.seq <= ?",
                    (after, upto),
                )
            }
            for seq, body, digest in batch:
                self._row(db, seq, bytes(body), bytes(digest), intents.pop(seq, None))
            for seq, (audit_id, *_) in intents.items():
                self.find("dropped", seq, audit_id, "the index of intents names this row, the chain does not have it")
            if len(batch) < _CHUNK:
                found = db.execute("SELECT seq, hash FROM head").fetchone()
                self._stored_head = Head(found[0], bytes(found[1])) if found else None
                return False
            return True
        finally:
            db.execute("COMMIT")

    def _row(self, db: sqlite3.Connection, seq: int, body: bytes, digest: bytes, intent: list[object] | None) -> None:
        before = self.head
        self._count += 1
        try:
            row = rows.decode(body)
        except (msgspec.MsgspecError, ValueError):
            row = None
        name = row.id if row is not None else ""
        gone = seq - before.seq - 1
        if gone:
            places = f"row {seq - 1} is" if gone == 1 else f"rows {before.seq + 1} to {seq - 1} are"
            self.find("dropped", before.seq + 1, "", f"{places} gone from the chain; row {seq} follows")
        place = self._place(seq, row) if row is not None else None
        if row is None:
            self.find("altered", seq, "", "the stored bytes are no row any more")
            self._flagged = seq
        elif gone:
            self._flagged = seq  # its link needs the row that is gone: nothing can be said about it
        elif link(before.hash, seq, body) != digest:
            self._mismatch(seq, name, place)
        elif place is not None:
            self.find(place, seq, name, "the link fits, its number does not: the chain was written anew from here")
        if self._expect is not None and seq == self._expect.seq and digest != self._expect.hash:
            self.find("altered", seq, name, "the chain does not go through the expected head: it was written anew")
        if row is not None:
            self._indexes(db, seq, row, intent)
        self.head = Head(seq, digest)

    def _place(self, seq: int, row: StoredRow) -> Kind | None:
        """Follow the numbering of the row's source; says what is wrong with its place."""
        source = self._sources.setdefault(row.source, _Source())
        number = row.number
        if number > source.last:
            jumped = number > source.last + 1
            if jumped:
                source.missing.append((source.last + 1, number - 1, seq))
            source.last = number
            return None
        for at, (first, last, place) in enumerate(source.missing):
            if first <= number <= last:
                kept = [(first, number - 1, place), (number + 1, last, place)]
                source.missing[at : at + 1] = [span for span in kept if span[0] <= span[1]]
                return "reordered"
        return "duplicated"

    def _mismatch(self, seq: int, name: str, place: Kind | None) -> None:
        """Name what a wrong link means. Right behind another wrong row it may only be that row's shadow."""
        behind = self._flagged == seq - 1 and self._flagged > 0
        self._flagged = seq
        if place is not None:
            self.find(place, seq, name, f"row {name} stands {'twice' if place == 'duplicated' else 'in another place'}")
        elif behind:
            self._suspects.append((seq, name))
        else:
            self.find("altered", seq, name, f"its bytes, or the link of row {seq - 1}, are not those that were stored")

    def _indexes(self, db: sqlite3.Connection, seq: int, row: StoredRow, intent: list[object] | None) -> None:
        """Compare the unchained indexes with the chained row."""
        claims = row.phase == "intent" and row.effect == "write"
        if intent is None:
            if claims:
                self.find("dropped", seq, row.id, "the index of intents does not have this intent of a write")
        else:
            audit_id, key, grant, state, ended, _, result = intent
            if (audit_id, key, grant, claims) != (row.id, row.idempotency_key, row.grant_id, True):
                self.find("altered", seq, row.id, "the index of intents says something else than the chained row")
            if (ended is None) != (state == "open"):
                self.find("altered", seq, row.id, f"the index says {state!r}, the outcomes do not")
            self._open += state == "open"
            self._unknown += state == "unknown"
            if ended is not None:
                self._outcome(db, seq, row, ended, result)
        if row.phase == "gap":
            source, numbers = str(row.detail.get("source", "")), str(row.detail.get("numbers", ""))
            self._gaps.append(f"{source} {numbers}: {row.detail.get('why', '')}")
            self._sources.setdefault(source, _Source()).stated += _spans(numbers)

    def _outcome(self, db: sqlite3.Connection, seq: int, row: StoredRow, ended: object, result: object) -> None:
        """Check the stored outcome of one intent against the chained row that it names."""
        found = db.execute("SELECT body FROM rows WHERE seq = ?", (ended,)).fetchone()
        try:
            end = rows.decode(bytes(found[0])) if found else None
        except (msgspec.MsgspecError, ValueError):
            return  # found where it stands
        if end is None:
            self.find("dropped", seq, row.id, f"its outcome, row {ended}, is gone from the chain")
            return
        digest = sha256(result).hexdigest() if isinstance(result, bytes) else None
        if end.ref != row.id or end.result_sha256 != digest:
            self.find("altered", seq, row.id, f"its stored outcome is not what row {ended} says")

    def finish(self, db: sqlite3.Connection) -> None:
        """Judge what only the whole chain shows."""
        reordered = any(finding.kind in {"reordered", "duplicated"} for finding in self._findings)
        for seq, name in self._suspects:
            if not reordered:
                self.find("altered", seq, name, "its bytes or its link are not those that were stored")
        if self._stored_head is None or self._stored_head.seq < self.head.seq:
            self.find("altered", self.head.seq, "", "the head record does not name the last row")
        elif self._stored_head.seq > self.head.seq:
            self.find("cut", self.head.seq + 1, "", f"the chain went on to row {self._stored_head.seq}")
        elif self._stored_head != self.head:
            self.find("altered", self.head.seq, "", "the head record has another link than the last row")
        if self._expect is not None and self._expect.seq > self.head.seq:
            self.find("cut", self.head.seq + 1, "", f"the chain went on to the expected row {self._expect.seq}")
        closed: dict[str, int] = dict(db.execute("SELECT id, last FROM sources WHERE last IS NOT NULL").fetchall())
        for name, source in self._sources.items():
            if closed.get(name, 0) > source.last:
                source.missing.append((source.last + 1, closed[name], self.head.seq + 1))
            for first, last, seq in source.missing:
                for number in _unstated(first, last, source.stated):
                    self.find("gap", seq, f"{name}-{number}", "this row was sent and is not here, and nothing says why")

    def find(self, kind: Kind, seq: int, audit_id: str, detail: str) -> None:
        """Note a finding."""
        if len(self._findings) < MAX_FINDINGS:
            self._findings.append(Finding(kind=kind, seq=seq, id=audit_id, detail=detail))

    def report(self) -> Report:
        """Return what was found."""
        return Report(
            rows=self._count,
            head=self.head,
            findings=tuple(sorted(self._findings, key=lambda finding: finding.seq)),
            unknown=self._unknown,
            open=self._open,
            gaps=tuple(self._gaps),
        )


def _spans(numbers: str) -> list[tuple[int, int]]:
    """Read "3-5,9-9,12-" as inclusive ranges."""
    out: list[tuple[int, int]] = []
    for span in numbers.split(","):
        first, dash, last = span.partition("-")
        if dash and first.isdigit() and (last.isdigit() or not last):
            out.append((int(first), int(last) if last else 2**63))
    return out


def _unstated(first: int, last: int, stated: list[tuple[int, int]]) -> list[int]:
    """Return the numbers from `first` to `last` that no statement covers, at most `MAX_FINDINGS` of them."""
    out: list[int] = []
    number = first
    while number <= last and len(out) < MAX_FINDINGS:
        cover = next((end for begin, end in stated if begin <= number <= end), None)
        if cover is None:
            out.append(number)
            number += 1
        else:
            number = cover + 1
    return out


def _after(db: sqlite3.Connection, last: int) -> Iterator[StoredRow]:
    """Yield the rows behind `last` that exist now, each chunk in a snapshot of its own."""
    while batch := db.execute(
        "SELECT seq, body FROM rows WHERE seq > ? ORDER BY seq LIMIT ?", (last, _CHUNK)
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
            yield db
    except sqlite3.Error as error:
        raise ConfigError(
            f"{path} cannot be read ({error})", next_step="read it as its owner, on a disk that is not read-only"
        ) from None
