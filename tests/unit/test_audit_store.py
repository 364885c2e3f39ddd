"""The audit file: what it may look like, and what its indexes promise (C5, C3)."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockgate.audit import place, reader, rows
from lockgate.audit.chain import EMPTY, Head
from lockgate.audit.store import Store, ranges
from lockgate.contract.errors import AuditUnavailable, ConfigError

Body = Callable[..., bytes]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    opened = Store(path)
    yield opened
    opened.close()


@pytest.fixture
def body() -> Body:
    numbers = iter(range(1, 1000))

    def make(phase: rows.Phase = "denied", **fields: Any) -> bytes:
        row = rows.Row(**{"phase": phase, "user": "u1", "agent": "a1", "run": "run_1", **fields})
        return rows.stamp(rows.encode(row), f"0123456789ab-{next(numbers)}", 1.0, 2.0)

    return make


def intent(store: Store, body: Body, key: str | None, grant: str | None = None, **fields: Any) -> tuple[str, object]:
    raw = body("intent", effect="write", idempotency_key=key, grant_id=grant, **fields)
    name = rows.decode(raw).id
    return name, store.claim(name, key, grant, raw)


def test_a_new_file_is_private_and_its_directory_too(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = Store(tmp_path / "new" / "audit.db")
    finally:
        os.umask(before)
    with store.transaction(durable=True):
        store.add(b'{"id":"x-1"}')
    modes = {entry.name: entry.stat().st_mode & 0o777 for entry in (tmp_path / "new").iterdir()}
    store.close()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert modes == {"audit.db": 0o600, "audit.db-wal": 0o600, "audit.db-shm": 0o600}


def test_more_than_one_missing_directory_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(AuditUnavailable, match="No such file"):
        Store(tmp_path / "a" / "b" / "audit.db")
    assert not (tmp_path / "a").exists()


def _wide(path: Path) -> None:
    path.touch()
    path.chmod(0o640)


def _link(path: Path) -> None:
    (path.parent / "other").touch(mode=0o600)
    path.symlink_to("other")


def _hard_link(path: Path) -> None:
    (path.parent / "other").touch(mode=0o600)
    path.hardlink_to(path.parent / "other")


def _fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def _text(path: Path) -> None:
    path.touch(mode=0o600)
    path.write_bytes(b"this is no database, but it is long enough to look for a header in it" * 20)


def _other_database(path: Path) -> None:
    path.touch(mode=0o600)
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE orders (id)")
    db.close()


def _open_directory(path: Path) -> None:
    path.parent.chmod(0o707)


@pytest.mark.parametrize(
    "spoil", [_wide, _link, _hard_link, _fifo, _text, _other_database, _open_directory, Path.mkdir]
)
def test_an_unsafe_place_is_refused_with_the_next_step(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    path = tmp_path / "dir" / "audit.db"
    path.parent.mkdir(mode=0o700)
    Store(path).close()  # negative control: the same place is fine before
    path.unlink()
    spoil(path)
    with pytest.raises(AuditUnavailable, match="Next step: "):
        Store(path)


def test_a_second_writer_is_refused(store: Store, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "LOCK_SECONDS", 0.05)
    with pytest.raises(AuditUnavailable, match="another gate"):
        Store(path)
    store.close()
    Store(path).close()


def test_a_transaction_is_whole_or_nothing(store: Store, path: Path, body: Body) -> None:
    with store.transaction(durable=True):
        store.add(body())
    head = store.head
    with pytest.raises(RuntimeError), store.transaction(durable=True):  # noqa: PT012 - a crash in the middle
        store.add(body())
        intent(store, body, "key-1")
        raise RuntimeError("in the middle")
    assert store.head == head
    with store.transaction(durable=False):
        assert store.held("key", "key-1") is None
        store.add(body())
    assert store.head.seq == 2
    assert [row.number for row in reader.tail(path)] == [1, 4]


def test_one_live_intent_a_key_and_one_intent_ever_a_grant(store: Store, body: Body) -> None:
    with store.transaction(durable=True):
        first, taken = intent(store, body, "key-1", "grant-1", args_hash="aa")
        assert taken is None
        _, by_key = intent(store, body, "key-1", "grant-2", args_hash="bb")
        assert by_key == store.held("key", "key-1")
        assert by_key == place_of(by_key, state="open", by="key", intent_id=first, run="run_1", args_hash="aa")
        _, by_grant = intent(store, body, "key-2", "grant-1")
        assert by_grant == place_of(by_grant, state="open", by="grant", intent_id=first)
        assert store.settle(first, "released", "failed", None, body("outcome", ref=first, status="failed")) is None
        second, taken = intent(store, body, "key-1", None)
        assert taken is None, "a released key is free again"
        _, by_grant = intent(store, body, "key-3", "grant-1")
        assert by_grant == place_of(by_grant, state="released", by="grant"), "a grant is never free again"
        done = body("outcome", ref=second, status="ok")
        assert store.settle(second, "done", "ok", b"[1]", done) is None
        assert store.settle(second, "done", "ok", b"[2]", body("outcome", ref=second)) == "done"
        assert store.settle("nobody-1", "done", "ok", None, body("outcome", ref="nobody-1")) == "released"
        held = store.held("key", "key-1")
        assert held == place_of(held, state="done", intent_id=second, status="ok", result=b"[1]")


def place_of(found: Any, **expected: object) -> Any:
    """Return `found` when it has the expected attributes, else something that is not equal to it."""
    got = {name: getattr(found, name) for name in expected}
    return found if got == expected else got


def test_calls_without_key_and_grant_never_collide(store: Store, body: Body) -> None:
    with store.transaction(durable=True):
        assert [intent(store, body, None)[1] for _ in range(3)] == [None, None, None]
        assert len(store.open_intents()) == 3


def test_an_unknown_outcome_can_still_be_learnt_but_keeps_its_key(store: Store, body: Body) -> None:
    with store.transaction(durable=True):
        name, _ = intent(store, body, "key-1")
        store.settle(name, "unknown", "unknown", None, body("unknown", ref=name))
        assert store.open_intents() == []
        assert place_of(store.held("key", "key-1"), state="unknown") == store.held("key", "key-1")
        assert store.settle(name, "done", "ok", b"1", body("outcome", ref=name, status="ok")) is None
        assert place_of(store.held("key", "key-1"), state="done", result=b"1") == store.held("key", "key-1")


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_file_that_went_away_takes_no_more_rows(store: Store, path: Path, body: Body, how: str) -> None:
    with store.transaction(durable=True):
        store.add(body())
    path.rename(path.with_name("elsewhere.db"))
    if how == "replaced":
        path.touch(mode=0o600)
    with pytest.raises(AuditUnavailable, match=how), store.transaction(durable=False):
        store.add(body())
    assert store.head.seq == 1


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM rows WHERE seq = 3",
        "UPDATE head SET seq = 2",
        "UPDATE rows SET body = CAST('{}' AS BLOB) WHERE seq = 3",
        "DELETE FROM head",
        "UPDATE rows SET hash = zeroblob(32) WHERE seq = 3",
    ],
)
def test_a_chain_with_a_changed_end_is_not_written_on(store: Store, path: Path, body: Body, change: str) -> None:
    for _ in range(3):
        with store.transaction(durable=False):
            store.add(body())
    store.close()
    Store(path).close()  # negative control
    with sqlite3.connect(path) as db:
        db.execute(change)
    db.close()
    with pytest.raises(AuditUnavailable, match="changed or cut"):
        Store(path)


def test_a_row_slipped_in_beside_the_writer_is_a_conflict(store: Store, path: Path, body: Body) -> None:
    with store.transaction(durable=True):
        store.add(body())
    with sqlite3.connect(path) as db:
        db.execute("INSERT INTO rows VALUES (2, ?, zeroblob(32))", (body(),))
    db.close()
    with pytest.raises(AuditUnavailable, match="another program"), store.transaction(durable=True):
        store.add(body())


def test_a_locked_file_is_a_typed_error(store: Store, path: Path, body: Body) -> None:
    store._db.execute("PRAGMA busy_timeout=50")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(AuditUnavailable, match="locked"), store.transaction(durable=True):
        store.add(body())
    other.close()
    with store.transaction(durable=True):
        store.add(body())


def test_the_view_for_people_shows_who_did_what(store: Store, path: Path, body: Body) -> None:
    with store.transaction(durable=True):
        store.add(body("denied", operation="refund", verdict="deny", rule="refund.amount.at_most", tenant="t1"))
    with sqlite3.connect(path) as db:
        shown = db.execute("SELECT user, agent, run, tenant, operation, verdict, rule, phase FROM audit").fetchall()
    db.close()
    assert shown == [("u1", "a1", "run_1", "t1", "refund", "deny", "refund.amount.at_most", "denied")]


def test_an_empty_chain_is_whole(store: Store, path: Path) -> None:
    assert store.head == EMPTY
    report = reader.verify(path)
    assert (report.ok, report.rows, report.head) == (True, 0, EMPTY)
    assert list(reader.tail(path)) == []
    assert [f.kind for f in reader.verify(path, Head(3, b"x" * 32)).findings] == ["cut"]


def test_reading_what_is_no_audit_file_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no audit file"):
        reader.verify(tmp_path / "absent.db")
    for spoil in (_text, _other_database):
        path = tmp_path / spoil.__name__
        spoil(path)
        with pytest.raises(ConfigError, match="Next step: "):
            list(reader.tail(path))


def test_ranges() -> None:
    assert ranges([]) == []
    assert ranges([3, 4, 5, 9, 11, 12]) == [(3, 5), (9, 9), (11, 12)]
