"""What every rung offers to the supervisor.

Rule 1: a `Machine` has never seen a run when it is handed out, runs once, and is destroyed. There is no release().
Rule 2: nothing here blocks, except `Template.start` and `close`: the supervisor is one thread with one poll set.
Rule 3: after `send_code` every byte that comes from a machine is hostile, its exit code included.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from lockgate.contract.bounds import Bounds
from lockgate.contract.run import ErrorInfo, KilledBy, Rung
from lockgate.contract.rungs import Boundary, Weakness


class TemplateSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a template is made of: a package set (a read-only tree) or the bare standard library.

    Attributes:
        env: name of the package set, None for the standard library alone.
        tree: absolute path of the package tree, or None.
        packages: (name, version) of what the tree holds.
        preload: modules imported before the first slot.
        memory_by: what caps the memory of a whole run from outside ("none" = nothing does).
        memory_by_rlimit: no memory cgroup exists and the operator accepted the fallback (RLIMIT_AS + NPROC 1).

    """

    env: str | None = None
    tree: str | None = None
    packages: tuple[tuple[str, str], ...] = ()
    preload: tuple[str, ...] = ()
    memory_by: str = "none"
    memory_by_rlimit: bool = False


class Nature(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor must know of a rung to hold its bounds; the defaults are those of the container rung.

    Attributes:
        fixed: bounds that are fixed when a machine is made; the others are set when a run takes it.
        sets: package sets that the rung brings itself, by name: nobody has to build them.
        forks: whether code can make processes.
        holds_memory: what of the rung holds the memory of a run where no memory cgroup can be had ("store limit"); "" =
            nothing, so that the operator must accept the fallback by rlimit.
        tasks: tasks of a machine in which no code runs, as its control group counts them.
        overhead: bytes that a machine itself may take beside the memory of the run.
        overhead_tasks: tasks that a machine itself may have beside those of the run.
        maps_files: whether machines map files of a disk, whose pages a group may be charged for (supervisor/watch.py).
        life: seconds after which a template and what is warm of it are replaced; None = they may grow old.
        work: the run's directory below /proc/PID/root of `Machine.host_pid`; None when the host cannot see it.

    """

    fixed: tuple[str, ...] = ("disk", "inodes")
    sets: tuple[str, ...] = ()
    forks: bool = True
    holds_memory: str = ""
    tasks: int = 1
    overhead: int = 0
    overhead_tasks: int = 0
    maps_files: bool = False
    life: float | None = None
    work: str | None = None


class MachineReady(msgspec.Struct, frozen=True):
    """The machine hardened itself and waits for code. `facts`: landlock ABI, mdwe, seccomp, stage times in us."""

    facts: dict[str, Any]


class MachineResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the code says of itself (hostile): the JSON of its value, its repr, its error, its exit code.

    `pressed`: bounds that refused it something, as the machine itself counted; for rungs whose kernel is their own.
    """

    value: bytes | None = None
    text: str = ""
    error: ErrorInfo | None = None
    exit_code: int = 0
    truncated: dict[str, int] = {}
    pressed: tuple[KilledBy, ...] = ()


class MachineEnded(msgspec.Struct, frozen=True):
    """The code ended its own process without a result, inside a machine that lives on: its wait status (a claim)."""

    status: int


class MachineFailed(msgspec.Struct, frozen=True):
    """The machine is unusable: a hardening step failed (`step`, `errno`), or it broke the control protocol.

    Step "lease" means that a warm machine could not be made ready for its run: nothing of the code reached it.
    """

    step: str
    errno: int
    detail: str


class MachineStopped(msgspec.Struct, frozen=True):
    """The machine ended the code itself at a bound, a little before the supervisor would have (a claim, like any)."""

    by: KilledBy


MachineEvent = MachineReady | MachineResult | MachineStopped | MachineEnded | MachineFailed


class Machine(Protocol):
    """One disposable sandbox.

    Attributes:
        pidfd: readable when the whole pid namespace is dead and reaped; -1 until spawned.
        host_pid: pid of the machine's first process in the supervisor's pid namespace, 0 until spawned.
        control: our end of the control socket, non-blocking; readable = call `on_control`.
        stdout: read end of the run's stdout, non-blocking. stderr: the same.

    """

    pidfd: int
    host_pid: int
    control: socket.socket
    stdout: int
    stderr: int

    def placed(self) -> None:
        """Its control group stands, with `host_pid` in it, or there are none: what must be born in it may begin."""
        ...

    def take_channel(self) -> socket.socket:
        """Give away the host end of the broker channel (once). The caller closes it after passing it on."""
        ...

    def on_control(self) -> list[MachineEvent]:
        """Read what is there (non-blocking) and return what it means. EOF before a result is `MachineFailed`."""
        ...

    def send_code(self, code: bytes, bounds: Bounds) -> bool:
        """Stage the code and let it run, without blocking; False = call `flush` when control is writable."""
        ...

    def stage_code(self, code: bytes, bounds: Bounds) -> bool:
        """Send the code as `send_code` does, but let nothing of it run before `go`. The machine is used by it."""
        ...

    def go(self) -> bool:
        """Let staged code run; False = call `flush` when control is writable."""
        ...

    def flush(self) -> bool:
        """Continue an unfinished `send_code`, `stage_code` or `go`; True when all is out."""
        ...

    def kill(self) -> None:
        """SIGKILL to the machine's first process through the pidfd; idempotent, never raises for a dead one."""
        ...

    def close(self) -> None:
        """Close every descriptor of ours; idempotent. The machine must be dead or will die by it."""
        ...


class Template(Protocol):
    """A warm parent that machines are made from; holds nothing of any run.

    Attributes:
        boundary: what stands between its machines and the host.
        weakness: what of the rung's wall is missing here. No code is sent until the caller accepted exactly that.
        lacks: the same in detail, for people; "" when nothing is missing.

    """

    rung: Rung
    boundary: Boundary
    weakness: Weakness | None
    lacks: str

    def fileno(self) -> int:
        """The control descriptor to poll; readable = call `on_readable`."""
        ...

    def request(self, bounds: Bounds) -> Machine:
        """Ask for one machine (sends, does not wait). Its `pidfd` is set by a later `on_readable`."""
        ...

    def on_readable(self) -> Sequence[Machine | MachineFailed]:
        """Machines that now have a pidfd and host_pid, in order of request; EOF raises `HostFault`."""
        ...

    def close(self) -> None:
        """Kill the template and all its machines, reap it, close descriptors. Idempotent."""
        ...


class Unavailable(msgspec.Struct, frozen=True):
    """Why a rung cannot be had on this host: the first missing piece and the command or setting that fixes it."""

    missing: str
    fix: str


class Runtime(Protocol):
    """A rung. Making one costs nothing: what a host has is looked at by `probe` and `start`."""

    rung: Rung
    boundary: Boundary
    nature: Nature

    def probe(self) -> Unavailable | None:
        """Boot one machine for real and look; None when it works."""
        ...

    def start(self, spec: TemplateSpec) -> Template:
        """Start a template, with a deadline.

        Raises:
            CannotIsolate: the host lacks a piece; names it and the fix.
            HostFault: a hardening step failed.

        """
        ...
