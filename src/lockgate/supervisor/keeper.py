"""The keeper: a small forked process that makes, fills and removes control groups, and outlives the supervisor.

Rule 1: it ends when its socket ends, and before that it removes every group of its supervisor. A supervisor that was
        killed with SIGKILL leaves no directory behind (its slots die by PDEATHSIG and by the launcher's EOF).
Rule 2: it is forked before the supervisor has threads, holds nothing but its socket, and never sees a run.
Rule 3: the reactor sends and never waits: moving a task between groups waits for an RCU grace period (ADR 0015).
"""

from __future__ import annotations

import array
import contextlib
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NoReturn

import msgspec

from lockgate.contract.errors import HostFault, ProcessDied
from lockgate.supervisor import cgroups, loop
from lockgate.supervisor.cgroups import Layout, Limits
from lockgate.supervisor.group import Group, limit_writes

_LAST_SECONDS: Final = 15.0
_REMOVE_SECONDS: Final = 10.0
_PACKET: Final = 8192


class Place(msgspec.Struct, frozen=True, tag=True):
    """Make group `number` with `limits` and move `pid` into it."""

    number: int
    pid: int
    limits: Limits


class Remove(msgspec.Struct, frozen=True, tag=True):
    """Remove group `number`, all of whose tasks are dead."""

    number: int


class Reply(msgspec.Struct, frozen=True):
    """`error` is empty when it was done; the eventfd of a placed v1 group comes with it."""

    number: int
    placed: bool
    error: str = ""


_orders: Final = msgspec.json.Decoder(Place | Remove)
_replies: Final = msgspec.json.Decoder(Reply)
_encoder: Final = msgspec.json.Encoder()


# ---- the keeper's own side ---------------------------------------------------------------------------------------
def _directories(layout: Layout, number: int) -> list[str]:
    return [f"{base}/s{number}" for base in layout.bases]


def _place(layout: Layout, order: Place) -> int:
    directories = _directories(layout, order.number)
    for directory in directories:
        os.mkdir(directory)  # noqa: PTH102
    for path, text in limit_writes(layout, f"s{order.number}", order.limits):
        cgroups.write(path, text)
    event = -1
    if layout.version == 1 and layout.memory is not None:
        base = f"{layout.memory}/s{order.number}"
        event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        control = os.open(f"{base}/memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
        try:
            cgroups.write(f"{base}/cgroup.event_control", f"{event} {control}")
        finally:
            os.close(control)
    for directory in directories:
        cgroups.write(f"{directory}/cgroup.procs", str(order.pid))
    return event


def _remove(layout: Layout, number: int) -> str:
    """Remove a group's directories; a task that is still leaving makes rmdir say EBUSY for a moment."""
    deadline = time.monotonic() + _REMOVE_SECONDS
    for directory in _directories(layout, number):
        while True:
            try:
                os.rmdir(directory)  # noqa: PTH106
            except FileNotFoundError:
                break
            except OSError as err:
                if time.monotonic() > deadline:
                    return f"rmdir {directory}: {err.strerror}"
                time.sleep(0.002)
            else:
                break
    return ""


def _serve(layout: Layout, sock: socket.socket) -> None:
    while raw := sock.recv(_PACKET):
        order = _orders.decode(raw)
        if isinstance(order, Remove):
            error = _remove(layout, order.number)
            sock.send(_encoder.encode(Reply(order.number, placed=False, error=error)))
            continue
        event, error = -1, ""
        try:
            event = _place(layout, order)
        except OSError as err:
            error = f"{err.filename or 'cgroup'}: {err.strerror}"
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [event]))] if event >= 0 else []
        sock.sendmsg([_encoder.encode(Reply(order.number, placed=True, error=error))], rights)
        if event >= 0:
            os.close(event)


def _clean(layout: Layout) -> None:
    """Remove everything; the slots' tasks may take a moment to die after their supervisor."""
    deadline = time.monotonic() + _LAST_SECONDS
    while not all(cgroups.remove_tree(base) for base in layout.bases) and time.monotonic() < deadline:
        # What is still alive has lost its supervisor: end it rather than wait for its wall clock.
        for base in layout.bases[-1:]:
            with contextlib.suppress(OSError):
                for entry in os.scandir(base):
                    if entry.is_dir():
                        _kill_all(entry.path)
        time.sleep(0.01)


def _kill_all(directory: str) -> None:
    with contextlib.suppress(OSError):
        cgroups.write(f"{directory}/cgroup.kill", "1")
        return
    with contextlib.suppress(OSError):
        for pid in cgroups.read(f"{directory}/cgroup.procs").split():
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)


def _keeper(layout: Layout, sock: socket.socket) -> NoReturn:
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)  # the agent's pipes must not stay open because of us
        for fd in range(3):
            os.dup2(null, fd)
        keep = sock.fileno()
        os.closerange(3, keep)
        os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
        with contextlib.suppress(OSError, msgspec.DecodeError):
            _serve(layout, sock)
        _clean(layout)
    finally:
        os._exit(0)


# ---- the supervisor's side ---------------------------------------------------------------------------------------
Placed = Callable[[Group | None, str], object]
Removed = Callable[[str], object]


class Keeper:
    """Handle on the forked keeper.

    Args:
        on_end: called once if the keeper dies: no group can be made any more, so the pool must stop.

    """

    def __init__(self, reactor: loop.Reactor, layout: Layout, on_end: Callable[[HostFault], object]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            _keeper(layout, theirs)
        theirs.close()
        ours.setblocking(False)
        self._layout = layout
        self._reactor = reactor
        self._sock = ours
        self._on_end = on_end
        self._number = 0
        self._placing: dict[int, tuple[Limits, Placed]] = {}
        self._removing: dict[int, Removed] = {}
        self._queue: deque[bytes] = deque()
        self.open = True
        reactor.add(ours.fileno(), self._on_event)

    @property
    def groups(self) -> int:
        """Groups being made or removed."""
        return len(self._placing) + len(self._removing)

    def place(self, pid: int, limits: Limits, done: Placed) -> None:
        """Make a group around host process `pid`; `done` gets it, or None and why not."""
        if not self.open:
            done(None, "the keeper of the groups is gone")
            return
        self._number += 1
        self._placing[self._number] = (limits, done)
        self._send(_encoder.encode(Place(self._number, pid, limits)))

    def remove(self, group: Group, done: Removed) -> None:
        """Remove a dead slot's group; `done` gets "" or what is in the way."""
        if not self.open:
            done("")  # `Engine.close` removes what a dead keeper left
            return
        self._removing[group.number] = done
        self._send(_encoder.encode(Remove(group.number)))

    def _send(self, raw: bytes) -> None:
        self._queue.append(raw)
        self._flush()

    def _flush(self) -> None:
        while self._queue and self.open:
            try:
                self._sock.send(self._queue[0])
            except BlockingIOError:
                self._reactor.mask(self._sock.fileno(), loop.IN | loop.OUT)
                return
            except OSError:
                self._end()
                return
            self._queue.popleft()

    def _on_event(self, mask: int) -> None:
        if mask & loop.OUT:
            self._flush()
            if self.open and not self._queue:
                self._reactor.mask(self._sock.fileno(), loop.IN)
        if not self.open or not mask & (loop.IN | loop.GONE):
            return
        try:
            raw, fds, _, _ = socket.recv_fds(self._sock, _PACKET, 1)
        except BlockingIOError:
            return
        except OSError:
            raw, fds = b"", []
        if not raw:
            self._end()
            return
        reply = _replies.decode(raw)
        if not reply.placed:
            self._removing.pop(reply.number)(reply.error)
            return
        limits, done = self._placing.pop(reply.number)
        if reply.error:
            self._send(_encoder.encode(Remove(reply.number)))
            self._removing[reply.number] = lambda _error: None
            done(None, reply.error)
        else:
            done(Group(self._layout, reply.number, limits, fds[0] if fds else -1), "")

    def _end(self) -> None:
        if self.open:
            self.close()
            fault = ProcessDied(
                "the process that keeps the control groups is gone", next_step="close this gate and open a new one"
            )
            for _, placed in list(self._placing.values()):
                placed(None, fault.message)
            for removed in list(self._removing.values()):
                removed("")
            self._placing.clear()
            self._removing.clear()
            self._on_end(fault)

    def close(self) -> None:
        """Close the socket, which makes the keeper clean up and end, and reap it; idempotent.

        All slots must be dead, or the keeper ends them.
        """
        if self.open:
            self.open = False
            self._reactor.remove(self._sock.fileno())
            self._sock.close()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
