"""One worker as the supervisor sees it.

Rule 1: a worker counts as ready only after this side looked for itself: every task of it has no capability, a seccomp
        filter, no new privileges and an id that is nobody else's (proc_pid_status(5)). Its own word is not enough.
Rule 2: how a run was stopped inside is a claim like any other: it can only end the run that makes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from lockgate.contract.bounds import Bounds
from lockgate.runtimes.framed import FramedMachine
from lockgate.runtimes.protocol import MachineEvent, MachineStopped
from lockgate.runtimes.wasm import layout

_MOST_TASKS: Final = 16  # a worker has two; more than a few are not looked at but refused
_GUEST_BYTES: Final = 1 << 32  # 32-bit addresses


class Wall:
    """What must be seen of every task of a worker.

    Args:
        ids: the ids that a worker may have on this host.
        seccomp: whether a filter must stand.

    """

    def __init__(self, ids: range, *, seccomp: bool = True) -> None:
        self._ids = ids
        self._seccomp = seccomp

    def wrong(self, pid: int) -> str:
        """Return what is wrong with a process, "" for nothing."""
        uids: set[tuple[str, ...]] = set()
        try:
            tasks = list(Path(f"/proc/{pid}/task").iterdir())
            if not 0 < len(tasks) <= _MOST_TASKS:
                return f"it has {len(tasks)} tasks"
            for task in tasks:
                status = _status((task / "status").read_bytes())
                missing = self._missing(status)
                if missing:
                    return f"task {task.name}: {missing}"
                uids.add(tuple(status["Uid"].split()))
        except (OSError, KeyError, ValueError) as error:
            return f"its tasks cannot be looked at ({type(error).__name__})"
        return "" if len(uids) == 1 else "its tasks have different ids"

    def _missing(self, status: dict[str, str]) -> str:
        for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
            if int(status[name], 16):
                return f"{name} is {status[name]}"
        if status["NoNewPrivs"] != "1":
            return "NoNewPrivs is not set"
        if self._seccomp and status["Seccomp"] != "2":
            return f"Seccomp is {status['Seccomp']}, not a filter"
        ids = {int(one) for one in (*status["Uid"].split(), *status["Gid"].split())}
        if not all(one in self._ids for one in ids):
            return f"it runs as {sorted(ids)}"
        return ""


def _status(raw: bytes) -> dict[str, str]:
    return {name: value.strip() for name, _, value in (line.partition(":") for line in raw.decode().splitlines())}


class WasmMachine(FramedMachine):
    """A worker: `runtimes.protocol.Machine`.

    Args:
        bounds: the widest of any run; none is fixed when a worker is made.
        wall: what must be seen of it; None for controls that leave parts of it out.
        room: bytes of linear memory beside the run's bound, where a control group holds that bound: the kernel must
            be the one to end the run, not the engine to refuse it (X6).

    """

    def __init__(self, bounds: Bounds, wall: Wall | None, room: int) -> None:
        super().__init__(bounds)
        self._wall = wall
        self._room = room

    def header(self, code: bytes, bounds: Bounds) -> bytes:
        """See `layout.CODE_HEADER`."""
        seconds = max(bounds.wall - layout.SOFT_STOP_SECONDS, bounds.wall / 2)
        memory = min(bounds.memory + self._room, _GUEST_BYTES)
        return layout.CODE_HEADER.pack(
            layout.CODE_MAGIC, len(code), bounds.value, memory, bounds.disk, bounds.inodes, seconds
        )

    def inspect(self) -> str:
        """See Rule 1."""
        return self._wall.wrong(self.host_pid) if self._wall is not None else ""

    def result(self, body: bytes) -> MachineEvent:
        """Return what the frame after the code means: a result, or how the run was stopped inside."""
        if body == layout.STOPPED:
            self.finish()
            return MachineStopped(by="wall")
        if body == layout.BROKE:
            return self.failed("protocol", 0, "the code broke the protocol of its door")
        return super().result(body)
