"""The outer end of a run's namespace: makes it, takes its sockets over, passes signals on, hears how it ended.

Rule 1: every wait has a deadline, and a namespace that is not ready by then is ended.
Rule 2: closing this object ends every process of the run, whatever state they are in.
Rule 3: no privilege is used that the caller lacks: a plain user maps itself and nobody else, root maps what it has.

Sources: user_namespaces(7) (who may write which map), pid_namespaces(7).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from lockgate.contract.errors import CannotIsolate, ConfigError, HostFault
from lockgate.egress.inside import FDS_PER_MESSAGE, MESSAGE_BYTES, Plan

READY_SECONDS: Final = 60.0
END_SECONDS: Final = 10.0
NOT_EXECUTABLE: Final = 126
NOT_FOUND: Final = 127


class Ended(msgspec.Struct, frozen=True):
    """How the command ended: by itself with `code`, or by `signal`."""

    code: int | None = None
    signal: int | None = None

    @property
    def exit_code(self) -> int:
        """What a shell would say: the code, or 128 and the signal."""
        if self.signal is not None:
            return 128 + self.signal
        return self.code if self.code is not None else 1


class Served(msgspec.Struct):
    """A socket of the namespace that is served out here; `kind`: "proxy", "dns-udp", "dns-tcp", "routed"."""

    kind: str
    address: str
    port: int
    sock: socket.socket


class Namespace:
    """One command in a namespace of its own.

    Args:
        plan: what to start.
        cwd: where the command starts; None = here.

    Attributes:
        served: its sockets, once `prepare` has returned.
        ipv6: whether the IPv6 pool is routed.

    """

    def __init__(self, plan: Plan, *, cwd: Path | None = None) -> None:
        self.served: list[Served] = []
        self.ipv6 = False
        self.plan = plan
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ctl = ours
        memory = os.memfd_create("lockgate-plan", os.MFD_CLOEXEC)
        try:
            os.write(memory, msgspec.json.encode(plan))
            os.lseek(memory, 0, os.SEEK_SET)
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-m", "lockgate.egress.inside", str(theirs.fileno()), str(memory)],
                env={},
                cwd=cwd,
                pass_fds=(theirs.fileno(), memory),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(memory)

    def fileno(self) -> int:
        """Readable when `poll` has something to say."""
        return self._ctl.fileno()

    def prepare(self, timeout: float = READY_SECONDS) -> None:
        """Have the namespace made, and take its sockets. The command may start at once; its connections wait.

        Raises:
            CannotIsolate: this host or this user cannot have one.
            HostFault: it was not ready in time.

        """
        deadline = time.monotonic() + timeout
        self._hear(deadline)  # {"unshared": true}
        try:
            write_maps(self.process.pid, self.plan)
        except OSError as error:
            raise _cannot("maps", error.errno or 0, str(error)) from None
        self._ctl.send(b"maps")
        while True:
            told, fds = self._hear(deadline)
            socks = [socket.socket(fileno=fd) for fd in fds]
            self.served += [
                Served(kind, address, port, sock)
                for (kind, address, port), sock in zip(told["sockets"], socks, strict=True)
            ]
            self.ipv6 = told["ipv6"]
            if told["last"]:
                return

    def started(self, timeout: float = READY_SECONDS) -> None:
        """Wait until the command is being started.

        Raises:
            CannotIsolate: a step before it failed.
            HostFault: it did not come to it in time.

        """
        self._hear(time.monotonic() + timeout)

    def poll(self) -> Ended | None:
        """Return how the command ended, if it did. Call it when `fileno` is readable.

        Raises:
            ConfigError: the command cannot be executed.
            HostFault: the namespace ended without a word.

        """
        told = self._message()[0]
        if told is None:
            raise HostFault(
                "the namespace of this run ended without a word", next_step="look at the kernel's log for a kill"
            )
        if "error" in told:
            raise _not_executable(self.plan.argv[0], told["errno"])
        return Ended(told.get("exit"), told.get("signal"))

    def signal(self, number: int) -> None:
        """Send a signal to the command."""
        with contextlib.suppress(OSError):
            self._ctl.send(bytes([number]))

    def close(self) -> None:
        """End every process of the run and close the sockets."""
        self._ctl.close()  # its first process sees the end, and its namespace ends with it
        for one in self.served:
            one.sock.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _hear(self, deadline: float) -> tuple[dict[str, Any], list[int]]:
        poll = select.poll()
        poll.register(self._ctl, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise HostFault("the namespace of this run was not ready in time", next_step="look at the load of the host")
        told, fds = self._message()
        if told is None:
            raise HostFault(
                f"the namespace could not be made: its process ended with {self.process.wait(END_SECONDS)}",
                next_step="look at the lines above",
            )
        if "error" in told:
            raise _cannot(told["error"], told["errno"], told["detail"])
        return told, fds

    def _message(self) -> tuple[dict[str, Any] | None, list[int]]:
        data, fds, _, _ = socket.recv_fds(self._ctl, MESSAGE_BYTES, FDS_PER_MESSAGE)
        return (json.loads(data), fds) if data else (None, fds)


def write_maps(pid: int, plan: Plan) -> None:
    """Map ids of a fresh user namespace to themselves: all that this process has as root, one otherwise.

    Raises:
        OSError: the kernel refused.

    """
    if os.geteuid() == 0 and plan.uid < 0:
        try:
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{pid}/{name}").write_text(_same(name), encoding="utf-8")
        except OSError as error:
            if error.errno != errno.EPERM:
                raise
        else:
            return
    uid, gid = (plan.uid, plan.gid) if plan.uid >= 0 else (os.geteuid(), os.getegid())
    Path(f"/proc/{pid}/setgroups").write_text("deny", encoding="utf-8")
    Path(f"/proc/{pid}/uid_map").write_text(f"{uid} {uid} 1", encoding="utf-8")
    Path(f"/proc/{pid}/gid_map").write_text(f"{gid} {gid} 1", encoding="utf-8")


def _same(name: str) -> str:
    """Return a map of every id that this process's own namespace has, to itself."""
    lines = Path(f"/proc/self/{name}").read_text(encoding="utf-8").splitlines()
    return "".join(f"{first} {first} {count}\n" for first, _, count in (line.split() for line in lines))


def _cannot(step: str, code: int, detail: str) -> CannotIsolate:
    what = os.strerror(code) if code else detail
    if step in ("unshare", "maps") or code == errno.EPERM:
        return CannotIsolate(
            f"this user cannot have a network namespace here ({step}: {what})",
            next_step="allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone=1, "
            "kernel.apparmor_restrict_unprivileged_userns=0), or in a container give it CAP_SYS_ADMIN or a seccomp "
            "profile that allows unshare and mount",
        )
    return CannotIsolate(
        f"the namespace could not be made ({step}: {what})", next_step="run it as another user, or report this"
    )


def _not_executable(name: bytes, code: int) -> ConfigError:
    error = CommandNotFound if code == errno.ENOENT else CommandNotExecutable
    shown = name[:200].decode("utf-8", "backslashreplace")
    return error(f"{shown!r} cannot be started: {os.strerror(code)}", next_step="name a program that is in PATH")


class CommandNotFound(ConfigError):
    """The command is nowhere in PATH."""

    code = "command"
    exit_code = NOT_FOUND


class CommandNotExecutable(ConfigError):
    """The command is there and cannot be executed."""

    code = "command"
    exit_code = NOT_EXECUTABLE


FORWARDED: Final = (
    signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH,
    signal.SIGALRM, signal.SIGCONT,
)  # fmt: skip
