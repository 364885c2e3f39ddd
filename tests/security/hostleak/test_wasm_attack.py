"""The attack suite inside the wasm rung, as a person runs it: nothing is reached, and no leak is allowed (X4, X8)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gate_fixtures import gate_home
from lockgate.cli.app import guarded
from lockgate.runtimes import attack
from wasm_rung_fixtures import WasmStart


@pytest.mark.timeout(120)
def test_nothing_is_reached_and_nothing_is_allowed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], wasm_start: WasmStart
) -> None:
    """X4, X8: the same questions as on every rung. That each can be answered is shown by the suite's own controls."""
    gate_home(tmp_path)
    capfd.readouterr()
    config = str(tmp_path / "lockgate.toml")
    code = guarded(["attack", "--json", "--no-controls", "--rung", "wasm", "--config", config])
    found = json.loads(capfd.readouterr().out)
    assert (code, found["rung"], found["reached"], found["allowed_leaks"]) == (0, "wasm", [], [])
    assert found["total"] >= 250
    assert "wasm" not in attack.ALLOWED or attack.ALLOWED["wasm"] == ()
