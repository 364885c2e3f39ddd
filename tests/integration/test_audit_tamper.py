"""C5: `verify` finds an altered, dropped, reordered, duplicated or cut-off row, by doing each to a real file."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from audit_fixtures import AuditLink, audit_intent, audit_row
from lockgate.audit import reader
from lockgate.audit.chain import Head, link
from lockgate.audit.reader import verify
from lockgate.contract.errors import ConfigError

Change = Callable[[sqlite3.Connection], object]
ROWS = 20


@pytest.fixture
def chain(audit_link: Callable[..., AuditLink]) -> tuple[Path, Head, str]:
    """Give a file with 20 rows: 1 to 12 appended, 13 to 20 four writes with their outcomes."""
    gate = audit_link()
    for number in range(12):
        gate.client.append(audit_row(operation="get_order", effect="read", detail={"number": number}))
    for number in range(4):
        intent = gate.client.intent(audit_intent(), f"key-{number}")
        assert isinstance(intent, str)
        gate.client.outcome(audit_row(effect="write", status="ok"), intent, b'{"paid":true}')
    head = gate.client.flush()
    assert gate.close() == 0
    return gate.path, head, gate.client.source


def swap_rows(db: sqlite3.Connection, one: int, two: int) -> None:
    """Exchange two rows with their links."""
    db.execute("UPDATE rows SET seq = -1 WHERE seq = ?", (one,))
    db.execute("UPDATE rows SET seq = ? WHERE seq = ?", (one, two))
    db.execute("UPDATE rows SET seq = ? WHERE seq = -1", (two,))


def swap_bodies(db: sqlite3.Connection, one: int, two: int) -> None:
    """Exchange two bodies and leave the links."""
    bodies = [db.execute("SELECT body FROM rows WHERE seq = ?", (seq,)).fetchone()[0] for seq in (one, two)]
    db.execute("UPDATE rows SET body = ? WHERE seq = ?", (bodies[1], one))
    db.execute("UPDATE rows SET body = ? WHERE seq = ?", (bodies[0], two))


def renumber(db: sqlite3.Connection, first: int, by: int) -> None:
    """Move every row from `first` on."""
    db.execute("UPDATE rows SET seq = -seq - ? WHERE seq >= ?", (by, first))
    db.execute("UPDATE rows SET seq = -seq WHERE seq < 0")


def copy(db: sqlite3.Connection, source: int, target: int) -> None:
    """Put a copy of a row at a place."""
    db.execute("INSERT INTO rows SELECT ?, body, hash FROM rows WHERE seq = ?", (target, source))


def rewrite(db: sqlite3.Connection) -> None:
    """Compute every link anew, and the head record too, as somebody who owns the machine can."""
    head = Head(0, bytes(32))
    for place, (seq, body) in enumerate(db.execute("SELECT seq, body FROM rows ORDER BY seq").fetchall(), 1):
        digest = link(head.hash, place, body)
        db.execute("UPDATE rows SET seq = ?, hash = ? WHERE seq = ?", (place, digest, seq))
        head = Head(place, digest)
    db.execute("UPDATE head SET seq = ?, hash = ?", (head.seq, head.hash))


def alter(db: sqlite3.Connection, seq: int) -> None:
    """Change one value in a row."""
    body = db.execute("SELECT body FROM rows WHERE seq = ?", (seq,)).fetchone()[0]
    assert b'"number":4' in body
    db.execute("UPDATE rows SET body = ? WHERE seq = ?", (body.replace(b'"number":4', b'"number":9'), seq))


def drop_renumbered(db: sqlite3.Connection) -> None:
    db.execute("DELETE FROM rows WHERE seq = 5")
    renumber(db, 6, -1)
    db.execute("UPDATE head SET seq = seq - 1")


def duplicate_inserted(db: sqlite3.Connection) -> None:
    renumber(db, 9, 1)
    copy(db, 5, 9)
    db.execute("UPDATE head SET seq = seq + 1")


def cut(db: sqlite3.Connection) -> None:
    db.execute("DELETE FROM rows WHERE seq > 10")
    db.execute("DELETE FROM intents")
    db.execute("DELETE FROM outcomes")


def found(path: Path, change: Change, expect: Head | None = None) -> list[tuple[str, int, str]]:
    assert verify(path, expect).ok, "negative control: before the change nothing is found"
    db = sqlite3.connect(path)
    with db:
        change(db)
    db.close()
    report = verify(path, expect)
    assert not report.ok
    return [(finding.kind, finding.seq, finding.id) for finding in report.findings]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda db: alter(db, 5), [("altered", 5, 5)]),
        (lambda db: db.execute("UPDATE rows SET body = x'7b7d' WHERE seq = 5"), [("altered", 5, 0), ("altered", 6, 5)]),
        (lambda db: db.execute("UPDATE rows SET hash = zeroblob(32) WHERE seq = 5"), [("altered", 5, 5)]),
        (lambda db: db.execute("DELETE FROM rows WHERE seq = 5"), [("dropped", 5, 0), ("dropped", 6, 5)]),
        (lambda db: db.execute("DELETE FROM rows WHERE seq = 1"), [("dropped", 1, 0), ("dropped", 2, 1)]),
        (drop_renumbered, [("dropped", 5, 6), ("dropped", 5, 5)]),
        (lambda db: swap_rows(db, 4, 9), [("reordered", 4, 9), ("reordered", 9, 4)]),
        (lambda db: swap_rows(db, 4, 5), [("reordered", 4, 5), ("reordered", 5, 4)]),
        (lambda db: swap_bodies(db, 4, 9), [("reordered", 4, 9), ("reordered", 9, 4)]),
        (lambda db: swap_bodies(db, 4, 5), [("reordered", 4, 5), ("reordered", 5, 4)]),
        (duplicate_inserted, [("duplicated", 9, 5)]),
        (lambda db: copy(db, 5, 21), [("duplicated", 21, 5), ("altered", 21, 0)]),
    ],
    ids=[
        "altered", "altered-beyond-reading", "link-altered", "dropped", "first-dropped", "dropped-and-renumbered",
        "rows-exchanged", "neighbours-exchanged", "contents-exchanged", "neighbours-contents-exchanged",
        "copy-inserted", "copy-at-the-end",
    ],
)  # fmt: skip
def test_a_changed_chain_is_found_and_the_row_named(
    chain: tuple[Path, Head, str], change: Change, expected: list[tuple[str, int, int]]
) -> None:
    path, _, source = chain
    names = [(kind, seq, f"{source}-{number}" if number else "") for kind, seq, number in expected]
    rest = found(path, change)
    for name in names:
        assert name in rest
        rest.remove(name)
    # What else is said concerns the intents alone: they moved away from under their index.
    assert all(seq > 11 for _, seq, _ in rest), rest


def test_a_cut_tail_is_found_by_the_head_record_and_names_what_is_gone(chain: tuple[Path, Head, str]) -> None:
    path, _, source = chain
    findings = found(path, cut)
    assert ("cut", 11, "") in findings
    assert {(kind, name) for kind, _, name in findings} >= {("dropped", f"{source}-{n}") for n in range(11, 21)}


def cut_with_head(db: sqlite3.Connection) -> None:
    cut(db)
    db.execute("UPDATE head SET (seq, hash) = (SELECT seq, hash FROM rows WHERE seq = 10)")
    db.execute("UPDATE sources SET last = 10")


def test_a_cut_tail_with_its_head_record_needs_a_head_kept_elsewhere(chain: tuple[Path, Head, str]) -> None:
    path, head, _ = chain
    copied = path.with_name("copy.db")
    shutil.copy(path, copied)
    assert ("cut", 11, "") in found(path, cut_with_head, head)
    db = sqlite3.connect(copied)
    with db:
        cut_with_head(db)
    db.close()
    assert verify(copied).ok, "the limit that the documentation states: a local chain does not find this"


def test_a_chain_written_anew_needs_a_head_kept_elsewhere(chain: tuple[Path, Head, str]) -> None:
    path, head, source = chain

    def change(db: sqlite3.Connection) -> None:
        alter(db, 5)
        rewrite(db)

    assert ("altered", 20, f"{source}-20") in found(path, change, head)
    assert verify(path).ok, "the limit that the documentation states: a local chain does not find this"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda db: (swap_bodies(db, 4, 5), rewrite(db)), ("reordered", 5, 4)),
        (lambda db: (duplicate_inserted(db), rewrite(db)), ("duplicated", 9, 5)),
        (lambda db: (db.execute("DELETE FROM rows WHERE seq = 5"), rewrite(db)), ("gap", 5, 5)),
    ],
    ids=["reordered", "duplicated", "dropped"],
)
def test_numbers_show_even_in_a_chain_written_anew(
    chain: tuple[Path, Head, str], change: Change, expected: tuple[str, int, int]
) -> None:
    path, _, source = chain
    kind, seq, number = expected
    assert (kind, seq, f"{source}-{number}") in found(path, change)


@pytest.mark.parametrize(
    "change",
    [
        lambda db: db.execute("UPDATE outcomes SET result = x'00' WHERE seq = 14"),
        lambda db: db.execute("UPDATE outcomes SET status = 'failed' WHERE seq = 14"),
        lambda db: db.execute("UPDATE intents SET key = 'another' WHERE seq = 13"),
        lambda db: db.execute("UPDATE intents SET state = 'open' WHERE seq = 13"),
        lambda db: db.execute("DELETE FROM intents WHERE seq = 13"),
        lambda db: db.execute("DELETE FROM outcomes WHERE seq = 14"),
    ],
    ids=["result", "status", "key", "state", "intent", "outcome"],
)
def test_a_changed_index_is_found_although_it_is_not_chained(chain: tuple[Path, Head, str], change: Change) -> None:
    """An attacker who frees a used key could make a payment run twice."""
    path, _, source = chain
    assert ("altered", 13, f"{source}-13") in found(path, change)


@pytest.mark.parametrize("place", [0, -1, -(2**62)])
def test_a_row_before_the_first_is_found_and_not_shown(chain: tuple[Path, Head, str], place: int) -> None:
    """C5: whoever may write the file cannot put a row where the chain does not look."""
    path, head, _ = chain
    assert [(kind, seq) for kind, seq, _ in found(path, lambda db: copy(db, 5, place), head)] == [("altered", place)]
    assert [row.seq for row in reader.tail(path, 50)] == list(range(1, ROWS + 1))


def test_an_outcome_of_no_intent_is_found(chain: tuple[Path, Head, str]) -> None:
    path, head, _ = chain
    change = "INSERT INTO outcomes SELECT 'nobody', seq, status, result FROM outcomes LIMIT 1"
    assert [(kind, name) for kind, _, name in found(path, lambda db: db.execute(change), head)] == [
        ("altered", "nobody")
    ]


@pytest.mark.parametrize("name", ["rows", "head", "intents", "outcomes", "sources"])
def test_a_view_in_the_place_of_a_table_is_refused_and_never_read(chain: tuple[Path, Head, str], name: str) -> None:
    """C5: this one would never end."""
    path, head, _ = chain
    assert verify(path, head).ok
    db = sqlite3.connect(path)
    db.executescript(
        f"ALTER TABLE {name} RENAME TO kept; CREATE VIEW {name} AS WITH RECURSIVE c(x) AS"
        " (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x AS seq, x'00' AS body, x'00' AS hash FROM c"
    )
    db.close()
    for read in (lambda: verify(path, head), lambda: list(reader.tail(path, 5)), lambda: list(reader.every(path))):
        with pytest.raises(ConfigError, match="stands for one of its tables"):
            read()


def test_a_damaged_file_is_a_finding_not_a_crash(chain: tuple[Path, Head, str]) -> None:
    path, _, _ = chain
    raw = bytearray(path.read_bytes())
    page = int.from_bytes(raw[16:18], "big")
    for at in range(page, len(raw), page):
        raw[at : at + 64] = b"\xff" * 64
    path.write_bytes(raw)
    assert "unreadable" in {finding.kind for finding in verify(path).findings}


def test_a_reader_changes_nothing(chain: tuple[Path, Head, str]) -> None:
    path, _, _ = chain
    before = path.read_bytes()
    assert len(list(reader.tail(path, 5))) == 5
    assert verify(path).ok
    assert path.read_bytes() == before
    with reader._opened(path) as db, pytest.raises(sqlite3.OperationalError, match="readonly"):
        db.execute("DELETE FROM rows")
