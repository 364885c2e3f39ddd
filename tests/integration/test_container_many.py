"""Five hundred warm slots at once, and what each of them costs (the figure of the mission, in the small)."""

from __future__ import annotations

import os
import re
import resource
import select
import time
from pathlib import Path

import pytest

from lockgate.contract.bounds import Bounds
from lockgate.runtimes.container import ContainerMachine, ContainerRuntime
from lockgate.runtimes.protocol import MachineFailed, MachineReady, TemplateSpec

WANTED = 500
DESCRIPTORS_EACH = 5
BUDGET = 3584  # KiB of one slot: PSS, page tables and slab


def _kib(file: str, *names: str) -> int:
    text = Path(file).read_text()
    return sum(int(re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)[1]) for name in names)  # type: ignore[index]


@pytest.mark.serial
def test_five_hundred_warm_slots() -> None:
    """X10: 500 slots are warm at once, each within 3.5 MiB, and all are gone when they are told."""
    template = ContainerRuntime().start(TemplateSpec())
    count = min(WANTED, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 100) // DESCRIPTORS_EACH)
    before = _kib("/proc/meminfo", "Slab", "PageTables")
    machines = [template.request(Bounds()) for _ in range(count)]
    try:
        waiting = {machine.control.fileno(): machine for machine in machines}
        poll = select.poll()
        poll.register(template.fileno(), select.POLLIN)
        for fd in waiting:
            poll.register(fd, select.POLLIN)
        deadline = time.monotonic() + 90
        while waiting and time.monotonic() < deadline:
            for fd, _ in poll.poll(1000):
                if fd == template.fileno():
                    assert not [one for one in template.on_readable() if isinstance(one, MachineFailed)]
                else:
                    assert isinstance(waiting.pop(fd).on_control()[0], MachineReady)
                    poll.unregister(fd)
        assert not waiting
        assert len({machine.host_pid for machine in machines}) == count
        kernel = (_kib("/proc/meminfo", "Slab", "PageTables") - before) / count
        if os.getuid() == 0:  # a slot is not dumpable: only root may read what it costs
            sample = machines[:: max(count // 40, 1)]
            pss = sum(_kib(f"/proc/{one.host_pid}/smaps_rollup", "Pss") for one in sample) / len(sample)
            assert pss + kernel <= BUDGET, (pss, kernel)
        assert kernel <= BUDGET / 2
    finally:
        for machine in machines:
            machine.kill()
        alive = [machine for machine in machines if not _dead(machine)]
        for machine in machines:
            machine.close()
        template.close()
    assert not alive


def _dead(machine: ContainerMachine) -> bool:
    poll = select.poll()
    poll.register(machine.pidfd, select.POLLIN)
    return bool(poll.poll(20_000))
