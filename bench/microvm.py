"""The microvm rung, on whatever its store was settled for: clone and pool hit beside a cold boot, memory, leaks.

`python bench/microvm.py [STORE]`: default is the emulated store that the tests use; `make test-kvm` gives its own.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from common import emit, interleave, row
from lockgate.contract.bounds import Bounds
from lockgate.contract.rungs import MicrovmChoices
from lockgate.runtimes.microvm import build
from lockgate.runtimes.microvm.runtime import MicrovmRuntime, MicrovmTemplate
from lockgate.runtimes.microvm.store import Store
from lockgate.runtimes.protocol import Machine, MachineReady, MachineResult, TemplateSpec

STORE = Path(__file__).parents[1] / ".venv" / "microvm"
COUNT = 50
COLD = 5
RUNS = 200
DEADLINE = 120.0
BOUNDS = Bounds()


def events_of(machine: Machine) -> list[object]:
    """Wait for what the machine says next."""
    while True:
        if not select.select([machine.control], [], [], DEADLINE)[0]:
            raise SystemExit("a machine did not answer in time")
        found = list(machine.on_control())
        if found:
            return found


def load(template: MicrovmTemplate) -> Machine:
    """Ask for a machine and wait until it is loaded and paused."""
    machine = template.request(BOUNDS)
    while machine.pidfd < 0:
        if not select.select([template.fileno()], [], [], DEADLINE)[0]:
            raise SystemExit("the loader did not answer in time")
        template.on_readable()
    machine.placed()
    if not isinstance(events_of(machine)[0], MachineReady):
        raise SystemExit("a machine was not loaded")
    return machine


def lease(machine: Machine) -> None:
    """Resume, reseed, run, result."""
    machine.send_code(b"1+1", BOUNDS)
    while not machine.flush():
        time.sleep(0.001)
    event = events_of(machine)[0]
    if not isinstance(event, MachineResult) or event.value != b"2":
        raise SystemExit(f"no result: {event}")


def end(machine: Machine) -> None:
    """Kill and wait."""
    machine.kill()
    if not select.select([machine.pidfd], [], [], DEADLINE)[0]:
        raise SystemExit("a killed machine lives")
    machine.close()


def clone(template: MicrovmTemplate) -> float:
    """Seconds from the request to the first result of user code, handshake included, cage on."""
    began = time.perf_counter()
    machine = load(template)
    lease(machine)
    took = time.perf_counter() - began
    end(machine)
    return took


def hit(template: MicrovmTemplate) -> float:
    """The same from a machine that is loaded and paused."""
    machine = load(template)
    began = time.perf_counter()
    lease(machine)
    took = time.perf_counter() - began
    end(machine)
    return took


def cold(store: Store, work: Path) -> float:
    """Seconds from nothing but kernel and image to a result: boot, freeze, load, run."""
    made = Path(tempfile.mkdtemp(dir=work))
    for name in ("kernels", "images"):
        (made / name).symlink_to(store.root / name)
    choice = store.choice()
    began = time.perf_counter()
    place = Store(made)
    builder = build.Builder(place)
    with contextlib.ExitStack() as owned:
        plan = builder.snapshot(choice, TemplateSpec())[0]
        parent = build.launch(plan, owned, DEADLINE)
        template = MicrovmTemplate("microvm", "emulated", parent, owned.pop_all())
        template.memory = choice.memory
        try:
            machine = load(template)
            lease(machine)
            took = time.perf_counter() - began
            end(machine)
        finally:
            template.close()
    shutil.rmtree(made)
    return took


def private(machine: Machine) -> float:
    """MiB that a loaded, paused machine's VMM shares with nobody."""
    lines = Path(f"/proc/{machine.host_pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def parent_of(machine: Machine) -> int:
    """The loader: parent of every VMM."""
    lines = Path(f"/proc/{machine.host_pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("PPid:")).split()[1])


def counted(pid: int) -> int:
    """Descriptors and children of the loader."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return len(os.listdir(f"/proc/{pid}/fd")) + len(children)


def main() -> None:
    """Print one row each."""
    store = Store(Path(sys.argv[1]) if len(sys.argv) > 1 else STORE)
    accel = store.choice().accel
    runtime = MicrovmRuntime(MicrovmChoices(store=str(store.root), allow_emulated=True))
    with tempfile.TemporaryDirectory(prefix="lockgate-bench-") as work:
        template = runtime.start(TemplateSpec())
        try:
            clones, hits = interleave(COUNT, lambda: clone(template), lambda: hit(template), warmup=3)
            colds = [cold(store, Path(work)) for _ in range(COLD)]
            machine = load(template)
            memory = [private(machine)]
            loader = parent_of(machine)
            end(machine)
            time.sleep(1.0)
            before = counted(loader)
            for _ in range(RUNS):
                clone(template)
            deadline = time.monotonic() + 30
            while counted(loader) > before and time.monotonic() < deadline:
                time.sleep(0.05)
            left = [float(counted(loader) - before)]
        finally:
            template.close()
    emit(
        row("F70", clones, unit="s", bar=0.12, reference=f"{accel} cold boot to first result", against=colds),
        row("F71", hits, unit="s", bar=0.5, reference=f"{accel} clone to first result", against=clones),
        row("F72", memory, unit="MiB private, loaded and paused", bar=64.0),
        row("F73", left, unit="descriptors and processes left by 200 runs", bar=0.0),
    )
    print(msgspec.json.encode({"vmm": store.choice().vmm, "accel": accel}).decode(), file=sys.stderr)


if __name__ == "__main__":
    main()
