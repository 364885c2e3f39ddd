"""The launcher: boots the template box, saves it, and from then on clones a keeper for each box that is asked for.

Rule 1: it never runs code of a run and holds nothing of one.
Rule 2: its files (bundle, checkpoint, the sentries' state) lie on a tmpfs that only its own mount namespace has: they
        are gone when the last box is, however that comes about.
Rule 3: boxes die with the launcher (PDEATHSIG) and the launcher with the supervisor (EOF of ctl and lifeline).

Started as `python -I -S launcher.py CTL LIFELINE PLAN`: three descriptors. Speaks the protocol of `runtimes.forked`,
with a fifth descriptor (the leash) in each request.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":  # the package's own __init__ files need more than the standard library
    _here = Path(__file__).resolve()
    for _name, _level in (("lockgate", 2), ("lockgate.runtimes", 1), ("lockgate.runtimes.gvisor", 0)):
        _package = types.ModuleType(_name)
        _package.__path__ = [str(_here.parents[_level])]
        sys.modules[_name] = _package

from lockgate.kernel import mounts_unsafe as mounts
from lockgate.kernel import process_unsafe as process
from lockgate.runtimes.gvisor import box, layout

_CTL_BYTES = 64 * 1024
_BOOT_SECONDS = 45.0
_SETTLE_SECONDS = (
    0.1  # the worker is in its wait by then; a checkpoint a moment earlier is as good, and restores as well
)


@dataclass
class Box:
    """A keeper that lives: its pidfd, and where its sentry keeps its state."""

    pidfd: int
    root: Path


class Failed(Exception):
    """A step of the template's start; becomes the error of the answer."""

    def __init__(self, step: str, detail: str, code: int = 0) -> None:
        super().__init__(detail)
        self.step, self.detail, self.code = step, detail, code


class Launcher:
    """One template: `plan` holds runsc, flags, work, config, modules (the guest's, as JSON text), restore."""

    def __init__(self, plan: dict[str, Any], ctl: socket.socket, lifeline: int) -> None:
        self.plan = plan
        self.ctl = ctl
        self.lifeline = lifeline
        self.work = Path(plan["work"])
        self.image = self.work / "image"
        self.restore = False
        self.boxes: dict[int, Box] = {}
        self.count = 0
        modules = plan["modules"].encode()
        self.payload = layout.BIRTH_HEADER.pack(len(modules)) + modules

    def prepare(self) -> dict[str, Any]:
        """Make the private directory, boot the template, save it; return what `ready` tells."""
        if self.plan["root"]:
            process.unshare(process.NEWNS)
        else:
            _own_user_namespace()
        mounts.make_private("/")
        mounts.mount("tmpfs", str(self.work), mounts.MS_NOSUID | mounts.MS_NODEV, "mode=0700,size=4g")
        (self.work / "empty").mkdir()
        (self.work / "bundle").mkdir()
        config = json.loads(self.plan["config"])
        config["root"] = {"path": str(self.work / "empty"), "readonly": True}
        (self.work / "bundle" / "config.json").write_text(json.dumps(config))
        facts: dict[str, Any] = {"boot": "cold"}
        if self.plan["restore"]:
            since = time.monotonic()
            facts |= self.template()
            facts["template_seconds"] = round(time.monotonic() - since, 3)
        return facts

    # ---- the template --------------------------------------------------------------------------------------------
    def template(self) -> dict[str, Any]:
        """Boot one box as far as its wait for birth and save it there. A failure to save leaves cold boots."""
        leash, theirs = socket.socketpair()
        birth = socket.socketpair()
        root = self.root()
        command = self.runsc(root, "run", f"--bundle={self.work}/bundle")
        save = self.runsc(root, "checkpoint", f"--image-path={self.image}", "--compression=none")
        pidfd = self.clone(box.Job(theirs, birth, command, save))
        theirs.close()
        birth[1].close()
        try:
            with leash, birth[0]:
                return self._save(leash, birth[0], pidfd)
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            _wait(pidfd, _BOOT_SECONDS)
            os.close(pidfd)
            shutil.rmtree(root, ignore_errors=True)

    def _save(self, leash: socket.socket, birth: socket.socket, pidfd: int) -> dict[str, Any]:
        deadline = time.monotonic() + _BOOT_SECONDS
        for one in (leash, birth):
            one.settimeout(_BOOT_SECONDS)
        leash.sendall(layout.GO)
        birth.sendall(self.payload)
        line = b""
        while not line.endswith(b"\n"):
            if not _wait(birth.fileno(), deadline - time.monotonic(), pidfd):
                raise Failed("boot", "the template did not boot in time", 110)
            more = birth.recv(layout.NOISE_BYTES)
            if not more:
                raise Failed("boot", "runsc ended while the template booted")
            line += more
        said = json.loads(line)
        if "ready" not in said:
            raise Failed(said["step"], said["detail"], said["errno"])
        time.sleep(_SETTLE_SECONDS)
        leash.sendall(box.CHECKPOINT)
        answer = json.loads(leash.recv(4 * layout.NOISE_BYTES) or b'{"status": -1, "noise": "the keeper ended"}')
        facts: dict[str, Any] = dict(said["ready"])
        if answer["status"] == 0 and (self.image / "checkpoint.img").is_file():
            self.restore = True
            size = sum(one.stat().st_size for one in self.image.iterdir())
            return facts | {"boot": "restored", "checkpoint": size}
        return facts | {"boot": "cold", "why_cold": f"checkpoint failed: {answer['noise'][-300:]}"}

    # ---- machines ------------------------------------------------------------------------------------------------
    def root(self) -> Path:
        """Make the directory in which one sentry keeps its state."""
        self.count += 1
        path = self.work / f"b{self.count}"
        path.mkdir(mode=0o700)
        return path

    def runsc(self, root: Path, verb: str, *options: str) -> list[str]:
        """Return the command line; a box's name within its own root needs to be no secret and no other's."""
        return [self.plan["runsc"], *self.plan["flags"], f"--root={root}", verb, *options, "box"]

    def clone(self, job: box.Job) -> int:
        """Clone a keeper; returns its pidfd. Never returns in the clone."""
        pid, pidfd = process.clone_slot(box.NAMESPACES)
        if pid == 0:
            box.keep(job)
        return pidfd

    def spawn(self, request: dict[str, Any], fds: list[int]) -> None:
        """Clone the keeper of one machine and report it."""
        if len(fds) != layout.MACHINE_DESCRIPTORS + 1:
            raise Failed("request", f"{len(fds)} descriptors with a request", 9)
        *machine, leash = fds
        root = self.root()
        birth = socket.socketpair()
        options = [f"--bundle={self.work}/bundle"]
        if self.restore:
            options.append(f"--image-path={self.image}")
        job = box.Job(
            socket.socket(fileno=os.dup(leash)),
            birth,
            self.runsc(root, "restore" if self.restore else "run", *options),
            message=b"" if self.restore else self.payload,
            order=request,
            machine=machine,
        )
        try:
            pidfd = self.clone(job)
        finally:
            job.leash.close()
            for one in birth:
                one.close()
        self.boxes[pidfd] = Box(pidfd, root)
        socket.send_fds(self.ctl, [json.dumps({"spawned": 1}).encode()], [pidfd])

    def serve(self) -> NoReturn:
        """Answer requests until the supervisor is gone, and clear away after boxes that ended."""
        poll = select.poll()
        for fd in (self.ctl.fileno(), self.lifeline):
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd in self.boxes:
                    poll.unregister(fd)
                    shutil.rmtree(self.boxes.pop(fd).root, ignore_errors=True)
                    os.close(fd)
                elif fd == self.lifeline or not self.answer():
                    self.end()
            for fd in self.boxes:
                poll.register(fd, select.POLLIN)

    def answer(self) -> bool:
        """Take one request; False at the end of ctl."""
        message, fds, _, _ = socket.recv_fds(self.ctl, _CTL_BYTES, layout.MACHINE_DESCRIPTORS + 1)
        try:
            if message:
                self.spawn(json.loads(message), list(fds))
        except BrokenPipeError:
            return False
        except (OSError, ValueError, KeyError, Failed) as error:
            self.send_error(error)
        finally:
            for fd in fds:
                os.close(fd)
        return bool(message)

    def send_error(self, error: BaseException) -> None:
        """Report a failed step."""
        step = error.step if isinstance(error, Failed) else "spawn"
        code = error.code if isinstance(error, Failed) else getattr(error, "errno", None) or 0
        self.ctl.send(json.dumps({"error": step, "errno": code, "detail": str(error)[:1000]}).encode())

    def end(self) -> NoReturn:
        """Kill every box, see each one dead, and end."""
        for fd in self.boxes:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        for fd in self.boxes:
            _wait(fd, 5.0)
        os._exit(0)


def _own_user_namespace() -> None:
    """Be id 0 of a user namespace with this one user in it: it may mount, and make the namespaces of boxes."""
    uid, gid = os.getuid(), os.getgid()
    process.unshare(process.NEWUSER | process.NEWNS)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        Path(f"/proc/self/{name}").write_text(text, encoding="utf-8")


def _wait(fd: int, seconds: float, other: int = -1) -> bool:
    """Wait until `fd` is readable; False when the time is over or `other` was readable first."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if other >= 0:
        poll.register(other, select.POLLIN)
    return any(one == fd for one, _ in poll.poll(max(seconds, 0) * 1000))


def main() -> NoReturn:
    """Be the launcher; a failure before `ready` is one message on ctl and exit status 99."""
    ctl_fd, lifeline, plan_fd = (int(one) for one in sys.argv[1:4])
    ctl = socket.socket(fileno=ctl_fd)
    launcher: Launcher | None = None
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps keepers; their pidfds say when
        with open(plan_fd, "rb") as file:  # noqa: PTH123 - a descriptor
            launcher = Launcher(json.load(file), ctl, lifeline)
        ctl.send(json.dumps({"ready": launcher.prepare()}).encode())
        launcher.serve()
    except BaseException as error:  # noqa: BLE001 - whatever it is, the supervisor must hear of it
        if launcher is not None and isinstance(error, Failed):
            launcher.send_error(error)
        else:
            code = getattr(error, "errno", None) or 0
            text = f"{type(error).__name__}: {error}"[:1000]
            ctl.send(json.dumps({"error": "start", "errno": code, "detail": text}).encode())
    os._exit(layout.STATUS_LOST)


if __name__ == "__main__":
    main()
