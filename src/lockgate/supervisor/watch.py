"""What a run uses, looked at while it runs: CPU-seconds, refused forks, and memory where no group caps it (X5, X6).

Rule 1: the CPU time of the *whole run* is counted, dead children included: RLIMIT_CPU is per process and only backs it.
Rule 2: the next look comes before the bound can be reached: remaining seconds over the cores the run may use.
Rule 3: a machine that maps files of a disk (an image) may be charged for their pages. When such a run is out of memory
        the kernel takes those away and reads them again, over and over, and kills nobody: what it holds beside them is
        looked at here.
Rule 4: without a group the counters come from the tasks of the machine's own process tree, never from a walk of /proc.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

from lockgate.contract.bounds import Bounds
from lockgate.supervisor.loop import Reactor, Timer
from lockgate.supervisor.slot import Slot

_TICK: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_CORES: Final = float(os.cpu_count() or 1)
_LONGEST: Final = 0.25
_SHORTEST: Final = 0.01
_RSS_EVERY: Final = 0.02
_HELD_EVERY: Final = 0.05
_HELD_SHARE: Final = 0.93  # of the group's limit; the rest is pages of files and of tables
# A run is ended as a fork bomb when the kernel refused it this many tasks over this long a time (ADR 0017).
BOMB_REFUSALS: Final = 500
BOMB_SECONDS: Final = 2.0

Trigger = Literal["cpu", "memory", "processes"]


class ProcessTree:
    """CPU time and resident memory of a process and its descendants, from /proc (proc_pid_stat(5), proc_pid_task(5)).

    Children of a pid namespace's first process cannot leave its tree: orphans come back to it.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: dict[tuple[int, bytes], int] = {}

    def look(self) -> tuple[float, int]:
        """Return (CPU-seconds, resident bytes).

        A dead child's time is in its parent's counters if it was waited for and in our last look if it was not; the
        larger of the two sums is still a lower bound, so a run is never ended before its limit.
        """
        waited = alive = resident = 0
        now: dict[tuple[int, bytes], int] = {}
        todo = [self._pid]
        while todo:
            pid = todo.pop()
            try:
                fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
                own, children = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
                resident += int(fields[21]) * _PAGE
                now[pid, fields[19]] = own
                alive += own
                waited += own + children
                for task in Path(f"/proc/{pid}/task").iterdir():
                    todo += [int(child) for child in (task / "children").read_bytes().split()]
            except (OSError, IndexError, ValueError):
                continue
        for key, ticks in self._seen.items():
            if key not in now:
                alive += ticks
                now[key] = ticks
        self._seen = now
        return max(alive, waited) / _TICK, resident


class Watch:
    """Looks after one run.

    Args:
        most: bytes of the group's limit when its machine maps files of a disk, else None.
        on_limit: called once, with the bound that was reached.

    """

    __slots__ = (
        "_base",
        "_bounds",
        "_cores",
        "_most",
        "_on_limit",
        "_reactor",
        "_refused",
        "_resident",
        "_rss",
        "_slot",
        "_timer",
        "_tree",
    )

    def __init__(
        self,
        reactor: Reactor,
        slot: Slot,
        bounds: Bounds,
        *,
        rss: bool,
        on_limit: Callable[[Trigger], object],
        most: int | None = None,
    ) -> None:
        self._reactor = reactor
        self._slot = slot
        self._bounds = bounds
        self._rss = rss
        self._most = most
        self._on_limit = on_limit
        self._tree: ProcessTree | None = None
        self._refused: float | None = None
        self._cores = min(_CORES, bounds.cpu_share) if slot.group is not None else _CORES
        self._base = self._seconds()
        self._resident = self._look_at_tree()[1] if rss else 0  # shared with the template: not this run's
        self._timer: Timer | None = reactor.after(self._pause(0.0), self._look)

    def _seconds(self) -> float:
        if self._slot.group is not None:
            used = self._slot.group.cpu_seconds()
            if used is not None:
                return used
        return self._look_at_tree()[0]

    def _look_at_tree(self) -> tuple[float, int]:
        if self._tree is None:
            self._tree = ProcessTree(self._slot.machine.host_pid)
        return self._tree.look()

    def _pause(self, used: float) -> float:
        if self._rss:
            return _RSS_EVERY
        return min(
            _LONGEST if self._most is None else _HELD_EVERY, max(_SHORTEST, (self._bounds.cpu - used) / self._cores)
        )

    def used(self) -> float:
        """Return the CPU-seconds since the code was sent."""
        return max(0.0, self._seconds() - self._base)

    def _look(self) -> None:
        self._timer = None
        if self._rss:
            seconds, resident = self._look_at_tree()
            if resident - self._resident > self._bounds.memory:
                self._on_limit("memory")
                return
            used = max(0.0, seconds - self._base)
        else:
            used = self.used()
        if used >= self._bounds.cpu:
            self._on_limit("cpu")
            return
        if self._bomb():
            self._on_limit("processes")
            return
        if self._most is not None and self._held() > _HELD_SHARE * self._most:
            self._on_limit("memory")
            return
        self._timer = self._reactor.after(self._pause(used), self._look)

    def _held(self) -> int:
        return self._slot.group.memory_held() if self._slot.group is not None else 0

    def _bomb(self) -> bool:
        group = self._slot.group
        if group is None or group.refusals() == 0:
            return False
        now = time.monotonic()
        if self._refused is None:
            self._refused = now
        return now - self._refused >= BOMB_SECONDS and group.refusals() >= BOMB_REFUSALS

    def stop(self) -> None:
        """Look no more; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def disk_full(host_pid: int, directory: str) -> bool | None:
    """Whether the run's disk has no free block or no free inode; None when this process may not look (statvfs(3))."""
    with contextlib.suppress(OSError):
        disk = os.statvfs(f"/proc/{host_pid}/root{directory}")
        return disk.f_bfree == 0 or disk.f_ffree == 0
    return None
