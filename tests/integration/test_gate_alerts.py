"""Denials of a Gate's runs reach the operator's sinks (E4)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lockgate as lg
from alerts_receiver import Receiver, alerts_config, until, webhook_sink
from gate_fixtures import CONFIG, gate_home, gate_scope
from lockgate.audit import reader


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def home(tmp_path: Path, receiver: Receiver, **options: Any) -> Path:
    """A deployment whose denials are told to `receiver`."""
    gate_home(tmp_path)
    alerts = alerts_config(tmp_path, webhook_sink(receiver, every=True), **options).read_text()
    path = tmp_path / "lockgate.toml"
    path.write_text(CONFIG + alerts.replace('[audit]\npath = "audit.db"\n', ""))
    return path


def reasons(found: list[Any]) -> set[tuple[str, str]]:
    return {(one.json["event"]["kind"], one.json["event"]["reason"]) for one in found}


def test_every_path_that_denies_is_told(tmp_path: Path, receiver: Receiver) -> None:
    """E4, X5, X7: broker, code, export, kill, render, rung; each with its audit row, critical ones marked."""
    with lg.sync.Gate(home(tmp_path, receiver, escalate=3)) as gate, gate.run_scope(gate_scope()) as run:
        assert run.try_call("nothing_like_it").reason == "not_available"
        assert run.try_call("pay", order="ord_1", amount=200_00).reason == "argument_not_allowed"
        run.code('import host\ntry:\n    host.export("../x", b"1")\nexcept host.Denied:\n    pass')
        assert run.code("while True: pass", timeout=0.5).killed_by == "wall"
        gate.render.markdown("![x](https://evil.test/?s=1)", run=run)
        with pytest.raises(lg.CannotIsolate):
            run.code("1", accept_shared_kernel=False)
        found = receiver.wait(
            lambda found: (
                reasons(found)
                >= {
                    ("operation", "not_available"),
                    ("operation", "argument_not_allowed"),
                    ("export", "argument_not_allowed"),
                    ("run", "killed_wall"),
                    ("render", "url_not_allowed"),
                    ("rung", "shared_kernel"),
                    ("finding", "escalation"),
                }
            )
        )
        assert {one.json["event"]["run"] for one in found} == {run.id}
        rows = {row.id for row in reader.tail(tmp_path / "audit.db", 1000)}
        assert {one.json["event"]["audit_id"] for one in found} <= rows
    escalation = next(one.json for one in found if one.json["why"] == "escalation")
    assert escalation["severity"] == "critical"
    assert escalation["ocsf"]["class_uid"] == 2004


def test_a_broken_protocol_is_critical(tmp_path: Path, receiver: Receiver) -> None:
    """C8: bytes that are no request kill the run and are told at once."""
    with lg.sync.Gate(home(tmp_path, receiver)) as gate, gate.run_scope(gate_scope()) as run:
        run.code("import os, time\nos.write(3, b'\\0\\0\\0\\0')\ntime.sleep(10)")
        found = receiver.wait(lambda found: ("finding", "protocol_violation") in reasons(found))
    told = next(one.json for one in found if one.json["event"]["reason"] == "protocol_violation")
    assert told["severity"] == "critical"


def test_an_alerter_that_was_killed_is_replaced_and_nothing_is_lost(tmp_path: Path, receiver: Receiver) -> None:
    """E4: kill -9 of the alerter; the Gate goes on, starts another, and both denials are told."""
    with lg.sync.Gate(home(tmp_path, receiver)) as gate, gate.run_scope(gate_scope()) as run:
        first = run.try_call("nothing_one").audit_id
        receiver.wait(lambda found: any(one.json["event"]["audit_id"] == first for one in found))
        children: Any = gate._session._children
        old = children.alerter.process.pid
        os.kill(old, signal.SIGKILL)
        second = run.try_call("nothing_two").audit_id
        # A blocking Gate notices an end while it waits for anything.
        until(lambda: run.try_call("echo", text="x").ok and children.alerter.process.pid != old, "a new alerter")
        receiver.wait(lambda found: any(one.json["event"]["audit_id"] == second for one in found))


def test_what_is_denied_last_is_told_before_the_gate_is_closed(tmp_path: Path, receiver: Receiver) -> None:
    with lg.sync.Gate(home(tmp_path, receiver)) as gate, gate.run_scope(gate_scope()) as run:
        last = run.try_call("nothing_at_all").audit_id
    receiver.wait(lambda found: any(one.json["event"]["audit_id"] == last for one in found))


def test_an_alerter_that_cannot_start_is_named(tmp_path: Path, receiver: Receiver) -> None:
    """E4: no Gate runs with alerts that were asked for and cannot be had."""
    path = home(tmp_path, receiver)
    state = tmp_path / "audit.db.alerts"
    state.write_bytes(b"this is no database" * 100)
    state.chmod(0o600)
    with pytest.raises(lg.HostFault, match="alerter"), lg.sync.Gate(path):
        pass


def test_the_same_without_blocking(tmp_path: Path, receiver: Receiver) -> None:
    """E4: the asynchronous Gate tells too, and replaces its alerter while it only waits."""

    async def main() -> tuple[str | None, str | None, bool]:
        async with lg.Gate(home(tmp_path, receiver)) as gate, gate.run_scope(gate_scope()) as run:
            first = (await run.try_call("nothing_one")).audit_id
            children: Any = gate._session._children
            old = children.alerter.process.pid
            os.kill(old, signal.SIGKILL)
            deadline = asyncio.get_running_loop().time() + 60
            while children.alerter.process.pid == old and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            second = (await run.try_call("nothing_two")).audit_id
            return first, second, children.alerter.process.pid != old

    first, second, replaced = asyncio.run(main())
    assert replaced
    receiver.wait(lambda found: {first, second} <= {one.json["event"]["audit_id"] for one in found})
