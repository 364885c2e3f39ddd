"""Checked by the type checkers, never run. A line that ends in `# error` must be refused by them, and no other."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Any, assert_type

import lockgate as lg

scope = lg.Scope(
    user="u",
    agent="a",
    tenant="t",
    expires=lg.minutes(10),
    allow={"refund": lg.where(amount=lg.at_most(50_00), budget=lg.budget(calls=3))},
)


async def ask(question: lg.Approval) -> lg.Decision:
    assert_type(question.arguments, Any)
    return question.decline("kim")


async def asynchronous() -> None:
    async with lg.Gate("lockgate.toml", on_approval=ask) as gate:
        assert_type(gate, lg.Gate)
        async with gate.run_scope(scope) as run:
            assert_type(run, lg.Run)
            result = await run.code("1", timeout=5, bounds={"memory": 1024}, on_stdout=print, export_to=Path())
            assert_type(result, lg.RunResult)
            assert_type(result.denials, tuple[lg.CallRecord, ...])
            assert_type(await run.call("refund", amount=1), Any)
            assert_type(await run.try_call("refund", amount=1), lg.CallOutcome)
            assert_type(await gate.operations(), list[dict[str, Any]])
            async with run.narrow(allow={}) as child:
                assert_type(child, lg.Run)
            await run.code(3)  # error
            await run.code("1", no_such_option=1)  # error
    print(lg.no_such_name)  # error
    with gate.run_scope(scope):  # error
        pass


def blocking() -> None:
    with lg.sync.Gate({"execution": {"pool": 1}}) as gate, gate.run_scope(scope) as run:
        assert_type(run, lg.sync.Run)
        assert_type(run.code(b"1"), lg.RunResult)
        assert_type(run.try_call("refund"), lg.CallOutcome)
        assert not isinstance(run.code("1"), Awaitable)


def later(question: lg.Approval) -> bool:
    return bool(question.operation)


lg.Gate(on_approval=later)  # error
