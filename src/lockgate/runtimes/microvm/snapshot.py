"""Snapshots: a machine booted once to the agent's ready line, frozen into two files; and those files as sealed memory.

Rule 1: a machine that is snapshotted has seen no run, no credential and no data of anybody (`agent.Agent.prepare`).
Rule 2: the memory of a snapshot is a sealed file: who opens it for writing, as QEMU does, still cannot change it.
Rule 3: the state file holds device state only; the RAM never passes through the VMM's migration stream.

Sources: memfd_create(2), fcntl(2) F_ADD_SEALS; lseek(2) SEEK_DATA.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import socket
import time
from typing import TYPE_CHECKING, Any, Final

from lockgate.runtimes import dialog
from lockgate.runtimes.microvm import qemu
from lockgate.runtimes.microvm.firecracker import shim
from lockgate.runtimes.microvm.qmp import QmpError

if TYPE_CHECKING:
    from lockgate.runtimes.microvm.loader import Loader

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_PIECE: Final = 1 << 20
STATE_BYTES: Final = 64 * 1024 * 1024
_QMP_SECONDS: Final = 30.0


def fresh(size: int) -> int:
    """Return an empty memory file of `size` bytes that any id may open."""
    fd = os.memfd_create("ram", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    os.fchmod(fd, 0o666)  # QEMU opens it for writing even to map it privately; the seals decide
    return fd


def sealed(path: str, size: int | None) -> int:
    """Return a memory file that holds the file at `path` and can never change.

    Raises:
        OSError: it cannot be read, or is not `size` bytes long.

    """
    source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        length = os.fstat(source).st_size
        if size is not None and length != size:
            raise OSError(errno.EINVAL, f"the snapshot has {length} bytes of memory, not {size}")
        fd = fresh(length)
        copy_data(source, fd, length)
    finally:
        os.close(source)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def copy_data(source: int, target: int, length: int) -> None:
    """Copy what is not a hole."""
    at = 0
    while at < length:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        end = os.lseek(source, at, os.SEEK_HOLE)
        while at < end:
            data = os.pread(source, min(_PIECE, end - at), at)
            if not data:
                raise OSError(errno.EIO, "the file shrank while it was read")
            at += os.pwrite(target, data, at)


def make(loader: Loader) -> dict[str, Any]:
    """Boot a machine, wait for its agent, freeze it, and write its two files; return what the agent said.

    Raises:
        OSError: the guest did not answer in time or its agent failed. QmpError: the VMM refused.

    """
    plan = loader.plan
    guest, guest_end = socket.socketpair()
    call, call_end = socket.socketpair()
    wire, wire_end = socket.socketpair()
    words, words_end = os.pipe2(os.O_CLOEXEC)
    state = fresh(0)
    given = {
        "control": guest_end.fileno(), "call": call_end.fileno(), "monitor": wire_end.fileno(), "words": words_end,
    }  # fmt: skip
    pid, pidfd = loader.start(0, given, cold=True)
    for one in (guest_end, call_end, wire_end):
        one.close()
    os.close(words_end)
    try:
        loader.step = "boot"
        facts = _agent(guest, words, pidfd, time.monotonic() + plan.seconds)
        loader.step = "freeze"
        if loader.yard is None:
            _freeze(wire, state, time.monotonic() + _QMP_SECONDS)
        else:
            _freeze_jailed(wire, time.monotonic() + _QMP_SECONDS)
        if not select.select([pidfd], [], [], _QMP_SECONDS)[0]:
            raise OSError(errno.ETIMEDOUT, "the VMM did not end after its snapshot")
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        for one in (guest, call, wire):
            one.close()
        loader.clear(pid)
    if loader.yard is None:  # a jailed machine's files have their places already
        loader.step = "write"
        _write(loader.files["ram"], loader.targets[0], plan.guest.memory)
        _write(state, loader.targets[1], STATE_BYTES)
    return facts


def _agent(guest: socket.socket, words: int, pidfd: int, deadline: float) -> dict[str, Any]:
    """Wait for the agent's first line."""
    said = b""
    while b"\n" not in said:
        left = deadline - time.monotonic()
        ready = select.select([guest.fileno(), pidfd], [], [], max(left, 0))[0]
        if guest.fileno() in ready:
            data = guest.recv(4096)
            said += data
            if data and len(said) <= dialog.READY_LINE_BYTES:
                continue
        text = os.read(words, 4096).decode("utf-8", "replace").strip() if pidfd in ready else ""
        why = f"the VMM ended: {text[-400:]}" if pidfd in ready else "its agent did not answer in time"
        raise OSError(errno.ENODATA if pidfd in ready else errno.ETIMEDOUT, why)
    line = said.partition(b"\n")[0]
    answer = json.loads(line[1:])
    if line[:1] != dialog.READY:
        raise OSError(
            answer.get("errno") or errno.EPROTO, f"its agent failed at {answer.get('step')}: {answer.get('detail')}"
        )
    return dict(answer)


def _freeze(wire: socket.socket, state: int, deadline: float) -> None:
    """Stop the machine and have its device state written to `state`."""
    monitor = qemu.Monitor(cold=True)
    asked = False
    wire.settimeout(1.0)
    while not monitor.saved:
        if time.monotonic() > deadline:
            raise OSError(errno.ETIMEDOUT, "the VMM did not write its state in time")
        try:
            data = wire.recv(64 * 1024)
        except TimeoutError:
            continue
        if not data:
            raise QmpError("the VMM ended while it wrote its state")
        more = monitor.feed(data)
        if more:
            wire.sendall(more)
        if monitor.ready and not asked:
            asked = True
            socket.send_fds(wire, [monitor.receive_state()], [state])
    wire.settimeout(None)


def target(path: str) -> int:
    """Return a new file at `path`, for `make` to fill."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)


def _freeze_jailed(wire: socket.socket, deadline: float) -> None:
    """Have a jailed machine write its snapshot to the places of the plan."""
    monitor = shim.Monitor()
    wire.sendall(shim.FREEZE)
    while not monitor.saved:
        wire.settimeout(max(deadline - time.monotonic(), 0.01))
        try:
            data = wire.recv(4096)
        except TimeoutError:
            raise OSError(errno.ETIMEDOUT, "the VMM did not write its snapshot in time") from None
        if not data:
            raise QmpError("the VMM ended while it wrote its snapshot")
        monitor.feed(data)


def _write(source: int, target: int, most: int) -> None:
    """Write a memory file to a file."""
    length = os.fstat(source).st_size
    if not 0 < length <= most:
        raise OSError(errno.EFBIG, f"a snapshot file of {length} bytes is outside 1..{most}")
    os.ftruncate(target, length)
    copy_data(source, target, length)
    os.fsync(target)
    os.close(target)
