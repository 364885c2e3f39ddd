"""One box as the supervisor sees it: the framed machine of every rung, on a leash to the keeper of its namespace.

Rule 1: nothing of the sentry starts before `placed`: it is born inside its control group.
Rule 2: a box sleeps from the moment it is ready until it is given code.
"""

from __future__ import annotations

import contextlib
import socket

from lockgate.contract.bounds import Bounds
from lockgate.runtimes.framed import FramedMachine
from lockgate.runtimes.gvisor import layout
from lockgate.runtimes.protocol import MachineEvent, MachineReady, MachineStopped


class GvisorMachine(FramedMachine):
    """A box: `runtimes.protocol.Machine`. Its pidfd stands for every process of the box."""

    def __init__(self, bounds: Bounds) -> None:
        self._leash: socket.socket | None = None
        super().__init__(bounds)
        try:
            self._leash, theirs = socket.socketpair()
        except OSError:
            self.close()
            raise
        self._leash.setblocking(False)
        self._theirs.append(theirs.detach())

    def _order(self, word: bytes) -> None:
        """Give the keeper a word. It reads them all, so the socket is never full; a dead one needs none."""
        if self._leash is not None:
            with contextlib.suppress(OSError):
                self._leash.send(word)

    def placed(self) -> None:
        """Its control group stands: let the keeper start the sentry in it."""
        self._order(layout.GO)

    def on_control(self) -> list[MachineEvent]:
        """As every machine, and put a box to sleep that became ready."""
        events = super().on_control()
        if not events and self._state == "failed" and self._leash is not None:
            # Control ends with the code's process, the keeper with the box: it has the last word.
            with contextlib.suppress(OSError):
                if self._leash.recv(1) == layout.DISK:
                    return [MachineStopped(by="disk")]
        if any(isinstance(one, MachineReady) for one in events):
            self._order(layout.FREEZE)
        return events

    def stage_code(self, code: bytes, bounds: Bounds) -> bool:
        """As every machine, and wake the box."""
        done = super().stage_code(code, bounds)
        self._order(layout.THAW)
        return done

    def close(self) -> None:
        """Close every descriptor of ours; idempotent. The box dies by it."""
        super().close()
        leash, self._leash = self._leash, None
        if leash is not None:
            leash.close()
