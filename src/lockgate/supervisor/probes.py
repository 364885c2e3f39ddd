"""The runs that attack the bounds of this host, and what the end of each proves (X2, X5 to X9).

Rule 1: a bound holds once it was seen to end, or to refuse, the run that went for it; by what is said beside it.
Rule 2: one that does not comes with the missing piece and the fix.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec

from lockgate.contract import wire
from lockgate.contract.bounds import Bounds, KiB, MiB
from lockgate.supervisor import cgroups, checkup
from lockgate.supervisor.checkup import Probe, Row
from lockgate.supervisor.line import Key

_FORKS: Final = 16


class BoundProbes(msgspec.Struct, frozen=True):
    """The probes of one report.

    Attributes:
        key: of the machines that are attacked.
        most: the operator's bounds.
        accepted: whether machines with such a key may be had; else they are attacked all the same, to say what holds.

    """

    layout: cgroups.Layout
    key: Key
    most: Bounds
    accepted: bool

    def all(self) -> list[Probe]:
        """Return the probes of every bound, in the order of the report's rows."""
        v1 = self.layout.version == 1
        share, group = ("cfs quota", "cgroup v1") if v1 else ("cpu.max", "cgroup v2")
        counter = (
            "cpuacct.usage"
            if self.layout.cpuacct
            else "cpu.stat"
            if self.layout.unified
            else "the tasks of its process tree"
        )
        spin = _killed(checkup.SPIN, {"cpu": 0.3, "wall": 10}, "cpu seconds", "cpu", counter)
        if not self.key.nature.forks:
            several = [Probe(checkup.HOG, {"memory": 128 * MiB, "wall": 10}, self._judge_hog), spin]
        elif self.key.memory_by_rlimit:
            several = [
                Probe(checkup.HOG, {"memory": 128 * MiB, "wall": 10}, self._judge_rlimit),
                Probe(checkup.FORKS, {"wall": 10}, partial(self._judge_forks, "RLIMIT_NPROC")),
                spin,
            ]
        else:
            several = [
                Probe(checkup.HOG_IN_CHILD, {"memory": 96 * MiB, "wall": 10}, self._judge_memory),
                Probe(checkup.FORKS, {"processes": _FORKS, "wall": 10}, partial(self._judge_forks, group)),
                _killed(checkup.TWO_SPINS, {"cpu": 0.3, "wall": 10}, "cpu seconds", "cpu", counter),
            ]
        flood: dict[str, float] = {"output_kill": 1 * MiB, "output": 4 * KiB, "wall": 10}
        return [
            _killed(checkup.SPIN, {"wall": 0.3}, "wall", "wall", "supervisor's timer"),
            *several,
            Probe(checkup.SPIN, {"cpu_share": 0.25, "wall": 0.8}, partial(self._judge_share, share)),
            Probe(checkup.DISK, {"wall": 20}, partial(self._judge_disk, "disk", "bytes", "tmpfs size")),
            Probe(checkup.FILES, {"wall": 20}, partial(self._judge_disk, "inodes", "files", "tmpfs nr_inodes")),
            _killed(checkup.FLOOD, flood, "output", "output", "supervisor's drain"),
        ]

    # ---- judges --------------------------------------------------------------------------------------------------
    def _judge_memory(self, finished: wire.Finished) -> list[Row]:
        layout = self.layout
        by = layout.memory_by
        whole = "OOM eventfd, then a kill of the run" if layout.version == 1 else "memory.oom.group"
        held = finished.killed_by == "memory"
        saw = f"a child's hog ended the run after {finished.usage.wall:.2f} s" if held else checkup.saw(finished)
        return [
            Row(name="memory", holds=held, by=by, saw=saw),
            Row(name="whole-run OOM", holds=held, by=whole, saw=saw),
            Row(name="swap", holds=bool(layout.swap), by=layout.swap, saw="same limit with and without swap"),
        ]

    def _judge_hog(self, finished: wire.Finished) -> list[Row]:
        held = _out_of_memory(finished)
        by = self.key.memory_by(self.layout.memory_by)
        return [Row(name="memory", holds=held, by=by, saw=checkup.saw(finished), fix="" if held else "report this")]

    def _judge_rlimit(self, finished: wire.Finished) -> list[Row]:
        missing = self.layout.missing
        why = f"{missing.get('memory') or missing.get('swap') or 'no memory cgroup'}: {cgroups.FIX}"
        held = _out_of_memory(finished) and self.accepted
        by = "rlimit (address space of the one process)"
        return [
            Row(name="memory", holds=held, by=by, saw=checkup.saw(finished), fix=why),
            Row(name="whole-run OOM", holds=False, by="none", saw="an exception inside instead of a kill", fix=why),
            Row(name="swap", holds=False, by="none", saw="not probed", fix=why),
        ]

    def _judge_forks(self, by: str, finished: wire.Finished) -> list[Row]:
        value = checkup.value(finished)
        most = 1 if self.key.memory_by_rlimit else _FORKS
        held = isinstance(value, int) and 0 < value <= most
        return [
            Row(name="pids", holds=held, by=by, saw=f"{value} tasks were the most", fix="" if held else cgroups.FIX)
        ]

    def _judge_share(self, by: str, finished: wire.Finished) -> list[Row]:
        cpu, wall = finished.usage.cpu, finished.usage.wall
        rate = cpu / wall if cpu is not None and wall else 1.0
        held = self.layout.cpu is not None and rate < 0.5
        return [
            Row(
                name="cpu share",
                holds=held,
                by=by if held else "none",
                saw=f"a spin under 0.25 cores got {rate:.2f}",
                fix="" if held else f"{self.layout.missing.get('cpu', 'no quota')}: {cgroups.FIX}",
            )
        ]

    def _judge_disk(self, name: str, unit: str, by: str, finished: wire.Finished) -> list[Row]:
        found = checkup.value(finished)
        most = getattr(self.most, name)
        if finished.killed_by == "disk":
            return [Row(name=name, holds=True, by="counted while code runs", saw=checkup.saw(finished))]
        held = isinstance(found, int) and 0 < found <= most
        return [
            Row(name=name, holds=held, by=by, saw=f"{found} {unit} were the most", fix="" if held else "report this")
        ]


def _killed(code: str, bounds: dict[str, float], name: str, killed_by: str, by: str) -> Probe:
    return Probe(code, bounds, lambda finished: [checkup.kill_row(name, killed_by, by, finished)])


def _out_of_memory(finished: wire.Finished) -> bool:
    return finished.killed_by == "memory" or (finished.error is not None and finished.error.name == "MemoryError")


def kill_of_groups(layout: cgroups.Layout) -> Row:
    """Return the row of what ends a whole run at once."""
    kill = "cgroup.kill" not in " ".join(layout.missing) and "kill" not in layout.missing and layout.unified
    return Row(
        name="cgroup.kill",
        holds=bool(kill),
        by="cgroup v2" if kill else "none",
        saw="kills go through it and the pidfd" if kill else "kills go through the pidfd alone",
        fix="" if kill else f"{layout.missing.get('kill', 'no cgroup v2')}: {cgroups.FIX}",
    )
