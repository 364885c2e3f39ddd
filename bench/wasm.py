"""The wasm rung: parked workers from dispatch to result, their preparation and memory, and calls out of the guest."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import lockgate as lg
from broker_call import CODE, OPERATIONS
from common import BARE_PYTHON, bare_python, base_python, emit, interleave, row
from lockgate.contract.bounds import Bounds
from lockgate.runtimes.framed import FramedMachine
from lockgate.runtimes.protocol import MachineReady, MachineResult, TemplateSpec
from lockgate.runtimes.wasm.runtime import WasmRuntime, WasmTemplate
from slots import end, kibibytes, wait_for

COUNT = 120
PARKED = 20
ROUNDS = 6
BOUNDS = Bounds()
IMPORT_PANDAS = 'python -c "import pandas"'
EXPRESSION = b"import pandas as pd\npd.DataFrame({'a': [1, 2, 3]}).a.sum().item()"
CONFIG = """
operations = "bench_operations:ops"
[execution]
rung = "wasm"
accept_shared_kernel = true
pool = 2
"""


def park(template: WasmTemplate) -> FramedMachine:
    """Ask for a worker and wait until it is hardened and parked."""
    machine = template.request(BOUNDS)
    while machine.pidfd < 0:
        wait_for(template)
        template.on_readable()
    events: list[object] = []
    while not events:
        wait_for(machine.control)
        events = list(machine.on_control())
    if not isinstance(events[0], MachineReady):
        raise SystemExit(f"a worker failed: {events[0]}")
    return machine  # type: ignore[return-value]


def dispatch(template: WasmTemplate, source: bytes, value: bytes | None) -> float:
    """Seconds from sending the code to its result, in a worker that was parked."""
    machine = park(template)
    began = time.perf_counter()
    machine.send_code(source, BOUNDS)
    events: list[object] = []
    while not events:
        wait_for(machine.control)
        events = list(machine.on_control())
    took = time.perf_counter() - began
    end(machine)
    if not isinstance(events[0], MachineResult) or events[0].value != value or events[0].error is not None:
        raise SystemExit(f"a worker gave {events[0]}")
    return took


def prepare(template: WasmTemplate) -> float:
    """Seconds from asking for a worker to having it parked."""
    began = time.perf_counter()
    machine = park(template)
    took = time.perf_counter() - began
    end(machine)
    return took


def native_pandas(folder: str) -> Callable[[], float]:
    """Install pandas for the bare interpreter and return the reference: starting it and importing pandas."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--target", folder, "pandas"], check=True, stdin=subprocess.DEVNULL)
    program = f"import sys; sys.path.insert(0, {folder!r}); import pandas"

    def once() -> float:
        began = time.perf_counter()
        subprocess.run([base_python(), "-I", "-c", program], check=True, env={}, close_fds=True)
        return time.perf_counter() - began

    return once


def workers() -> None:
    """Print the figures of workers by themselves."""
    runtime = WasmRuntime()
    bare_template, warm_template = runtime.start(TemplateSpec()), runtime.start(TemplateSpec(env="numpy-pandas"))
    try:
        prints, prepared, bare = interleave(
            COUNT,
            lambda: dispatch(bare_template, b"print('hi')", None),
            lambda: prepare(bare_template),
            bare_python,
        )
        emit(
            row("wasm: parked worker, dispatch to result of print", prints, unit="s", bar=0.20, reference=BARE_PYTHON,
                against=bare),
            row("wasm: worker preparation, hardened", prepared, unit="s", bar=3.0, reference=BARE_PYTHON, against=bare),
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            native = native_pandas(folder)
            first, imports = interleave(COUNT, lambda: dispatch(warm_template, EXPRESSION, b"6"), native, warmup=3)
        emit(
            row("wasm: parked worker, dispatch to first pandas expression", first, unit="s", bar=0.03,
                reference=IMPORT_PANDAS, against=imports)
        )  # fmt: skip
        machines = [park(warm_template) for _ in range(PARKED)]
        each = [
            kibibytes(f"/proc/{one.host_pid}/smaps_rollup", "Private_Dirty", "Private_Clean") / 1024 for one in machines
        ]
        emit(row("wasm: private memory per parked worker (numpy, pandas)", each, unit="MiB", bar=12.0))
        for one in machines:
            end(one)
    finally:
        bare_template.close()
        warm_template.close()


async def calls() -> None:
    """Print what a call costs from the guest, beside the same call from a slot of the container rung."""
    took: dict[str, list[float]] = {"wasm": [], "container": []}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "bench_operations.py").write_text(OPERATIONS)
        scope = lg.Scope(user="b", agent="b", tenant="b", expires=lg.minutes(30), allow={"get_order": {}})
        config = Path(folder) / "lockgate.toml"
        config.write_text(CONFIG)
        async with lg.Gate(config) as gate, gate.run_scope(scope) as run:
            for turn in range(ROUNDS + 1):
                for rung, kept in took.items():
                    await asyncio.sleep(0.1)  # the pools have refilled
                    result = await run.code(CODE, rung=rung)
                    if result.value is None:
                        raise SystemExit(f"the run failed: {result.error or result!r}")
                    if turn:
                        kept.extend(result.value)
    emit(
        row("wasm: host call from the guest, audited", took["wasm"], unit="s", bar=4.0,
            reference="the container rung's broker call", against=took["container"])
    )  # fmt: skip


if __name__ == "__main__":
    workers()
    asyncio.run(calls())
