"""`rung="auto"` (X2, X3): a rung that was booted here and is strong enough for a model's code, or a refusal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gate_fixtures import gate_home, gate_scope
from lockgate.audit import reader
from lockgate.contract.errors import CannotIsolate
from lockgate.gate.sync import Gate
from lockgate.policy.choose import STRENGTH

STRONG = {rung for rung, strength in STRENGTH.items() if strength >= 2}


def _home(folder: Path, more: str) -> Path:
    path = gate_home(folder)
    text = path.read_text().replace('rung = "container"', 'rung = "auto"\n' + more)
    path.write_text(text + "\n[execution.gvisor]\nallow_old = true\n")
    return path


def test_auto_runs_on_a_rung_that_does_not_share_the_kernel(tmp_path: Path) -> None:
    """X2: chosen by booting; the result and the audit row name what was chosen."""
    with Gate(_home(tmp_path, "")) as gate:
        try:
            choice = gate.choice()
        except CannotIsolate:
            if os.geteuid() == 0:
                raise
            pytest.skip("no rung above the container runs here")
        with gate.run_scope(gate_scope()) as run:
            result = run.code("6 * 7")
    assert result.value == 42
    assert result.rung == choice.rung
    assert result.rung in STRONG
    rungs = {row.rung for row in reader.tail(tmp_path / "audit.db", 50) if row.rung is not None}
    assert rungs == {choice.rung}


def test_auto_never_goes_below_the_level(tmp_path: Path) -> None:
    """X3: hardware is asked for and none is to be had; that a shared kernel was accepted changes nothing."""
    with (
        Gate(_home(tmp_path, 'reaches = "control_plane"\nmicrovm = { store = "none" }\n')) as gate,
        gate.run_scope(gate_scope()) as run,
    ):
        assert gate.accept_shared_kernel
        with pytest.raises(CannotIsolate, match="strong enough") as refused:
            run.code("open('ran', 'w')")
        assert "microvm" in refused.value.message
        assert refused.value.next_step
        # The control: asked for by name, what was accepted does run.
        assert run.code("1 + 1", rung="container").value == 2
    rows = list(reader.tail(tmp_path / "audit.db", 50))
    assert any(row.reason == "cannot_isolate" and row.verdict == "deny" for row in rows), rows
