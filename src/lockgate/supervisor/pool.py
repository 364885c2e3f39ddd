"""Warm machines.

Rule 1: what is warm is the machine, never the run: nothing here has seen a RunSpec. There is no release().
Rule 2: one machine is made at a time (two while runs wait), and not while runs are being started, unless one waits.
Rule 3: a slot that cannot harden or be placed in its group is never handed out; who waits gets the typed error.
Rule 4: once a kill did not work (`stop`), no machine is made or handed out any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final

from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import HostFault, LockgateError
from lockgate.contract.rungs import Weakness
from lockgate.runtimes.protocol import Template
from lockgate.supervisor import loop
from lockgate.supervisor.cgroups import Layout
from lockgate.supervisor.growing import Growing
from lockgate.supervisor.keeper import Keeper
from lockgate.supervisor.line import Home, Key, Line, Shelf, Waiter
from lockgate.supervisor.slot import Graveyard, Klass, Slot
from lockgate.supervisor.starter import Starter

LINGER_SECONDS: Final = 0.002
_QUIET: Final = 0.003  # seconds after a run started or ended in which no machine is made
_LINES: Final = 8
_SHELVES: Final = 8

StartTemplate = Callable[[Key], Template]


class Pool:
    """Warm slots for the supervisor.

    Args:
        start_template: starts the template of a key; may block; runs in the starter's thread.
        most: the widest bounds of any run.
        recycle: machines made from a template before it is replaced.

    """

    def __init__(
        self,
        reactor: loop.Reactor,
        layout: Layout,
        keeper: Keeper | None,
        starter: Starter,
        start_template: StartTemplate,
        *,
        most: Bounds,
        recycle: int,
    ) -> None:
        self._reactor = reactor
        self._layout = layout
        self._starter = starter
        self._start_template = start_template
        self._most = most
        self._recycle = recycle
        self._lines: dict[Key, Line] = {}
        self._homes: set[Home] = set()
        self._lingering: dict[Slot, loop.Timer] = {}
        self._timer: loop.Timer | None = None
        self._active = 0.0
        self._closing = False
        self.fault: HostFault | None = None
        self.graveyard = Graveyard(reactor, keeper, self.stop, self._kick)
        self.growing = Growing(
            reactor, layout, keeper, self.graveyard, warm=self._shelve, drop=self._drop, lost=self._lost
        )
        self.template_seconds = 0.0

    # ---- for runs ------------------------------------------------------------------------------------------------
    def acquire(
        self,
        key: Key,
        bounds: Bounds,
        got: Callable[[Slot], object],
        failed: Callable[[LockgateError], object],
        *,
        seconds: float,
    ) -> Callable[[], None]:
        """Give `got` a warm slot, at once if there is one, else within `seconds`; returns what cancels the wait."""
        self._active = time.monotonic()
        if self.fault is not None or self._closing:
            failed(self.fault or HostFault("the supervisor is closing", next_step="open a new gate"))
            return _nothing
        line, shelf = self._shelf(key, bounds)
        while shelf.warm:
            slot = shelf.warm.popleft()
            if slot.warm:
                got(slot)
                self._reactor.defer(self._kick)  # the run first
                return _nothing
        waiter = Waiter(got, failed)
        if line.closed_until > self._active and line.error is not None:
            failed(line.error)
            return _nothing
        shelf.waiters.append(waiter)
        waiter.timer = self._reactor.after(seconds, partial(self._late, line, shelf, waiter, seconds))
        self._kick()
        return partial(_cancel, shelf, waiter)

    def touch(self) -> None:
        """Note that a run begins or ends: making machines keeps out of its way."""
        self._active = time.monotonic()

    def finished(self, slot: Slot, *, by_rlimit: bool, tasks: int = 1) -> None:
        """Destroy a slot whose run gave its result, out of the way of those who now deal with that result.

        Tearing down namespaces takes milliseconds of a core that broker and agent want. A slot whose only task has
        said all it may say waits for that long; one that left anything running is killed at once (ADR 0016).
        """
        alone = slot.group.alone(tasks) if slot.group is not None else by_rlimit
        if alone and not slot.dead and not self._closing:
            self.graveyard.deafen(slot)
            self._reactor.handler(slot.machine.pidfd, lambda _mask: self.done(slot, hard=False))
            self._lingering[slot] = self._reactor.after(LINGER_SECONDS, partial(self.done, slot, hard=False))
        else:
            self.done(slot, hard=False)

    def done(self, slot: Slot, *, hard: bool) -> None:
        """Destroy a slot that was handed out."""
        timer = self._lingering.pop(slot, None)
        if timer is not None:
            timer.cancel()
        slot.home.live -= 1
        self.graveyard.bury(slot, hard=hard)
        self._retire(slot.home)
        self._kick()

    def target(self, key: Key, count: int) -> None:
        """Keep `count` warm slots of `key` under the operator's bounds."""
        self._shelf(key, self._most)[1].target = count
        self._kick()

    def warm(self, key: Key) -> int:
        """Return how many warm slots of `key` are there under the operator's bounds."""
        return len(self._shelf(key, self._most)[1].warm)

    def forget(self, key: Key, bounds: Bounds) -> bool:
        """Keep nothing warm for the unusual class of `bounds` any more; False while a machine of it is being made."""
        line = self._lines.get(key)
        klass, usual = self._klass(key, bounds), self._klass(key, self._most)
        shelf = line.shelves.get(klass) if line is not None else None
        if line is None or shelf is None or klass == usual:
            return True
        if shelf.growing or shelf.waiters:
            return False
        self._drop_shelf(line, klass)
        return True

    def knows(self, key: Key) -> bool:
        """Whether machines of `key` were asked for before."""
        return key in self._lines

    def leave(self, key: Key) -> bool:
        """Keep no machine and no template of `key` any more; False while one is being made or waited for."""
        line = self._lines.get(key)
        if line is None:
            return True
        if line.starting or line.waiting or any(shelf.growing for shelf in line.shelves.values()):
            return False
        self._drop_line(line)
        return True

    def weakness(self, key: Key) -> Weakness | None:
        """Return what of the rung's wall is missing in the present template of `key`; None before there is one."""
        line = self._lines.get(key)
        return line.home.template.weakness if line is not None and line.home is not None else None

    def error(self, key: Key) -> LockgateError | None:
        """Return why `key` has no machines, None if it has or may have."""
        line = self._lines.get(key)
        return self.fault or (line.error if line is not None and line.closed_until > time.monotonic() else None)

    def counts(self) -> dict[str, int]:
        """Return numbers for `Stats`."""
        shelves = [shelf for line in self._lines.values() for shelf in line.shelves.values()]
        return {
            "warm": sum(len(shelf.warm) for shelf in shelves),
            "waiting": sum(len(shelf.waiters) for shelf in shelves),
            "growing": self.growing.count,
            "dying": len(self.graveyard.dying) + len(self._lingering),
            "reaped": self.graveyard.reaped,
            "made": self.growing.made,
            "templates": len(self._homes),
        }

    # ---- lines and shelves ---------------------------------------------------------------------------------------
    def _klass(self, key: Key, bounds: Bounds) -> Klass:
        by_rlimit = key.nature.forks and (self._layout.pids is None or key.memory_by_rlimit)
        return Klass.of(bounds, by_rlimit=by_rlimit, fixed=key.nature.fixed)

    def _shelf(self, key: Key, bounds: Bounds) -> tuple[Line, Shelf]:
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(key)
            if len(self._lines) > _LINES:
                self._drop_line(min((x for x in self._lines.values() if not x.waiting), key=lambda x: x.used))
        line.used = self._active
        klass = self._klass(key, bounds)
        shelf = line.shelves.get(klass)
        if shelf is None:
            # One machine of an unusual class is kept warm once somebody asked for it; the least used class gives way.
            shelf = line.shelves[klass] = Shelf(klass.bounds(self._most), 1)
            idle = [k for k, s in line.shelves.items() if not s.waiters and not s.growing and s is not shelf]
            if len(line.shelves) > _SHELVES and idle:
                self._drop_shelf(line, min(idle, key=lambda k: (line.shelves[k].target, line.shelves[k].used)))
        shelf.used = self._active
        return line, shelf

    def _drop_shelf(self, line: Line, klass: Klass) -> None:
        shelf = line.shelves.pop(klass)
        shelf.target = 0
        while shelf.warm:
            self.done(shelf.warm.popleft(), hard=False)

    def _drop_line(self, line: Line) -> None:
        del self._lines[line.key]
        for klass in list(line.shelves):
            self._drop_shelf(line, klass)
        home, line.home = line.home, None
        if home is not None:
            self._retire(home)

    def _late(self, line: Line, shelf: Shelf, waiter: Waiter, seconds: float) -> None:
        _cancel(shelf, waiter)
        waiter.failed(
            line.error
            or HostFault(
                f"no sandbox became free within {seconds:g} s",
                next_step="run fewer at once, or give [execution] pool or max_runs a larger value",
            )
        )

    # ---- growing -------------------------------------------------------------------------------------------------
    def _kick(self) -> None:
        """Make a machine now or as soon as it is in nobody's way."""
        if self.fault is not None or self._closing or self._full():
            return
        lines = [line for line in self._lines.values() if line.wanted and not line.starting]
        if not lines:
            return
        now = time.monotonic()
        quiet = self._active + _QUIET
        when = min(max(line.closed_until, now if line.hungry else quiet) for line in lines)
        if when <= now:
            self._reactor.defer(self._grow)
        elif self._timer is None or self._timer.callback is None or when < self._timer.when:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._reactor.at(when, self._kick)

    def _full(self) -> bool:
        return self.growing.count >= (2 if any(line.waiting for line in self._lines.values()) else 1)

    def _grow(self) -> None:
        if self.fault is not None or self._closing or self._full():
            return
        now = time.monotonic()
        lines = [x for x in self._lines.values() if x.wanted and x.closed_until <= now and not x.starting]
        if not lines:
            return
        line = max(lines, key=lambda x: (x.waiting, x.hungry, -x.used))
        home = line.home
        if home is None or home.dead:
            self._start(line)
            return
        if home.worn(self._recycle, line.key.nature.life):
            self._start(line)  # the worn-out one serves until its successor is there
        shelf = line.next_shelf()
        if shelf is not None:
            self.growing.ask(line, shelf, home)
            if line.waiting:
                self._kick()

    def _start(self, line: Line) -> None:
        if line.starting:
            return
        line.starting = True
        self._starter.submit(partial(self._start_template, line.key), partial(self._started, line, time.monotonic()))

    def _started(self, line: Line, since: float, template: Template | None, error: LockgateError | None) -> None:
        line.starting = False
        self.template_seconds = time.monotonic() - since
        if template is None:
            line.failed(error or HostFault("a template did not start", next_step="run `lockgate doctor`"), final=True)
            self._kick()
            return
        home = Home(template)
        self._homes.add(home)
        old, line.home = line.home, home
        if old is not None:
            if line.key.nature.life is not None:
                self._evict(line, old)
            self._retire(old)
        if self._closing or self._lines.get(line.key) is not line:
            line.home = None
            self._retire(home)
            return
        self._reactor.add(template.fileno(), lambda _mask: self._on_template(line, home))
        self._kick()

    def _evict(self, line: Line, home: Home, *, hard: bool = False) -> None:
        """Destroy the warm machines of a template that grew old, as they did, or that is lost."""
        for shelf in line.shelves.values():
            for slot in [slot for slot in shelf.warm if slot.home is home]:
                shelf.warm.remove(slot)
                self.done(slot, hard=hard)

    def _retire(self, home: Home) -> None:
        """Close a template that has a successor, once nothing lives from it."""
        current = any(line.home is home for line in self._lines.values())
        if (current and not home.dead) or home.live > 0 or home.asked or home not in self._homes:
            return
        self._homes.discard(home)
        for line in self._lines.values():
            if line.home is home:
                line.home = None
        self._reactor.remove(home.template.fileno())
        self._starter.submit(home.template.close, _ignore)

    def _on_template(self, line: Line, home: Home) -> None:
        self.growing.hear(line, home)
        self._retire(home)

    def _shelve(self, slot: Slot) -> None:
        """Shelve a slot that became warm, or give it to who waits."""
        shelf: Shelf = slot.shelf
        if shelf.waiters:
            waiter = shelf.waiters.popleft()
            if waiter.timer is not None:
                waiter.timer.cancel()
            waiter.got(slot)
        elif shelf.target > len(shelf.warm):
            shelf.warm.append(slot)
        else:
            self.done(slot, hard=False)
        self._kick()

    # ---- failing -------------------------------------------------------------------------------------------------
    def _drop(self, line: Line, slot: Slot, error: LockgateError) -> None:
        """Destroy a slot that never became warm, or died on its shelf."""
        self.growing.over(slot)
        if slot in slot.shelf.warm:
            slot.shelf.warm.remove(slot)
        line.failed(error)
        self.done(slot, hard=True)

    def _lost(self, line: Line, home: Home, error: LockgateError) -> None:
        """A template died or hangs: its machines die with it, and the line starts another."""
        if home.dead:
            return
        home.dead = True
        while home.asked:
            slot = home.asked.popleft()
            self.growing.over(slot)
            home.live -= 1
            slot.machine.close()
        self._evict(line, home, hard=True)
        line.failed(error)
        if line.home is home:
            line.home = None
        self._homes.discard(home)
        self._reactor.remove(home.template.fileno())
        self._starter.submit(home.template.close, _ignore)
        self._kick()

    def stop(self, fault: HostFault) -> None:
        """Hand out nothing any more; the first fault is the one that is told."""
        if self.fault is None:
            self.fault = fault
            for line in self._lines.values():
                line.failed(fault, final=True)

    # ---- the end -------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Kill every warm slot and fail every waiter; templates follow in `close_templates`."""
        self._closing = True
        error = HostFault("the supervisor is closing", next_step="open a new gate")
        for line in self._lines.values():
            line.failed(error, final=True)
            for klass in list(line.shelves):
                self._drop_shelf(line, klass)
        for slot in list(self._lingering):
            self.done(slot, hard=False)
        for slot in self.growing.spawned:
            self.growing.over(slot)
            self.done(slot, hard=True)

    def close_templates(self) -> None:
        """Close every template: what still lives in one dies with it."""
        for home in list(self._homes):
            self._homes.discard(home)
            self._reactor.remove(home.template.fileno())
            while home.asked:
                home.asked.popleft().machine.close()
            self._starter.submit(home.template.close, _ignore)


def _cancel(shelf: Shelf, waiter: Waiter) -> None:
    if waiter.timer is not None:
        waiter.timer.cancel()
    if waiter in shelf.waiters:
        shelf.waiters.remove(waiter)


def _nothing() -> None:
    return


def _ignore(_value: object, _error: object) -> None:
    return
