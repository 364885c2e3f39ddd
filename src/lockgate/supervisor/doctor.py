"""What holds on this host, and by what: a real machine is booted and attacked for each bound (X2, X3).

Rule 1: a row says "holds" only after it was seen to hold in a run of this very pool; a file that exists proves nothing.
Rule 2: a bound that does not hold comes with the missing piece and the fix.
Rule 3: data goes in, data comes out; the command line renders it.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any, Final, get_args

import msgspec

from lockgate.contract import wire
from lockgate.contract.bounds import KiB, MiB
from lockgate.contract.errors import HostFault, LockgateError
from lockgate.contract.run import Rung, RunSpec
from lockgate.supervisor import cgroups
from lockgate.supervisor.engine import Engine
from lockgate.supervisor.line import Key
from lockgate.supervisor.loop import Reactor
from lockgate.supervisor.run import Deck, Run
from lockgate.supervisor.settings import Settings

_SECONDS: Final = 90.0
_TIMED: Final = 9


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One bound or wall: whether it holds, by what, what was seen, and the fix if it does not."""

    name: str
    holds: bool
    by: str
    saw: str
    fix: str = ""


class Probe(msgspec.Struct, frozen=True):
    """A run that attacks a bound; `judge` makes its rows."""

    code: str
    bounds: dict[str, float]
    judge: Callable[[wire.Finished], list[Row]]


_SPIN: Final = "while True: pass"
_HOG_IN_CHILD: Final = (
    "import os, time\nif os.fork() == 0:\n    x = []\n    while True: x.append(bytearray(1 << 20))\ntime.sleep(20)"
)
_HOG: Final = "x = []\nwhile True: x.append(bytearray(1 << 20))"
_FORKS: Final = (
    "import os, time\nn = 1\ntry:\n    while n < 1000:\n        if os.fork() == 0:\n            time.sleep(20)\n"
    "        n += 1\nexcept OSError: pass\nn"
)
_TWO_SPINS: Final = "import os\nos.fork()\nwhile True: pass"
_DISK: Final = (
    "import os\nn = 0\ntry:\n    with open('big', 'wb') as f:\n        while True: n += f.write(b'x' * 65536)\n"
    "except OSError: pass\nos.truncate('big', 0)\nm = 0\ntry:\n    while m < 100000:\n"
    "        open(f'f{m}', 'w').close(); m += 1\nexcept OSError: pass\n[n, m]"
)
_FLOOD: Final = "import os\nb = b'x' * 65536\nwhile True: os.write(1, b)"
_INSIDE: Final = """
import mmap, os, socket
def refused(f):
    try: f()
    except (OSError, ValueError) as e: return e.errno if isinstance(e, OSError) else -1
    return 0
[refused(lambda: socket.socket()), refused(lambda: mmap.mmap(-1, 4096, prot=7)), len(os.listdir('/proc')),
 sorted(set(os.environ) - {'HOME', 'TMPDIR', 'LC_CTYPE'}), refused(lambda: open('/usr/x', 'w')),
 refused(lambda: os.pidfd_open(1) and os.setns(0, 0) if hasattr(os, 'setns') else os.chroot('/'))]
"""


class Doctor:
    """Runs the probes of one report in an engine.

    Args:
        done: gets the report.

    """

    def __init__(self, engine: Engine, done: Callable[[dict[str, Any]], object]) -> None:
        self._engine = engine
        self._done = done
        self._key: Key | None = None
        self._rows: list[Row] = []
        self._error: LockgateError | None = None
        self._by_rlimit = False
        self._facts: dict[str, Any] = {}
        self._todo: list[Probe] = []
        self._begun = time.monotonic()
        self._times: list[float] = []
        self._number = 0
        base = engine.deck
        self._deck = Deck(
            base.reactor, base.pool, self._attach, _no_detach, self._received, base.over, base.memory_by, base.work
        )
        self._probe: Probe | None = None

    def begin(self) -> None:
        """Boot a machine, then run one probe after another."""
        settings = self._engine.settings
        try:
            self._key = self._engine.key(settings.rung, settings.env)
        except LockgateError as err:
            self._error = err
            try:
                # What else holds is still worth knowing: boot it as if the fallback had been accepted.
                self._key = self._engine.key(settings.rung, settings.env, accept_rlimit=True)
            except LockgateError:
                self._finish()
                return
        self._by_rlimit = self._key.memory_by_rlimit
        self._todo = self._probes()
        self._next()

    # ---- running -------------------------------------------------------------------------------------------------
    def _attach(self, _message: wire.Attach, run: Run) -> None:
        # No broker stands behind these runs: the channel stays closed at this end, and the code has no need of it.
        if run.slot is not None:
            run.slot.machine.take_channel().close()
            self._facts = run.slot.facts or {}
        self._engine.reactor.defer(lambda: run.attached(ok=True))

    def _next(self) -> None:
        if not self._todo or self._key is None or time.monotonic() - self._begun > _SECONDS:
            self._finish()
            return
        self._probe = self._todo.pop(0)
        self._number += 1
        most = self._engine.settings.bounds
        bounds = msgspec.structs.replace(
            most, **{name: min(value, getattr(most, name)) for name, value in self._probe.bounds.items()}
        )
        spec = RunSpec(ticket=f"doctor {self._number}", code=self._probe.code, bounds=bounds)
        run = Run(self._deck, -self._number, spec, self._probe.code.encode(), self._key)
        self._engine.runs[run.ident] = self._engine.tickets[spec.ticket] = run
        self._engine.reactor.defer(lambda: run.begin(self._engine.settings.acquire))

    def _received(self, message: wire.SupervisorToAgent) -> None:
        if isinstance(message, wire.Finished) and self._probe is not None:
            self._rows += self._probe.judge(message)
            self._engine.reactor.defer(self._next)
        elif isinstance(message, wire.Refused):
            self._error = self._error or HostFault(message.fault.message, next_step=message.fault.next_step)
            self._finish()

    def _finish(self) -> None:
        done, self._done = self._done, _no_report
        done(self._report())

    # ---- probes --------------------------------------------------------------------------------------------------
    def _probes(self) -> list[Probe]:
        layout = self._engine.layout
        share, group = ("cfs quota", "cgroup v1") if layout.version == 1 else ("cpu.max", "cgroup v2")
        counter = (
            "cpuacct.usage" if layout.cpuacct else "cpu.stat" if layout.unified else "the tasks of its process tree"
        )
        timed = [Probe("1+1", {}, self._time) for _ in range(_TIMED)]
        memory = (
            Probe(_HOG, {"memory": 128 * MiB, "wall": 10}, self._judge_rlimit)
            if self._by_rlimit
            else Probe(_HOG_IN_CHILD, {"memory": 96 * MiB, "wall": 10}, self._judge_memory)
        )
        forks: list[Probe] = []
        if not self._by_rlimit:
            forks = [
                Probe(_FORKS, {"processes": 16, "wall": 10}, lambda f: self._judge_forks(f, group)),
                Probe(_TWO_SPINS, {"cpu": 0.3, "wall": 10}, lambda f: [_kill_row("cpu seconds", "cpu", counter, f)]),
            ]
        else:
            forks = [
                Probe(_FORKS, {"wall": 10}, lambda f: self._judge_forks(f, "RLIMIT_NPROC")),
                Probe(_SPIN, {"cpu": 0.3, "wall": 10}, lambda f: [_kill_row("cpu seconds", "cpu", counter, f)]),
            ]
        return [
            *timed,
            Probe(_INSIDE, {}, self._judge_inside),
            Probe(_SPIN, {"wall": 0.3}, lambda f: [_kill_row("wall", "wall", "supervisor's timer", f)]),
            memory,
            *forks,
            Probe(_SPIN, {"cpu_share": 0.25, "wall": 0.8}, lambda f: [self._judge_share(f, share)]),
            Probe(_DISK, {"wall": 20}, self._judge_disk),
            Probe(
                _FLOOD,
                {"output_kill": 1 * MiB, "output": 4 * KiB, "wall": 10},
                lambda f: [_kill_row("output", "output", "supervisor's drain", f)],
            ),
        ]

    def _time(self, finished: wire.Finished) -> list[Row]:
        self._times.append(finished.usage.wall)
        return []

    def _judge_inside(self, finished: wire.Finished) -> list[Row]:
        try:
            network, exec_gain, proc, environment, write, namespace = msgspec.json.decode(finished.value)
        except (msgspec.DecodeError, TypeError, ValueError):
            saw = finished.error.message if finished.error is not None else "nothing"
            return [Row(name="seccomp", holds=False, by="", saw=saw, fix="report this")]
        facts = self._facts
        rows = [
            ("userns", facts.get("userns") in {"root", "rootless"}, f"{facts.get('userns')} id map", "fresh per run"),
            ("landlock", bool(facts.get("landlock")), f"ABI {facts.get('landlock')}", f"write to /usr: errno {write}"),
            ("mdwe", exec_gain != 0, _mdwe(facts), f"writable and executable mapping: errno {exec_gain}"),
            ("seccomp", namespace != 0, f"{facts.get('filter')} instructions", f"setns or chroot: errno {namespace}"),
            ("network", network != 0, "seccomp and an empty net namespace", f"socket(): errno {network}"),
            ("proc cover", proc == 0, "no procfs in the tree", f"{proc} entries in /proc"),
            ("environment", not environment, "cleared by the guest runner", f"{len(environment)} variables"),
        ]
        return [
            Row(name=name, holds=holds, by=by, saw=saw, fix="" if holds else "use a newer kernel (6.3 or later)")
            for name, holds, by, saw in rows
        ]

    def _judge_memory(self, finished: wire.Finished) -> list[Row]:
        layout = self._engine.layout
        by = layout.memory_by
        whole = "OOM eventfd, then a kill of the run" if layout.version == 1 else "memory.oom.group"
        held = finished.killed_by == "memory"
        saw = f"a child's hog ended the run after {finished.usage.wall:.2f} s" if held else _saw(finished)
        return [
            Row(name="memory", holds=held, by=by, saw=saw),
            Row(name="whole-run OOM", holds=held, by=whole, saw=saw),
            Row(name="swap", holds=bool(layout.swap), by=layout.swap, saw="same limit with and without swap"),
        ]

    def _judge_rlimit(self, finished: wire.Finished) -> list[Row]:
        missing = self._engine.layout.missing
        why = f"{missing.get('memory') or missing.get('swap') or 'no memory cgroup'}: {cgroups.FIX}"
        held = finished.killed_by == "memory" or (finished.error is not None and finished.error.name == "MemoryError")
        by = "rlimit (address space of the one process)"
        return [
            Row(name="memory", holds=held and self._error is None, by=by, saw=_saw(finished), fix=why),
            Row(name="whole-run OOM", holds=False, by="none", saw="an exception inside instead of a kill", fix=why),
            Row(name="swap", holds=False, by="none", saw="not probed", fix=why),
        ]

    def _judge_forks(self, finished: wire.Finished, by: str) -> list[Row]:
        value = _value(finished)
        most = 1 if self._by_rlimit else 16
        held = isinstance(value, int) and 0 < value <= most
        return [
            Row(name="pids", holds=held, by=by, saw=f"{value} tasks were the most", fix="" if held else cgroups.FIX)
        ]

    def _judge_share(self, finished: wire.Finished, by: str) -> Row:
        cpu, wall = finished.usage.cpu, finished.usage.wall
        rate = cpu / wall if cpu is not None and wall else 1.0
        held = self._engine.layout.cpu is not None and rate < 0.5
        return Row(
            name="cpu share",
            holds=held,
            by=by if held else "none",
            saw=f"a spin under 0.25 cores got {rate:.2f}",
            fix="" if held else f"{self._engine.layout.missing.get('cpu', 'no quota')}: {cgroups.FIX}",
        )

    def _judge_disk(self, finished: wire.Finished) -> list[Row]:
        value = _value(finished)
        most = self._engine.settings.bounds
        try:
            size, files = msgspec.convert(value, tuple[int, int])
        except msgspec.ValidationError:
            size = files = 0
        return [
            Row(name="disk", holds=0 < size <= most.disk, by="tmpfs size", saw=f"{size} bytes were the most"),
            Row(
                name="inodes", holds=0 < files <= most.inodes, by="tmpfs nr_inodes", saw=f"{files} files were the most"
            ),
        ]

    # ---- the report ----------------------------------------------------------------------------------------------
    def _report(self) -> dict[str, Any]:
        engine = self._engine
        layout = engine.layout
        booted = bool(self._times)
        rows = list(self._rows)
        if booted:
            kill = "cgroup.kill" not in " ".join(layout.missing) and "kill" not in layout.missing and layout.unified
            rows.append(
                Row(
                    name="cgroup.kill",
                    holds=bool(kill),
                    by="cgroup v2" if kill else "none",
                    saw="kills go through it and the pidfd" if kill else "kills go through the pidfd alone",
                    fix="" if kill else f"{layout.missing.get('kill', 'no cgroup v2')}: {cgroups.FIX}",
                )
            )
        settings = engine.settings
        rungs: list[dict[str, Any]] = []
        for rung in get_args(Rung):
            runtime = engine.runtimes.get(rung)
            row: dict[str, Any] = {"rung": rung, "available": False, "boundary": None, "missing": "", "fix": ""}
            if runtime is None:
                row["missing"], row["fix"] = (
                    "this version does not have it",
                    "use the container rung, knowing its kernel",
                )
            else:
                row["boundary"] = runtime.boundary
                row["available"] = booted and rung == settings.rung and self._error is None
                if self._error is not None:
                    row["missing"], row["fix"] = self._error.message, self._error.next_step
            rungs.append(row)
        stages = self._facts.get("stages_us")
        return {
            "host": {
                "kernel": platform.release(),
                "machine": platform.machine(),
                "python": platform.python_version(),
                "uid": os.getuid(),
                "cpus": os.cpu_count(),
            },
            "rungs": rungs,
            "bounds": msgspec.to_builtins(rows),
            "memory_by": "rlimit" if self._by_rlimit and self._error is None else layout.memory_by,
            "missing": layout.missing,
            "timings": {
                "acquire_to_result_ms": round(statistics.median(self._times) * 1000, 3) if booted else None,
                "refill_ms": round(engine.pool.refill_seconds * 1000, 3) if booted else None,
                "slowest_reap_ms": round(engine.pool.graveyard.slowest * 1000, 3) if booted else None,
                "stages_us": stages,
            },
        }


def _mdwe(facts: dict[str, Any]) -> str:
    return "PR_SET_MDWE" if facts.get("mdwe") else "seccomp (no PR_SET_MDWE on this kernel)"


def _value(finished: wire.Finished) -> Any:
    try:
        return msgspec.json.decode(finished.value)
    except msgspec.DecodeError:
        return None


def _saw(finished: wire.Finished) -> str:
    if finished.killed_by is not None:
        return f"killed by {finished.killed_by} after {finished.usage.wall:.2f} s"
    if finished.error is not None:
        return f"{finished.error.name} inside after {finished.usage.wall:.2f} s"
    return f"it ended by itself after {finished.usage.wall:.2f} s"


def _kill_row(name: str, killed_by: str, by: str, finished: wire.Finished) -> Row:
    held = finished.killed_by == killed_by
    return Row(name=name, holds=held, by=by, saw=_saw(finished), fix="" if held else "report this: it holds everywhere")


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
