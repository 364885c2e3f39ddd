"""The wasm rung as the supervisor has it: zygotes, one run to its end, native code placed in a worker, a Gate."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

import lockgate as lg
from gate_fixtures import gate_home, gate_scope
from lockgate.contract.bounds import Bounds
from lockgate.runtimes import attack
from lockgate.runtimes.protocol import TemplateSpec
from lockgate.runtimes.single import Outcome, run_once
from lockgate.runtimes.wasm.runtime import WasmRuntime, WasmTemplate
from wasm_guest_fixtures import built

WasmStart = Callable[..., contextlib.AbstractContextManager[WasmTemplate]]


@pytest.fixture(scope="session")
def wasm_start() -> WasmStart:
    """Start a zygote with switches (zygote.py); it ends with the block. One with switches hashes no 350 MB again."""
    built("stdlib")

    @contextlib.contextmanager
    def start(*arguments: str, spec: TemplateSpec | None = None) -> Iterator[WasmTemplate]:
        skipped = [one for one in arguments if one.startswith("--skip=")] or ["--skip="]
        if arguments:
            arguments = (*(set(arguments) - set(skipped)), f"{skipped[0]},verify")
        template = WasmRuntime(arguments).start(spec or TemplateSpec())
        try:
            yield template
        finally:
            template.close()

    return start


@pytest.fixture(scope="session")
def wasm_template(wasm_start: WasmStart) -> Iterator[WasmTemplate]:
    """A zygote with no switch: what the supervisor starts."""
    with wasm_start() as template:
        yield template


@pytest.fixture
def wasm_run(wasm_template: WasmTemplate) -> Callable[..., Outcome]:
    """Run source in a fresh worker to its end: `wasm_run("1+1", wall=5)`."""

    def run(source: str, **options: Any) -> Outcome:
        extra = {name: options.pop(name) for name in ("broker", "meanwhile", "keep") if name in options}
        return run_once(wasm_template, source.encode(), Bounds(**{"wall": 20.0, **options}), **extra)

    return run


def value(outcome: Outcome) -> Any:
    """What the code says its value is."""
    assert outcome.result is not None, outcome
    assert outcome.result.value is not None, outcome
    return msgspec.json.decode(outcome.result.value)


def answers(template: WasmTemplate) -> dict[str, attack.Row]:
    """Every probe of the attack suite, asked in a worker of `template`."""
    outcome = run_once(template, attack.program().encode(), Bounds(wall=60))
    return {row.id: row for row in attack.rows(value(outcome))}


@pytest.fixture(scope="module")
def wasm_gate(tmp_path_factory: pytest.TempPathFactory, wasm_start: WasmStart) -> Iterator[lg.sync.Gate]:
    """A Gate over the real processes whose runs are on this rung, shared by a module."""
    with lg.sync.Gate(gate_home(tmp_path_factory.mktemp("gate"), "wasm")) as opened:
        yield opened


@pytest.fixture
def wasm_gate_run(wasm_gate: lg.sync.Gate) -> Iterator[lg.sync.Run]:
    """A run on this rung that may use every operation of the deployment."""
    with wasm_gate.run_scope(gate_scope()) as run:
        yield run
