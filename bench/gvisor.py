"""The gvisor rung: a pool hit beside the container's, a box made on demand beside bare `runsc do`, memory, leaks."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import lockgate as lg
from common import emit, interleave, row
from lockgate.contract.bounds import Bounds
from lockgate.runtimes.gvisor import GvisorRuntime
from lockgate.runtimes.protocol import Template, TemplateSpec
from lockgate.runtimes.single import run_once

HITS = 60
COLD = 50
RUNS = 200
DO_FLAGS = ("--platform=systrap", "--network=none", "--ignore-cgroups")


def gate_at(home: Path, rung: str) -> lg.sync.Gate:
    """A Gate that keeps two boxes of the rung warm."""
    home.mkdir()
    config = home / "lockgate.toml"
    config.write_text(
        f'[execution]\nrung = "{rung}"\npool = 2\naccept_shared_kernel = true\n[audit]\npath = "audit.db"\n'
        "[execution.gvisor]\nallow_old = true\n"
    )
    return lg.sync.Gate(config)


def hit(gate: lg.sync.Gate, run: lg.sync.Run) -> float:
    """Seconds of one run whose box was warm."""
    gate.prewarm(2)
    began = time.perf_counter()
    result = run.code("1+1")
    took = time.perf_counter() - began
    if result.value != 2:
        raise SystemExit(f"no result: {result}")
    return took


def made(template: Template) -> float:
    """Seconds from the request of a box to the first result in it."""
    began = time.perf_counter()
    outcome = run_once(template, b"1+1", Bounds(wall=30.0), patience=60.0)
    if outcome.result is None:
        raise SystemExit(f"no result: {outcome.failed}")
    return outcome.start_seconds + outcome.run_seconds if outcome.run_seconds else time.perf_counter() - began


def bare(runsc: str, root: str) -> float:
    """Seconds of `runsc do /bin/true`, as its makers start it."""
    began = time.perf_counter()
    subprocess.run([runsc, *DO_FLAGS, f"--root={root}", "do", "/bin/true"], check=True, env={}, capture_output=True)
    return time.perf_counter() - began


def held(supervisor: int) -> list[float]:
    """MiB of each group of a supervisor that no other process shares, its keeper's own pages included."""
    found: list[float] = []
    for stat in Path("/sys/fs/cgroup").glob(f"memory/**/lockgate-{supervisor}-*/s*/memory.stat"):
        fields = dict(line.split() for line in stat.read_text().splitlines())
        pids = [int(pid) for pid in (stat.parent / "cgroup.procs").read_text().split()]
        if pids:
            keeper = Path(f"/proc/{min(pids)}/smaps_rollup").read_text().splitlines()
            own = sum(int(line.split()[1]) for line in keeper if line.startswith("Private_"))
            found.append((int(fields["rss"]) + int(fields["shmem"])) / 2**20 + own / 2**10)
    return found


def supervisor_of(gate: lg.sync.Gate) -> int:
    """The pid whose groups belong to the gate: the supervisor is the child that runs that module."""
    del gate
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        if b"lockgate.supervisor" in Path(f"/proc/{child}/cmdline").read_bytes():
            pid = int(child)
            if any(Path("/sys/fs/cgroup/memory").glob(f"**/lockgate-{pid}-*/s*/cgroup.procs")):
                return pid
    raise SystemExit("no supervisor with groups is a child of this process")


def leaks(gate: lg.sync.Gate, run: lg.sync.Run) -> list[float]:
    """What 200 runs left: descriptors, groups and processes more than before."""

    def counted() -> list[int]:
        for _ in range(600):
            gate.prewarm(2)
            stats = gate.stats()
            if not (stats["dying"] or stats["growing"]):
                break
            time.sleep(0.02)
        return [stats["fds"], stats["groups"], stats["watched"]]

    codes = ("1+1", "1/0", "import os; os._exit(3)", "open('a', 'w').write('b')")
    for turn in range(4):
        run.code(codes[turn])
    before = counted()
    for turn in range(RUNS):
        run.code(codes[turn % len(codes)])
    return [float(abs(one - other)) for one, other in zip(counted(), before, strict=True)]


def main() -> None:
    """Print one row each."""
    if os.geteuid() != 0:
        sys.exit("needs root: boxes of a plain user are neither restored nor, without delegation, bounded")
    runtime = GvisorRuntime()
    scope = lg.Scope(user="bench", agent="bench", tenant="bench", expires=lg.minutes(60), allow={})
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        boxed = stack.enter_context(gate_at(home / "gvisor", "gvisor"))
        box = stack.enter_context(boxed.run_scope(scope))
        boxed.prewarm(2)
        members = held(supervisor_of(boxed))
        packed = stack.enter_context(gate_at(home / "container", "container"))
        slot = stack.enter_context(packed.run_scope(scope))
        hits, slots = interleave(HITS, lambda: hit(boxed, box), lambda: hit(packed, slot))
        emit(
            row(
                "gVisor pool hit to first result",
                hits,
                unit="s",
                bar=6.0,
                reference="container pool hit",
                against=slots,
            ),
            row("idle gVisor pool member, private memory", members, unit="MiB", bar=40.0),
            row(f"gVisor: left over after {RUNS} runs", leaks(boxed, box), unit="things", bar=0.0),
        )
    with tempfile.TemporaryDirectory() as root:
        restored, cold = runtime.start(TemplateSpec()), GvisorRuntime(restore=False).start(TemplateSpec())
        try:
            path = runtime.runsc().path
            first, booted, done = interleave(
                COLD, lambda: made(restored), lambda: made(cold), lambda: bare(path, root), warmup=2
            )
        finally:
            restored.close()
            cold.close()
    emit(
        row(
            "gVisor cold to first result (restored)",
            first,
            unit="s",
            bar=1.5,
            reference="runsc do /bin/true",
            against=done,
        ),
        row("gVisor restored box", first, unit="s", bar=1.0, reference="the same box booted cold", against=booted),
    )


if __name__ == "__main__":
    main()
