"""The microvm rung through the public API: refused where it is emulated, flagged where that was accepted, attacked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import lockgate as lg
import microvm_fixtures
from gate_fixtures import gate_home, gate_scope
from lockgate.audit import reader
from lockgate.cli.app import guarded
from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import CannotIsolate
from lockgate.runtimes import attack
from lockgate.runtimes.microvm.runtime import MicrovmRuntime
from lockgate.runtimes.protocol import TemplateSpec
from lockgate.runtimes.single import run_once

pytestmark = pytest.mark.timeout(300)


def unaccepted(home: Path) -> Path:
    """A deployment of the rung whose operator accepted nothing."""
    config = gate_home(home, "microvm")
    config.write_text(config.read_text().replace("allow_emulated = true", "allow_emulated = false"))
    return config


def test_an_emulated_machine_is_refused_until_that_is_accepted_and_flagged_after(
    tmp_path: Path, rung_or_skip: Callable[[str], None]
) -> None:
    """X3: no code reaches it unaccepted; accepted for one call, result and every row of that run say so."""
    rung_or_skip("microvm")
    if not microvm_fixtures.emulated():
        pytest.skip("these machines are the processor's own")
    with lg.sync.Gate(unaccepted(tmp_path)) as gate, gate.run_scope(gate_scope(echo={})) as run:
        with pytest.raises(CannotIsolate) as caught:
            run.code("host.call('echo', text='x')")
        assert "emulated" in caught.value.message
        assert "accept_weaker" in caught.value.next_step
        assert not [row for row in reader.tail(tmp_path / "audit.db", 1000) if row.operation == "echo"]
        done = run.code("host.call('echo', text='x')['text']", accept_weaker=("emulated",))
        with pytest.raises(CannotIsolate):  # for that call alone
            run.code("1")
    assert (done.value, done.weakness, done.rung) == ("x", "emulated", "microvm")
    made = [row for row in reader.tail(tmp_path / "audit.db", 1000) if row.rung == "microvm"]
    assert {"intent", "outcome"} <= {row.phase for row in made}
    refused = [row for row in made if row.phase == "denied"]
    assert {(row.operation, row.reason) for row in refused} == {("run.code", "cannot_isolate")}
    assert [row for row in made if row.weakness != "emulated" and row not in refused] == []


def test_hardware_is_never_replaced_by_emulation(tmp_path: Path, rung_or_skip: Callable[[str], None]) -> None:
    """X3: what was settled for one accelerator is never run on another, and nothing is built without a word."""
    rung_or_skip("microvm")
    config = unaccepted(tmp_path)
    empty = tmp_path / "empty"
    config.write_text(config.read_text().replace(str(microvm_fixtures.choices().store), str(empty)))
    with (
        lg.sync.Gate(config) as gate,
        gate.run_scope(gate_scope(echo={})) as run,
        pytest.raises(CannotIsolate) as caught,
    ):
        run.code("1")
    assert "lockgate microvm build" in caught.value.next_step
    assert not empty.exists()


def test_no_primitive_answers_inside_a_machine(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], rung_or_skip: Callable[[str], None]
) -> None:
    """X1, X4, X8: the whole attack suite, through the Gate."""
    rung_or_skip("microvm")
    config = gate_home(tmp_path, "microvm")
    config.write_text(config.read_text().replace("wall = 20.0", "wall = 200.0\ncpu = 200.0"))  # it is emulated
    capfd.readouterr()
    code = guarded(
        ["attack", "--rung", "microvm", "--json", "--no-controls", "--config", str(tmp_path / "lockgate.toml")]
    )
    found = json.loads(capfd.readouterr()[0])
    assert (code, found["reached"]) == (0, [])
    assert found["total"] >= 150
    assert {leak["id"] for leak in found["allowed_leaks"]} == {leak.id for leak in attack.ALLOWED["microvm"]}


def test_the_same_probes_answer_where_the_worker_gave_up_nothing(rung_or_skip: Callable[[str], None]) -> None:
    """Negative control: in a guest whose worker kept its rights the same list reaches its primitives."""
    rung_or_skip("microvm")
    template = MicrovmRuntime(microvm_fixtures.choices(), settings=microvm_fixtures.OPEN).start(TemplateSpec())
    try:
        bounds = Bounds(wall=200, cpu=200)
        outcome = run_once(template, attack.program().encode(), bounds, patience=60)
    finally:
        template.close()
    assert outcome.result is not None, outcome
    found = attack.rows(msgspec.json.decode(outcome.result.value or b"null"))
    report = attack.judge("microvm", found, attack.Controls(rows={}, missing={}))
    assert len(report.reached) >= 40, report.reached
    assert {"Escape", "HostDoS"} <= {row.goal for row in report.reached}


def test_a_guest_cannot_forge_the_loader(tmp_path: Path, rung_or_skip: Callable[[str], None]) -> None:
    """X9: what a worker writes on its own control descriptor is never taken for the loader's word."""
    rung_or_skip("microvm")
    with lg.sync.Gate(gate_home(tmp_path, "microvm")) as gate, gate.run_scope(gate_scope(echo={})) as run:
        lines = (b"A{}\n", b'S{"status":0,"oom":1,"refused":9,"full":true}\n', b'F{"step":"x","errno":1,"detail":""}\n')
        for line in lines:
            done = run.code(f"import os, time\nos.write(4, {line!r})\ntime.sleep(30)")
            assert (done.killed_by, done.exit_code) == ("protocol", 137), done
        assert run.code("40 + 2").value == 42
