"""The supervisor's side of a template.

Rule 1: after `start` nothing here waits; requests that the socket cannot take now are kept and sent later, in order.
Rule 2: answers come in the order of the requests, because the template is single-threaded.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
from collections import deque
from typing import Any, Final

import msgspec

from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import HostFault
from lockgate.contract.run import Rung
from lockgate.runtimes.container import layout
from lockgate.runtimes.container.machine import ContainerMachine
from lockgate.runtimes.protocol import Boundary, MachineFailed

_CLOSE_SECONDS: Final = 10.0


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a template; exactly one of ready, spawned and error is set."""

    ready: dict[str, Any] | None = None
    spawned: int | None = None
    error: str | None = None
    errno: int = 0
    detail: str = ""


answers: Final = msgspec.json.Decoder(Answer)
_DROPPED: Final = "the template is gone"


class ContainerTemplate:
    """A warm template: `runtimes.protocol.Template`.

    Args:
        ctl: our end of its control socket, non-blocking.
        lifeline: write end of the pipe whose end the launcher waits for.
        launcher: the process to reap.
        facts: what the template said of itself.
        owned: whatever else must live as long as the template (the claim on its id range).

    Attributes:
        facts: userns mode, Landlock ABI, filter length, interpreter version, bytes of the preloaded image.
        requested: machines asked for so far; a template is worth replacing after some thousands (address layout and
            hash seed are the same in all its slots).

    """

    rung: Rung = "container"
    boundary: Boundary = "shared kernel"

    def __init__(
        self,
        ctl: socket.socket,
        lifeline: int,
        launcher: subprocess.Popen[bytes],
        facts: dict[str, Any],
        owned: contextlib.ExitStack,
    ) -> None:
        self._ctl = ctl
        self._lifeline = lifeline
        self._launcher = launcher
        self._owned = owned
        self._unsent: deque[tuple[bytes, ContainerMachine]] = deque()
        self._waiting: deque[ContainerMachine] = deque()
        self._closed = False
        self.facts = facts
        self.requested = 0

    def fileno(self) -> int:
        """The descriptor to poll; readable = call `on_readable`."""
        return self._ctl.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether requests wait for room; then `on_readable` may also be called when the descriptor is writable."""
        return bool(self._unsent)

    def request(self, bounds: Bounds, *, cold: bool = False) -> ContainerMachine:
        """Ask for one machine; does not wait.

        Args:
            bounds: its class: disk, inodes, processes, cpu and memory are fixed from now on.
            cold: leave out the warm-up, for a machine that is used the moment it is there.

        Raises:
            HostFault: no descriptor is left, or the template is closed.

        """
        if self._closed:
            raise HostFault("this template is closed", next_step="start another one")
        try:
            machine = ContainerMachine(bounds)
        except OSError as error:
            raise HostFault(
                f"no descriptors for another sandbox: {os.strerror(error.errno or 0)}",
                next_step="raise the limit of open files (ulimit -n), or keep fewer sandboxes warm",
            ) from error
        limits = {
            "disk": bounds.disk,
            "inodes": bounds.inodes,
            "processes": bounds.processes,
            "cpu": bounds.cpu,
            "memory": bounds.memory,
        }
        self._unsent.append((msgspec.json.encode({"bounds": limits, "cold": cold}), machine))
        self.requested += 1
        self._send()
        return machine

    def _send(self) -> None:
        while self._unsent:
            message, machine = self._unsent[0]
            try:
                socket.send_fds(self._ctl, [message], machine.slot_descriptors())
            except (BlockingIOError, TimeoutError):
                return
            except OSError as error:
                # Too many descriptors in flight, the template has to take some first.
                if error.errno == errno.ETOOMANYREFS and self._waiting:
                    return
                raise HostFault(
                    f"{_DROPPED}: {os.strerror(error.errno or 0)}", next_step="start another template"
                ) from error
            self._unsent.popleft()
            machine.forget_slot_descriptors()
            self._waiting.append(machine)

    def on_readable(self) -> list[ContainerMachine | MachineFailed]:
        """Return the machines that now have a pidfd, in order of request; a failed one is `MachineFailed`.

        Raises:
            HostFault: the template ended or broke its protocol.

        """
        arrived: list[ContainerMachine | MachineFailed] = []
        while True:
            try:
                message, fds, _, _ = socket.recv_fds(self._ctl, layout.CTL_BYTES, 1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                message, fds = b"", []
            if not message:
                raise HostFault(_DROPPED, next_step="start another template")
            arrived.append(self._one(message, fds))
        self._send()
        return arrived

    def _one(self, message: bytes, fds: list[int]) -> ContainerMachine | MachineFailed:
        try:
            answer = answers.decode(message)
            machine = self._waiting.popleft()
        except (msgspec.MsgspecError, IndexError) as error:
            for fd in fds:
                os.close(fd)
            raise HostFault("the template sent what nobody asked for", next_step="start another template") from error
        if answer.error is not None or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            machine.close()
            return MachineFailed(step=answer.error or "spawn", errno=answer.errno, detail=answer.detail)
        # A slot that is already dead keeps its pidfd: control says why, like for any other.
        machine.spawned(fds[0])
        return machine

    def close(self) -> None:
        """Kill the template and all its machines, reap it, close descriptors; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._ctl.close()
        os.close(self._lifeline)
        try:
            self._launcher.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._launcher.kill()  # PDEATHSIG takes the template along, and its pid namespace the slots
            self._launcher.wait()
        for _, machine in self._unsent:
            machine.close()
        for machine in self._waiting:
            machine.close()
        self._unsent.clear()
        self._waiting.clear()
        self._owned.close()
