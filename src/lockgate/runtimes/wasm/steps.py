"""One heavy step of a build in a process of its own, with a deadline, a word a second, and a look at the memory first.

Rule 1: it asks for the memory before it takes it, and says so when there is too little.
Rule 2: a step that dies is told from one that fails: the kernel's kill for memory has no words.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lockgate.contract.bounds import MiB
from lockgate.contract.errors import EnvBuildFailed

Progress = Callable[[str], object]
_TICK: Final = 1.0


def step(what: str, arguments: list[str], limit: float, memory: int, progress: Progress) -> float:
    """Run one step of the workshop in a process of its own; returns its seconds."""
    memory_for(what, memory)
    begun = time.monotonic()
    command = [sys.executable, "-I", "-m", "lockgate.runtimes.wasm.workshop", *arguments]
    with tempfile.TemporaryFile() as words:
        worker = subprocess.Popen(command, env={}, stdin=subprocess.DEVNULL, stdout=words, stderr=words)
        try:
            while True:
                elapsed = time.monotonic() - begun
                progress(f"{what} ({elapsed:.0f} s)")
                try:
                    code = worker.wait(_TICK)
                    break
                except subprocess.TimeoutExpired:
                    if elapsed > limit:
                        raise EnvBuildFailed(
                            f"{what} did not end within {limit:g} s",
                            next_step="look for what keeps this machine busy; then build again",
                        ) from None
        finally:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
        if code:
            words.seek(0)
            raise _failed(what, code, words.read(1 << 16).decode("utf-8", "replace"), memory)
    return time.monotonic() - begun


def _failed(what: str, code: int, words: str, memory: int) -> EnvBuildFailed:
    if code in {-signal.SIGKILL, -signal.SIGABRT} or "MemoryError" in words:
        return EnvBuildFailed(
            f"{what} was ended, most likely for want of memory",
            next_step=f"give it {memory // MiB} MiB (a larger machine, a wider cgroup), then build again",
        )
    return EnvBuildFailed(
        f"{what} failed: {words.strip()[-1000:] or code}", next_step="mend what it names, or report these words"
    )


def memory_for(what: str, need: int) -> None:
    """Refuse a step that needs more memory than there is.

    Raises:
        EnvBuildFailed: says how much it takes and how much is free.

    """
    free = available_memory()
    if free is not None and free < need:
        raise EnvBuildFailed(
            f"{what} takes up to {need // MiB} MiB of memory, and {free // MiB} are free here",
            next_step="end other programs, widen this control group, or build on a larger machine of the same kind",
        )


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that a new process could take: the system's, what each control group above leaves, the rlimit.

    Source: Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst; getrlimit(2).
    """
    found = [int(line.split()[1]) * 1024 for line in _lines(proc / "meminfo") if line.startswith("MemAvailable:")]
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = (*line.strip().split(":", 2), "", "")[:3]
        if not controllers:
            for top in (cgroup, cgroup / "unified"):
                found += _left(top, path, "memory.max", "memory.current", ("inactive_file", "active_file"))
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes"
            found += _left(cgroup / "memory", path, *names, ("total_inactive_file", "total_active_file"))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        found.append(soft)
    return min(found) if found else None


def _left(top: Path, path: str, limit: str, used: str, reclaimable: tuple[str, ...]) -> list[int]:
    """Return what each group from `path` up to `top` leaves; files in its cache make room."""
    found: list[int] = []
    here = top / path.lstrip("/")
    while here.is_relative_to(top):
        most, now = _lines(here / limit), _lines(here / used)
        if most and now and most[0].isdecimal():
            cache = sum(
                int(value)
                for name, _, value in (line.partition(" ") for line in _lines(here / "memory.stat"))
                if name in reclaimable
            )
            found.append(int(most[0]) - int(now[0]) + cache)
        here = here.parent
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("ascii", "replace").splitlines()
    except OSError:
        return []
