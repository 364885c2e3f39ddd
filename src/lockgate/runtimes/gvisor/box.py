"""The keeper of one box: pid 1 of a pid namespace in which the sentry and all that belongs to it live. Stdlib only.

Rule 1: the box is this namespace. Killing the keeper kills every process of it, and the keeper's pidfd is readable only
        when the kernel has reaped the last one (pid_namespaces(7)): that is the proof of death.
Rule 2: nothing of the sentry starts before GO, which comes when the keeper stands in its control group.
Rule 3: the keeper holds no run. Of the code's descriptors it keeps control alone, reads nothing from it, and writes
        only before there is code.
Rule 4: the leash's end is the box's end.

A warm box sleeps: an idle sentry takes some percent of a core for its timers, so FREEZE stops everything in the
namespace (SIGSTOP, which a pending SIGKILL overrides) and THAW lets it go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
from dataclasses import dataclass, field
from typing import Any, NoReturn

from lockgate.kernel import mounts_unsafe as mounts
from lockgate.kernel import process_unsafe as process
from lockgate.runtimes.gvisor import layout

NAMESPACES = process.NEWPID | process.NEWNS | process.NEWNET | process.NEWIPC | process.NEWUTS
CHECKPOINT = b"C"
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
_PROC = mounts.MS_NOSUID | mounts.MS_NODEV | mounts.MS_NOEXEC


@dataclass
class Job:
    """What a keeper is born with.

    Attributes:
        leash: our end. birth: both ends of the guest's stdin, (host's, guest's).
        command: argv of the sentry. checkpoint: argv that saves it; empty for a machine.
        message: what goes to the guest at once. machine: its four descriptors; empty for a template.

    """

    leash: socket.socket
    birth: tuple[socket.socket, socket.socket]
    command: list[str]
    checkpoint: list[str] = field(default_factory=list[str])
    message: bytes = b""
    order: dict[str, Any] = field(default_factory=dict[str, Any])
    machine: list[int] = field(default_factory=list[int])

    def descriptors(self) -> list[int]:
        """Return every descriptor that the keeper needs."""
        return [self.leash.fileno(), *(one.fileno() for one in self.birth), *self.machine]


class _Keeper:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.child = 0
        self.child_fd = -1
        self.thawed = False
        self.noise = b""
        self.noise_fd, self._noise_in = os.pipe()
        os.set_blocking(self.noise_fd, False)
        self.poll = select.poll()

    def start(self) -> None:
        job = self.job
        self.child = os.fork()
        if self.child == 0:
            _become_runsc(job.command, job.birth[1].fileno(), self._noise_in)
        self.child_fd = os.pidfd_open(self.child)
        job.birth[1].close()
        if job.machine:
            job.birth[0].sendall(job.message)
            body = json.dumps(job.order).encode()
            head = layout.BIRTH_HEADER.pack(len(body))
            socket.send_fds(job.birth[0], [head + body], job.machine)
            # Control stays ours for one word, should the sentry not come up; the others are the guest's alone.
            for fd in (job.machine[0], *job.machine[2:]):
                os.close(fd)
        self.poll.register(self.child_fd, select.POLLIN)
        self.poll.register(self.noise_fd, select.POLLIN)

    def run(self) -> NoReturn:
        leash = self.job.leash
        self.poll.register(leash, select.POLLIN)
        while True:
            for fd, _ in self.poll.poll():
                if fd == leash.fileno():
                    self.order(leash.recv(1))
                elif fd == self.noise_fd:
                    self.hear()
                else:
                    self.ended()

    def order(self, word: bytes) -> None:
        if not word:
            os._exit(0)
        if word == layout.GO and not self.child:
            self.start()
        elif word == layout.FREEZE and not self.thawed:
            os.kill(-1, signal.SIGSTOP)
        elif word == layout.THAW:
            self.thaw()
        elif word == CHECKPOINT:
            self.checkpoint()

    def thaw(self) -> None:
        if not self.thawed:
            self.thawed = True
            self.job.birth[0].close()
            os.kill(-1, signal.SIGCONT)

    def checkpoint(self) -> None:
        pid = os.fork()
        if pid == 0:
            _become_runsc(self.job.checkpoint, -1, self._noise_in)
        status = os.waitpid(pid, 0)[1]
        self.hear()
        self.job.leash.sendall(json.dumps({"status": status, "noise": self.noise.decode("utf-8", "replace")}).encode())

    def hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.noise = (self.noise + os.read(self.noise_fd, 65536))[-layout.NOISE_BYTES :]

    def ended(self) -> NoReturn:
        """The sentry is gone: say why on control if no code was there yet, and go with its status."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])
        self.hear()
        if not self.thawed and self.job.machine:
            text = self.noise.decode("utf-8", "replace").strip() or f"runsc ended with status {code}"
            report = {"step": "runsc", "errno": 0, "detail": text[-500:]}
            with contextlib.suppress(OSError):
                os.write(self.job.machine[1], b"F" + json.dumps(report).encode() + b"\n")
        if code == layout.STATUS_DISK:
            with contextlib.suppress(OSError):
                self.job.leash.sendall(layout.DISK)
        os._exit(code if code >= 0 else 128 - code)


def _become_runsc(argv: list[str], stdin: int, output: int) -> NoReturn:
    """Exec runsc with its three streams and one descriptor more.

    A high descriptor makes the kernel give the process a table that need not grow once it has threads: growing waits
    for a grace period each time, which costs a sixth of a start.
    """
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null if stdin < 0 else stdin, 0)
        os.dup2(output, 1)  # a pipe, never a file: the sentry writes at offsets of its own
        os.dup2(output, 2)
        os.dup2(null, layout.SENTRY_FD)
        os.closerange(3, layout.SENTRY_FD)
        os.execve(argv[0], argv, _ENVIRONMENT)  # noqa: S606 - fixed program
    finally:
        os._exit(127)


def keep(job: Job) -> NoReturn:
    """Be the keeper: called in the clone, which is pid 1 of its namespaces."""
    try:
        process.die_with_parent()
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        keep_open = sorted({0, 1, 2, *job.descriptors()})
        for low, high in zip(keep_open, [*keep_open[1:], 1 << 20], strict=True):
            if high > low + 1:
                os.closerange(low + 1, high)
        mounts.make_private("/")
        mounts.mount("proc", "/proc", _PROC)  # runsc asks it for itself: it must be that of this namespace
        _Keeper(job).run()
    except BaseException as error:  # noqa: BLE001 - fail closed, and say so where somebody listens
        if job.machine:
            report = {"step": "keeper", "errno": getattr(error, "errno", 0) or 0, "detail": repr(error)[:500]}
            with contextlib.suppress(OSError):
                os.write(job.machine[1], b"F" + json.dumps(report).encode() + b"\n")
    finally:
        os._exit(layout.STATUS_LOST)
