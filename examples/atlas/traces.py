"""What a program leaves behind: processes (and with them their namespaces), cgroups, mounts, descriptors.

Rule 1: a process is known by its pid and its start time together, so a pid that was used again is not mistaken.
Rule 2: only descendants of the watched process count: other work on the same machine does not disturb the check.
Rule 3: a descendant whose parent ended becomes ours (`reaper_unsafe`), so there is no way out of being counted.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

PERIOD = 0.05


def start_time(pid: int) -> str | None:
    """Return when the process started, in ticks since boot (proc_pid_stat(5)); None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def children(pid: int) -> list[int]:
    """Return the pids that `pid` and its threads started and that are still theirs (proc_tid_children(5))."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def groups(pid: int) -> set[str]:
    """Return the cgroup directories of a process."""
    found: set[str] = set()
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            for root in [f"/sys/fs/cgroup/{names}"] if names else ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]:
                found.add((root + path).rstrip("/"))
    return found


def all_groups() -> set[str]:
    """Return every cgroup directory of this machine."""
    return {folder for folder, _, _ in os.walk("/sys/fs/cgroup")}


def mounts() -> int:
    """How many mounts this process sees."""
    return len(Path("/proc/self/mountinfo").read_text().splitlines())


def descriptors() -> int:
    """How many descriptors this process has."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@dataclass
class Watcher:
    """Follows a process and its descendants until `finish`."""

    pid: int
    seen: dict[tuple[int, str], str] = field(default_factory=dict)
    cgroups: set[str] = field(default_factory=set)
    _before: set[str] = field(default_factory=all_groups)
    _ours: set[int] = field(default_factory=lambda: set(children(os.getpid())))
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _follow(self) -> None:
        while not self._stop.wait(PERIOD):
            self._look(self.pid)

    def _look(self, first: int) -> None:
        """Remember a process and its descendants."""
        todo = [first]
        while todo:
            pid = todo.pop()
            todo += children(pid)
            started = start_time(pid)
            if started is None or (pid, started) in self.seen:
                continue
            name = ""
            with suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
            self.seen[pid, started] = name
            self.cgroups |= groups(pid) - self._before

    def _adopt(self) -> None:
        """Reap orphans that ended; remember those that live on, with all that they started."""
        for pid in set(children(os.getpid())) - self._ours:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            self._look(pid)

    def end(self) -> None:
        """Kill what was left: it is named in the check, and does not stay."""
        for pid, at in self.seen:
            if start_time(pid) == at:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._adopt()

    def left(self, seconds: float = 3.0) -> list[str]:
        """Return what is still there, after giving the kernel up to `seconds` to reap it."""
        deadline = time.monotonic() + seconds
        while True:
            self._adopt()
            found = [f"process {pid} ({name})" for (pid, at), name in self.seen.items() if start_time(pid) == at]
            found += [f"cgroup {path}" for path in sorted(self.cgroups) if Path(path).is_dir()]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.05)
