"""The shipped conformance suite, on every rung this host can run (X1, X4 to X10, C8)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import lockgate as lg
from gate_fixtures import gate_home, gate_scope
from lockgate.contract.run import Rung
from lockgate.contract.rungs import BUILT
from lockgate.runtimes.conformance import CHECKS, Check, NotConformant, run_suite
from lockgate.supervisor.engine import runtimes
from supervisor_client import descendants

RUNGS = BUILT


class GateSubject:
    """A rung behind the public API."""

    def __init__(self, gate: lg.Gate, run: lg.Run, rung: Rung) -> None:
        self._gate = gate
        self._run = run
        self._rung = rung

    async def code(self, source: str, **bounds: float) -> lg.RunResult:
        return await self._run.code(source, bounds=bounds)

    async def processes(self) -> int:
        for _ in range(100):
            await self._gate.prewarm(2)
            stats = await self._gate.stats()
            if not stats["dying"] and not stats["growing"] and not stats["runs"]:
                break
            await asyncio.sleep(0.05)
        return len(descendants(os.getpid())) - (await self._gate.stats())["warm"]

    async def supervisor_rss(self) -> int:
        return (await self._gate.stats())["rss"]

    def may_fork(self) -> bool:
        if not runtimes()[self._rung].nature.forks:
            return False
        return (
            self._rung != "container" or os.geteuid() == 0
        )  # without a memory cgroup the run is one process (docs/security/limits.md)


@asynccontextmanager
async def subject(home: Path, rung: Rung) -> AsyncIterator[GateSubject]:
    async with lg.Gate(gate_home(home, rung)) as gate, gate.run_scope(gate_scope(echo={})) as run:
        facts = gate.facts["supervisor"]
        if not facts["available"] and os.geteuid() != 0:  # it boots, but a bound of it cannot be held for this user
            pytest.skip(f"the {rung} rung: {facts['error']['message']}")
        yield GateSubject(gate, run, rung)


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.timeout(400)
def test_every_promise_of_a_rung(rung: Rung, tmp_path: Path, rung_or_skip: Callable[[str], None]) -> None:
    rung_or_skip(rung)

    async def main() -> list[tuple[str, str]]:
        async with subject(tmp_path, rung) as one:
            return await run_suite(one)

    assert asyncio.run(main()) == []


class Leaky:
    """A rung that is none: it runs code in this very process. The suite must notice (negative control)."""

    async def code(self, source: str, **bounds: float) -> lg.RunResult:
        if (
            "while True" in source
            or "_exit" in source
            or "fork" in source
            or "sleep" in source
            or "10_000_000" in source
        ):
            return lg.RunResult(run_id="x", rung="container")
        names: dict[str, object] = {}
        lines = source.rsplit("\n", 1)
        try:
            exec("\n".join(lines[:-1]), names)
            value = eval(lines[-1], names)
        except BaseException as error:
            return lg.RunResult(run_id="x", rung="container", exit_code=1, text=str(error))
        return lg.RunResult(run_id="x", rung="container", value=value)

    async def processes(self) -> int:
        return 0

    async def supervisor_rss(self) -> int:
        return 0

    def may_fork(self) -> bool:
        return True


async def _fails(one: Check) -> bool:
    try:
        await one.run(Leaky())
    except NotConformant:
        return True
    except Exception:
        return True
    return False


def test_the_suite_fails_where_there_is_no_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)  # noqa: TID251 - what the leaky control plants is taken away again
    try:
        passed = [one.name for one in CHECKS if not asyncio.run(_fails(one))]
    finally:
        import builtins
        import json
        import sys

        for place in (builtins, sys, json):
            place.__dict__.pop("planted", None)
        os.environ.pop("PLANTED", None)  # noqa: TID251
        assert dict(os.environ) == before  # noqa: TID251
    assert passed in ([], ["two_runs_draw_different_randomness"])
