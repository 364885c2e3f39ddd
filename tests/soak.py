"""Mixed runs at full rate while broker and supervisor are killed at random moments; then count what is left.

    python tests/soak.py --runs 20000            # make soak
    python tests/soak.py --seconds 40 --kills 4  # the short one of the test suite

Every run ends in a result or a typed error; afterwards no process, mount, cgroup or descriptor is left, the audit log
verifies, and each write that began has an outcome or stands as unknown.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import lockgate as lg
from gate_fixtures import OPERATIONS
from lockgate.audit import reader
from supervisor_client import descendants, groups_of

HOSTILE = (
    "while True: pass",
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "import os\nb = b'x' * 65536\nwhile True: os.write(1, b)",
    "import os\nos.write(3, b'\\x7f\\xff\\xff\\xff')\nwhile True: pass",
)
ORDINARY = ("sum(range(1000))", "host.call('echo', text='hello')", "print('x' * 1000)", "{'a': [1, 2, 3]}", "1 / 0")
WRITE = "host.call('pay', order='ord_{n}', amount=100)"
CONFIG = """
operations = "soak_operations:ops"
[audit]
path = "audit.db"
[execution]
rung = "container"
accept_shared_kernel = true
memory = "rlimit"
pool = 4
[execution.bounds]
wall = 0.6
memory = 134217728
processes = 24
disk = 16777216
"""
DEADLINE = 60.0  # seconds after which a single run counts as hung


def child(which: str) -> int | None:
    """The pid of our child that runs `lockgate.<which>`; None when it is gone already."""
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
            if f"-m lockgate.{which} " in command and parent == str(os.getpid()):
                return pid
    return None


def census(supervisors: set[int]) -> dict[str, int]:
    """What this process, its children and the groups of every supervisor it ever had come to."""
    return {
        "processes": len(descendants(os.getpid())),
        "fds": len(os.listdir("/proc/self/fd")),
        "mounts": Path("/proc/self/mountinfo").read_text().count("\n"),
        "cgroups": sum(len(groups_of(pid)) for pid in supervisors),
    }


class Soak:
    """One soak and its counters."""

    def __init__(self, *, runs: int, seconds: float, kills: int, seed: int, home: Path) -> None:
        self.chance = random.Random(seed)
        self.left = runs
        self.until = time.monotonic() + seconds
        self.kills = kills
        self.home = home
        self.ends: collections.Counter[str] = collections.Counter()
        self.took: list[float] = []
        self.peak = 0
        self.number = 0
        self.supervisors: set[int] = set()
        self.groups_seen = 0

    @property
    def over(self) -> bool:
        return self.left <= 0 or time.monotonic() > self.until

    def source(self) -> str:
        """Draw the next piece of code: one in twenty is hostile, one in ten writes."""
        self.number += 1
        if self.chance.random() < 0.05:
            return self.chance.choice(HOSTILE)
        if self.chance.random() < 0.10:
            return WRITE.format(n=self.number)
        return self.chance.choice(ORDINARY)

    async def worker(self, gate: lg.Gate) -> None:
        """Run until the soak is over or the Gate is broken."""
        async with gate.run_scope(SCOPE) as run:
            while not self.over:
                self.left -= 1
                began = time.perf_counter()
                try:
                    result = await asyncio.wait_for(run.code(self.source()), DEADLINE)
                except lg.ProcessDied as error:
                    self.ends[type(error).__name__] += 1
                    return
                except lg.LockgateError as error:
                    self.ends[type(error).__name__] += 1
                else:
                    self.took.append(time.perf_counter() - began)
                    self.ends[result.killed_by or ("error" if result.error else "ok")] += 1

    async def killer(self, gap: float) -> None:
        """After a random time kill broker or supervisor, by pid, once."""
        await asyncio.sleep(self.chance.uniform(0.2, 1.0) * gap)
        which = self.chance.choice(("broker", "supervisor"))
        pid = child(which)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            self.ends[f"killed the {which}"] += 1

    async def round(self, gap: float | None) -> None:
        """Open a Gate and work until its end: the end of the soak, or of one of its processes."""
        gate = lg.Gate(self.home / "lockgate.toml")
        try:
            await gate.start()
            pid = child("supervisor")
            if pid is not None:
                self.supervisors.add(pid)
                self.groups_seen += len(groups_of(pid))
            work = [asyncio.ensure_future(self.worker(gate)) for _ in range(4)]
            if gap is not None:
                work.append(asyncio.ensure_future(self.killer(gap)))
            await asyncio.gather(*work, return_exceptions=True)
            with contextlib.suppress(lg.LockgateError):
                self.peak = max(self.peak, (await gate.stats())["rss"])
        finally:
            await gate.close()


SCOPE = lg.Scope(
    user="soak", agent="soak", tenant="soak", expires=lg.minutes(600),
    allow={"echo": {}, "pay": lg.where(amount=lg.at_most(10_000))},
)  # fmt: skip


async def soak(*, runs: int, seconds: float, kills: int, seed: int) -> dict[str, Any]:
    """Run it; returns the report, with `left` empty and `audit` sound if all promises held."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "soak_operations.py").write_text(OPERATIONS)
        (home / "lockgate.toml").write_text(CONFIG)
        one = Soak(runs=0, seconds=seconds, kills=kills, seed=seed, home=home)
        await one.round(None)  # every import and cache once
        before = census(one.supervisors)
        one.left, began = runs, time.monotonic()
        gap = min(seconds, runs / 60) / (kills + 1)
        while not one.over:
            killed = sum(count for end, count in one.ends.items() if end.startswith("killed"))
            await one.round(gap if killed < kills else None)
        await one.round(None)  # a last start settles what the killed brokers left open
        took = time.monotonic() - began
        after: dict[str, int] = {}
        for _ in range(40):
            after = census(one.supervisors)
            if all(after[key] <= before[key] for key in before):
                break
            await asyncio.sleep(0.25)
        report = reader.verify(home / "audit.db")
        times = sorted(one.took)
        return {
            "runs": runs - max(one.left, 0),
            "rate": round(len(times) / took, 1),
            "p50_ms": round(times[len(times) // 2] * 1e3, 2),
            "p99_ms": round(times[int(len(times) * 0.99)] * 1e3, 2),
            "peak_rss_mib": round(one.peak / 2**20, 1),
            "own_peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
            "ends": dict(one.ends),
            "groups_seen": one.groups_seen,
            "left": {key: after[key] - before[key] for key in before if after[key] > before[key]},
            "audit": {"ok": report.ok, "rows": report.rows},
        }


def main() -> int:
    """Return 0 when nothing was left and the audit log verifies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=7200.0)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args()
    print(f"seed {options.seed}", file=sys.stderr)
    report = asyncio.run(soak(runs=options.runs, seconds=options.seconds, kills=options.kills, seed=options.seed))
    print(json.dumps(report, indent=1))
    return 0 if not report["left"] and report["audit"]["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
