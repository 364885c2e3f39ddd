"""One machine as the supervisor sees it, for every rung that speaks the protocol of `dialog`.

Rule 1: after code was sent every byte of a machine is hostile. Its length is checked before it is kept, its JSON goes
        through one strict type, every cap is checked again here; anything odd is `MachineFailed(step="protocol")`.
Rule 2: nothing here waits. Sockets and pipes are non-blocking; a machine that does not read cannot hold the supervisor.
Rule 3: control is read with recv(), never recvmsg(): descriptors that a machine passes are dropped by the kernel.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
from typing import Any, Final

import msgspec

from lockgate.contract.bounds import Bounds
from lockgate.contract.run import ErrorInfo
from lockgate.runtimes import dialog
from lockgate.runtimes.protocol import MachineEvent, MachineFailed, MachineReady, MachineResult

_READ: Final = 64 * 1024
_SLACK: Final = 256 * 1024  # error, names, punctuation; a traceback is capped inside and here
_ESCAPED: Final = 6  # a control character takes six bytes in JSON


class _Claim(msgspec.Struct, forbid_unknown_fields=True):
    """What a slot sends of itself."""

    value: msgspec.Raw
    text: str
    error: ErrorInfo | None
    exit_code: int
    truncated: dict[str, int]


class _Failure(msgspec.Struct, forbid_unknown_fields=True):
    step: str
    errno: int
    detail: str


_claims: Final = msgspec.json.Decoder(_Claim, strict=True)
_failures: Final = msgspec.json.Decoder(_Failure, strict=True)
_facts: Final = msgspec.json.Decoder(dict[str, Any])
_anything: Final = msgspec.json.Decoder()


def _cut(text: str, cap: int) -> tuple[str, int]:
    """Return (text of at most `cap` bytes of UTF-8, bytes dropped)."""
    data = text.encode("utf-8", "replace")
    if len(data) <= cap:
        return text, 0
    kept = data[:cap].decode("utf-8", "ignore")
    return kept, len(data) - len(kept.encode())


class FramedMachine:
    """A machine on four descriptors: `runtimes.protocol.Machine`.

    Args:
        bounds: the bounds it was made for.

    Attributes:
        pidfd: readable when its whole pid namespace is dead and reaped; -1 until the template reported it.
        host_pid: pid of its first process in this pid namespace; 0 until then.
        control: our end of the control socket.
        stdout: read end of the run's stdout. stderr: the same.
        bounds: what it was made for; a run's own may only be narrower.

    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.pidfd = -1
        self.host_pid = 0
        self.stdout = self.stderr = -1
        self._doomed = False
        self._closed = False
        self._inbox = bytearray()
        self._outbox = memoryview(b"")
        self._state: str = "hardening"
        self._caps = bounds
        self._theirs: list[int] = []
        self._channel: socket.socket | None = None
        channel = inner = None
        try:
            self._channel, channel = socket.socketpair()
            self.control, inner = socket.socketpair()
            self.stdout, stdout = os.pipe2(os.O_CLOEXEC)
            self._theirs = [stdout]
            self.stderr, stderr = os.pipe2(os.O_CLOEXEC)
            self._theirs = [channel.detach(), inner.detach(), stdout, stderr]
        except OSError:
            for one in (channel, inner):
                if one is not None:
                    one.close()
            self.close()
            raise
        self.control.setblocking(False)
        os.set_blocking(self.stdout, False)
        os.set_blocking(self.stderr, False)

    # ---- for the template's side ---------------------------------------------------------------------------------
    def slot_descriptors(self) -> list[int]:
        """Return the slot's four ends (channel, control, stdout, stderr), to be sent to the template."""
        return self._theirs

    def forget_slot_descriptors(self) -> None:
        """Close the slot's ends here, once they are on their way: from then on EOF means that the slot is gone."""
        for fd in self._theirs:
            os.close(fd)
        self._theirs = []

    def spawned(self, pidfd: int) -> bool:
        """Take the pidfd; False when the slot died before it could be looked at."""
        os.set_inheritable(pidfd, False)
        self.pidfd = pidfd
        with open(f"/proc/self/fdinfo/{pidfd}", "rb") as file:  # noqa: PTH123 - once per slot, kept cheap
            for line in file:
                if line.startswith(b"Pid:"):
                    self.host_pid = max(int(line.split()[1]), 0)
        if self._doomed:
            self.kill()
        return self.host_pid > 0

    # ---- runtimes.protocol.Machine -------------------------------------------------------------------------------
    def placed(self) -> None:
        """Its control group stands; a machine whose processes are born before that has nothing to do."""

    def take_channel(self) -> socket.socket:
        """Give away the host end of the broker channel, once; the caller closes it after passing it on."""
        channel, self._channel = self._channel, None
        if channel is None:
            raise ValueError("the channel of this machine was given away before")
        return channel

    def send_code(self, code: bytes, bounds: Bounds) -> bool:
        """Send the code and let it run, without blocking; False = call `flush` when control is writable."""
        self.stage_code(code, bounds)
        return self.go()

    def stage_code(self, code: bytes, bounds: Bounds) -> bool:
        """Send the code without blocking: it is compiled, and nothing of it runs before `go`."""
        if self._state != "ready":
            raise ValueError(f"code can be sent once, to a machine that is ready; this one is {self._state}")
        self._state = "running"
        self._caps = bounds
        self._outbox = memoryview(self.header(code, bounds) + code)
        return self.flush()

    def header(self, code: bytes, bounds: Bounds) -> bytes:
        """Return what goes before the code; for rungs whose machines hold bounds that others have from birth."""
        return dialog.CODE_HEADER.pack(dialog.CODE_MAGIC, len(code), bounds.value)

    def inspect(self) -> str:
        """Return what is wrong with a machine that says it is ready, "" for nothing; for rungs that can look."""
        return ""

    def go(self) -> bool:
        """Let staged code run; as `send_code`."""
        self._outbox = memoryview(bytes(self._outbox) + dialog.GO)
        return self.flush()

    def flush(self) -> bool:
        """Continue an unfinished `send_code`; True when all is out, or when nobody is there to take it."""
        while self._outbox:
            try:
                self._outbox = self._outbox[self.control.send(self._outbox) :]
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno not in {errno.EPIPE, errno.ECONNRESET}:
                    raise
                self._outbox = memoryview(b"")  # its end is seen by on_control
        return True

    def on_control(self) -> list[MachineEvent]:
        """Read what is there and return what it means. EOF before a result is `MachineFailed(step="ended")`."""
        events: list[MachineEvent] = []
        while self._state not in {"done", "failed"}:
            try:
                data = self.control.recv(_READ)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                events.append(self.failed("ended", 0, f"the slot ended while {self._state}, without a word"))
                break
            self._inbox += data
            event = self._line() if self._state == "hardening" else self._frame()
            if event is not None:
                events.append(event)
            if len(data) < _READ:
                break
        return events

    def kill(self) -> None:
        """SIGKILL the slot's first process, and with it the whole pid namespace; idempotent."""
        self._doomed = True
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Close every descriptor of ours; idempotent. The slot dies by it if it is still waiting for code."""
        if self._closed:
            return
        self._closed = True
        self.forget_slot_descriptors()
        if self._channel is not None:
            self._channel.close()
        if hasattr(self, "control"):
            self.control.close()
        for fd in (self.stdout, self.stderr, self.pidfd):
            if fd >= 0:
                os.close(fd)
        self.stdout = self.stderr = self.pidfd = -1

    # ---- what a slot says ----------------------------------------------------------------------------------------
    def finish(self) -> None:
        """Listen to nothing more: the machine said how its run ended."""
        self._state = "done"

    def failed(self, step: str, code: int, detail: str) -> MachineFailed:
        """Return why nothing more of this machine is listened to."""
        self._state = "failed"
        self._inbox.clear()
        return MachineFailed(step=step, errno=code, detail=detail)

    def _line(self) -> MachineEvent | None:
        """Before code: one line, R or F. These bytes come from our own code, yet are checked like any others."""
        end = self._inbox.find(b"\n")
        if end < 0:
            if len(self._inbox) > dialog.READY_LINE_BYTES:
                return self.failed("protocol", 0, "the first line of the slot has no end")
            return None
        kind, body = bytes(self._inbox[:1]), bytes(self._inbox[1:end])
        if end + 1 != len(self._inbox) or end > dialog.READY_LINE_BYTES:
            return self.failed("protocol", 0, "the slot spoke before it was asked")
        self._inbox.clear()
        try:
            if kind == dialog.READY:
                facts = _facts.decode(body)
                wrong = self.inspect()
                if wrong:
                    return self.failed("check", errno.EPERM, wrong)
                self._state = "ready"
                return MachineReady(facts=facts)
            if kind == dialog.FAILED:
                failure = _failures.decode(body)
                return self.failed(failure.step, failure.errno, failure.detail)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            return self.failed("protocol", 0, f"the first line of the slot is no JSON: {type(error).__name__}")
        return self.failed("protocol", 0, "the first line of the slot is neither R nor F")

    def _frame(self) -> MachineEvent | None:
        """After code: one frame, at most as long as the caps allow. A ready slot says nothing before it has code."""
        if self._state == "ready":
            return self.failed("protocol", 0, "the slot spoke before it had code")
        if len(self._inbox) < dialog.RESULT_HEADER.size:
            return None
        (length,) = dialog.RESULT_HEADER.unpack_from(self._inbox)
        cap = self._caps.value * (1 + _ESCAPED) + _SLACK
        if not 0 < length <= cap:
            return self.failed("protocol", 0, f"a result of {length} bytes is outside 1..{cap}")
        if len(self._inbox) < dialog.RESULT_HEADER.size + length:
            return None
        body = bytes(self._inbox[dialog.RESULT_HEADER.size : dialog.RESULT_HEADER.size + length])
        self._inbox.clear()  # bytes after the frame are nobody's
        return self.result(body)

    def result(self, body: bytes) -> MachineEvent:
        """Return what the frame that came after the code means."""
        try:
            claim = _claims.decode(body)
            raw = bytes(claim.value)
            _anything.decode(claim.value)  # so that no later reader of the value can fail where this one did not
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError) as error:
            return self.failed("protocol", 0, f"the result is not what a slot sends: {type(error).__name__}")
        if not 0 <= claim.exit_code <= 255 or not claim.truncated.keys() <= {"value", "text"}:
            return self.failed("protocol", 0, "the result has fields out of range")
        if any(not 0 < count < 1 << 53 for count in claim.truncated.values()):
            return self.failed("protocol", 0, "the result counts dropped bytes that cannot be")
        truncated = dict(claim.truncated)
        value = None if raw == b"null" else raw
        if value is not None and len(value) > self._caps.value:
            truncated["value"], value = len(value), None
        text, dropped = _cut(claim.text, self._caps.value)
        if dropped:
            truncated["text"] = truncated.get("text", 0) + dropped
        if "text" in truncated:
            text += f"… [{truncated['text']} bytes dropped]"
        info = claim.error
        if info is not None:
            info = ErrorInfo(
                name=_cut(info.name, dialog.ERROR_NAME_BYTES)[0],
                message=_cut(info.message, dialog.ERROR_MESSAGE_BYTES)[0],
                traceback=_cut(info.traceback, 2 * dialog.ERROR_TRACEBACK_BYTES)[0],
            )
        self.finish()
        return MachineResult(value=value, text=text, error=info, exit_code=claim.exit_code, truncated=truncated)
