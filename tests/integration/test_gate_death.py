"""A process dies, a task is cancelled, nothing can start: what the agent learns. Nothing hangs, nothing stays."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import lockgate as lg
from gate_fixtures import gate_scope
from lockgate.audit import reader

LONG = "import time\nwhile True: time.sleep(0.05)"


def within(seconds: float, work: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(seconds):
            return await work

    return asyncio.run(bounded())


def pids(gate: lg.Gate | lg.sync.Gate) -> dict[str, int]:
    children = gate._session._children
    assert children is not None
    return {child.name: child.process.pid for child in children.all}


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def until(ready: Callable[[], bool]) -> None:
    """Wait for what another process does; `within` bounds it."""
    while not ready():  # noqa: ASYNC110 — the event is another process's
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("victim", ["broker", "supervisor"])
def test_a_killed_process_fails_what_needs_it_at_once_and_by_name(gate_config: Path, victim: str):
    async def scene() -> None:
        async with lg.Gate(gate_config) as gate:
            started = pids(gate)
            async with gate.run_scope(gate_scope()) as run:
                waiting = [asyncio.create_task(run.code(LONG)) for _ in range(2)]
                await asyncio.sleep(0.5)
                os.kill(started[victim], signal.SIGKILL)
                began = time.monotonic()
                for task in waiting:
                    with pytest.raises(lg.ProcessDied) as caught:
                        await task
                    assert caught.value.process == victim
                    assert victim in caught.value.message
                    assert caught.value.next_step
                with pytest.raises(lg.ProcessDied):
                    await run.code("1")
                if victim == "broker":
                    with pytest.raises(lg.ProcessDied):
                        await run.call("echo", text="x")
                else:  # the capability half does not need the supervisor
                    assert await run.call("echo", text="x") == {"text": "x"}
                assert time.monotonic() - began < 20
        assert all(gone(pid) for pid in started.values())

    try:
        within(30, scene())
    except lg.ProcessDied:
        assert victim == "broker"  # the run could not be closed, and that is said


def test_a_call_in_flight_when_the_broker_dies_is_unknown_and_not_failed(gate_config: Path):
    """C5: a write may have happened. The next Gate on the same audit file records it as unknown."""

    async def scene() -> None:
        async with lg.Gate(gate_config) as gate:
            run = await gate.run_scope(gate_scope()).__aenter__()
            task = asyncio.create_task(run.call("wait", ms=20_000))
            await until(lambda: any(row.phase == "intent" for row in reader.tail(gate_config.parent / "audit.db")))
            os.kill(pids(gate)["broker"], signal.SIGKILL)
            with pytest.raises(lg.OutcomeUnknown) as caught:
                await task
            assert isinstance(caught.value.__cause__, lg.ProcessDied)
            assert caught.value.operation == "wait"
        async with lg.Gate(gate_config):
            pass  # whoever opens the file next settles what was left open

    within(40, scene())
    report = reader.verify(gate_config.parent / "audit.db")
    assert (report.unknown, report.open, report.findings) == (1, 0, ())


def test_the_death_of_the_audit_writer_stops_writes_and_is_typed(gate_config: Path):
    """C5: no audit, no write."""
    with lg.sync.Gate(gate_config) as gate:
        run = gate.run_scope(gate_scope()).__enter__()
        assert run.call("pay", order="ord_1", amount=1) == {"amount": 1}
        os.kill(pids(gate)["audit writer"], signal.SIGKILL)
        time.sleep(0.2)
        with pytest.raises(lg.LockgateError) as caught:
            run.call("pay", order="ord_2", amount=1)
        assert isinstance(caught.value, lg.CallFailed | lg.Denied | lg.ProcessDied | lg.AuditUnavailable)
        with pytest.raises(lg.LockgateError):
            run.code("1+1")


def test_cancelling_kills_the_run_and_frees_its_slot(gate_config: Path):
    async def scene() -> None:
        async with lg.Gate(gate_config) as gate, gate.run_scope(gate_scope()) as run:
            task = asyncio.create_task(run.code(LONG))
            while (await gate.stats())["runs"] != 1:  # noqa: ASYNC110 — as in `until`
                await asyncio.sleep(0.02)
            began = time.monotonic()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert time.monotonic() - began < 15
            assert (await gate.stats())["runs"] == 0
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await run.code(LONG)
            assert (await gate.stats())["runs"] == 0
            assert (await run.code("1+1")).value == 2

    within(30, scene())


def test_many_runs_at_once_get_their_own_answers(gate_config: Path):
    """X10 and the ticket rule: concurrent runs of one scope never share a ticket or an answer."""

    async def scene() -> None:
        async with lg.Gate(gate_config) as gate, gate.run_scope(gate_scope()) as run:
            codes = [run.code(f"host.call('echo', text='{n}')['text'], {n} * 2") for n in range(12)]
            calls = [run.try_call("echo", text=str(n)) for n in range(6)]
            results = await asyncio.gather(*codes, *calls)
            assert [one.value for one in results[:12]] == [[str(n), n * 2] for n in range(12)]
            assert [one.value for one in results[12:] if one.ok] == [
                {"text": str(n)} for n, one in enumerate(results[12:]) if one.ok
            ]

    within(60, scene())


def test_threads_share_a_blocking_gate(gate: lg.sync.Gate, gate_run: lg.sync.Run):
    """One thread leads and reads for all; each gets its own answer, and its callback runs in a waiting thread."""
    answers: dict[int, Any] = {}

    def work(number: int) -> None:
        answers[number] = gate_run.code(f"import time; time.sleep(0.05); {number}").value

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == {number: number for number in range(6)}


def test_a_gate_opened_in_a_short_lived_thread_outlives_it(gate_config: Path):
    """PR_SET_PDEATHSIG follows the thread that forked; the children must not die with a worker thread."""
    opened: list[lg.sync.Gate] = []

    def work() -> None:
        gate = lg.sync.Gate(gate_config)
        gate.start()
        opened.append(gate)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    (gate,) = opened
    try:
        time.sleep(0.2)
        with gate.run_scope(gate_scope()) as run:
            assert run.call("echo", text="still here") == {"text": "still here"}
    finally:
        gate.close()


def test_approvals_are_asked_and_a_missing_answer_denies(gate_config: Path):
    """C3: a grant is for the exact arguments; a failing callback declines."""
    asked: list[lg.Approval] = []

    async def decide(ask: lg.Approval) -> lg.Decision:
        asked.append(ask)
        await asyncio.sleep(0.01)
        return ask.grant("kim") if ask.arguments["amount"] == 3000 else ask.decline("kim")

    async def scene() -> None:
        async with lg.Gate(gate_config, on_approval=decide) as gate, gate.run_scope(gate_scope()) as run:
            assert await run.call("pay", order="ord_1", amount=3000) == {"amount": 3000}
            with pytest.raises(lg.Denied) as caught:
                await run.call("pay", order="ord_1", amount=4000)
            assert caught.value.reason == "approval_denied"
            inside = await run.code('host.call("pay", order="ord_2", amount=3000)')
            assert inside.value == {"amount": 3000}
        assert [ask.operation for ask in asked] == ["pay"] * 3

    within(30, scene())

    with lg.sync.Gate(gate_config) as gate, gate.run_scope(gate_scope()) as run:
        began = time.monotonic()
        assert run.try_call("pay", order="ord_8", amount=3000).reason == "approval_required"
        assert time.monotonic() - began < 10  # nobody to ask, so nothing to wait for

    def broken(_ask: lg.Approval) -> lg.Decision:
        raise ValueError("sk-synthetic-in-a-callback")

    with lg.sync.Gate(gate_config, on_approval=broken) as gate, gate.run_scope(gate_scope()) as run:
        assert run.try_call("pay", order="ord_9", amount=3000).reason == "approval_denied"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (("gate_test_operations:ops", "missing_module:ops"), lg.ConfigError),
        (("gate_test_operations:ops", "gate_test_operations:Echo"), lg.ConfigError),
        (('path = "audit.db"', 'path = "/proc/audit.db"'), lg.LockgateError),
    ],
)
def test_a_start_that_cannot_be_is_typed_and_leaves_nothing(gate_config: Path, change: tuple[str, str], kind: type):
    gate_config.write_text(gate_config.read_text().replace(*change))
    gate = lg.sync.Gate(gate_config)
    before = set(os.listdir("/proc/self/fd"))
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        gate.start()
    assert time.monotonic() - began < 20
    assert caught.value.next_step
    assert gate._session._children is None
    assert set(os.listdir("/proc/self/fd")) == before


def test_closing_leaves_no_process_and_no_descriptor(gate_config: Path):
    before = len(os.listdir("/proc/self/fd"))
    with lg.sync.Gate(gate_config) as gate, gate.run_scope(gate_scope()) as run:
        run.code("1")
        started = pids(gate)
        began = time.monotonic()
    assert time.monotonic() - began < 20
    assert all(gone(pid) for pid in started.values())
    assert len(os.listdir("/proc/self/fd")) == before
    gate.close()  # idempotent


def test_the_children_die_with_an_agent_that_is_killed(gate_config: Path):
    """They see EOF, and asked the kernel for SIGKILL at their parent's end."""
    program = (
        "import sys, time, lockgate as lg\n"
        f"gate = lg.sync.Gate({str(gate_config)!r}); gate.start()\n"
        "print(*[c.process.pid for c in gate._session._children.all], flush=True)\ntime.sleep(60)\n"
    )
    agent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert agent.stdout is not None
        children = [int(pid) for pid in agent.stdout.readline().split()]
        assert len(children) == 3
        assert not any(gone(pid) for pid in children)
    finally:
        agent.kill()
        agent.wait()
        agent.stdout.close()
    deadline = time.monotonic() + 10
    while not all(gone(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert all(gone(pid) for pid in children)


def test_a_forked_process_cannot_use_its_parent_s_gate(gate: lg.sync.Gate, gate_run: lg.sync.Run):
    """Two processes on one link would take each other's answers."""
    session = gate._session
    own = session._pid
    session._pid = own + 1
    try:
        with pytest.raises(lg.HostFault, match="belongs to the process"):
            gate_run.code("1")
    finally:
        session._pid = own
    assert gate_run.code("1").value == 1


def test_what_children_print_goes_to_the_log_and_never_blocks_them(gate_config: Path, tmp_path: Path):
    operations = gate_config.parent / "gate_test_operations.py"
    operations.write_text(operations.read_text() + "\nprint('loud start' + '.' * 200_000)\n")
    log = tmp_path / "children.log"
    with lg.sync.Gate(gate_config, log=log) as gate, gate.run_scope(gate_scope()) as run:
        assert run.call("echo", text="x") == {"text": "x"}
    assert b"loud start" in log.read_bytes()
    assert log.stat().st_mode & 0o777 == 0o600
