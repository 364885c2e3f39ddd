"""One pass over a chain: links, numbering, indexes, end.

Rule 1: a row whose link fits its predecessor is as it was stored, unless everything from some row on was written anew;
        numbering, the head record and an expected head are there for that.
Rule 2: one change is one finding. A wrong link shows at the changed row, and sometimes once more at the row behind;
        what cannot be told apart is said together, never hidden.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from hashlib import sha256
from typing import Final, Literal

import msgspec

from lockgate.audit import rows
from lockgate.audit.chain import EMPTY, Head, link
from lockgate.audit.rows import StoredRow

CHUNK: Final = 4096
MAX_FINDINGS: Final = 1000

Kind = Literal["altered", "dropped", "reordered", "duplicated", "cut", "gap", "unreadable"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is not as it was written.

    Attributes:
        kind: "altered" = bytes, link or index changed; "dropped" = a row is gone; "reordered" = it stood elsewhere;
            "duplicated" = it stands twice; "cut" = the end is gone; "gap" = a row was lost before it was stored;
            "unreadable" = the file is damaged.
        seq: the place in the chain where it shows.
        id: audit id of the row that it is about, "" when it cannot be told.
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


class _Wrong:
    """A row with a wrong link, until the next good row of its source shows where it should have stood."""

    __slots__ = ("high", "low", "row", "seq", "source")

    def __init__(self, seq: int, row: StoredRow | None, source: _Source | None) -> None:
        self.seq = seq
        self.row = row
        self.source = source
        self.low = source.good if source is not None else 0
        self.high = 0  # none seen

    @property
    def misplaced(self) -> bool:
        """Whether its number lies outside those of the good rows around it."""
        number = self.row.number if self.row is not None else 0
        return self.row is not None and (number <= self.low or 0 < self.high <= number)


class _Source:
    """What was seen of the numbers of one source."""

    __slots__ = ("good", "last", "missing", "name", "place", "stated", "twice", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.last = 0  # highest number seen
        self.place = 0  # where the last row stood
        self.good = 0  # highest number among rows with a good link
        self.missing: list[tuple[int, int, int, int]] = []  # first, last; between which two places
        self.stated: list[tuple[int, int]] = []
        self.twice: set[int] = set()
        self.waiting: list[_Wrong] = []

    def see(self, number: int, seq: int) -> None:
        """Take one number, in whatever order they come."""
        if number > self.last:
            if number > self.last + 1:
                self.missing.append((self.last + 1, number - 1, self.place, seq))
            self.last = number
        else:
            for at, (first, last, begin, end) in enumerate(self.missing):
                if first <= number <= last:
                    halves = ((first, number - 1, begin, end), (number + 1, last, begin, end))
                    self.missing[at : at + 1] = [half for half in halves if half[0] <= half[1]]
                    break
            else:
                self.twice.add(number)
        self.place = seq


class Check:
    """Feeds on an open database, chunk by chunk, and yields a `Report`.

    Args:
        expect: a head that was kept elsewhere, or None.

    """

    def __init__(self, expect: Head | None) -> None:
        self._expect = expect
        self._head = EMPTY
        self._stored_head: Head | None = None
        self._count = 0
        self._findings: list[Finding] = []
        self._sources: dict[str, _Source] = {}
        self._holes: list[tuple[int, int]] = []
        self._wrong: list[_Wrong] = []
        self._unknown = 0
        self._open = 0
        self._gaps: list[str] = []

    def run(self, db: sqlite3.Connection) -> Report:
        """Check everything; a damaged file ends the pass with a finding."""
        try:
            while self._chunk(db):
                pass
            self._finish(db)
        except sqlite3.DatabaseError as error:
            place = self._head.seq + 1
            self._find("unreadable", place, "", f"the file is damaged where this row should be ({error})")
        return Report(
            rows=self._count,
            head=self._head,
            findings=tuple(sorted(self._findings, key=lambda finding: finding.seq)),
            unknown=self._unknown,
            open=self._open,
            gaps=tuple(self._gaps),
        )

    def _chunk(self, db: sqlite3.Connection) -> bool:
        """Check the next rows in one snapshot; False when that was the end."""
        db.execute("BEGIN")
        try:
            after = self._head.seq
            batch = db.execute(
                "SELECT seq, body, hash FROM rows WHERE seq > ? ORDER BY seq LIMIT ?", (after, CHUNK)
            ).fetchall()
            ended = len(batch) < CHUNK
            upto = 2**62 if ended else batch[-1][0]
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
                self._find("dropped", seq, str(audit_id), "the index of intents has this row, the chain does not")
            if ended:
                found = db.execute("SELECT seq, hash FROM head").fetchone()
                self._stored_head = Head(found[0], bytes(found[1])) if found else None
            return not ended
        finally:
            db.execute("COMMIT")

    def _row(self, db: sqlite3.Connection, seq: int, body: bytes, digest: bytes, intent: list[object] | None) -> None:
        before = self._head
        self._head = Head(seq, digest)
        self._count += 1
        try:
            row = rows.decode(body)
        except ValueError:  # msgspec's errors are ValueErrors
            row = None
        source = None
        if row is not None:
            source = self._sources.get(row.source) or self._sources.setdefault(row.source, _Source(row.source))
            source.see(row.number, seq)
        if seq != before.seq + 1:
            gone = "this row is" if seq == before.seq + 2 else f"{seq - before.seq - 1} rows from here are"
            self._holes.append((before.seq + 1, seq - 1))
            detail = f"{gone} gone from the chain; row {seq} behind cannot be checked because of it"
            self._find("dropped", before.seq + 1, "", detail)
            # The link of this row needs the one that is gone: nothing can be said about it.
        elif link(before.hash, seq, body) != digest:
            wrong = _Wrong(seq, row, source)
            self._wrong.append(wrong)
            if source is not None:
                source.waiting.append(wrong)
        elif row is None:
            self._find("altered", seq, "", "the stored bytes are no row")
        elif source is not None:
            self._good(seq, row, source)
        if self._expect is not None and seq == self._expect.seq and digest != self._expect.hash:
            name = row.id if row is not None else ""
            self._find("altered", seq, name, "the chain does not go through the expected head: it was written anew")
        if row is not None:
            self._indexes(db, seq, row, intent)

    def _good(self, seq: int, row: StoredRow, source: _Source) -> None:
        """A row with a good link: its number must be higher than all good ones before."""
        number = row.number
        if number <= source.good:
            kind: Kind = "duplicated" if number in source.twice else "reordered"
            self._find(kind, seq, row.id, "its link fits, its number does not: the chain was written anew from here")
            return
        source.good = number
        for wrong in source.waiting:
            wrong.high = number
        source.waiting.clear()

    def _indexes(self, db: sqlite3.Connection, seq: int, row: StoredRow, intent: list[object] | None) -> None:
        """Compare the indexes, which are not chained, with the chained row."""
        claims = row.phase == "intent" and row.effect == "write"
        if intent is not None:
            audit_id, key, grant, state, ended, status, result = intent
            if (audit_id, key, grant, "intent") != (row.id, row.idempotency_key, row.grant_id, row.phase):
                self._find("altered", seq, row.id, "the index of intents says something else than the chained row")
            if (ended is None) != (state == "open"):
                self._find("altered", seq, row.id, f"the index says that this intent is {state}, its outcome does not")
            self._open += state == "open"
            self._unknown += state == "unknown"
            if ended is not None:
                self._outcome(db, row, seq, (ended, status, result))
        elif claims:
            self._find("altered", seq, row.id, "the index of intents does not have this intent of a write")
        if row.phase == "gap":
            name, numbers = str(row.detail.get("source", "")), str(row.detail.get("numbers", ""))
            self._gaps.append(f"{name} {numbers}: {row.detail.get('why', '')}")
            source = self._sources.get(name) or self._sources.setdefault(name, _Source(name))
            source.stated += _spans(numbers)

    def _outcome(self, db: sqlite3.Connection, row: StoredRow, seq: int, stored: tuple[object, object, object]) -> None:
        """Check the stored outcome of one intent against the chained row that it names."""
        ended, status, result = stored
        found = db.execute("SELECT body FROM rows WHERE seq = ?", (ended,)).fetchone()
        if found is None:
            self._find("dropped", seq, row.id, f"its outcome, row {ended}, is gone from the chain")
            return
        try:
            end = rows.decode(bytes(found[0]))
        except ValueError:
            return  # found where it stands
        digest = sha256(result).hexdigest() if isinstance(result, bytes) else None
        said = "unknown" if end.phase == "unknown" else end.status
        if (end.ref, end.result_sha256, said) != (row.id, digest, status):
            self._find("altered", seq, row.id, f"its stored outcome is not what row {ended} says")

    def _finish(self, db: sqlite3.Connection) -> None:
        """Judge what only the whole chain shows."""
        self._judge_wrong()
        for seq, _ in db.execute("SELECT seq, 0 FROM rows WHERE seq < 1 ORDER BY seq LIMIT ?", (MAX_FINDINGS,)):
            self._find("altered", seq, "", "a row stands before the first place of the chain, where none is written")
        orphans = "SELECT intent FROM outcomes WHERE intent NOT IN (SELECT id FROM intents) LIMIT ?"
        for (name,) in db.execute(orphans, (MAX_FINDINGS,)):
            self._find("altered", self._head.seq, str(name), "an outcome is stored for an intent that is not there")
        end, told, expect = self._head, self._stored_head, self._expect
        if told is None or told.seq < end.seq:
            self._find("altered", end.seq, "", "the head record does not name the last row")
        elif told.seq > end.seq:
            self._find("cut", end.seq + 1, "", f"the chain went on to row {told.seq}")
        elif told != end:
            self._find("altered", end.seq, "", "the head record has another link than the last row")
        if expect is not None and expect.seq > end.seq and (told is None or expect.seq > told.seq):
            self._find("cut", end.seq + 1, "", f"the chain went on to row {expect.seq}, which was expected")
        for name, last in db.execute("SELECT id, last FROM sources WHERE last IS NOT NULL").fetchall():
            source = self._sources.get(name) or self._sources.setdefault(name, _Source(name))
            if last > source.last:
                source.missing.append((source.last + 1, last, source.place, end.seq + 1))
        holes = [*self._holes, *((wrong.seq, wrong.seq) for wrong in self._wrong if wrong.row is not None)]
        if told is not None and told.seq > end.seq:
            holes.append((end.seq + 1, told.seq))
        unreadable = [wrong.seq for wrong in self._wrong if wrong.row is None]
        for source in self._sources.values():
            for first, last, begin, place in source.missing:
                kind: Kind = "gap"
                detail = "this row was sent, is not here, and nothing says why"
                if any(at <= place and upto > begin for at, upto in holes):
                    kind, detail = "dropped", "this row is gone"
                elif any(begin < at <= place for at in unreadable):
                    kind, detail = "altered", "this row was there; its bytes are no row any more"
                for number in _unstated(first, last, source.stated):
                    self._find(kind, place, f"{source.name}-{number}", detail)

    def _judge_wrong(self) -> None:
        """Name what the wrong links mean, one run of neighbouring rows after the other."""
        run: list[_Wrong] = []
        for wrong in self._wrong:
            if run and wrong.seq != run[-1].seq + 1:
                self._judge_run(run)
                run = []
            run.append(wrong)
        if run:
            self._judge_run(run)

    def _judge_run(self, run: list[_Wrong]) -> None:
        """Name the rows of one run. Those that fit where they stand may be unchanged: they share a finding."""
        moved = {wrong.seq for wrong in run if wrong.misplaced} | _inverted([w for w in run if not w.misplaced])
        named: list[Finding] = []
        behind = 0
        for wrong in run:
            kind: Kind = "altered"
            name, detail = "", "the stored bytes are no row"
            if wrong.row is not None and wrong.source is not None:
                name = wrong.row.id
                if wrong.row.number in wrong.source.twice:
                    kind, detail = "duplicated", "this row stands twice, here in a place that is not its own"
                elif wrong.seq in moved:
                    kind, detail = "reordered", "this row was moved to this place"
                elif named:
                    behind = wrong.seq
                    continue
                elif any(end == wrong.seq for _, _, _, end in wrong.source.missing):
                    kind, detail = "dropped", "what stood before this row is gone, and the rest was numbered anew"
                else:
                    detail = f"its bytes, or the link of row {wrong.seq - 1}, were changed"
            named.append(Finding(kind=kind, seq=wrong.seq, id=name, detail=detail))
        for at, finding in enumerate(named):
            last = at == len(named) - 1 and behind
            tail = f"; other rows from here to {behind} cannot be checked because of it" if last else ""
            self._find(finding.kind, finding.seq, finding.id, finding.detail + tail)

    def _find(self, kind: Kind, seq: int, audit_id: str, detail: str) -> None:
        if len(self._findings) < MAX_FINDINGS:
            self._findings.append(Finding(kind=kind, seq=seq, id=audit_id, detail=detail))


def _inverted(run: list[_Wrong]) -> set[int]:
    """Return the places of rows that stand before a lower or behind a higher number of their own source."""
    out: set[int] = set()
    for order in (1, -1):
        best: dict[int, int] = {}
        for wrong in run[::order]:
            if wrong.row is not None:
                number, source = order * wrong.row.number, id(wrong.source)
                if number < best.get(source, number):
                    out.add(wrong.seq)
                best[source] = max(number, best.get(source, number))
    return out


def _spans(numbers: str) -> Iterator[tuple[int, int]]:
    """Read "3-5,9-9,12-" as inclusive ranges."""
    for span in numbers.split(","):
        first, dash, last = span.partition("-")
        if dash and first.isdigit() and (last.isdigit() or not last):
            yield int(first), int(last) if last else 2**63


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
