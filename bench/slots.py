"""Slots of the container rung by themselves: a cold one to its first line of code, and the memory of a warm one."""

from __future__ import annotations

import selectors
import statistics
import time
from pathlib import Path

from common import BARE_PYTHON, bare_python, emit, interleave, row
from lockgate.contract.bounds import Bounds
from lockgate.runtimes.container import ContainerRuntime
from lockgate.runtimes.framed import FramedMachine as ContainerMachine
from lockgate.runtimes.protocol import MachineFailed, MachineReady, MachineResult, TemplateSpec

COUNT = 200
WARM = 500
DEADLINE = 30.0
BOUNDS = Bounds()


def wait_for(fd: object, seconds: float = DEADLINE) -> None:
    """Wait until `fd` is readable, or give up loudly."""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)  # type: ignore[arg-type]
        if not selector.select(seconds):
            raise SystemExit("nothing came in time")


def make(template: object, *, cold: bool) -> ContainerMachine:
    """Ask for a slot and wait until it is hardened."""
    machine = template.request(BOUNDS, cold=cold)  # type: ignore[attr-defined]
    while machine.pidfd < 0:
        wait_for(template)
        template.on_readable()  # type: ignore[attr-defined]
    events: list[object] = []
    while not events:
        wait_for(machine.control)
        events = list(machine.on_control())
    if not isinstance(events[0], MachineReady):
        raise SystemExit(f"a slot failed: {events[0]}")
    return machine


def end(machine: ContainerMachine) -> None:
    """Kill a slot and wait until its namespace is gone."""
    machine.kill()
    wait_for(machine.pidfd)
    machine.close()


def cold(template: object) -> float:
    """Seconds from the request to the first line that the code prints."""
    began = time.perf_counter()
    machine = make(template, cold=True)
    machine.send_code(b"print(1, flush=True)", BOUNDS)
    wait_for(machine.stdout)
    took = time.perf_counter() - began
    events: list[object] = []
    while not events:
        wait_for(machine.control)
        events = list(machine.on_control())
    if not isinstance(events[0], MachineResult) or isinstance(events[0], MachineFailed):
        raise SystemExit(f"a cold slot failed: {events[0]}")
    end(machine)
    return took


def kibibytes(path: str, *keys: str) -> float:
    """Sum of the named lines of a /proc file, in KiB."""
    found = 0.0
    for line in Path(path).read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in keys:
            found += float(rest.split()[0])
    return found


def main() -> None:
    """Print one row each."""
    template = ContainerRuntime().start(TemplateSpec())
    try:
        slots, bare = interleave(COUNT, lambda: cold(template), bare_python)
        emit(row("cold container slot to first line of code", slots, unit="s", bar=0.80, reference=BARE_PYTHON,
                 against=bare))  # fmt: skip
        time.sleep(1)
        slab = kibibytes("/proc/meminfo", "Slab", "KernelStack")
        machines = [make(template, cold=False) for _ in range(WARM)]
        slab = (kibibytes("/proc/meminfo", "Slab", "KernelStack") - slab) / WARM
        each = [
            (
                kibibytes(f"/proc/{m.host_pid}/smaps_rollup", "Pss")
                + kibibytes(f"/proc/{m.host_pid}/status", "VmPTE")
                + slab
            )
            / 1024
            for m in machines
        ]
        emit(
            row("memory per warm slot (PSS, page tables, slab)", each, unit="MiB", bar=3.5),
            row("warm slots at once", [float(len(machines))], unit="slots", bar=WARM, at_most=False),
        )
        print(f"slab and kernel stack per slot: {slab:.0f} KiB, PSS median {statistics.median(each):.2f} MiB in all")
        for machine in machines:
            machine.kill()
        for machine in machines:
            end(machine)
    finally:
        template.close()


if __name__ == "__main__":
    main()
