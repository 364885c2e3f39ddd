"""A thousand mixed runs, then the count of everything that could have been left behind."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

import lockgate as lg
from common import emit, row

COUNT = 1000
KINDS = {
    "normal": "sum(range(1000))",
    "fork": "import os\nfor _ in range(4):\n    if os.fork() == 0:\n        os._exit(0)\n",
    "memory": "x = bytearray(1 << 30)",
    "loop": "while True: pass",
    "flood": "import sys\nfor _ in range(2000): sys.stdout.write('x' * 4096)\n",
}
# Out of ten runs: mostly ordinary, each hostile kind in turn.
ORDER = ("normal", "fork", "normal", "flood", "normal", "memory", "normal", "loop", "normal", "flood")
CONFIG = """
[execution]
rung = "container"
accept_shared_kernel = true
pool = 6
[execution.bounds]
wall = 0.5
memory = 134217728
processes = 16
"""


def census(pids: list[int]) -> dict[str, int]:
    """Count what the host and the lockgate processes hold."""
    descriptors = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
    namespaces = {os.readlink(f"/proc/{p}/ns/pid") for p in os.listdir("/proc") if p.isdigit() and readable(p)}
    cgroups = sum(len(dirs) for top in ("memory", "pids", "cpu", "unified") for _, dirs, _ in walk(top))
    processes = descendants()
    mounts = Path("/proc/self/mountinfo").read_text().count("\n")
    return {
        "fds": descriptors,
        "mounts": mounts,
        "cgroups": cgroups,
        "namespaces": len(namespaces),
        "processes": processes,
    }


def descendants() -> int:
    """Processes that come from this one, slots included."""
    parents: dict[str, str] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[name] = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
    found, more = set(), {str(os.getpid())}
    while more:
        found |= more
        more = {pid for pid, parent in parents.items() if parent in more} - found
    return len(found)


def walk(top: str) -> Any:
    """The cgroup tree of one controller, if there is one."""
    return os.walk(f"/sys/fs/cgroup/{top}")


def readable(pid: str) -> bool:
    """Whether the process still exists and lets us look."""
    try:
        os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return False
    return True


def child(module: str) -> int:
    """The pid of our child that runs `lockgate.<module>`."""
    for name in os.listdir("/proc"):
        try:
            command = Path(f"/proc/{name}/cmdline").read_bytes()
            parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if parent == str(os.getpid()) and f"lockgate.{module}".encode() in command:
            return int(name)
    raise SystemExit(f"no child runs lockgate.{module}")


def rss(pid: int) -> float:
    """Resident set in MiB."""
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def settle(gate: lg.Gate, pids: list[int], target: dict[str, int] | None) -> dict[str, int]:
    """Wait until the pool is full and quiet, at most 20 seconds, then count."""
    counts: dict[str, int] = {}
    for _ in range(80):
        await gate.prewarm(6)
        await asyncio.sleep(0.25)
        before, counts = counts, census(pids)
        if counts == before and (target is None or all(counts[k] <= target[k] for k in target)):
            break
    return counts


async def main() -> None:
    """Run the mix and print one row per thing that may not grow."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "lockgate.toml"
        config.write_text(CONFIG)
        scope = lg.Scope(user="bench", agent="bench", tenant="bench", expires=lg.minutes(60), allow={})
        async with lg.Gate(config) as gate, gate.run_scope(scope) as run:
            pids = [child("supervisor"), child("broker")]
            for name in ORDER:  # every path once, so that lazy imports and buffers are in the first count
                await run.code(KINDS[name])
            before = await settle(gate, pids, None)
            resident = rss(pids[0])
            for turn in range(COUNT):
                await run.code(KINDS[ORDER[turn % len(ORDER)]])
            after = await settle(gate, pids, before)
            grown = rss(pids[0]) - resident
    left = {key: max(0, after[key] - before[key]) for key in before}
    for key, value in left.items():
        emit(row(f"{COUNT} mixed runs: {key} left", [float(value)], unit="", bar=0))
    emit(row(f"{COUNT} mixed runs: supervisor RSS growth", [grown], unit="MiB", bar=1.0))


if __name__ == "__main__":
    asyncio.run(main())
