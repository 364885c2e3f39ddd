"""Everything of the supervisor but its links: groups, keeper, starter, pool, runs. `process` and `doctor` drive it.

Rule 1: what this host cannot hold is refused here, before a machine is taken: shared kernel, memory, env (X3).
Rule 2: bounds of a run are checked against the operator's; none is silently narrowed or widened.
Rule 3: `close` returns when no process, group, mount or descriptor of any run is left, or says what is.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from lockgate.contract import wire
from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import BadScript, CannotIsolate, ConfigError, HostFault, LockgateError, UnknownRung
from lockgate.contract.run import RunSpec
from lockgate.runtimes.container import ContainerRuntime
from lockgate.runtimes.gvisor import GvisorRuntime
from lockgate.runtimes.microvm import MicrovmRuntime
from lockgate.runtimes.protocol import Runtime, Template, TemplateSpec
from lockgate.runtimes.wasm.runtime import WasmRuntime
from lockgate.supervisor import cgroups, envs
from lockgate.supervisor.keeper import Keeper
from lockgate.supervisor.line import Key
from lockgate.supervisor.loop import Reactor
from lockgate.supervisor.pool import Pool
from lockgate.supervisor.run import Attach, Deck, Run
from lockgate.supervisor.settings import Settings
from lockgate.supervisor.slot import REAP_SECONDS
from lockgate.supervisor.starter import Starter

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def runtimes(settings: Settings | None = None) -> dict[str, Runtime]:
    """Return the rungs that this version has, set up as the operator chose."""
    chosen = settings or Settings()
    return {
        "container": ContainerRuntime(),
        "gvisor": GvisorRuntime(chosen.gvisor),
        "microvm": MicrovmRuntime(chosen.microvm),
        "wasm": WasmRuntime(store=Path(chosen.wasm.store) if chosen.wasm.store is not None else None),
    }


class Engine:
    """The supervisor without its links.

    Args:
        settings: the operator's choices.
        attach: hands a run's channel to the broker.
        detach: tells the broker that a run is over.
        send: gives a message to the agent.
        hear: takes what the broker has sent by now.

    """

    def __init__(
        self,
        settings: Settings,
        reactor: Reactor,
        attach: Attach,
        detach: Callable[[wire.Detach], None],
        send: Callable[[wire.SupervisorToAgent], None],
        *,
        hear: Callable[[], object] = lambda: None,
    ) -> None:
        raise_open_files()
        self.settings = settings
        self.reactor = reactor
        self.runtimes = runtimes(settings)
        self.layout = cgroups.find(settings.cgroup)
        self.fault: HostFault | None = None
        # The keeper is forked before the starter's thread exists: fork(2) copies one thread only.
        self.keeper = Keeper(reactor, self.layout, self._keeper_gone) if self.layout.bases else None
        self._starter = Starter(reactor)
        self.pool = Pool(
            reactor,
            self.layout,
            self.keeper,
            self._starter,
            self._start_template,
            most=settings.bounds,
            recycle=settings.recycle,
        )
        self.deck = Deck(
            reactor, self.pool, attach, detach, send, self._over, self.layout.memory_by, settings.accepted, hear
        )
        self.runs: dict[int, Run] = {}
        self.tickets: dict[str, Run] = {}
        self._keys: dict[tuple[str, str | None, bool], Key] = {}

    def _keeper_gone(self, fault: HostFault) -> None:
        self.pool.stop(fault)

    def _start_template(self, key: Key) -> Template:
        tree: str | None = None
        packages: tuple[tuple[str, str], ...] = ()
        preload: tuple[str, ...] = ()
        if key.env is not None and key.env not in key.nature.sets:
            info = envs.find(key.env, store=self.store)
            tree, packages, preload = info.tree, info.packages, info.preload
        runtime = self.runtimes[key.rung]
        return runtime.start(
            TemplateSpec(
                env=key.env,
                tree=tree,
                packages=packages,
                preload=preload,
                memory_by=self.layout.memory_by,
                memory_by_rlimit=key.memory_by_rlimit,
            )
        )

    @property
    def store(self) -> Path | None:
        """The operator's package-set store, None for the user's own."""
        return Path(self.settings.env_store) if self.settings.env_store is not None else None

    # ---- what may run --------------------------------------------------------------------------------------------
    def key(self, rung: str, env: str | None, *, accept_rlimit: bool = False) -> Key:
        """Return the line that serves (rung, env).

        Raises:
            UnknownRung: this version has no such rung.
            UnknownEnv: no package set of that name was built.
            CannotIsolate: no memory cgroup can be had and the fallback was not accepted.

        """
        known = self._keys.get((rung, env, accept_rlimit))
        if known is not None:
            return known
        if rung not in self.runtimes:
            raise UnknownRung(
                f"this version has no rung {rung!r}", next_step="use one of: " + ", ".join(sorted(self.runtimes))
            )
        nature = self.runtimes[rung].nature
        if env is not None and env not in nature.sets:
            envs.find(env, store=self.store)
        by_rlimit = self.layout.memory_by == "none" and not nature.holds_memory
        if by_rlimit and not (accept_rlimit or self.settings.memory == "rlimit"):
            why = self.layout.missing.get("memory") or self.layout.missing.get("swap") or "no memory cgroup"
            raise CannotIsolate(
                f"the memory of a whole run cannot be capped here: {why}",
                next_step=(
                    f'{cgroups.FIX}; or set [execution] memory = "rlimit" to accept a limit on address space '
                    "in its place (one process, no threads, an exception instead of a kill)"
                ),
            )
        key = self._keys[rung, env, accept_rlimit] = Key(self.runtimes[rung].rung, env, by_rlimit, nature)
        return key

    def _check(self, spec: RunSpec) -> tuple[Key, bytes]:
        key = self.key(spec.rung, spec.env, accept_rlimit=spec.accept_memory_rlimit)
        shared = self.runtimes[spec.rung].boundary == "shared kernel"
        if shared and not (spec.accept_shared_kernel or self.settings.accept_shared_kernel):
            raise CannotIsolate(
                f"the {spec.rung} rung shares the host's kernel with the code that runs in it",
                next_step="ask for a stronger rung, or accept that with accept_shared_kernel = true",
            )
        check_bounds(spec.bounds, self.settings.bounds)
        return key, check_code(spec.code, spec.bounds.code)

    def start(self, ident: int, spec: RunSpec) -> Run:
        """Begin a run; what comes of it goes to `send` with `ident`.

        Raises:
            LockgateError: it may not run here; nothing was done.

        """
        if self.pool.fault is not None:
            raise self.pool.fault
        if len(self.runs) >= self.settings.max_runs * 16 or ident in self.runs or spec.ticket in self.tickets:
            raise HostFault(
                "too many runs are waiting, or this run was started before",
                next_step="wait for earlier runs to end, then start this one with a new ticket",
            )
        key, code = self._check(spec)
        run = Run(self.deck, ident, spec, code, key)
        self.runs[ident] = self.tickets[spec.ticket] = run
        run.begin(self.settings.acquire)
        return run

    def _over(self, run: Run) -> None:
        self.runs.pop(run.ident, None)
        self.tickets.pop(run.ticket, None)

    # ---- warm-up and counters ------------------------------------------------------------------------------------
    def when_warm(self, key: Key, count: int, seconds: float, done: Callable[[LockgateError | None], object]) -> None:
        """Keep `count` machines of `key`; `done(None)` once they are warm, `done(error)` when that is not to be."""
        deadline = time.monotonic() + seconds
        self.pool.target(key, count)

        def look() -> None:
            error = self.pool.error(key)
            if self.pool.warm(key) >= count:
                done(None)
            elif error is not None:
                done(error)
            elif time.monotonic() > deadline:
                done(HostFault(f"{count} machines were not warm within {seconds:g} s", next_step="ask for fewer"))
            else:
                self.reactor.after(0.001, look)

        look()

    def stats(self) -> dict[str, Any]:
        """Return counters: machines by state, runs, descriptors, groups, resident bytes, the slowest reap."""
        return {
            **self.pool.counts(),
            "runs": len(self.runs),
            "fds": sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1,
            "watched": self.reactor.watched,
            "groups": self.groups(),
            "rss": rss(),
            "slowest_reap": self.pool.graveyard.slowest,
            "refill_seconds": self.pool.growing.refill_seconds,
            "fault": str(self.pool.fault) if self.pool.fault is not None else None,
        }

    def groups(self) -> int:
        """Count the slot directories that exist now, in the hierarchy that has most."""
        most = 0
        for base in self.layout.bases:
            with contextlib.suppress(OSError):
                most = max(most, sum(1 for entry in os.scandir(base) if entry.is_dir()))
        return most

    def settle(self) -> None:
        """Put what start-up made out of the garbage collector's sight: a collection must not meet a run."""
        gc.collect()
        gc.freeze()

    # ---- the end -------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """End every run, kill every machine, and wait until the kernel says that they are gone."""
        error = HostFault("the supervisor is closing", next_step="open a new gate")
        for run in list(self.runs.values()):
            run.refuse(error)
        self.pool.close()
        deadline = time.monotonic() + REAP_SECONDS + 1
        while self.pool.graveyard.dying and time.monotonic() < deadline:
            self.reactor.turn(min(deadline, time.monotonic() + 0.1))
        self.pool.close_templates()
        self._starter.close()
        if self.keeper is not None:
            self.keeper.close()
            for base in self.layout.bases:
                cgroups.remove_tree(base)  # nothing is left unless the keeper had died


def check_bounds(asked: Bounds, most: Bounds) -> None:
    """Refuse bounds wider than the operator's.

    Raises:
        ConfigError: names the first that is.

    """
    if asked == most:
        return
    for name in asked.__struct_fields__:
        value, limit = getattr(asked, name), getattr(most, name)
        if value > limit:
            raise ConfigError(
                f"this run asks for {name}={value!r}, but the operator allows {limit!r} at most",
                next_step=f"ask for at most {limit!r}, or let the operator raise it in [execution.bounds]",
            )


def check_code(code: str, cap: int) -> bytes:
    """Return the source as UTF-8.

    Raises:
        BadScript: it holds a NUL or a lone surrogate, or is over `cap` bytes.

    """
    try:
        raw = code.encode()
    except UnicodeEncodeError:
        raise BadScript("the code is not valid Unicode text", next_step="send UTF-8 without surrogates") from None
    if len(raw) > cap:
        raise BadScript(f"the code has {len(raw)} bytes, above its cap of {cap}", next_step="send less code")
    if b"\0" in raw:
        raise BadScript("the code holds a NUL byte", next_step="send Python source text")
    return raw


def rss() -> int:
    """Return the resident bytes of this process (proc_pid_statm(5))."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def raise_open_files() -> None:
    """Allow as many descriptors as the hard limit does: a warm slot holds eight."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def facts_of(engine: Engine, key: Key | None, error: LockgateError | None) -> dict[str, Any]:
    """Return what `Ready` tells the agent: the rung, its kind of boundary, what holds memory, or why nothing runs."""
    settings = engine.settings
    runtime = engine.runtimes.get(settings.rung)
    weakness = engine.pool.weakness(key) if key is not None else None
    boundary = "emulated" if weakness == "emulated" else runtime.boundary if runtime is not None else None
    facts: dict[str, Any] = {
        "rung": settings.rung,
        "env": settings.env,
        "available": error is None,
        "boundary": boundary,
        "memory_by": key.memory_by(engine.layout.memory_by) if key is not None else engine.layout.memory_by,
        "weakness": weakness,
        "bounds": msgspec.to_builtins(settings.bounds),
    }
    if error is not None:
        facts["error"] = {"code": error.code, "message": error.message, "next_step": error.next_step}
    return facts
