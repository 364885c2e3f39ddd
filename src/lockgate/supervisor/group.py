"""The group of one slot, as the reactor sees it: counters, limits, kill.

Rule 1: nothing here waits: single reads and writes of control files (a few microseconds each).
Rule 2: a counter that cannot be read is None or zero, never an exception: the watch goes on with what is left.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

from lockgate.supervisor import cgroups
from lockgate.supervisor.cgroups import Layout, Limits

_MAX_CFS: Final = 1000.0


def quota_us(share: float) -> int:
    """Return the CFS quota for `share` cores; the kernel's least is 1 ms."""
    return max(1000, round(share * cgroups.PERIOD_US))


class Group:
    """Files of slot `number` under a layout; made by the keeper, removed by the keeper.

    Args:
        oom_fd: v1 eventfd that becomes readable when the group is out of memory, -1 on v2.

    """

    __slots__ = ("_cpu_fd", "_layout", "_limits", "_name", "_peak_fd", "number", "oom_fd")

    def __init__(self, layout: Layout, number: int, limits: Limits, oom_fd: int) -> None:
        self.number = number
        self.oom_fd = oom_fd
        self._layout = layout
        self._limits = limits
        self._name = f"s{number}"
        self._cpu_fd = self._open_first(
            (layout.cpuacct, "cpuacct.usage"), (layout.unified, "cpu.stat"), (layout.cpu, "cpu.stat")
        )
        self._peak_fd = (
            self._open_first((layout.memory, "memory.max_usage_in_bytes"))
            if layout.version == 1
            else self._open_first((layout.memory, "memory.peak"))
        )

    def _open_first(self, *candidates: tuple[str | None, str]) -> int:
        for base, knob in candidates:
            if base is not None:
                with contextlib.suppress(OSError):
                    return os.open(f"{base}/{self._name}/{knob}", os.O_RDONLY | os.O_CLOEXEC)
        return -1

    # ---- counters
    def cpu_seconds(self) -> float | None:
        """Return the CPU time of every task that ever was in the group."""
        if self._cpu_fd < 0:
            return None
        try:
            raw = os.pread(self._cpu_fd, 256, 0)
        except OSError:
            return None
        if self._layout.cpuacct is not None:
            return int(raw) / 1e9
        for line in raw.splitlines():
            if line.startswith(b"usage_usec "):
                return int(line[11:]) / 1e6
        return None

    def memory_peak(self) -> int | None:
        """Return the most bytes the group held at once (memory.peak needs Linux 5.19 on v2)."""
        if self._peak_fd < 0:
            return None
        try:
            return int(os.pread(self._peak_fd, 64, 0))
        except OSError:
            return None

    def memory_held(self) -> int:
        """Return the bytes of the group that the kernel could not drop and read again: no page of a file on a disk."""
        names = (b"rss ", b"shmem ") if self._layout.version == 1 else (b"anon ", b"shmem ")
        try:
            with open(f"{self._layout.memory}/{self._name}/memory.stat", "rb") as lines:  # noqa: PTH123 - often
                return sum(int(line.split()[1]) for line in lines if line.startswith(names))
        except (OSError, ValueError):
            return 0

    def oom_signalled(self) -> bool:
        """Whether v1's eventfd says that the group ran out of memory; cheap, and False on v2."""
        if self.oom_fd >= 0:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.oom_fd)
                return True
        return False

    def out_of_memory(self) -> bool:
        """Whether the kernel ended a task of the group for want of memory, or is about to."""
        if self.oom_signalled():
            return True
        file = "memory.oom_control" if self._layout.version == 1 else "memory.events"
        return self._counter(self._layout.memory, file, "oom_kill ") > 0

    def refusals(self) -> int:
        """Return how often a fork was refused because the group held its most tasks (pids.events)."""
        return self._counter(self._layout.pids, "pids.events", "max ")

    def alone(self, tasks: int = 1) -> bool:
        """Whether the group holds at most the machine's own `tasks`: nothing that the run left runs beside them."""
        if self._layout.pids is None:
            return False
        try:
            return int(cgroups.read(f"{self._layout.pids}/{self._name}/pids.current")) <= tasks
        except (OSError, ValueError):
            return False

    def _counter(self, base: str | None, file: str, key: str) -> int:
        if base is None:
            return 0
        try:
            text = cgroups.read(f"{base}/{self._name}/{file}")
        except OSError:
            return 0
        return next((int(line[len(key) :]) for line in text.splitlines() if line.startswith(key)), 0)

    # ---- orders
    def tighten(self, limits: Limits) -> None:
        """Give the group the limits of the run that takes it.

        Raises:
            OSError: the kernel refused one: the slot must not be used.

        """
        old, self._limits = self._limits, limits
        if limits == old:
            return
        for path, text in limit_writes(self._layout, self._name, limits, old):
            cgroups.write(path, text)

    def kill(self) -> None:
        """Kill every task by cgroup.kill where it exists, and stop throttling the dying (they die slower by it)."""
        if self._layout.unified is not None:
            with contextlib.suppress(OSError):
                cgroups.write(f"{self._layout.unified}/{self._name}/cgroup.kill", "1")
        if self._layout.cpu is not None:
            with contextlib.suppress(OSError):
                if self._layout.version == 1:
                    cgroups.write(f"{self._layout.cpu}/{self._name}/cpu.cfs_quota_us", "-1")
                else:
                    cgroups.write(f"{self._layout.cpu}/{self._name}/cpu.max", f"max {cgroups.PERIOD_US}")

    def close(self) -> None:
        """Close our descriptors; idempotent."""
        for name in ("oom_fd", "_cpu_fd", "_peak_fd"):
            fd = getattr(self, name)
            if fd >= 0:
                os.close(fd)
                setattr(self, name, -1)


def limit_writes(layout: Layout, name: str, limits: Limits, old: Limits | None = None) -> list[tuple[str, str]]:
    """Return the writes, in order, that give group `name` its limits.

    On v1 memsw may never be below limit: widen it first, tighten it last (cgroup-v1/memory.rst, 2.4).
    """
    writes: list[tuple[str, str]] = []
    if layout.memory is not None and (old is None or old.memory != limits.memory):
        base = f"{layout.memory}/{name}"
        if layout.version == 1:
            pair = [(f"{base}/memory.limit_in_bytes", str(limits.memory))]
            if layout.swap == "memsw":
                memsw = (f"{base}/memory.memsw.limit_in_bytes", str(limits.memory))
                widen = old is not None and limits.memory > old.memory
                pair = [memsw, *pair] if widen else [*pair, memsw]
            writes += pair
            if old is None:
                writes.append((f"{base}/memory.swappiness", "0"))
        else:
            writes.append((f"{base}/memory.max", str(limits.memory)))
            if old is None:
                if layout.swap == "swap.max":
                    writes.append((f"{base}/memory.swap.max", "0"))
                writes.append((f"{base}/memory.oom.group", "1"))
    if layout.pids is not None and (old is None or old.processes != limits.processes):
        writes.append((f"{layout.pids}/{name}/pids.max", str(limits.processes)))
    if layout.cpu is not None and (old is None or old.cpu_share != limits.cpu_share):
        quota = quota_us(limits.cpu_share)
        if layout.version == 1:
            writes.append((f"{layout.cpu}/{name}/cpu.cfs_quota_us", str(quota)))
        else:
            writes.append((f"{layout.cpu}/{name}/cpu.max", f"{quota} {cgroups.PERIOD_US}"))
    return writes
