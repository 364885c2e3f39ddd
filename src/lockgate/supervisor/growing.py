"""Machines on their way to being warm: asked of a template, spawned, hardened by themselves, placed in their group.

Rule 1: each has a deadline from the moment it is asked for. One that its template never answered for takes the template
        with it; one that is late afterwards goes alone.
Rule 2: a machine is counted as growing from the request until it is warm, dropped or lost, and then once no more.
Rule 3: until a run takes it a machine says that it is ready and nothing else. A byte of output, a second word, its end
        or its group's running out of memory is a failure, on the shelf as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from lockgate.contract.bounds import CEILINGS
from lockgate.contract.errors import CannotIsolate, HostFault, LockgateError
from lockgate.runtimes.protocol import Machine, MachineFailed, MachineReady
from lockgate.supervisor import loop
from lockgate.supervisor.cgroups import Layout
from lockgate.supervisor.group import Group
from lockgate.supervisor.keeper import Keeper
from lockgate.supervisor.line import Home, Line, Shelf, hardening_error
from lockgate.supervisor.slot import Graveyard, Slot

GROW_SECONDS: Final = 15.0
_FDS: Final = "raise the limit of open files (ulimit -n), or keep fewer machines warm"


class Growing:
    """Asks templates for machines and sees each to the moment when a run may take it.

    Args:
        warm: called when one is warm.
        drop: called when one failed, whether it grew or stood on its shelf.
        lost: called when a template failed, and with it all that was asked of it.

    Attributes:
        made: machines that became warm. refill_seconds: what the last one took.

    """

    def __init__(
        self,
        reactor: loop.Reactor,
        layout: Layout,
        keeper: Keeper | None,
        graveyard: Graveyard,
        *,
        warm: Callable[[Slot], object],
        drop: Callable[[Line, Slot, LockgateError], object],
        lost: Callable[[Line, Home, LockgateError], object],
    ) -> None:
        self._reactor = reactor
        self._layout = layout
        self._keeper = keeper
        self._graveyard = graveyard
        self._warm = warm
        self._drop = drop
        self._lost = lost
        self._slots: set[Slot] = set()
        self.made = 0
        self.refill_seconds = 0.0

    @property
    def count(self) -> int:
        """How many grow now."""
        return len(self._slots)

    @property
    def spawned(self) -> list[Slot]:
        """Those for which their template has answered."""
        return [slot for slot in self._slots if slot not in slot.home.asked]

    # ---- a template ----------------------------------------------------------------------------------------------
    def ask(self, line: Line, shelf: Shelf, home: Home) -> None:
        """Ask a template for a machine of a shelf's class."""
        bounds = shelf.bounds
        if self._layout.pids is not None and "processes" not in line.key.nature.fixed:
            # The group refuses and counts; the rlimit only backs it. It counts forks in flight too, so it needs room
            # for as many again (ADR 0017).
            bounds = msgspec.structs.replace(bounds, processes=min(2 * bounds.processes, int(CEILINGS["processes"])))
        try:
            machine = home.template.request(bounds)
        except LockgateError as err:
            self._lost(line, home, err)
            return
        except OSError as err:
            self._lost(line, home, HostFault(f"a sandbox cannot be asked for ({err.strerror})", next_step=_FDS))
            return
        slot = Slot(machine, shelf.bounds, home, shelf)
        slot.timer = self._reactor.after(GROW_SECONDS, partial(self._too_slow, line, slot))
        self._slots.add(slot)
        home.asked.append(slot)
        home.live += 1
        home.made += 1
        shelf.growing += 1

    def hear(self, line: Line, home: Home) -> None:
        """Take what a template says of the machines that were asked of it."""
        try:
            events = home.template.on_readable()
        except LockgateError as err:
            self._lost(line, home, err)
            return
        for event in events:
            if not home.asked:
                break
            slot = home.asked.popleft()
            if isinstance(event, MachineFailed):
                self._drop(line, slot, hardening_error(event))
            else:
                self._spawned(line, slot, event)

    def over(self, slot: Slot) -> None:
        """Count a slot as growing no more; idempotent."""
        if slot.growing:
            slot.growing = False
            slot.shelf.growing -= 1
            self._slots.discard(slot)
        if slot.timer is not None:
            slot.timer.cancel()
            slot.timer = None

    # ---- a machine -----------------------------------------------------------------------------------------------
    def _spawned(self, line: Line, slot: Slot, machine: Machine) -> None:
        slot.machine = machine
        self._reactor.add(machine.control.fileno(), lambda _mask: self._on_control(line, slot))
        self._reactor.add(machine.pidfd, lambda _mask: self._on_end(line, slot))
        # Watched from now on, not only once a run takes it: that is five system calls less before the code is sent.
        for fd in (machine.stdout, machine.stderr):
            self._reactor.add(fd, lambda _mask: self._on_noise(line, slot))
        if self._keeper is None:
            slot.placed = True
            machine.placed()
        elif machine.host_pid > 0:  # else it is dead already, and 0 would be the keeper itself
            limits = line.key.limits(slot.bounds)
            self._keeper.place(machine.host_pid, limits, lambda group, error: self._placed(line, slot, group, error))

    def _placed(self, line: Line, slot: Slot, group: Group | None, error: str) -> None:
        if group is not None:
            slot.placed = True
            slot.group = group
            if not slot.buried:
                slot.machine.placed()
                if group.oom_fd >= 0:
                    self._reactor.add(group.oom_fd, lambda _mask: self._on_noise(line, slot))
                self._settle(line, slot)
            elif slot not in self._graveyard.dying:  # it died meanwhile; its group is all that is left of it
                self._graveyard.clear(slot)
        elif not slot.buried:
            text = f"a sandbox cannot be put into its control group ({error})"
            self._drop(
                line, slot, CannotIsolate(text, next_step="run `lockgate doctor`; it says which bound is held how")
            )

    def _on_control(self, line: Line, slot: Slot) -> None:
        for event in slot.machine.on_control():
            if isinstance(event, MachineReady):
                slot.facts = event.facts
                self._settle(line, slot)
            else:
                detail = event if isinstance(event, MachineFailed) else MachineFailed("ready", 0, "a result came early")
                self._drop(line, slot, hardening_error(detail))
                return

    def _on_noise(self, line: Line, slot: Slot) -> None:
        self._drop(line, slot, hardening_error(MachineFailed("idle", 0, "it wrote or ran out of memory before a run")))

    def _on_end(self, line: Line, slot: Slot) -> None:
        slot.dead = True
        self._drop(line, slot, hardening_error(MachineFailed("idle", 0, "its first process ended")))

    def _settle(self, line: Line, slot: Slot) -> None:
        """Give a slot away that became warm."""
        if not slot.warm or not slot.growing:
            return
        self.over(slot)
        line.succeeded()
        self.made += 1
        self.refill_seconds = time.monotonic() - slot.started
        self._warm(slot)

    def _too_slow(self, line: Line, slot: Slot) -> None:
        error = HostFault(
            f"a sandbox was not ready within {GROW_SECONDS:g} s",
            next_step="look at the load of this machine; run `lockgate doctor`",
        )
        if slot in slot.home.asked:
            self._lost(line, slot.home, error)  # the template itself hangs
        else:
            self._drop(line, slot, error)
