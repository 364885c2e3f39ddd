"""What Atlas may ask for: three operations, each with types. Only the broker imports this file.

Rule 1: the tenant is the run's. No argument names one, and the database is opened so that it can show no other.
Rule 2: a write has an idempotency key, so a repeated request is answered and not repeated.
Rule 3: a refund goes out with a token that was minted for this call; it is good for this order and this amount, once.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import lockgate as lg

ORDERS = Path(__file__).with_name("orders.db")
ops = lg.Operations()


class OrderRef(lg.Args):
    """Names one order."""

    order_id: Annotated[str, lg.Id("ord")]


class Order(lg.Result):
    """An order of this run's tenant. Money is in cents, dates are ISO 8601."""

    id: str
    customer: str
    plan: str
    price: int
    started: str
    cancelled: str | None
    days: int
    note: str


class Found(lg.Result):
    """`order` is None when this tenant has no such order, whoever else may have one."""

    order: Order | None


class RefundArgs(lg.Args):
    """How much of which order."""

    order_id: Annotated[str, lg.Id("ord")]
    amount: lg.Cents


class Refunded(lg.Result):
    """The receipt. The service's answer has more fields; what is not declared here does not leave the broker."""

    id: str
    order_id: str
    amount: int


class NoteArgs(lg.Args):
    """A line for the order's history."""

    order_id: Annotated[str, lg.Id("ord")]
    text: Annotated[str, lg.Text(500)]


class Noted(lg.Result):
    """`saved` is False when this tenant has no such order."""

    saved: bool


@contextmanager
def orders_of(call: lg.Call, *, write: bool = False) -> Iterator[sqlite3.Connection]:
    """Open the orders database for one call, so that statements see one tenant only.

    SQLite has no row-level security, so the connection makes its own: a temporary view holds this tenant's rows, and
    an authorizer refuses each read of `orders` that does not come through that view. Writes go to `notes` alone.
    """
    tenant = call.principal.tenant
    mode = "rw" if write else "ro"
    db = sqlite3.connect(f"{ORDERS.as_uri()}?mode={mode}", uri=True, timeout=call.remaining, isolation_level=None)
    try:
        db.create_function("call_tenant", 0, lambda: tenant, deterministic=True)
        db.execute("CREATE TEMP VIEW mine AS SELECT * FROM main.orders WHERE tenant = call_tenant()")

        def allowed(action: int, table: str | None, _: str | None, __: str | None, view: str | None) -> int:
            seen = action == sqlite3.SQLITE_READ and (table == "mine" or view == "mine")
            noted = write and action == sqlite3.SQLITE_INSERT and table == "notes"
            if seen or noted or action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_FUNCTION):
                return sqlite3.SQLITE_OK
            return sqlite3.SQLITE_DENY

        db.set_authorizer(allowed)
        yield db
    finally:
        db.close()


@ops.operation(effect="read", timeout=2, max_result=4096)
def get_order(call: lg.Call, args: OrderRef) -> Found:
    """Return one order."""
    with orders_of(call) as db:
        row = db.execute(
            "SELECT id, customer, plan, price, started, cancelled, days, note FROM mine WHERE id = ?", (args.order_id,)
        ).fetchone()
    if row is None:
        return Found(order=None)
    keys = ("id", "customer", "plan", "price", "started", "cancelled", "days", "note")
    return Found(order=Order(**dict(zip(keys, row, strict=True))))


@ops.operation(effect="write", idempotency=("order_id", "amount"), timeout=4, max_result=1024)
def refund(call: lg.Call, args: RefundArgs) -> Refunded:
    """Refund a part of an order through the payments service."""
    body = {"order_id": args.order_id, "amount": args.amount}
    answer = call.backend("payments").post("v1", "refunds", json=body, scope=["refund:create"], cap=4096)
    return answer.json(Refunded)


@ops.operation(effect="write", idempotency=("order_id", "text"), timeout=2, max_result=256)
def add_note(call: lg.Call, args: NoteArgs) -> Noted:
    """Add a line to an order's history."""
    with orders_of(call, write=True) as db:
        done = db.execute(
            "INSERT INTO notes(tenant, order_id, text) SELECT call_tenant(), id, ? FROM mine WHERE id = ?",
            (args.text, args.order_id),
        )
    return Noted(saved=done.rowcount == 1)
