"""What holds on this host, and by what: a real machine is booted and attacked for each bound (X2, X3).

Rule 1: a row says "holds" only after it was seen to hold in a run of this very pool; a file that exists proves nothing.
Rule 2: data goes in, data comes out; the command line renders it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, get_args

import msgspec

from lockgate.contract import wire
from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import HostFault, LockgateError
from lockgate.contract.run import Rung, RunSpec
from lockgate.contract.rungs import BOUNDARIES, BUILT, RUNGS, Weakness
from lockgate.runtimes import attack
from lockgate.supervisor import checkup
from lockgate.supervisor.checkup import Probe, Row
from lockgate.supervisor.engine import Engine
from lockgate.supervisor.line import Key
from lockgate.supervisor.loop import Reactor
from lockgate.supervisor.probes import BoundProbes, kill_of_groups
from lockgate.supervisor.run import Deck, Run
from lockgate.supervisor.settings import Settings

_SECONDS: Final = 90.0
_TIMED: Final = 9
_COLD: Final = 3
_WARM_SECONDS: Final = 2.0
_TIDY_SECONDS: Final = 10.0


class Doctor:
    """Runs the probes of one report in an engine.

    Args:
        done: gets the report.

    """

    def __init__(self, engine: Engine, done: Callable[[dict[str, Any]], object]) -> None:
        self._engine = engine
        self._done = done
        # What could exist here is booted, whatever rung the operator asked for.
        asked = engine.settings.rung
        self._chosen: Rung = asked if asked in engine.runtimes else "container"
        self._key: Key | None = None
        self._errors: dict[Rung, LockgateError] = {}
        self._rows: list[Row] = []
        self._error: LockgateError | None = None
        self._by_rlimit = False
        self._facts: dict[str, Any] = {}
        self._todo: list[Probe] = []
        self._begun = time.monotonic()
        self._warm: list[float] = []
        self._cold: list[float] = []
        self._cold_files = max(1, min(1000, engine.settings.bounds.inodes - _COLD))
        self._since = 0.0
        self._asked: dict[Rung, list[attack.Row]] = {}
        self._weak: dict[Rung, str] = {}
        self._lent: list[Key] = []
        self._asked_for: set[Bounds] = set()
        self._number = 0
        base = engine.deck
        # The probes are ours: whatever is missing of a rung's wall is reported, and keeps none of them from running.
        self._deck = Deck(
            base.reactor,
            base.pool,
            self._attach,
            _no_detach,
            self._received,
            base.over,
            base.memory_by,
            get_args(Weakness),
        )
        self._probe: Probe | None = None

    def begin(self) -> None:
        """Boot a machine, then run one probe after another."""
        settings = self._engine.settings
        try:
            self._key = self._engine.key(self._chosen, settings.env)
        except LockgateError as err:
            self._error = err
            try:
                # What else holds is still worth knowing: boot it as if the fallback had been accepted.
                self._key = self._engine.key(self._chosen, settings.env, accept_rlimit=True)
            except LockgateError:
                self._finish()
                return
        self._by_rlimit = self._key.memory_by_rlimit
        self._todo = self._probes(self._key) + self._others()
        self._next()

    def _others(self) -> list[Probe]:
        """The attack suite in every other rung that this version drives and this host may have."""
        return [
            Probe(attack.program(), {}, partial(self._judge_attack, rung), other=rung)
            for rung in self._engine.runtimes
            if rung in BUILT and rung != self._chosen
        ]

    # ---- running -------------------------------------------------------------------------------------------------
    def _attach(self, _message: wire.Attach, run: Run) -> None:
        # No broker stands behind these runs: the channel stays closed at this end, and the code has no need of it.
        if run.slot is not None:
            run.slot.machine.take_channel().close()
            if self._probe is not None and self._probe.other is None:
                self._facts = run.slot.facts or {}
        self._engine.reactor.defer(lambda: run.attached(ok=True))

    def _next(self) -> None:
        if not self._todo or self._key is None or time.monotonic() - self._begun > _SECONDS:
            self._finish()
            return
        self._probe = self._todo.pop(0)
        key, rung = self._key, self._probe.other
        if rung is not None:
            try:
                key = self._engine.key(rung, None)
            except LockgateError as err:
                self._errors[rung] = err
                self._engine.reactor.defer(self._next)
                return
            if not self._engine.pool.knows(key):
                self._lent.append(key)
                self._engine.pool.target(key, 0)  # the one machine that is asked, and none behind it
        self._number += 1
        most = self._engine.settings.bounds
        bounds = msgspec.structs.replace(
            most, **{name: min(value, getattr(most, name)) for name, value in self._probe.bounds.items()}
        )
        if rung is None:
            self._asked_for.add(bounds)
        spec = RunSpec(ticket=f"doctor {self._number}", code=self._probe.code, rung=key.rung, bounds=bounds)
        run = Run(self._deck, -self._number, spec, self._probe.code.encode(), key)
        self._engine.runs[run.ident] = self._engine.tickets[spec.ticket] = run

        def begin() -> None:
            self._since = time.monotonic()
            run.begin(self._engine.settings.acquire)

        if self._probe.warm:
            self._when_warm(key, time.monotonic() + _WARM_SECONDS, begin)
        else:
            self._engine.reactor.defer(begin)

    def _when_warm(self, key: Key, deadline: float, then: Callable[[], object]) -> None:
        """Wait without asking for more machines than the operator has."""
        if self._engine.pool.warm(key) or time.monotonic() > deadline:
            then()
        else:
            self._engine.reactor.after(0.001, lambda: self._when_warm(key, deadline, then))

    def _received(self, message: wire.SupervisorToAgent) -> None:
        if isinstance(message, wire.Finished) and self._probe is not None:
            if message.weakness is not None:
                self._weak[self._probe.other or self._chosen] = message.weakness
            self._rows += self._probe.judge(message)
            self._engine.reactor.defer(self._next)
        elif isinstance(message, wire.Refused) and self._probe is not None and self._probe.other is not None:
            self._errors[self._probe.other] = HostFault(message.fault.message, next_step=message.fault.next_step)
            self._engine.reactor.defer(self._next)
        elif isinstance(message, wire.Refused):
            self._error = self._error or HostFault(message.fault.message, next_step=message.fault.next_step)
            self._finish()

    def _finish(self, deadline: float | None = None) -> None:
        """Let go of the machines of unusual classes and of other rungs, then report."""
        deadline = deadline or time.monotonic() + _TIDY_SECONDS
        pool, key = self._engine.pool, self._key
        gone = [pool.leave(other) for other in self._lent]
        if key is not None:
            gone += [pool.forget(key, bounds) for bounds in self._asked_for]
        if not all(gone) and time.monotonic() < deadline:
            self._engine.reactor.after(0.005, lambda: self._finish(deadline))
            return
        done, self._done = self._done, _no_report
        done(self._report())

    # ---- probes --------------------------------------------------------------------------------------------------
    def _probes(self, key: Key) -> list[Probe]:
        timed = [Probe("1+1", {}, lambda _: self._time(self._warm), warm=True) for _ in range(_TIMED)]
        # A class of bounds that nobody asked for yet has no warm machine.
        files = self._cold_files
        timed += [Probe("1+1", {"inodes": files + n}, lambda _: self._time(self._cold)) for n in range(_COLD)]
        inside = checkup.INSIDE.get(self._chosen)
        asked = [Probe(inside.code, {}, lambda f: inside.judge(checkup.value(f), self._facts))] if inside else []
        bounds = BoundProbes(self._engine.layout, key, self._engine.settings.bounds, self._error is None)
        return [
            *timed,
            *asked,
            Probe(attack.program(), {}, partial(self._judge_attack, self._chosen)),
            *bounds.all(),
        ]

    def _time(self, times: list[float]) -> list[Row]:
        times.append(time.monotonic() - self._since)
        return []

    def _judge_attack(self, rung: Rung, finished: wire.Finished) -> list[Row]:
        with contextlib.suppress(HostFault):
            self._asked[rung] = attack.rows(checkup.value(finished))
        return []

    # ---- the report ----------------------------------------------------------------------------------------------
    def _report(self) -> dict[str, Any]:
        engine = self._engine
        layout = engine.layout
        booted = bool(self._warm)
        rows = list(self._rows)
        if booted:
            rows.append(kill_of_groups(layout))
        stages = self._facts.get("stages_us")
        return {
            "host": {
                "kernel": platform.release(),
                "machine": platform.machine(),
                "python": platform.python_version(),
                "uid": os.getuid(),
                "cpus": os.cpu_count(),
            },
            "rungs": [self._rung(rung, booted=booted) for rung in RUNGS],
            "bounds": msgspec.to_builtins(rows),
            "memory_by": "rlimit" if self._by_rlimit and self._error is None else layout.memory_by,
            "missing": layout.missing,
            "timings": {
                "warm_ms": checkup.median_ms(self._warm),
                "cold_ms": checkup.median_ms(self._cold),
                "template_ms": round(engine.pool.template_seconds * 1000, 3) if booted else None,
                "refill_ms": round(engine.pool.growing.refill_seconds * 1000, 3) if booted else None,
                "slowest_reap_ms": round(engine.pool.graveyard.slowest * 1000, 3) if booted else None,
                "stages_us": stages,
            },
        }

    def _rung(self, rung: Rung, *, booted: bool) -> dict[str, Any]:
        """Return the row of a rung: available only after the attack suite ran inside it and reached nothing."""
        runtime = self._engine.runtimes.get(rung)
        row: dict[str, Any] = {
            "rung": rung,
            "available": False,
            "boundary": "emulated" if self._weak.get(rung) == "emulated" else BOUNDARIES[rung],
            "missing": "",
            "fix": "",
        }
        row |= {"probes": 0, "reached": [], "weakness": self._weak.get(rung)}
        error = self._error if rung == self._chosen else self._errors.get(rung)
        asked = self._asked.get(rung)
        if runtime is None:
            row["missing"], row["fix"] = "not in this version", "use the container rung, knowing its kernel"
        elif error is not None:
            row["missing"], row["fix"] = error.message, error.next_step
        elif not booted and rung == self._chosen:
            row["missing"], row["fix"] = "a sandbox that answers in time", "look at the load of this machine; try again"
        elif asked is None and rung != self._chosen:
            row["missing"], row["fix"] = "the time to ask it", f'set [execution] rung = "{rung}"'
        elif asked is None:
            row["missing"] = "an end of the attack suite inside it"
            row["fix"] = "raise wall, code and value in [execution.bounds], then see: lockgate attack"
        if runtime is not None and asked is not None:
            found = attack.judge(rung, asked, attack.Controls(rows={}, missing={}))
            row["probes"], row["reached"] = found.total, [one.id for one in found.reached]
            if found.reached and not row["missing"]:
                row["missing"] = f"a wall: {len(found.reached)} primitives can be reached from inside"
                row["fix"] = "run `lockgate attack`; run no hostile code here until it is clean"
        row["available"] = not row["missing"]
        return row


def _no_detach(_message: wire.Detach) -> None:
    return


def _no_report(_report: dict[str, Any]) -> None:
    return


def _no_attach(_message: wire.Attach, run: Run) -> None:
    raise HostFault(f"run {run.ident} has no broker", next_step="report this")


def _no_send(_message: wire.SupervisorToAgent) -> None:
    return


def report(settings: Settings | None = None) -> dict[str, Any]:
    """Boot, probe and clean up in this process, without broker or agent; what `lockgate doctor` prints.

    Raises:
        HostFault: the probes did not end in time.

    """
    reactor = Reactor()
    engine = Engine(settings or Settings(pool=1), reactor, _no_attach, _no_detach, _no_send)
    reports: list[dict[str, Any]] = []

    def done(data: dict[str, Any]) -> None:
        reports.append(data)
        reactor.stop()

    try:
        Doctor(engine, done).begin()
        if not reports:
            reactor.run(time.monotonic() + _SECONDS + 10)
    finally:
        engine.close()
        reactor.close()
    if not reports:
        raise HostFault("the probes did not end in time", next_step="look at the load of this machine; try again")
    return reports[0]
