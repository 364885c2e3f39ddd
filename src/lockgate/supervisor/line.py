"""A line of machines: one template at a time, and shelves of warm machines made from it.

Rule 1: a machine leaves its shelf once and never returns. There is no release().
Rule 2: nothing here has seen a RunSpec; a waiter is a pair of callbacks.
Rule 3: three failures in a row close the line for a while and tell every waiter why; nobody waits for a broken line.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import CannotIsolate, HostFault, LockgateError
from lockgate.contract.run import Rung
from lockgate.runtimes.protocol import MachineFailed, Nature, Template
from lockgate.supervisor.cgroups import Limits
from lockgate.supervisor.loop import Timer
from lockgate.supervisor.slot import Klass, Slot

FAILURES: Final = 3
BACK_OFF_MOST: Final = 30.0


class Key(NamedTuple):
    """What a template is made for, and the nature of its rung."""

    rung: Rung
    env: str | None
    memory_by_rlimit: bool
    nature: Nature = Nature()

    def limits(self, bounds: Bounds) -> Limits:
        """Return what the control group of a machine with `bounds` is given."""
        return Limits.of(bounds, self.nature.overhead, self.nature.overhead_tasks)

    def memory_by(self, group: str) -> str:
        """Return what caps the memory of a run where groups do it by `group` ("none" = they cannot)."""
        return "rlimit" if self.memory_by_rlimit else self.nature.holds_memory if group == "none" else group


class Waiter:
    """Someone who wants one warm slot; exactly one of the two callbacks is called, once."""

    __slots__ = ("failed", "got", "timer")

    def __init__(self, got: Callable[[Slot], object], failed: Callable[[LockgateError], object]) -> None:
        self.got = got
        self.failed = failed
        self.timer: Timer | None = None


class Shelf:
    """Warm machines of one bounds class."""

    __slots__ = ("bounds", "growing", "target", "used", "waiters", "warm")

    def __init__(self, bounds: Bounds, target: int) -> None:
        self.bounds = bounds
        self.target = target
        self.warm: deque[Slot] = deque()
        self.waiters: deque[Waiter] = deque()
        self.growing = 0
        self.used = time.monotonic()

    @property
    def wanted(self) -> int:
        """How many machines must still be asked for."""
        return max(self.target, len(self.waiters)) - len(self.warm) - self.growing


class Home:
    """A template and what was asked of it: answers come in order of request."""

    __slots__ = ("asked", "dead", "live", "made", "since", "template")

    def __init__(self, template: Template) -> None:
        self.template = template
        self.asked: deque[Slot] = deque()
        self.live = 0
        self.made = 0
        self.dead = False
        self.since = time.monotonic()

    def worn(self, made: int, life: float | None) -> bool:
        """Whether it should be replaced: after `made` machines, or `life` seconds."""
        return self.made >= made or (life is not None and time.monotonic() - self.since > life)


class Line:
    """All of one `Key`."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.home: Home | None = None
        self.starting = False
        self.shelves: dict[Klass, Shelf] = {}
        self.failures = 0
        self.closed_until = 0.0
        self.error: LockgateError | None = None
        self.used = time.monotonic()

    @property
    def waiting(self) -> bool:
        """Whether anyone waits."""
        return any(shelf.waiters for shelf in self.shelves.values())

    @property
    def hungry(self) -> bool:
        """Whether a machine is wanted now: someone waits, or a shelf in use ran out."""
        return any(
            shelf.wanted > 0 and (shelf.waiters or not shelf.warm) and not shelf.growing
            for shelf in self.shelves.values()
        )

    @property
    def wanted(self) -> bool:
        """Whether a machine is wanted at all."""
        return any(shelf.wanted > 0 for shelf in self.shelves.values())

    def next_shelf(self) -> Shelf | None:
        """Return the shelf that needs a machine most: those who wait first."""
        wanting = [shelf for shelf in self.shelves.values() if shelf.wanted > 0]
        return max(wanting, key=lambda s: (len(s.waiters) - s.growing, -len(s.warm), s.used)) if wanting else None

    def succeeded(self) -> None:
        """A machine became warm."""
        self.failures = 0
        self.error = None

    def failed(self, error: LockgateError, *, final: bool = False) -> bool:
        """Count a failure; True once the line is closed for a while (at once when `final`)."""
        self.failures += 1
        self.error = error
        if not final and self.failures < FAILURES:
            return False
        self.closed_until = time.monotonic() + min(BACK_OFF_MOST, 2.0 ** max(0, self.failures - FAILURES))
        for shelf in self.shelves.values():
            while shelf.waiters:
                shelf.waiters.popleft().failed(error)
        return True


def hardening_error(failure: MachineFailed) -> LockgateError:
    """Return the typed error of a machine that could not be made: nothing was run in it (X3)."""
    name = f" ({failure.detail})" if failure.detail else ""
    if failure.errno:
        return CannotIsolate(
            f"a sandbox could not be hardened: step {failure.step} failed with errno {failure.errno}{name}",
            next_step="run `lockgate doctor`; it says which kernel feature is missing and what brings it",
        )
    return HostFault(
        f"a sandbox was lost while it was made: {failure.step}{name}",
        next_step="run `lockgate doctor`; if it finds nothing, report this",
    )
