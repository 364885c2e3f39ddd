"""The template's own side of `forked`: clones itself for each request and gives the child an id of its own.

Rule 1: exactly one thread, always: a raw clone copies one, and locks that others hold would never be released.
Rule 2: it never reads a byte that a child wrote.
Rule 3: two live children never have the same id, or they could reach each other.

Stdlib only: it also runs where nothing else is installed. Sources: user_namespaces(7), clone(2).
"""

from __future__ import annotations

import array
import json
import os
import resource
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from lockgate.kernel import process_unsafe as process
from lockgate.runtimes import dialog

NOBODY = 65534
IDS = 64_000
_exit = os._exit  # a guest may put its own in the place of os._exit

T = TypeVar("T")


class Child(NamedTuple):
    """What a child knows when it is born: its descriptors, the end of the parent's word, the request."""

    fds: list[int]
    go: int
    request: dict[str, Any]


class Stages:
    """Where a child is on its way, and how long each step took."""

    def __init__(self, fail: str) -> None:
        self.name = "clone"
        self.microseconds: dict[str, int] = {}
        self._fail = fail
        self._since = time.perf_counter_ns()

    def next(self, name: str) -> None:
        """Begin step `name`."""
        now = time.perf_counter_ns()
        self.microseconds[self.name] = (now - self._since) // 1000
        self.name, self._since = name, now
        if name == self._fail:
            raise OSError(1, "made to fail by the template's argument")


class Nursery:
    """Serves spawn requests until ctl ends.

    Args:
        ctl: our end of the control socket.
        proc: descriptor of a procfs.
        first_id: the first of `IDS` ids that children may have, as this process's user namespace names them; None =
            children map themselves to the one id that this process has.
        isolate: whether children get namespaces of their own; where none can be had they keep this process's ids.
        own_proc: whether `proc` shows the pids that this process sees; else those of an outer pid namespace.

    Attributes:
        step: what is being done, for the error that a failure becomes.

    """

    def __init__(
        self, ctl: socket.socket, proc: int, *, first_id: int | None, own_proc: bool, isolate: bool = True
    ) -> None:
        self.step = "start"
        self._ctl = ctl
        self._proc = proc
        self._first_id = first_id
        self._own_proc = own_proc
        self._isolate = isolate
        self._made = 0
        self._pids = array.array("i", [0]) * IDS

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Send one message to the supervisor."""
        data = json.dumps(message).encode()
        if fds:
            socket.send_fds(self._ctl, [data], fds)
        else:
            self._ctl.send(data)

    def serve(self, born: Callable[[Child], T]) -> T:
        """Answer requests; returns only in a child, with what `born` made of it, and ends this process on EOF."""
        while True:
            message, fds, _, _ = socket.recv_fds(self._ctl, dialog.CTL_BYTES, dialog.MACHINE_DESCRIPTORS)
            if not message:
                _exit(0)
            child: Child | None = None
            try:
                child = self._spawn(json.loads(message), fds)
            except (OSError, ValueError, KeyError) as error:
                self._failed(error)
            if child is not None:
                return born(child)
            for fd in fds:
                os.close(fd)

    def _failed(self, error: Exception) -> None:
        code = getattr(error, "errno", None) or 0
        self.send({"error": self.step, "errno": code, "detail": f"{type(error).__name__}: {error}"[:1000]})

    def _spawn(self, request: dict[str, Any], fds: list[int]) -> Child | None:
        """Clone, write the child's maps, report it. Returns in the child what it knows, None in the parent."""
        self.step = "request"
        if len(fds) != dialog.MACHINE_DESCRIPTORS:
            raise OSError(9, f"{len(fds)} descriptors with a request, not {dialog.MACHINE_DESCRIPTORS}")
        self.step = "clone"
        self.one_thread()
        number = self._free_id()
        go_read, go_write = os.pipe()
        try:
            pid, pidfd = process.clone_slot(process.ALL_NAMESPACES if self._isolate else 0)
        except OSError:
            os.close(go_read)
            os.close(go_write)
            raise
        if pid == 0:
            os.close(go_write)
            return Child(fds, go_read, request)
        try:
            os.close(go_read)
            self.step = "maps"
            if self._first_id is not None:
                self._map(pid if self._own_proc else self._seen_as(pidfd), self._first_id + number)
            self._pids[number] = pid
            self.send({"spawned": pid}, (pidfd,))
            os.write(go_write, b"g")
        except BrokenPipeError:
            pass  # the child died on its own; its pidfd says so to whoever waits for it
        finally:
            os.close(pidfd)
            os.close(go_write)  # without the byte the child sees EOF and ends
        return None

    def _map(self, pid: int, outside: int) -> None:
        write(self._proc, f"{pid}/setgroups", b"deny")
        write(self._proc, f"{pid}/uid_map", b"%d %d 1" % (NOBODY, outside))
        write(self._proc, f"{pid}/gid_map", b"%d %d 1" % (NOBODY, outside))

    def settle_child(self, child: Child) -> None:
        """Wait for the parent's word; where it has no range of ids, map the one that there is.

        Raises:
            OSError: the parent ended before.

        """
        if os.read(child.go, 1) != b"g":
            raise OSError(32, "the template ended before the maps were written")
        os.close(child.go)
        if self._first_id is None and self._isolate:
            for name, line in (("setgroups", b"deny"), ("uid_map", b"65534 0 1"), ("gid_map", b"65534 0 1")):
                write(self._proc, f"self/{name}", line)

    def one_thread(self) -> None:
        """Check Rule 1.

        Raises:
            OSError: there are more.

        """
        tasks = len(names(self._proc, "self/task"))
        if tasks != 1:
            raise OSError(11, f"{tasks} threads in the template; do not preload the package that starts them")

    def _free_id(self) -> int:
        """Return an id number that no live child has."""
        for _ in range(IDS):
            number = self._made % IDS
            self._made += 1
            if not self._pids[number] or not _alive(self._pids[number]):
                return number
        raise OSError(11, "every id is in use")

    def _seen_as(self, pidfd: int) -> int:
        """Return the pid that our procfs, which may be that of an outer pid namespace, shows for `pidfd`."""
        fd = open_in(self._proc, f"self/fdinfo/{pidfd}", os.O_RDONLY)
        try:
            lines = os.read(fd, 4096).splitlines()
        finally:
            os.close(fd)
        return next(int(line.split()[1]) for line in lines if line.startswith(b"Pid:"))


def set_limits(limits: dict[int, int]) -> None:
    """Set every resource limit, soft and hard, to its value or to the hard limit that is there (setrlimit(2))."""
    for which, value in limits.items():
        hard = resource.getrlimit(which)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (bound, bound))


# What no machine has a use for.
NO_LIMITS = {
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_MEMLOCK: 0,
    resource.RLIMIT_MSGQUEUE: 0,
    resource.RLIMIT_NICE: 0,
    resource.RLIMIT_RTPRIO: 0,
    resource.RLIMIT_SIGPENDING: 128,
}


def open_in(proc: int, name: str, flags: int) -> int:
    """Open a file of a procfs."""
    return os.open(name, flags | os.O_CLOEXEC, dir_fd=proc)


def write(proc: int, name: str, data: bytes) -> None:
    """Write a file of a procfs with one call."""
    fd = open_in(proc, name, os.O_WRONLY)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def names(proc: int, name: str) -> list[str]:
    """List a directory of a procfs."""
    fd = open_in(proc, name, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return os.listdir(fd)  # noqa: PTH208 - a descriptor
    finally:
        os.close(fd)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
