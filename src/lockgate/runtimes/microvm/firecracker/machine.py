"""Machines of Firecracker: a template booted once and frozen, and clones of it that run once.

Rule 1: FILE, LOADED, LEASED, DEAD: one way. A clone is resumed once; a second resume raises.
Rule 2: whoever waits has a deadline, and a VMM that ended is an error at once, with the last line that it wrote.
Rule 3: the guest listens and the host connects: connections do not survive a snapshot, listeners do, and a guest that
        could connect out would need a socket on this host, which is never made.
Rule 4: the exit status of a VMM proves nothing (an internal error of KVM ends it with 0); that it is gone does.

Sources: docs/snapshotting/snapshot-support.md and docs/vsock.md of Firecracker v1.12.
"""

from __future__ import annotations

import os
import secrets
import select
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from lockgate.contract.errors import HostFault
from lockgate.runtimes import ids
from lockgate.runtimes.dialog import READY, READY_LINE_BYTES
from lockgate.runtimes.microvm.firecracker.api import Api, vsock
from lockgate.runtimes.microvm.firecracker.binary import Binaries
from lockgate.runtimes.microvm.firecracker.jail import UID_BASE, UIDS, Jail, Limits

MiB: Final = 1024 * 1024
CONTROL_PORT: Final = 52
CALL_PORT: Final = 53
VSOCK: Final = "v.sock"
LOAD: Final[Mapping[str, object]] = {
    "snapshot_path": "/s",
    "mem_backend": {"backend_type": "File", "backend_path": "/m"},
    "resume_vm": False,
}
SAVE: Final[Mapping[str, object]] = {"snapshot_type": "Full", "snapshot_path": "/s", "mem_file_path": "/m"}
_CID: Final = 3
_VMM_BYTES: Final = 64 * MiB
_LOAD_SECONDS: Final = 20.0
_RETRY: Final = 0.01

State = Literal["FILE", "LOADED", "LEASED", "DEAD"]


@dataclass(frozen=True)
class Recipe:
    """What a template is booted from.

    Attributes:
        kernel: ELF vmlinux. append: its command line. memory: bytes of guest RAM, whole MiB.
        initrd: or None. drives: read-only images, the root first.

    """

    kernel: Path
    append: str
    memory: int
    initrd: Path | None = None
    drives: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Frozen:
    """A snapshot: two files of root's, mode 0444, in a directory that only root may enter. `memory`: bytes of RAM."""

    state: Path
    ram: Path
    drives: tuple[Path, ...]
    memory: int


class Uids:
    """Hands out uids, none twice while it is in use."""

    def __init__(self) -> None:
        self._taken: set[int] = set()
        self._last = secrets.randbelow(UIDS)

    def take(self) -> int:
        """Return a free uid.

        Raises:
            HostFault: all are in use.

        """
        try:
            self._last = ids.number_of(self._taken, self._last, UIDS)
        except OSError:
            raise HostFault("every uid for machines is in use", next_step="end some machines") from None
        self._taken.add(self._last)
        return UID_BASE + self._last

    def give_back(self, uid: int) -> None:
        """Free `uid`; its cage is gone."""
        self._taken.discard(uid - UID_BASE)


class Clone:
    """One machine made from a snapshot: LOADED when the constructor returns, paused, and new to every run.

    Args:
        base: directory of machines (`Jail`). frozen: what it is made from.
        grouped: whether the jailer makes control groups for it; else the caller's bound it.

    Raises:
        HostFault: the VMM refused, ended or hung; nothing of it is left.

    """

    def __init__(self, base: Path, frozen: Frozen, binaries: Binaries, uids: Uids, *, grouped: bool = True) -> None:
        self._uids = uids
        self.state: State = "FILE"
        self.jail = Jail(base, ident(), uids.take())
        deadline = time.monotonic() + _LOAD_SECONDS
        try:
            files = {"s": frozen.state, "m": frozen.ram}
            self.jail.prepare({**files, **drives(frozen.drives)})
            self.jail.start(binaries, Limits(memory=frozen.memory + _VMM_BYTES) if grouped else None)
            self._api = Api(self.jail.path("api.sock"), self.jail.pidfd, deadline)
            self._api.put("/snapshot/load", LOAD, deadline)
        except BaseException as error:
            _tell(self.jail, error)
            self.destroy()
            raise
        self.state = "LOADED"

    def resume(self, seconds: float) -> tuple[socket.socket, socket.socket]:
        """Let it run, and return streams to its control port and to its call port.

        Raises:
            HostFault: it was resumed before, or did not answer in `seconds`; it is dead then.

        """
        deadline = time.monotonic() + seconds
        self.start(seconds)
        try:
            path = self.jail.path(VSOCK)
            control = vsock(path, CONTROL_PORT, self.jail.pidfd, deadline)
            try:
                return control, vsock(path, CALL_PORT, self.jail.pidfd, deadline)
            except BaseException:
                control.close()
                raise
        except BaseException as error:
            _tell(self.jail, error)
            self.kill()
            raise

    def start(self, seconds: float = _LOAD_SECONDS) -> None:
        """Let it run; as `resume` without the streams."""
        if self.state != "LOADED":
            raise HostFault(f"a machine is resumed once; this one is {self.state}", next_step="take another one")
        self.state = "LEASED"
        try:
            self._api.patch("/vm", {"state": "Resumed"}, time.monotonic() + seconds)
        except BaseException as error:
            _tell(self.jail, error)
            self.kill()
            raise

    def kill(self) -> None:
        """SIGKILL to everything in the cage; idempotent, does not wait."""
        self.state = "DEAD"
        self.jail.kill()

    def wait(self, seconds: float) -> bool:
        """Whether everything in the cage is gone within `seconds`."""
        return self.jail.pidfd < 0 or bool(select.select([self.jail.pidfd], [], [], seconds)[0])

    def destroy(self) -> None:
        """Kill, reap, and take away all that it had; idempotent, off a request's path."""
        if self.jail.uid:
            self.kill()
            if hasattr(self, "_api"):
                self._api.close()
            self.jail.destroy()
            self._uids.give_back(self.jail.uid)
            self.jail.uid = 0


def freeze(recipe: Recipe, base: Path, target: Path, binaries: Binaries, *, uids: Uids, seconds: float) -> Frozen:
    """Boot `recipe`, wait until its control port answers, and freeze it into `target` (a new directory).

    Raises:
        HostFault: it did not boot, or the VMM refused; nothing of it is left.

    """
    deadline = time.monotonic() + seconds
    jail = Jail(base, ident(), uids.take())
    target.mkdir(parents=True, mode=0o700)
    try:
        given = {"k": recipe.kernel, **({"i": recipe.initrd} if recipe.initrd else {}), **drives(recipe.drives)}
        kept = {name: _keep(path, target / name) for name, path in given.items()}
        jail.prepare(kept)
        jail.start(binaries, Limits(memory=2 * recipe.memory + _VMM_BYTES, fsize=False))
        api = Api(jail.path("api.sock"), jail.pidfd, deadline)
        for path, body in boot_calls(recipe):
            api.put(path, body, deadline)
        greeting(jail.path(VSOCK), jail.pidfd, deadline)
        api.patch("/vm", {"state": "Paused"}, deadline)
        api.put("/snapshot/create", SAVE, deadline)
        api.close()
        jail.kill()
        take_out(jail, target / "s", target / "m")
    except BaseException as error:
        _tell(jail, error)
        shutil.rmtree(target, ignore_errors=True)
        raise
    finally:
        jail.destroy()
        uids.give_back(jail.uid)
    images = tuple(kept[name] for name in drives(recipe.drives))
    return Frozen(target / "s", target / "m", images, recipe.memory)


def take_out(jail: Jail, state: Path, ram: Path) -> None:
    """Move a snapshot out of the cage in which a dead VMM wrote it, as files of root's that nobody can change."""
    for name, target in (("s", state), ("m", ram)):
        made = Path(jail.path(name))
        os.chown(made, 0, 0)
        made.chmod(0o444)
        made.rename(target)


def boot_calls(recipe: Recipe) -> list[tuple[str, Mapping[str, object]]]:
    """Return the calls that boot a machine: no network interface, no metadata service, no balloon."""
    source: dict[str, object] = {"kernel_image_path": "/k", "boot_args": recipe.append}
    if recipe.initrd is not None:
        source["initrd_path"] = "/i"
    calls: list[tuple[str, Mapping[str, object]]] = [
        ("/machine-config", {"vcpu_count": 1, "mem_size_mib": recipe.memory // MiB}),
        ("/boot-source", source),
        ("/vsock", {"guest_cid": _CID, "uds_path": f"/{VSOCK}"}),
    ]
    for number, name in enumerate(drives(recipe.drives)):
        drive = {"drive_id": name, "path_on_host": f"/{name}", "is_root_device": number == 0, "is_read_only": True}
        calls.append((f"/drives/{name}", drive))
    return [*calls, ("/actions", {"action_type": "InstanceStart"})]


def drives(paths: tuple[Path, ...]) -> dict[str, Path]:
    """Return the files of a machine's drives by the names that they have in its cage."""
    return {f"drive{number}": path for number, path in enumerate(paths)}


def _keep(path: Path, target: Path) -> Path:
    """Return `path` as a file of root's, mode 0444, beside the snapshot: a link if it is one, else a copy."""
    status = path.stat()
    if status.st_uid == 0 and not status.st_mode & 0o222:
        try:
            os.link(path, target)
        except OSError:
            pass
        else:
            return target
    shutil.copyfile(path, target)
    target.chmod(0o444)
    return target


def greeting(path: str, pidfd: int, deadline: float) -> str:
    """Return the line with which the guest says that it is ready.

    The guest closes that connection, and its end is waited for. Were it closed from here, the guest's answer to that
    could still be on its way when the machine is frozen, and would end the first connection of every clone.
    """
    while True:
        try:
            stream = vsock(path, CONTROL_PORT, pidfd, deadline)
        except HostFault:
            if time.monotonic() > deadline or select.select([pidfd], [], [], _RETRY)[0]:
                raise
        else:
            break
    said = b""
    with stream:
        while len(said) <= READY_LINE_BYTES:
            stream.settimeout(max(deadline - time.monotonic(), _RETRY))
            try:
                data = stream.recv(4096)
            except TimeoutError:
                break
            if not data and said[:1] == READY and said.endswith(b"\n"):
                return said.decode("utf-8", "replace")
            if not data:
                break
            said += data
    raise HostFault("the guest did not say that it is ready", next_step="see: lockgate doctor")


def _tell(jail: Jail, error: BaseException) -> None:
    """Add the last line that the VMM wrote to an error about it."""
    if isinstance(error, HostFault):
        lines = [line for line in jail.listen().splitlines() if line.strip()]
        if lines:
            clean = "".join(char if char.isprintable() else "?" for char in lines[-1][-300:])
            error.add_note(f"the VMM's last line: {clean}")


def ident() -> str:
    """Return a fresh name for a machine."""
    return f"m{secrets.token_hex(6)}"
