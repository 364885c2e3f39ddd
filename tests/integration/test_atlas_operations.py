"""Atlas's operations open the database for one tenant: no statement on that connection sees another's rows (C3)."""

from __future__ import annotations

import importlib.util
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from lockgate.broker.call import Call
from lockgate.contract.run import Principal

ATLAS = Path(__file__).parents[2] / "examples" / "atlas"


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    state = tmp_path_factory.mktemp("atlas")
    subprocess.run([sys.executable, ATLAS / "seed.py", state], check=True, timeout=30)
    spec = importlib.util.spec_from_file_location("atlas_operations", state / "operations.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def call(tenant: str) -> Call:
    return Call(
        call_id="c-1",
        operation="get_order",
        principal=Principal(user="u", agent="atlas", tenant=tenant, run="r"),
        deadline=time.monotonic() + 5,
        idempotency_key=None,
        backends={},
        args=None,
    )


def test_each_tenant_sees_its_own_order_and_no_other(operations: ModuleType) -> None:
    for order, owner in (("ord_4417", "acme"), ("ord_9001", "globex")):
        for tenant in ("acme", "globex", "initech"):
            found = operations.get_order(call(tenant), operations.OrderRef(order_id=order)).order
            assert (found is not None) == (tenant == owner)


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize(
    "statement",
    [
        "SELECT * FROM orders",
        "SELECT * FROM main.orders",
        "SELECT count(*), max(note) FROM orders",
        "SELECT m.id FROM mine m JOIN orders o ON o.id = m.id",
        "SELECT id FROM mine WHERE id IN (SELECT id FROM orders)",
        "SELECT * FROM notes",
        "SELECT name FROM sqlite_master",
        "PRAGMA table_info(orders)",
        "ATTACH ':memory:' AS other",
        "CREATE TEMP VIEW theirs AS SELECT * FROM main.orders",
        "DROP VIEW mine",
        "UPDATE orders SET price = 1",
        "DELETE FROM notes",
    ],
)
def test_no_statement_reaches_past_the_view(operations: ModuleType, statement: str, write: bool) -> None:
    with operations.orders_of(call("acme"), write=write) as db, pytest.raises(sqlite3.Error):
        db.execute(statement).fetchall()


def test_the_same_statements_reach_without_the_view(operations: ModuleType) -> None:
    """Negative control: an ordinary connection to the same file sees every tenant."""
    with sqlite3.connect(operations.ORDERS) as db:
        tenants = {row[0] for row in db.execute("SELECT tenant FROM orders")}
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    db.close()
    assert tenants == {"acme", "globex", "initech"}
    with operations.orders_of(call("acme")) as db:
        assert db.execute("SELECT DISTINCT tenant FROM mine").fetchall() == [("acme",)]


def test_a_note_is_written_for_ones_own_order_alone(operations: ModuleType) -> None:
    own = operations.NoteArgs(order_id="ord_4417", text="mine")
    assert operations.add_note(call("acme"), own).saved is True
    assert operations.add_note(call("globex"), own).saved is False
    with sqlite3.connect(operations.ORDERS) as db:
        assert db.execute("SELECT tenant, order_id, text FROM notes").fetchall() == [("acme", "ord_4417", "mine")]
    db.close()
