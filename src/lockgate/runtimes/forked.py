"""The supervisor's side of a template that forks: of every rung whose machines are children of one warm process.

On ctl (SOCK_SEQPACKET, one JSON message a packet) goes {"bounds": {...}, "cold": bool} with SCM_RIGHTS [channel,
control, stdout, stderr]; back comes {"ready": {...}} once, then for each request {"spawned": pid} with SCM_RIGHTS
[pidfd] or {"error": step, "errno": n, "detail": text}.

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
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import CannotIsolate, HostFault
from lockgate.contract.run import Rung
from lockgate.contract.rungs import Boundary, Weakness
from lockgate.runtimes import dialog
from lockgate.runtimes.framed import FramedMachine
from lockgate.runtimes.protocol import MachineFailed

_CLOSE_SECONDS: Final = 10.0


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a template; exactly one of ready, spawned and error is set."""

    ready: dict[str, Any] | None = None
    spawned: int | None = None
    error: str | None = None
    errno: int = 0
    detail: str = ""


_answers: Final = msgspec.json.Decoder(Answer)
_DROPPED: Final = "the template is gone"


class Parent(NamedTuple):
    """A warm process that said it is ready: our end of its control socket, the lifeline that it ends with, itself."""

    ctl: socket.socket
    lifeline: int
    process: subprocess.Popen[bytes]
    facts: dict[str, Any]


Explain = Callable[[str, int, str], CannotIsolate | HostFault]


def launch(argv: list[str], plan: bytes, seconds: float, explain: Explain) -> Parent:
    """Start the program that becomes a template, with nothing but three descriptors, and wait until it is ready.

    Args:
        argv: the program; the numbers of its control socket, its lifeline and a file that holds `plan` are appended.
        seconds: the longest wait.
        explain: makes the error of a failed step from its name, errno and detail.

    Raises:
        CannotIsolate: what `explain` made of it. HostFault: the same, or it ended or hung without a word.

    """
    ctl, lifeline, process = _launch(argv, plan)
    try:
        facts = _wait_ready(ctl, seconds, explain)
    except BaseException:
        ctl.close()
        os.close(lifeline)
        process.kill()
        process.wait()
        raise
    ctl.setblocking(False)
    return Parent(ctl, lifeline, process, facts)


def _launch(argv: list[str], plan: bytes) -> tuple[socket.socket, int, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    memory = os.memfd_create("plan", os.MFD_CLOEXEC)
    try:
        os.write(memory, plan)
        os.lseek(memory, 0, os.SEEK_SET)
        fds = (theirs.fileno(), read_end, memory)
        process = subprocess.Popen(
            [*argv, *map(str, fds)],
            env={},
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=True,
            cwd="/",
        )
    except OSError as error:
        ours.close()
        os.close(write_end)
        raise HostFault(
            f"the process that sandboxes come from could not be started: {error.strerror}",
            next_step=f"check that {argv[0]} can be executed by this user",
        ) from error
    finally:
        theirs.close()
        os.close(read_end)
        os.close(memory)
    return ours, write_end, process


def _wait_ready(ctl: socket.socket, seconds: float, explain: Explain) -> dict[str, Any]:
    ctl.settimeout(seconds)
    try:
        message = ctl.recv(dialog.CTL_BYTES)
    except TimeoutError as error:
        raise HostFault(
            f"the template was not ready after {seconds:.0f} seconds",
            next_step="preload fewer packages, or look for a stalled disk",
        ) from error
    except OSError:
        message = b""
    if not message:
        raise HostFault("the template ended without a word", next_step="run `lockgate doctor`")
    answer = _answers.decode(message)
    if answer.ready is not None:
        return answer.ready
    raise explain(answer.error or "start", answer.errno, answer.detail)


class ForkedTemplate:
    """A warm template: `runtimes.protocol.Template`.

    Args:
        parent: what `launch` returned.
        owned: whatever else must live as long as the template (the claim on its id range).

    Attributes:
        facts: userns mode, Landlock ABI, filter length, interpreter version, bytes of the preloaded image.
        requested: machines asked for so far; a template is worth replacing after some thousands (address layout and
            hash seed are the same in all its slots).

    """

    def __init__(
        self,
        rung: Rung,
        boundary: Boundary,
        parent: Parent,
        owned: contextlib.ExitStack,
        weakness: Weakness | None = None,
    ) -> None:
        self.rung: Rung = rung
        self.boundary: Boundary = boundary
        self.weakness: Weakness | None = weakness
        self.lacks = ""
        self._ctl, self._lifeline, self._launcher, self.facts = parent
        self._owned = owned
        self._unsent: deque[tuple[bytes, FramedMachine]] = deque()
        self._waiting: deque[FramedMachine] = deque()
        self._closed = False
        self.requested = 0

    def fileno(self) -> int:
        """The descriptor to poll; readable = call `on_readable`."""
        return self._ctl.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether requests wait for room; then `on_readable` may also be called when the descriptor is writable."""
        return bool(self._unsent)

    def request(self, bounds: Bounds, *, cold: bool = False) -> FramedMachine:
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
            machine = self._make(bounds)
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

    def _make(self, bounds: Bounds) -> FramedMachine:
        return FramedMachine(bounds)

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

    def on_readable(self) -> list[FramedMachine | MachineFailed]:
        """Return the machines that now have a pidfd, in order of request; a failed one is `MachineFailed`.

        Raises:
            HostFault: the template ended or broke its protocol.

        """
        arrived: list[FramedMachine | MachineFailed] = []
        while True:
            try:
                message, fds, _, _ = socket.recv_fds(self._ctl, dialog.CTL_BYTES, 1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                message, fds = b"", []
            if not message:
                raise HostFault(_DROPPED, next_step="start another template")
            arrived.append(self._one(message, fds))
        self._send()
        return arrived

    def _one(self, message: bytes, fds: list[int]) -> FramedMachine | MachineFailed:
        try:
            answer = _answers.decode(message)
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
