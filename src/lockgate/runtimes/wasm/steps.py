"""One heavy step of a build in a process of its own, with a deadline, a word a second, and a look at the memory first.

Rule 1: it asks for the memory before it takes it, and says so when there is too little.
Rule 2: a step that dies is told from one that fails: the kernel's kill for memory has no words.
"""

from __future__ import annotations

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
    _memory_for(what, memory)
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


def _memory_for(what: str, need: int) -> None:
    free = available_memory()
    if free is not None and free < need:
        raise EnvBuildFailed(
            f"{what} takes up to {need // MiB} MiB of memory, and {free // MiB} are free here",
            next_step="end other programs, widen this control group, or build on a larger machine of the same kind",
        )


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that a new process could take: the system's, and those that this control group leaves."""
    found = [int(line.split()[1]) * 1024 for line in _lines(proc / "meminfo") if line.startswith("MemAvailable:")]
    for line in _lines(proc / "self" / "cgroup"):
        number, _, path = line.partition("::")
        if number != "0":
            continue
        here = cgroup / path.strip().lstrip("/")
        while here.is_relative_to(cgroup):
            limit, used = _lines(here / "memory.max"), _lines(here / "memory.current")
            if limit and used and limit[0].strip() != "max":
                found.append(int(limit[0]) - int(used[0]))
            here = here.parent
    return min(found) if found else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("ascii", "replace").splitlines()
    except OSError:
        return []
