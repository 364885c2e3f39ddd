"""The public spelling, as people write it. Both type checkers must take it and know the types it gives.

`assert_type` fails in a checker; the lines marked as wrong must be wrong (an unused ignore fails the check).
"""

from __future__ import annotations

from typing import Annotated, Literal, assert_type

import lockgate as lg
from lockgate.contract.reasons import Reason
from lockgate.policy import Call as CallProtocol

ops = lg.Operations()
OrderId = Annotated[str, lg.Id("ord")]


class RefundArgs(lg.Args):
    """An argument of every kind."""

    order_id: OrderId
    amount: lg.Cents
    reason: Literal["damaged", "late"]
    count: Annotated[int, lg.Int(1, 10)] = 1
    note: Annotated[str, lg.Text(200)] | None = None
    items: Annotated[list[OrderId], lg.ListOf(20)] | None = None
    callback: Annotated[str, lg.Url("https://hooks.example/T1/*")] | None = None
    report_path: Annotated[str, lg.PathBeneath("reports")] | None = None


class Receipt(lg.Result):
    """A result."""

    id: str
    amount: int


@ops.operation(effect="write", idempotency=("order_id", "amount"), timeout=5, max_result=16_384)
async def refund(call: lg.Call, args: RefundArgs) -> Receipt:
    """Refund a part of an order."""
    assert_type(args.order_id, str)
    assert_type(args.amount, int)
    assert_type(args.reason, Literal["damaged", "late"])
    assert_type(args.note, str | None)
    assert_type(args.items, list[str] | None)
    token = await call.mint("payments", scope=["refund:create"])
    with token.use() as secret:
        assert_type(secret, str)
    assert_type(call.principal.tenant, str)
    return Receipt(id=args.order_id, amount=args.amount)


@ops.operation(effect="read", max_result=1024, labels=("private",))
def lookup(call: lg.Call, args: RefundArgs) -> Receipt:
    """Show that a plain function keeps its type."""
    return Receipt(id=call.id, amount=args.amount)


def as_protocol(call: lg.Call) -> CallProtocol:
    """Show that the broker's call is what the policy package promises."""
    return call


def frozen(args: RefundArgs, receipt: Receipt) -> None:
    """Nothing of a typed object changes."""
    args.amount = 5  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    receipt.amount = 5  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]


def by_keyword() -> RefundArgs:
    """Arguments are made by keyword, plain values do."""
    RefundArgs("ord_1", 5, "late")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    return RefundArgs(order_id="ord_1", amount=5, reason="late")


def wrong_kinds() -> None:
    """A kind is called with what it takes."""
    lg.Id(5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    lg.Int(1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    lg.one_of(1.5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


scope = lg.Scope(
    user="u1",
    agent="support",
    tenant="t1",
    expires=lg.minutes(10),
    allow={
        "lookup": {},
        "refund": lg.where(
            order_id=lg.one_of("ord_4417"),
            amount=[lg.at_most(50_00), lg.at_least(1)],
            budget=lg.budget(calls=3, total={"amount": 100_00}),
            approve=lg.when(amount=lg.more_than(20_00)),
        ),
    },
    deny=["other"],
)
child = scope.narrow(allow={"refund": lg.where(amount=lg.at_most(5_00))}, deny={"lookup": lg.when()}, expires=60)
assert_type(child, lg.Scope)
compiled = scope.compile(ops, 0.0)
assert_type(compiled.hash, str)
reason: Reason = "expired"
