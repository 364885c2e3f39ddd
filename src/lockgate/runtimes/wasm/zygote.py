"""The zygote: holds the engine's library, the guest's files and the sealed image, and never an engine. Forks workers.

Rule 1: it never makes an engine: an engine may start threads, and the fork comes first.
Rule 2: it sees no run, no code and nothing of a broker; its environment is empty.
Rule 3: what it maps or hands on was checked against its digest here, in this process, before the first worker.
Rule 4: its root holds one file, the compiled module. Whatever a worker could open is this, read only.

Started by runtime.py with CTL LIFELINE PLAN: three descriptors (forked.launch).
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import msgspec

from lockgate.contract.errors import LockgateError
from lockgate.kernel import landlock_unsafe as landlock
from lockgate.kernel import mounts_unsafe as mounts
from lockgate.kernel import process_unsafe as process
from lockgate.kernel.seccomp_unsafe import Filter
from lockgate.kernel.syscalls_unsafe import ARCH
from lockgate.runtimes import dialog
from lockgate.runtimes.nursery import Child, Nursery
from lockgate.runtimes.wasm import artifacts, calls, image_unsafe, layout, worker

Mode = Literal["root", "rootless", "none"]

_MOUNT_POINTS: Final = ("/tmp", "/mnt", "/usr")  # noqa: S108 - any directory of this host: it is left behind by the pivot
_NO_SUID_DEV: Final = mounts.ATTR_NOSUID | mounts.ATTR_NODEV
_SWITCHES: Final = frozenset({"--fail", "--skip", "--marker", "--native", "--early-thread"})


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor's side decided.

    Attributes:
        artifacts: the files, with their digests.
        base: first of 65,536 ids of this host that are ours to give away; 0 = none are.
        arguments: switches; only tests and controls give any, see `Options`.

    """

    artifacts: artifacts.Artifacts
    base: int = 0
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Options:
    """What tests change: `--fail=STEP` makes that step of every worker fail, `--skip=A,B` leaves steps out,
    `--marker=ERRNO` is the errno of every refusal of the filter in the place of an end, `--native` runs the code in
    the worker's own interpreter (native code, placed behind the wall), `--early-thread` runs it there in a thread that
    is older than the wall.
    """  # noqa: D205

    fail: str = ""
    skip: frozenset[str] = frozenset()
    marker: int | None = None
    native: bool = False
    early_thread: bool = False

    @staticmethod
    def of(arguments: tuple[str, ...]) -> Options:
        """Read the switches.

        Raises:
            ValueError: there is no such switch.

        """
        given = {name: value for name, _, value in (one.partition("=") for one in arguments)}
        unknown = given.keys() - _SWITCHES
        if unknown:
            raise ValueError(f"unknown switches {sorted(unknown)}")
        marker = given.get("--marker")
        return Options(
            fail=given.get("--fail", ""),
            skip=frozenset(given.get("--skip", "").split(",")) - {""},
            marker=int(marker) if marker else None,
            native="--native" in given or "--early-thread" in given,
            early_thread="--early-thread" in given,
        )


class Zygote:
    """Prepares what all workers share, then serves requests until ctl ends."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.options = Options.of(plan.arguments)
        self.step = "start"
        self.mode: Mode = "none"
        self.missing: list[str] = []

    def prepare(self) -> dict[str, Any]:
        """Check the files, leave the host's view, build what every worker needs. Returns the facts of `ready`."""
        files = self.plan.artifacts
        self.step = "verify"
        if "verify" not in self.options.skip:
            artifacts.verify(files)
        self.image = _above(image_unsafe.seal(files.image, files.image_sha256))
        self.stdlib = _above(os.open(files.stdlib, os.O_RDONLY | os.O_CLOEXEC))
        self.proc = _above(os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        self.null = _above(os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC))
        self.mode = self._enter_namespaces()
        self.engine_file = files.cwasm
        if self.mode != "none" and "root" not in self.options.skip:
            self._empty_root(files.cwasm)
            self.engine_file = layout.ENGINE_FILE
        elif self.mode == "none":
            self.missing.append("user namespaces, so the files of the host are hidden by Landlock alone")
        self.step = "landlock"
        self.landlock = landlock.abi()
        if not self.landlock:
            self.missing.append("Landlock (Linux 5.13, with landlock among lsm=)")
        self.step = "filter"
        own = self.mode != "none"
        self.filter = Filter(calls.build(ARCH, every=self.options.marker, own_namespace=own))
        self.step = "settle"
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps workers
        gc.collect()
        gc.freeze()
        self.step = "serve"
        return {
            "mode": self.mode,
            "landlock": self.landlock,
            "filter": self.filter.length,
            "missing": self.missing,
            "engine": files.engine,
            "image": os.fstat(self.image).st_size,
            "set": files.name,
        }

    def _enter_namespaces(self) -> Mode:
        """Take a mount namespace of our own: as root directly, else as the first id of a user namespace."""
        self.step = "unshare"
        if "namespaces" in self.options.skip:
            return "none"
        if self.plan.base:
            with contextlib.suppress(PermissionError):  # root without CAP_SYS_ADMIN, as in many containers
                process.unshare(process.NEWNS)
                return "root"
        uid, gid = os.geteuid(), os.getegid()
        try:
            process.unshare(process.NEWUSER | process.NEWNS)
        except OSError:
            return "none"
        self.step = "maps"
        for name, line in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            Path(f"/proc/self/{name}").write_text(line, encoding="ascii")
        process.set_dumpable(1)
        return "rootless"

    def _empty_root(self, cwasm: str) -> None:
        """Leave the host's files for a root with nothing in it but the compiled module, read only."""
        self.step = "root"
        mounts.make_private("/")
        engine = mounts.clone_tree(cwasm)
        mounts.set_attributes(engine, mounts.ATTR_RDONLY | _NO_SUID_DEV)
        root = mounts.new_filesystem("tmpfs", _NO_SUID_DEV | mounts.ATTR_NOEXEC, size="4k", nr_inodes="8", mode="0755")
        place = next(one for one in _MOUNT_POINTS if Path(one).is_dir())
        mounts.attach(root, place)
        os.close(root)
        os.chdir(place)
        Path("." + layout.ENGINE_FILE).touch(mode=0o400)
        mounts.attach(engine, "." + layout.ENGINE_FILE)
        os.close(engine)
        self.step = "pivot_root"
        mounts.pivot_here()
        mounts.remount("/", mounts.MS_RDONLY | mounts.MS_NOSUID | mounts.MS_NODEV | mounts.MS_NOEXEC)

    def job(self, child: Child, nursery: Nursery) -> worker.Job:
        """Return what a worker knows when it is born."""
        return worker.Job(
            nursery=nursery,
            child=child,
            mode=self.mode,
            proc=self.proc,
            null=self.null,
            image=self.image,
            stdlib=self.stdlib,
            engine_file=self.engine_file,
            landlock=self.landlock,
            filter=self.filter,
            fail=self.options.fail,
            skip=self.options.skip,
            native=self.options.native,
            early_thread=self.options.early_thread,
        )


def _above(fd: int) -> int:
    """Move a descriptor out of the way of those that a worker's fixed numbers take."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64)
    finally:
        os.close(fd)


def _close_others(keep: set[int]) -> None:
    """Close every descriptor that is not ours; 0 to 2 are /dev/null."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers
        fd = int(name)
        if fd > 2 and fd not in keep:
            with contextlib.suppress(OSError):
                os.close(fd)


def main(argv: list[str]) -> NoReturn:
    """Be the zygote; a failure is one message on ctl and exit status 99."""
    ctl_fd, _lifeline, plan_fd = (int(one) for one in argv)
    process.die_with_parent()
    ctl = socket.socket(fileno=_above(ctl_fd))
    zygote: Zygote | None = None
    step, code, detail = "plan", 0, ""
    try:
        os.umask(0o077)
        with open(plan_fd, "rb") as file:  # noqa: PTH123 - a descriptor
            plan = msgspec.json.decode(file.read(), type=Plan)
        _close_others({ctl.fileno()})
        zygote = Zygote(plan)
        facts = zygote.prepare()
        first = plan.base + layout.FIRST_ID if zygote.mode == "root" else None
        nursery = Nursery(ctl, zygote.proc, first_id=first, own_proc=True, isolate=zygote.mode != "none")
        nursery.one_thread()
        nursery.send({"ready": facts})
        worker.enter(nursery.serve(lambda child: zygote.job(child, nursery)))
    except LockgateError as error:
        step, detail = "refused", json.dumps({"code": error.code, "message": error.message, "next": error.next_step})
    except BaseException as error:  # noqa: BLE001 - whatever it is, the supervisor must hear of it
        code = getattr(error, "errno", None) or 0
        step, detail = zygote.step if zygote else "plan", f"{type(error).__name__}: {error}"[:1000]
    with contextlib.suppress(OSError):
        ctl.send(json.dumps({"error": step, "errno": code, "detail": detail}).encode())
    os._exit(dialog.STATUS_HARDENING_FAILED)
