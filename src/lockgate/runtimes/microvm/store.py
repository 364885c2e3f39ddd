"""The store of a host's kernels, images and snapshots; every file is named for its content.

Rule 1: a file gets its place by one rename, complete, and is never changed. Who comes second keeps what is there.
Rule 2: what is used was written by this user or root and cannot be written by anyone else, or it is refused.
Rule 3: one builder at a time; what a dead one left in `tmp` is removed by the next.

Layout: `kernels/KEY/{vmlinux,initrd,kernel.json}`, `images/KEY.erofs`, `snapshots/KEY/{ram,state,snapshot.json}`,
`choice.json`, `verdicts.json`, `lock`, `tmp/`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Final

import msgspec

from lockgate.contract.errors import CannotIsolate, HostFault
from lockgate.runtimes import stores
from lockgate.runtimes.microvm.vmm import Accel, Name

Progress = Callable[[str], object]

_PIECE: Final = 1 << 20
BUILD: Final = "build it with: lockgate microvm build"


class KernelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel with its initramfs.

    Attributes:
        key: names its directory. source: where it came from, in words. release: as `uname -r` says it, where known.
        acpi: whether it finds devices by ACPI (a distribution's) or by its command line (a small one of ours).

    """

    key: str
    source: str
    release: str
    acpi: bool


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What `lockgate microvm build` settled for this host.

    Attributes:
        binary: path of the VMM. version: as it says itself. sha256: of the binary.
        jailer: path of Firecracker's, empty for QEMU.
        memory: the widest memory bound of a run, bytes.
        append: the kernel's command line.

    """

    vmm: Name
    accel: Accel
    binary: str
    version: str
    sha256: str
    kernel: KernelInfo
    memory: int
    append: str
    jailer: str = ""


class SnapshotInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot: the hashes of its two files, and what the agent in it said of itself."""

    key: str
    ram_sha256: str
    state_sha256: str
    memory: int
    facts: dict[str, object]


def default_store() -> Path:
    """Return this user's store, found without reading the environment; root's is below /var/lib."""
    return stores.of_this_user("microvm") or Path("/nonexistent")


def digest_of(*parts: str | bytes) -> str:
    """Return a name for content: SHA-256 over parts that cannot run together."""
    total = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        total.update(len(raw).to_bytes(8, "big") + raw)
    return total.hexdigest()


def sparse_sha256(path: Path) -> str:
    """Return a SHA-256 over a file's size and its data, each piece with its place; holes cost nothing."""
    total = hashlib.sha256()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        total.update(size.to_bytes(8, "big"))
        at = 0
        while at < size:
            data = os.pread(fd, _PIECE, at)
            if not data:
                break
            if data.count(0) != len(data):  # whether zeros are a hole is the file system's business, not the content's
                total.update(at.to_bytes(8, "big") + data)
            at += len(data)
    finally:
        os.close(fd)
    return total.hexdigest()


def check_file(path: Path, what: str) -> Path:
    """Return `path` if this user or root wrote it and nobody else can.

    Raises:
        CannotIsolate: it is missing, or others may write it.

    """
    try:
        info = path.stat()
    except OSError as error:
        raise CannotIsolate(f"{what} is missing from the microvm store ({error.strerror})", next_step=BUILD) from None
    if not stat.S_ISREG(info.st_mode) or info.st_mode & 0o022 or info.st_uid not in {0, os.getuid()}:
        raise CannotIsolate(
            f"{what} may have been written by somebody else ({path})",
            next_step="find out who owns the store; then remove it and " + BUILD,
        )
    return path


class Store:
    """One directory of kernels, images and snapshots."""

    def __init__(self, root: Path) -> None:
        self.root = root

    # ---- reading -------------------------------------------------------------------------------------------------
    def choice(self) -> Choice:
        """Return what was settled here.

        Raises:
            CannotIsolate: nothing was built in this store, or by another version.

        """
        path = self.root / "choice.json"
        if not path.exists():
            raise CannotIsolate(f"nothing was built in the microvm store {self.root}", next_step=BUILD)
        check_file(path, "what was built")
        try:
            return msgspec.json.decode(path.read_bytes(), type=Choice)
        except msgspec.MsgspecError as error:
            raise CannotIsolate(
                f"the microvm store {self.root} is of another version ({error})", next_step=BUILD
            ) from None

    def kernel(self, key: str) -> tuple[Path, Path]:
        """Return (vmlinux, initrd) of a kernel."""
        place = self.root / "kernels" / key
        return check_file(place / "vmlinux", "the kernel"), check_file(place / "initrd", "the initramfs")

    def snapshot(self, key: str) -> tuple[Path, Path, SnapshotInfo] | None:
        """Return (ram, state, facts) of a snapshot; None when it was not made yet."""
        place = self.root / "snapshots" / key
        try:
            info = msgspec.json.decode((place / "snapshot.json").read_bytes(), type=SnapshotInfo)
        except (OSError, msgspec.MsgspecError):
            return None
        return check_file(place / "ram", "a snapshot's memory"), check_file(place / "state", "a snapshot's state"), info

    # ---- writing -------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def building(self, seconds: float = 600.0) -> Generator[Path]:
        """Yield an empty directory while no other builder is at work; `seconds` is the longest wait for one.

        Raises:
            HostFault: another one did not end, or the store cannot be written.

        """
        try:
            for name in ("kernels", "images", "snapshots", "tmp"):
                (self.root / name).mkdir(mode=0o755, parents=True, exist_ok=True)
            fd = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise HostFault(
                f"the microvm store {self.root} cannot be written ({error.strerror})",
                next_step="name another one with --store or [execution.microvm] store",
            ) from None
        try:
            _lock(fd, seconds)
            for old in (self.root / "tmp").iterdir():
                remove(old)
            work = Path(tempfile.mkdtemp(dir=self.root / "tmp"))
            work.chmod(0o755)
            try:
                yield work
            finally:
                remove(work)
        finally:
            os.close(fd)

    def publish(self, made: Path, final: Path, mode: int = 0o444) -> None:
        """Give something finished its place; what is there already stays."""
        for file in made.iterdir() if made.is_dir() else (made,):
            file.chmod(mode)
        try:
            made.rename(final)
        except OSError:
            if not final.exists():
                raise
            remove(made)

    def write(self, name: str, value: object, work: Path) -> None:
        """Replace a small JSON file in one step."""
        made = work / name
        made.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1))
        made.chmod(0o644)
        made.replace(self.root / name)


def _lock(fd: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise HostFault(
                    f"another build in this microvm store did not end within {seconds:g} s",
                    next_step="look for a lockgate that hangs; then build again",
                ) from None
            time.sleep(0.05)
        else:
            return


def remove(path: Path) -> None:
    """Remove a file or a tree; what is gone already is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
