"""Tickets and runs: one use, one run, a short time (C3)."""

from __future__ import annotations

import time
from typing import Annotated

import pytest

from lockgate.audit.rows import argument_hash
from lockgate.broker.hash_key import ArgumentHash
from lockgate.broker.runs import MAX_TICKETS, Run, Runs, UnknownRun
from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import HostFault, ScopeError
from lockgate.policy import Args, Ledger, Operations, Result, Scope, Text


class Say(Args):
    text: Annotated[str, Text(10)]


class Said(Result):
    text: str


ops = Operations()


@ops.operation(effect="read", max_result=100)
def say(call: object, args: Say) -> Said:
    return Said(text=args.text)


ops.seal()


def make(runs: Runs, parent: Run | None = None, **bounds: float) -> Run:
    scope = Scope(user="u1", agent="a1", tenant="t1", expires=60, allow={"say": {}}).compile(ops, time.monotonic())
    run = Run(scope, bounds=Bounds().narrow(**bounds), ledger=Ledger(), parent=parent)
    runs.add(run)
    return run


def test_a_ticket_works_once() -> None:
    runs = Runs()
    run = make(runs)
    ticket = runs.ticket(run)
    found = runs.redeem(ticket.value)
    assert found is ticket
    assert found.run is run
    assert runs.redeem(ticket.value) is None


@pytest.mark.parametrize("forged", ["", "x", "0" * 48])
def test_a_forged_ticket_is_worth_nothing(forged: str) -> None:
    runs = Runs()
    runs.ticket(make(runs))
    assert runs.redeem(forged) is None


def test_a_ticket_grows_old() -> None:
    runs = Runs(ticket_seconds=0.05)
    ticket = runs.ticket(make(runs))
    time.sleep(0.06)
    assert runs.redeem(ticket.value) is None


def test_tickets_cannot_be_guessed_from_another() -> None:
    runs = Runs()
    run = make(runs)
    values = {runs.ticket(run).value for _ in range(100)}
    assert len(values) == 100
    assert all(len(value) == 48 for value in values)


def test_a_closed_run_takes_its_tickets_and_children_along() -> None:
    runs = Runs()
    parent = make(runs)
    child = make(runs, parent)
    grandchild = make(runs, child)
    tickets = [runs.ticket(run) for run in (parent, child, grandchild)]
    other = make(runs)
    kept = runs.ticket(other)
    assert {run.id for run in runs.close(parent)} == {parent.id, child.id, grandchild.id}
    assert [runs.redeem(ticket.value) for ticket in tickets] == [None] * 3
    assert runs.redeem(kept.value) is kept
    with pytest.raises(UnknownRun):
        runs.get(child.id)
    with pytest.raises(UnknownRun):
        runs.ticket(parent)
    with pytest.raises(UnknownRun):
        make(runs, parent)
    assert runs.close(parent) == []


def test_bounds_of_a_ticket_can_only_be_narrower() -> None:
    runs = Runs()
    run = make(runs, calls=10)
    assert runs.ticket(run, Bounds(calls=5)).bounds.calls == 5
    with pytest.raises(ScopeError, match="calls is wider"):
        runs.ticket(run, Bounds(calls=11))


def test_unused_tickets_do_not_pile_up() -> None:
    runs = Runs()
    run = make(runs)
    for _ in range(MAX_TICKETS):
        runs.ticket(run)
    with pytest.raises(HostFault, match="unused"):
        runs.ticket(run)
    runs.ticket(make(runs))  # another run is not in its way


def test_calls_in_flight_are_counted() -> None:
    run = make(Runs(), calls_in_flight=2)
    assert [run.enter() for _ in range(3)] == [True, True, False]
    run.leave()
    assert run.enter()


def test_the_prepared_argument_hash_is_the_audit_logs_own() -> None:
    key = bytes(range(32))
    for operation, canonical in (("get_order", b'{"order_id":"ord_1"}'), ("r", b""), ("x" * 200, b"y" * 5000)):
        assert ArgumentHash(key)(operation, canonical) == argument_hash(key, operation, canonical)
    with pytest.raises(ValueError, match="longer than a block"):
        ArgumentHash(bytes(65))
