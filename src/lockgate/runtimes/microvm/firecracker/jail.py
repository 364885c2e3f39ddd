"""The cage of one Firecracker process: Firecracker's own jailer, inside namespaces of ours.

Rule 1: nothing runs without the jailer, and the jailer needs root: a caller without it gets a typed refusal.
Rule 2: each machine has a uid of its own, which is used again only after the machine's cage was taken down.
Rule 3: files of a snapshot are hard links to one root-owned copy of mode 0444; no machine can change what the next one
        is made of.
Rule 4: directories and control groups lie below one that is named for the process that made them (pid and start time),
        so that what a killed one left can be told from what a living one uses.
Rule 5: a minder, first process of a fresh pid namespace, stands between us and the jailer. It dies with its parent
        (PDEATHSIG, which the VMM itself loses when it changes its uid), and with it all of the namespace.

Sources: docs/jailer.md and docs/prod-host-setup.md of Firecracker v1.12; pid_namespaces(7); cgroups(7).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

from lockgate.contract.errors import CannotIsolate, HostFault
from lockgate.kernel import process_unsafe as process
from lockgate.runtimes.microvm.firecracker.binary import Binaries

GROUP: Final = "lockgate-fc"
UID_BASE: Final = 0x2000_0000  # far from any account, and from the ids of the other rungs' machines
UIDS: Final = 60_000
_NAMESPACES: Final = process.NEWPID | process.NEWNET | process.NEWIPC | process.NEWUTS
_CGROUPS: Final = Path("/sys/fs/cgroup")
_FSIZE: Final = 1024 * 1024
_DESTROY_SECONDS: Final = 5.0
_WORDS_BYTES: Final = 16 * 1024
_FAILED: Final = 99


def owner(pid: int) -> str:
    """Return the name of a process: its pid and the clock tick it started in (proc(5), field 22)."""
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    return f"{pid}-{int(stat.rpartition(b')')[2].split()[19])}"


def yard(base: Path) -> Path:
    """Return the directory below `base` for this process's machines, made, after a sweep of what dead ones left."""
    base.mkdir(parents=True, exist_ok=True)
    base.chmod(0o711)
    sweep(base)
    own = base / owner(os.getpid())
    own.mkdir(mode=0o711, exist_ok=True)
    return own


def leave(own: Path) -> None:
    """Take away a `yard` of this process, with all that stands in it; its machines are destroyed already."""
    shutil.rmtree(own, ignore_errors=True)
    for hierarchy in _hierarchies():
        with contextlib.suppress(FileNotFoundError):
            (hierarchy / GROUP / own.name).rmdir()


def sweep(base: Path) -> int:
    """Take away directories and control groups of processes that are gone; return how many owners that were."""
    dead: set[str] = set()
    folders = [base, *(hierarchy / GROUP for hierarchy in _hierarchies())]
    for folder in folders:
        if not folder.is_dir():
            continue
        for one in folder.iterdir():
            if not one.is_dir() or not re.fullmatch(r"[0-9]+-[0-9]+", one.name) or _lives(one.name):
                continue
            dead.add(one.name)
            if folder is base:
                shutil.rmtree(one, ignore_errors=True)
                continue
            deadline = time.monotonic() + _DESTROY_SECONDS
            for group in (*(group for group in one.iterdir() if group.is_dir()), one):
                _remove(group, deadline)
    return len(dead)


def _lives(name: str) -> bool:
    try:
        return owner(int(name.partition("-")[0])) == name
    except (OSError, IndexError, ValueError):
        return False


def _hierarchies() -> tuple[Path, ...]:
    return (_CGROUPS, *(_CGROUPS / name for name in ("memory", "pids")))


@dataclass(frozen=True)
class Limits:
    """What a machine may take of the host.

    Attributes:
        memory: bytes, of guest and VMM together. tasks: threads of the VMM. fsize: whether files it writes are capped
            (a template's are not: writing its snapshot would end it).

    """

    memory: int
    tasks: int = 16
    fsize: bool = True


@dataclass
class Jail:
    """One cage, from an empty directory to nothing.

    Args:
        base: the `yard` of this process, on the file system that holds the snapshots.
        ident: name of the machine, letters, digits and hyphens. uid: of the VMM, and its gid.

    Attributes:
        pidfd: of the minder; readable when every process in the cage is gone. -1 before `start`.
        words: read end of what the VMM writes, non-blocking. -1 before `start`.

    """

    base: Path
    ident: str
    uid: int
    pidfd: int = -1
    words: int = -1
    minder: int = 0
    said: bytearray = field(default_factory=bytearray)

    @property
    def root(self) -> Path:
        """What the VMM sees as its root directory."""
        return self.base / "firecracker" / self.ident / "root"

    def path(self, name: str) -> str:
        """Return the path from outside of a file in the cage."""
        return str(self.root / name)

    def prepare(self, files: Mapping[str, Path]) -> None:
        """Make the directory and link `files` into it by the names that the VMM will use.

        Raises:
            HostFault: a file is on another file system, or may be written by others than root.

        """
        self.root.mkdir(parents=True, mode=0o755)
        self.root.chmod(0o700)
        os.chown(self.root, self.uid, self.uid)
        for name, path in files.items():
            status = path.stat()
            if status.st_uid != 0 or status.st_mode & 0o222:
                raise HostFault(f"{path.name} of a snapshot can be changed", next_step="make it root's, mode 0444")
            try:
                os.link(path, self.root / name)
            except OSError as error:
                raise HostFault(
                    f"{path.name} cannot be linked into the cage: {error.strerror}",
                    next_step="keep snapshots and machines on one file system",
                ) from None

    def start(self, binaries: Binaries, limits: Limits | None, *, more: tuple[str, ...] = ()) -> None:
        """Start the jailer and in it the VMM, whose API will listen at `path("api.sock")`.

        Raises:
            CannotIsolate: this process is not root. HostFault: the kernel gives no process.

        """
        need_root()
        argv = self.argv(binaries, limits, more)
        self.words, words = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self.minder, self.pidfd = process.clone_slot(_NAMESPACES)
            if self.minder == 0:
                _mind(argv, words)
        except OSError as error:
            raise HostFault(f"no process for a VMM: {error.strerror}", next_step="see: lockgate doctor") from None
        finally:
            os.close(words)

    def argv(self, binaries: Binaries, limits: Limits | None, more: tuple[str, ...] = ()) -> list[str]:
        """Return the jailer's command line; no option of it widens what the VMM has by itself.

        Without `limits` the VMM stays in the control groups that it is started in, and these must bound it.
        """
        uid = str(self.uid)
        out = [
            binaries.jailer, "--id", self.ident, "--exec-file", binaries.firecracker, "--uid", uid, "--gid", uid,
            "--chroot-base-dir", str(self.base),
        ]  # fmt: skip
        if limits is not None:
            out += self._groups_of(limits)
        out += ["--resource-limit", "no-file=256"]
        if limits is None or limits.fsize:
            out += ["--resource-limit", f"fsize={_FSIZE}"]
        return [*out, "--", "--api-sock", "/api.sock", *more]

    def _groups_of(self, limits: Limits) -> list[str]:
        unified = (_CGROUPS / "cgroup.controllers").exists()
        caps = (
            {"memory.max": limits.memory, "memory.swap.max": 0, "pids.max": limits.tasks}
            if unified
            else {"memory.limit_in_bytes": limits.memory, "pids.max": limits.tasks}
        )
        out = ["--cgroup-version", "2" if unified else "1", "--parent-cgroup", f"{GROUP}/{self.base.name}"]
        for name, value in caps.items():
            out += ["--cgroup", f"{name}={value}"]
        return out

    def vmm(self) -> int:
        """Return the pid of the VMM itself in our pid namespace, 0 when there is none (any more)."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/{self.minder}/task/{self.minder}/children").read_text("ascii").split()[0])
        return 0

    def listen(self) -> str:
        """Take what the VMM wrote so far and return the first 16 KiB of all of it; the rest is dropped."""
        while self.words >= 0:
            try:
                data = os.read(self.words, 65536)
            except BlockingIOError:
                break
            if not data:
                break
            self.said += data[: _WORDS_BYTES - len(self.said)]
        return self.said.decode("utf-8", "replace")

    def kill(self) -> None:
        """SIGKILL to the first process of the namespace, and so to all of it; idempotent, does not wait."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def destroy(self) -> None:
        """Kill, reap, and take away directory and control groups; off a request's path.

        Raises:
            HostFault: something of it did not go away in five seconds.

        """
        self.kill()
        if self.minder:
            os.waitpid(self.minder, 0)
            self.minder = 0
        for fd in (self.pidfd, self.words):
            if fd >= 0:
                os.close(fd)
        self.pidfd = self.words = -1
        shutil.rmtree(self.root.parent, ignore_errors=True)
        deadline = time.monotonic() + _DESTROY_SECONDS
        for group in self.groups():
            _remove(group, deadline)

    def groups(self) -> Iterator[Path]:
        """Yield the control groups of the machine that exist, in every hierarchy."""
        for hierarchy in _hierarchies():
            one = hierarchy / GROUP / self.base.name / self.ident
            if one.is_dir():
                yield one


def _remove(group: Path, deadline: float) -> None:
    while True:
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise HostFault(
                    f"the control group {group} does not go away: {error.strerror}", next_step="see who is in it"
                ) from None
            time.sleep(0.005)
        else:
            return


def need_root() -> None:
    """Raise CannotIsolate where the jailer could not do its work."""
    if os.geteuid() != 0:
        raise CannotIsolate(
            "Firecracker's jailer needs root", next_step="run the supervisor as root, or use the qemu VMM"
        )


def execute(argv: list[str], words: int) -> int:
    """Start the jailer as a child of this process; what it writes goes to `words`, and it has no other descriptor."""
    pid = os.fork()
    if pid:
        return pid
    try:
        fcntl.fcntl(words, fcntl.F_SETFD, 0)
        null = os.open("/dev/null", os.O_RDONLY)
        for target, source in enumerate((null, words, words)):
            os.dup2(source, target)
        process.close_from(3)
        os.execve(argv[0], argv, {})  # noqa: S606 - no shell is wanted
    finally:
        os._exit(_FAILED)


def _mind(argv: list[str], words: int) -> NoReturn:
    """Be the first process of the namespace: run the jailer, reap, and end as it ended."""
    try:
        process.die_with_parent()
        kept = fcntl.fcntl(words, fcntl.F_DUPFD, 3)
        os.dup2(kept, 3)
        process.close_from(4)
        pid = execute(argv, 3)
        while True:
            ended, status = os.wait()
            if ended == pid:
                os._exit(os.waitstatus_to_exitcode(status) & 0x7F)
    finally:
        os._exit(_FAILED)
