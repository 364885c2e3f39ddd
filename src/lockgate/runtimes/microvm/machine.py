"""One virtual machine as the supervisor sees it.

Rule 1: what the loader adds to a slot's dialog are lines that begin with a letter no result can begin with: "A" the
        handshake is done, "F" it is not and nothing ran, "S" what the guest's agent saw of the worker.
Rule 2: "S" is the guest's word about its own run: it names a bound that ended the run, and never widens one.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

import msgspec

from lockgate.contract.bounds import Bounds
from lockgate.contract.run import KilledBy
from lockgate.runtimes import dialog
from lockgate.runtimes.framed import FramedMachine
from lockgate.runtimes.microvm import layout
from lockgate.runtimes.protocol import MachineEnded, MachineEvent, MachineResult, MachineStopped


class _Seen(msgspec.Struct, forbid_unknown_fields=True):
    """The worker as the guest's agent saw it: its wait status once it ended, and which bounds refused it something."""

    status: int | None
    oom: int
    refused: int
    full: bool


class _Failure(msgspec.Struct, forbid_unknown_fields=True):
    step: str
    errno: int
    detail: str


_seen: Final = msgspec.json.Decoder(_Seen, strict=True)
_failures: Final = msgspec.json.Decoder(_Failure, strict=True)
_LINES: Final = layout.ACK + layout.SEEN + dialog.FAILED


class MicrovmMachine(FramedMachine):
    """A machine: `runtimes.protocol.Machine`. Its bounds are set when a run takes it, with the lease."""

    _leased = False
    _pressed: tuple[KilledBy, ...] = ()

    def placed(self) -> None:
        """Its control group stands: what is born in it may begin. A full or closed socket has told the loader more."""
        with contextlib.suppress(OSError):
            self.control.send(layout.PLACED)

    def header(self, code: bytes, bounds: Bounds) -> bytes:
        """Return the lease: the bounds that the machine takes on for this run, then what goes before any code."""
        limits = {
            "disk": bounds.disk,
            "inodes": bounds.inodes,
            "processes": bounds.processes,
            "cpu": bounds.cpu,
            "memory": bounds.memory,
        }
        lease = msgspec.json.encode(limits)
        return dialog.RESULT_HEADER.pack(len(lease)) + lease + super().header(code, bounds)

    # ---- what comes back -----------------------------------------------------------------------------------------
    def _frame(self) -> MachineEvent | None:
        """After code: the loader's lines, then one result."""
        while self._inbox and self._inbox[:1] in _LINES and self._state == "running":
            end = self._inbox.find(b"\n")
            if end < 0:
                if len(self._inbox) > dialog.READY_LINE_BYTES:
                    return self.failed("protocol", 0, "a line of the loader has no end")
                return None
            kind, body = bytes(self._inbox[:1]), bytes(self._inbox[1:end])
            del self._inbox[: end + 1]
            event = self._loader_line(kind, body)
            if event is not None:
                return event
        if self._state == "running" and self._inbox and not self._leased:
            return self.failed("protocol", 0, "the machine spoke before its handshake")
        event = super()._frame()
        if isinstance(event, MachineResult) and self._pressed:
            return msgspec.structs.replace(event, pressed=self._pressed)
        return event

    def _loader_line(self, kind: bytes, body: bytes) -> MachineEvent | None:
        try:
            if kind == dialog.FAILED:
                failure = _failures.decode(body)
                late = "protocol" if failure.step == "protocol" else "ended"
                step = late if self._leased else "lease"  # before the handshake nothing of the code was there
                return self.failed(step, failure.errno, f"{failure.step}: {failure.detail}")
            if kind == layout.ACK:
                self._leased = True
                return None
            seen = _seen.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return self.failed("protocol", 0, f"a line of the machine is not what it should be: {type(error).__name__}")
        pressed: list[KilledBy] = []
        if seen.refused > 0:
            pressed.append("processes")
        if seen.full:
            pressed.append("disk")
        self._pressed = tuple(pressed)
        if seen.status is None:
            return None
        self._state = "failed"
        if seen.oom > 0:
            return MachineStopped(by="memory")
        if os.WIFEXITED(seen.status) or os.WIFSIGNALED(seen.status):
            return MachineEnded(status=seen.status)
        return self.failed("protocol", 0, "the worker ended in a way that no process can")
