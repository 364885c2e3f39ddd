"""One machine in the loader: from the start of its VMM to the last byte that it left.

Rule 1: loading, loaded, leasing, running, over: one way. There is no second lease.
Rule 2: while something waits to leave for the supervisor, nothing more is read from the guest.
Rule 3: nothing is forwarded to a guest before its handshake is done, and nothing of the guest but the answer is taken.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from typing import Final

from lockgate.runtimes import dialog
from lockgate.runtimes.microvm import layout
from lockgate.runtimes.microvm.outbox import Outbox
from lockgate.runtimes.microvm.poll import IN, OUT, Poll
from lockgate.runtimes.microvm.qmp import QmpError
from lockgate.runtimes.microvm.vmm import Monitor

READ: Final = 64 * 1024
LOAD_SECONDS: Final = 30.0
_LENGTH: Final = struct.Struct(">I")
_BOUNDS_BYTES: Final = 16 * 1024
_CODE_BYTES: Final = 1 << 20  # kept here before the guest takes it; the rest waits in the socket
_OWN: Final = 0x40  # a result's length begins below it, the lines of a loader above
_WORDS_BYTES: Final = 4096


class Vm:
    """A machine.

    Args:
        pid: of its VMM, and a pidfd of it.
        number: of the host id that it has.
        guest: our end of its control port. wire: our end of its monitor. words: what the VMM writes.
        begin: what makes the VMM start, once the machine stands in its control group; empty = it has started.
        control: the supervisor's side of it.
        out: write end of the run's stdout. err: the same.
        facts: what the machine is, for the doctor.

    """

    def __init__(
        self,
        poll: Poll,
        *,
        pid: int,
        pidfd: int,
        number: int,
        monitor: Monitor,
        wire: socket.socket,
        guest: socket.socket,
        words: int,
        begin: bytes = b"",
        control: socket.socket,
        out: int,
        err: int,
        lease_seconds: float,
        facts: dict[str, str],
        gone: Callable[[Vm], None],
    ) -> None:
        self.pid, self.pidfd, self.number = pid, pidfd, number
        self.state = "loading"
        self.deadline: float | None = time.monotonic() + LOAD_SECONDS
        self._poll = poll
        self._monitor = monitor
        self._wire, self._guest, self._words, self._control = wire, guest, words, control
        self._streams = {ord("o"): out, ord("e"): err}
        self._begin: bytes | None = begin
        self._lease_seconds = lease_seconds
        self._facts: dict[str, object] = {"userns": "vm", "stages_us": {}, **facts}
        self._gone = gone
        self._said = bytearray()
        self._asked = bytearray()
        self._to_guest = bytearray()
        self._from_guest = bytearray()
        self._answer = bytearray()
        self._leaving = Outbox()
        self._blocked = -1
        self._dead = False
        for one in (wire, guest, control):
            one.setblocking(False)
        for fd in (words, out, err):
            os.set_blocking(fd, False)
        poll.watch(pidfd, IN, lambda _mask: self._on_dead())
        poll.watch(words, IN, lambda _mask: self._on_words())
        poll.watch(wire.fileno(), IN, lambda _mask: self._on_wire())
        poll.watch(guest.fileno(), IN, self._on_guest)
        poll.watch(control.fileno(), IN, lambda _mask: self._on_control())

    # ---- the VMM -------------------------------------------------------------------------------------------------
    def _on_wire(self) -> None:
        try:
            data = self._wire.recv(READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._poll.forget(self._wire.fileno())
            return
        try:
            more = self._monitor.feed(data)
            if more:
                self._wire.send(more)
        except (QmpError, OSError) as error:
            self._fail("load" if self.state == "loading" else "vmm", error)
            return
        if self._monitor.loaded and self.state == "loading":
            self.state, self.deadline = "loaded", None
            self._leave(self._control.fileno(), dialog.READY + json.dumps(self._facts).encode() + b"\n")

    def _on_words(self) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = os.read(self._words, READ)
        if not data:
            self._poll.forget(self._words)
        self._said += data[: _WORDS_BYTES - len(self._said)]

    def _on_dead(self) -> None:
        """The VMM is gone: pass on what the guest had sent, then close."""
        self._poll.forget(self.pidfd)
        self._dead = True
        _, status = os.waitpid(self.pid, 0)
        if self.state in {"loading", "leasing"}:
            self._on_words()
            said = self._said.decode("utf-8", "replace").strip().splitlines()
            detail = f"the VMM ended with status {os.waitstatus_to_exitcode(status)}"
            self._tell("vmm", 0, f"{detail}: {said[-1][:300]}" if said else detail)
        self.state = "over" if self.state != "running" else "running"
        self._drain()

    def _drain(self) -> None:
        """After the end: forward the rest in order, as the supervisor takes it, then close."""
        while not self._leaving.waiting and self.state == "running" and self._read_guest():
            pass
        if self._leaving.waiting:
            return
        self.close()

    # ---- the guest -----------------------------------------------------------------------------------------------
    def _on_guest(self, mask: int) -> None:
        if mask & OUT:
            self._push()
        if mask & ~OUT and not self._leaving.waiting:
            self._read_guest()
        if not self._dead:
            self._arm()

    def _read_guest(self) -> bool:
        """Take one piece from the guest; False when there is none now or ever."""
        try:
            data = self._guest.recv(READ)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._poll.forget(self._guest.fileno())
            return False
        if self.state not in {"leasing", "running"}:
            self._fail("protocol", OSError(errno.EPROTO, "the guest spoke before it was asked"))
            return False
        self._from_guest += data
        self._frames()
        return True

    def _frames(self) -> None:
        """Take whole frames off what the guest sent, until something of them waits to leave."""
        data = self._from_guest
        while not self._leaving.waiting and len(data) >= layout.FRAME.size and self.state in {"leasing", "running"}:
            kind, length = layout.FRAME.unpack_from(data)
            if kind == dialog.FAILED[0] and self.state == "leasing":
                if b"\n" in data or len(data) > dialog.READY_LINE_BYTES:
                    self._refused(bytes(data.partition(b"\n")[0]))
                return
            if kind not in layout.KINDS or not 0 < length <= layout.FRAME_BYTES:
                self._fail("protocol", OSError(errno.EPROTO, "a frame that no agent sends"))
                return
            if len(data) < layout.FRAME.size + length:
                return
            payload = bytes(data[layout.FRAME.size : layout.FRAME.size + length])
            del data[: layout.FRAME.size + length]
            self._take(kind, payload)

    def _take(self, kind: int, payload: bytes) -> None:
        if self.state == "leasing":
            self._handshake(kind, payload)
        elif kind in self._streams:
            self._leave(self._streams[kind], payload)
        elif kind == layout.STATUS:
            self._leave(self._control.fileno(), layout.SEEN + payload.replace(b"\n", b" ") + b"\n")
        else:
            if not self._answer:
                self._answer += payload[:1]
                if payload[0] >= _OWN:
                    self._fail("protocol", OSError(errno.EPROTO, "a result that no runner sends"))
                    return
            self._leave(self._control.fileno(), payload)

    def _handshake(self, kind: int, payload: bytes) -> None:
        """Take the worker's first line: its hardening is done, and with it the handshake."""
        if kind != layout.WORKER:
            self._fail("handshake", OSError(errno.EPROTO, "the guest did something else than the handshake"))
            return
        self._answer += payload
        end = self._answer.find(b"\n")
        if end < 0 and len(self._answer) <= dialog.READY_LINE_BYTES:
            return
        line = bytes(self._answer[:end])
        if end != len(self._answer) - 1 or line[:1] not in {dialog.READY, dialog.FAILED}:
            self._fail("handshake", OSError(errno.EPROTO, "the worker's first line is no answer"))
        elif line[:1] == dialog.FAILED:
            self._refused(line)
        else:
            self._answer.clear()
            self.state, self.deadline = "running", None
            self._leave(self._control.fileno(), layout.ACK + line[1:] + b"\n")
            self._to_guest += self._asked
            self._asked.clear()
            self._push()

    def _refused(self, line: bytes) -> None:
        self._leave(self._control.fileno(), line[: dialog.READY_LINE_BYTES] + b"\n")
        self.state = "over"
        self.kill()

    def _push(self) -> None:
        """Send the guest what waits for it."""
        while self._to_guest:
            try:
                sent = self._guest.send(self._to_guest[:READ])
            except BlockingIOError:
                return
            except OSError:
                self._to_guest.clear()
                return
            del self._to_guest[:sent]

    # ---- the supervisor ------------------------------------------------------------------------------------------
    def _on_control(self) -> None:
        try:
            data = self._control.recv(READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:  # it wants no more of this machine
            self._poll.forget(self._control.fileno())
            self.state = "over"
            self.kill()
            return
        if self._begin is not None and data[:1] == layout.PLACED:
            data = data[1:]
            begin, self._begin = self._begin, None
            if begin:
                with contextlib.suppress(OSError):  # a VMM that is gone is told by its pidfd
                    self._wire.send(begin)
        if self.state == "running":
            self._to_guest += data
            self._push()
        else:
            self._asked += data
            if self.state == "loaded":
                self._lease()
        if not self._dead:
            self._arm()

    def _lease(self) -> None:
        """Resume the machine for the run whose bounds came, and begin the handshake; its clock is armed first."""
        if len(self._asked) < _LENGTH.size:
            return
        (length,) = _LENGTH.unpack_from(self._asked)
        if length > _BOUNDS_BYTES:
            self._fail("lease", OSError(errno.EPROTO, "bounds that no supervisor sends"))
            return
        if len(self._asked) < _LENGTH.size + length:
            return
        bounds = bytes(self._asked[_LENGTH.size : _LENGTH.size + length])
        del self._asked[: _LENGTH.size + length]
        self.state, self.deadline = "leasing", time.monotonic() + self._lease_seconds
        try:
            self._wire.send(self._monitor.resume())
        except OSError as error:
            self._fail("resume", error)
            return
        header = (layout.LEASE_MAGIC, time.time_ns(), len(bounds), secrets.token_bytes(layout.ENTROPY_BYTES))
        self._to_guest += layout.LEASE.pack(*header) + bounds
        self._push()

    # ---- leaving -------------------------------------------------------------------------------------------------
    def _leave(self, fd: int, data: bytes) -> None:
        self._leaving.put(fd, data)
        self._flush()

    def _flush(self) -> None:
        self._wait_for(self._leaving.flush())

    def _wait_for(self, fd: int) -> None:
        if self._blocked == fd:
            return
        old, self._blocked = self._blocked, fd
        if old >= 0:
            if old == self._control.fileno():
                self._poll.watch(old, IN, lambda _mask: self._on_control())
            else:
                self._poll.forget(old)
        if fd >= 0:
            both = fd == self._control.fileno()
            self._poll.watch(fd, OUT | IN if both else OUT, self._on_room)

    def _on_room(self, mask: int) -> None:
        if mask & ~(OUT | select.EPOLLERR) and self._blocked == self._control.fileno():
            self._on_control()
        if self.state == "closed":
            return
        self._flush()
        if not self._leaving.waiting:
            self._frames()
        if self._dead:
            self._drain()
        else:
            self._arm()

    def _arm(self) -> None:
        """Read from each side what the other has room for."""
        if self.state in {"over", "closed"}:
            return
        mask = 0 if self._leaving.waiting else IN
        self._poll.watch(self._guest.fileno(), mask | (OUT if self._to_guest else 0), self._on_guest)
        if self._blocked != self._control.fileno():
            room = len(self._asked) + len(self._to_guest) < _CODE_BYTES
            self._poll.watch(self._control.fileno(), IN if room else 0, lambda _mask: self._on_control())

    # ---- ends ----------------------------------------------------------------------------------------------------
    def _tell(self, step: str, code: int, detail: str) -> None:
        report = {"step": step, "errno": code, "detail": detail[:500]}
        self._leave(self._control.fileno(), dialog.FAILED + json.dumps(report).encode() + b"\n")

    def _fail(self, step: str, error: Exception) -> None:
        """Give this machine up: say why, and kill it."""
        if self.state not in {"over", "closed"}:
            code = error.errno if isinstance(error, OSError) and error.errno else 0
            self._tell(step, code, str(error))
            self.state = "over"
        self.kill()

    def late(self) -> None:
        """Its deadline passed."""
        step = "load" if self.state == "loading" else "handshake"
        self._fail(step, OSError(errno.ETIMEDOUT, "the guest did not answer in time"))

    def kill(self) -> None:
        """SIGKILL to its VMM; idempotent."""
        self.deadline = None
        if not self._dead:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Close every descriptor; its VMM is dead."""
        if self.state == "closed":
            return
        self.state = "closed"
        for one in (self._wire, self._guest, self._control):
            self._poll.forget(one.fileno())
            one.close()
        for fd in (self._words, *self._streams.values(), self.pidfd):
            self._poll.forget(fd)
            os.close(fd)
        self._gone(self)
