"""Which bound ended a run that no trigger had ended yet, when its result or its end comes in.

Rule 1: what the code says of its end is a reason to look, never the answer: a counter of the kernel's, or what the
        machine saw of it from outside, has to agree.
Rule 2: only a run that ended is looked at here. What ends a run at its bound is `Run`'s and `Watch`'s.
"""

from __future__ import annotations

from typing import Final

from lockgate.contract.run import KilledBy
from lockgate.runtimes.protocol import MachineResult
from lockgate.supervisor.outcome import Outcome, blames_disk, blames_processes
from lockgate.supervisor.slot import Slot
from lockgate.supervisor.watch import Watch, disk_full

_SPENT: Final = 0.95  # of the CPU bound: the kernel's own limit may end the code just before the next look


def of_result(slot: Slot, result: MachineResult, outcome: Outcome, work: str | None) -> KilledBy | None:
    """Return the bound that a run with a result met; `work`: its directory, None where not seen."""
    if slot.group is not None and slot.group.oom_signalled():
        return "memory"
    if blames_processes(outcome.error) and _refused_tasks(slot, result):
        return "processes"
    if blames_disk(outcome.error) and ("disk" in result.pressed or (work and disk_full(slot.machine.host_pid, work))):
        return "disk"
    return None


def _refused_tasks(slot: Slot, result: MachineResult) -> bool:
    return "processes" in result.pressed or (slot.group is not None and slot.group.refusals() > 0)


def of_end(slot: Slot, watch: Watch | None, cpu: float) -> KilledBy | None:
    """Return the bound that ended a machine without a result; `cpu`: seconds that the run might use."""
    if slot.group is not None and slot.group.out_of_memory():
        return "memory"
    return "cpu" if cpu_spent(watch, cpu) else None


def cpu_spent(watch: Watch | None, cpu: float) -> bool:
    """Whether a run that ended had used up its CPU-seconds."""
    return watch is not None and watch.used() >= cpu * _SPENT
