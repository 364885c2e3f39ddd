"""The process between the loader and one jailed VMM: it speaks the API, and moves bytes between sockets and vsock.

Firecracker takes no inherited descriptors, so somebody has to connect. The shim makes a jailed machine look to the
loader like any other: a wire with words, a control socket, a channel.

Rule 1: it is the first process of a fresh pid namespace and dies with the loader; its end is the end of the VMM.
Rule 2: it holds nothing of a run but the bytes on their way, does not look into them, and keeps at most `PIECE` of them
        for each direction: who does not read holds up only whoever writes to him.
Rule 3: it waits for words of the loader only while the VMM lives; every call of the API has a deadline.

Words on the wire, lines: from the loader "start", "resume", "freeze"; from here "loaded", "saved", "error TEXT".
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import time
from pathlib import Path
from typing import Final, NoReturn

from lockgate.contract.errors import LockgateError
from lockgate.kernel import process_unsafe as process
from lockgate.runtimes.microvm.firecracker import jail, machine
from lockgate.runtimes.microvm.firecracker.api import Api, vsock
from lockgate.runtimes.microvm.firecracker.binary import Binaries
from lockgate.runtimes.microvm.firecracker.jail import Jail
from lockgate.runtimes.microvm.qmp import QmpError
from lockgate.runtimes.microvm.vmm import Plan

NAMESPACES: Final = process.NEWPID | process.NEWNET | process.NEWIPC | process.NEWUTS
START: Final = b"start\n"
RESUME: Final = b"resume\n"
FREEZE: Final = b"freeze\n"
PIECE: Final = 64 * 1024
_LINE_BYTES: Final = 1024
_LOAD_SECONDS: Final = 20.0
_FAILED: Final = 99
_CONTROL, _CALL, _WIRE, _WORDS = 3, 4, 5, 6


class Monitor:
    """The loader's side of the wire (`vmm.Monitor`)."""

    ready = True

    def __init__(self) -> None:
        self.loaded = False
        self.saved = False
        self._said = b""

    def feed(self, data: bytes) -> bytes:
        """Take what the shim said.

        Raises:
            QmpError: the VMM failed, in its words.

        """
        self._said += data
        if len(self._said) > 4 * _LINE_BYTES:
            raise QmpError("the shim said more than it has to say")
        *lines, self._said = self._said.split(b"\n")
        for line in lines:
            if line == b"loaded":
                self.loaded = True
            elif line == b"saved":
                self.saved = True
            else:
                raise QmpError(line.decode("utf-8", "replace")[:500])
        return b""

    def resume(self) -> bytes:
        """Return what makes a loaded machine run."""
        return RESUME


def run(plan: Plan, one: Jail, given: dict[str, int], *, cold: bool) -> NoReturn:
    """Be the shim: with `cold` boot and freeze a machine, else load a snapshot, run it once and end with it.

    Args:
        given: descriptors by name: control, call, monitor (the wire), words (what the VMM writes).

    """
    try:
        process.die_with_parent()
        high = [fcntl.fcntl(given[name], fcntl.F_DUPFD, 64) for name in ("control", "call", "monitor", "words")]
        for target, fd in enumerate(high, _CONTROL):
            os.dup2(fd, target)
        process.close_from(_WORDS + 1)
        wire = socket.socket(fileno=_WIRE)
        try:
            (_boot if cold else _serve)(plan, one, wire)
        except (LockgateError, OSError) as error:
            words = " ".join(str(error).split())[: _LINE_BYTES - 16]
            with contextlib.suppress(OSError):
                wire.sendall(f"error {words}\n".encode())
            os._exit(_FAILED)
        os._exit(0)
    finally:
        os._exit(_FAILED)


class _Vmm:
    """The jailed process and its API."""

    def __init__(self, plan: Plan, one: Jail, files: dict[str, Path], deadline: float, *, capped: bool) -> None:
        self.jail = one
        pair = Binaries(plan.binary, plan.jailer, "", "")
        one.prepare(files)
        argv = one.argv(pair, None if capped else jail.Limits(memory=2 * plan.guest.memory, fsize=False))
        self.pid = jail.execute(argv, _WORDS)
        self.pidfd = os.pidfd_open(self.pid)
        self.api = Api(one.path("api.sock"), self.pidfd, deadline)

    def connect(self, port: int, deadline: float) -> socket.socket:
        return vsock(self.jail.path(machine.VSOCK), port, self.pidfd, deadline)

    def word(self, wire: socket.socket, expected: bytes) -> None:
        """Wait for a word of the loader, as long as the VMM lives."""
        _word(wire, expected, self.pidfd)


def _word(wire: socket.socket, expected: bytes, pidfd: int | None) -> None:
    said = b""
    while said != expected:
        ready, _, _ = select.select([wire, *((pidfd,) if pidfd is not None else ())], [], [])
        data = wire.recv(len(expected) - len(said)) if wire in ready else b""
        if not data:
            os._exit(_FAILED)  # the loader wants no more of this machine, or the VMM is gone
        said += data
        if not expected.startswith(said):
            os._exit(_FAILED)


def _serve(plan: Plan, one: Jail, wire: socket.socket) -> None:
    _word(wire, START, None)
    drives = _drives(plan)
    deadline = time.monotonic() + _LOAD_SECONDS
    vmm = _Vmm(plan, one, {"s": Path(plan.state), "m": Path(plan.ram), **drives}, deadline, capped=True)
    vmm.api.put("/snapshot/load", machine.LOAD, deadline)
    wire.sendall(b"loaded\n")
    vmm.word(wire, RESUME)
    deadline = time.monotonic() + plan.lease_seconds
    vmm.api.patch("/vm", {"state": "Resumed"}, deadline)
    control = vmm.connect(machine.CONTROL_PORT, deadline)
    call = vmm.connect(machine.CALL_PORT, deadline)
    pairs = [(socket.socket(fileno=_CONTROL), control), (socket.socket(fileno=_CALL), call)]
    _relay(pairs, vmm.pidfd, wire)


def _boot(plan: Plan, one: Jail, wire: socket.socket) -> None:
    guest = plan.guest
    images = tuple(_drives(plan).values())
    recipe = machine.Recipe(Path(guest.kernel), guest.append, guest.memory, Path(guest.initrd), images)
    deadline = time.monotonic() + plan.seconds
    given = {"k": recipe.kernel, "i": Path(guest.initrd), **_drives(plan)}
    vmm = _Vmm(plan, one, given, deadline, capped=False)
    for path, body in machine.boot_calls(recipe):
        vmm.api.put(path, body, deadline)
    greeting = machine.greeting(one.path(machine.VSOCK), vmm.pidfd, deadline)
    socket.socket(fileno=_CONTROL).sendall(greeting.encode())
    vmm.word(wire, FREEZE)
    deadline = time.monotonic() + _LOAD_SECONDS
    vmm.api.patch("/vm", {"state": "Paused"}, deadline)
    vmm.api.put("/snapshot/create", machine.SAVE, deadline)
    os.kill(vmm.pid, 9)
    os.waitpid(vmm.pid, 0)
    machine.take_out(one, Path(plan.state), Path(plan.ram))
    wire.sendall(b"saved\n")


def _drives(plan: Plan) -> dict[str, Path]:
    guest = plan.guest
    paths = (guest.root, *((guest.packages,) if guest.packages is not None else ()))
    return machine.drives(tuple(Path(path) for path in paths))


def _relay(pairs: list[tuple[socket.socket, socket.socket]], pidfd: int, wire: socket.socket) -> None:
    """Move bytes both ways of each pair until the VMM or the loader is gone."""
    poll = select.poll()
    ways: dict[int, tuple[socket.socket, socket.socket]] = {}
    waiting: dict[int, bytes] = {}
    for here, there in pairs:
        for source, target in ((here, there), (there, here)):
            source.setblocking(False)
            ways[source.fileno()] = (source, target)
            poll.register(source, select.POLLIN)
    back = {source.fileno(): target.fileno() for source, target in ways.values()}
    poll.register(pidfd, select.POLLIN)
    poll.register(wire, 0)

    def arm(fd: int) -> None:
        """Listen on `fd` for bytes if the last ones left, and for room if some wait to leave by it."""
        mask = 0 if fd in waiting or fd not in ways else select.POLLIN
        mask |= select.POLLOUT if back[fd] in waiting else 0
        if mask:
            poll.register(fd, mask)
        else:  # a socket whose other end is closed would be ready for ever
            with contextlib.suppress(KeyError):
                poll.unregister(fd)

    while True:
        for fd, mask in poll.poll():
            if fd == wire.fileno():
                return
            if fd == pidfd:
                os._exit(0)
            if mask & select.POLLOUT and back[fd] in waiting:
                _push(back[fd], ways, waiting)
            if mask & ~select.POLLOUT and fd in ways and fd not in waiting:
                source, target = ways[fd]
                try:
                    data = source.recv(PIECE)
                except BlockingIOError:
                    continue
                except OSError:
                    data = b""
                if data:
                    waiting[fd] = data
                    _push(fd, ways, waiting)
                else:  # no more from there; the other way goes on
                    with contextlib.suppress(OSError):
                        target.shutdown(socket.SHUT_WR)
                    del ways[fd]
            for other in (fd, back[fd]):
                arm(other)


def _push(fd: int, ways: dict[int, tuple[socket.socket, socket.socket]], waiting: dict[int, bytes]) -> None:
    data = waiting.pop(fd)
    try:
        data = data[ways[fd][1].send(data) :]
    except BlockingIOError:
        pass
    except OSError:
        data = b""  # nobody is there to take it
    if data:
        waiting[fd] = data
