"""A machine with its group, from the clone to the last descriptor.

Rule 1: a slot is warm only when it hardened itself (`MachineReady`) *and* stands in its group.
Rule 2: a slot leaves the pool once. Whatever happens to it then ends in `Graveyard.bury`.
Rule 3: a killed slot must be gone within ten seconds, or this host cannot be trusted to kill: the pool stops.
"""

from __future__ import annotations

import fcntl
import select
import struct
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import HostFault
from lockgate.runtimes.protocol import Machine, Nature
from lockgate.supervisor import loop
from lockgate.supervisor.group import Group
from lockgate.supervisor.keeper import Keeper

REAP_SECONDS: Final = 10.0
_RLIMITS: Final = ("processes", "memory")


class Klass(NamedTuple):
    """What is fixed when a machine is made; every other bound is set when a run takes it.

    A group's limits can be set later, so tasks and memory count only where rlimits hold them.
    """

    names: tuple[str, ...]
    values: tuple[float, ...]

    @staticmethod
    def of(bounds: Bounds, *, by_rlimit: bool, fixed: tuple[str, ...] = Nature().fixed) -> Klass:
        """Return the class of machines that can hold `bounds`; `fixed` is that of the rung's nature."""
        names = (*fixed, *(name for name in _RLIMITS if name not in fixed)) if by_rlimit else fixed
        return Klass(names, tuple([getattr(bounds, name) for name in names]))

    def bounds(self, most: Bounds) -> Bounds:
        """Return the bounds that a machine of this class is made with: the operator's, with these made tighter."""
        return msgspec.structs.replace(most, **dict(zip(self.names, self.values, strict=True)))


class Slot:
    """One machine, its group, and what it said of itself when it was ready."""

    __slots__ = (
        "bounds",
        "buried",
        "dead",
        "facts",
        "group",
        "growing",
        "home",
        "machine",
        "placed",
        "shelf",
        "started",
        "timer",
    )

    def __init__(self, machine: Machine, bounds: Bounds, home: Any, shelf: Any) -> None:
        self.machine = machine
        self.bounds = bounds
        self.home = home
        self.shelf = shelf
        self.growing = True
        self.buried = False
        self.timer: loop.Timer | None = None
        self.group: Group | None = None
        self.placed = False
        self.dead = False
        self.facts: dict[str, Any] | None = None
        self.started = time.monotonic()

    @property
    def warm(self) -> bool:
        """Whether a run may take it."""
        return self.placed and self.facts is not None and not self.dead and not self.buried


def is_dead(pidfd: int) -> bool:
    """Whether the process behind a pidfd and with it its whole pid namespace is gone (pidfd_open(2))."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


_PIDFD_INFO_EXIT: Final = 1 << 3
_INFO: Final = struct.Struct("<QQ11Ii")  # struct pidfd_info: mask, cgroup id, eleven ids, exit status
_PIDFD_GET_INFO: Final = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11


def exit_status(pidfd: int) -> int | None:
    """Return the wait status of a dead process that is not our child (PIDFD_GET_INFO, Linux 6.15), None if unknown."""
    buffer = bytearray(_INFO.size)
    struct.pack_into("<Q", buffer, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, buffer, True)
    except OSError:
        return None
    fields = _INFO.unpack(buffer)
    return fields[-1] if fields[0] & _PIDFD_INFO_EXIT else None


class Graveyard:
    """Sees killed slots to their end, in the background.

    Args:
        on_fault: called when a slot outlives its kill or its group cannot be removed.
        on_change: called whenever one is gone.

    """

    def __init__(
        self,
        reactor: loop.Reactor,
        keeper: Keeper | None,
        on_fault: Callable[[HostFault], object],
        on_change: Callable[[], object],
    ) -> None:
        self._reactor = reactor
        self._keeper = keeper
        self._on_fault = on_fault
        self._on_change = on_change
        self.dying: set[Slot] = set()
        self.reaped = 0
        self.slowest = 0.0

    def bury(self, slot: Slot, *, hard: bool = False) -> None:
        """Kill a slot and see to its end; `hard` = something in it resists, so use cgroup.kill and lift its quota."""
        machine = slot.machine
        slot.buried = True
        self.deafen(slot)
        if hard and slot.group is not None and not slot.dead:
            slot.group.kill()
        killed = time.monotonic()
        machine.kill()
        self.dying.add(slot)
        if machine.pidfd < 0 or slot.dead or is_dead(machine.pidfd):
            self._gone(slot, killed, None)
            return
        timer = self._reactor.after(REAP_SECONDS, lambda: self._outlived(slot))
        self._reactor.remove(machine.pidfd)
        self._reactor.add(machine.pidfd, lambda _mask: self._gone(slot, killed, timer))

    def deafen(self, slot: Slot) -> None:
        """Listen to nothing more of a slot but its end; idempotent."""
        machine = slot.machine
        for fd in (machine.control.fileno(), machine.stdout, machine.stderr):
            if fd >= 0:
                self._reactor.remove(fd)
        if slot.group is not None and slot.group.oom_fd >= 0:
            self._reactor.remove(slot.group.oom_fd)

    def _outlived(self, slot: Slot) -> None:
        pid = slot.machine.host_pid
        self._on_fault(
            HostFault(
                f"a killed sandbox (process {pid}) is still alive after {REAP_SECONDS:g} s, so no more are started",
                next_step=f"look at /proc/{pid}/stack and the kernel log; restart the gate when it is gone",
            )
        )

    def _gone(self, slot: Slot, killed: float, timer: loop.Timer | None) -> None:
        if timer is not None:
            timer.cancel()
        self.slowest = max(self.slowest, time.monotonic() - killed)
        slot.dead = True
        if slot.machine.pidfd >= 0:
            self._reactor.remove(slot.machine.pidfd)
        slot.machine.close()
        self.clear(slot)

    def clear(self, slot: Slot) -> None:
        """Remove the group of a dead slot."""
        group, slot.group = slot.group, None
        if group is None or self._keeper is None:
            self._done(slot, "")
            return
        group.close()
        self._keeper.remove(group, lambda error: self._done(slot, error))

    def _done(self, slot: Slot, error: str) -> None:
        self.dying.discard(slot)
        self.reaped += 1
        if error:
            self._on_fault(
                HostFault(
                    f"the control group of a dead sandbox cannot be removed ({error})",
                    next_step="look for processes in that group; restart the gate when they are gone",
                )
            )
        self._on_change()
