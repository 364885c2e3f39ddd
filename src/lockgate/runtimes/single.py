"""One machine, one run, from start to end, waiting: for `probe()`, for `doctor` and for tests of a rung by itself.

Rule 1: every wait has a deadline, armed before code is sent; what is not over by then is killed.
Rule 2: it returns when the machine is dead and reaped, with every descriptor closed.

The supervisor does not use this: it drives many machines from one poll set and holds every bound. Here only the wall
clock is held and output is kept up to a cap.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import CannotIsolate, HostFault
from lockgate.contract.frames import Decoder, encode
from lockgate.runtimes.protocol import (
    Machine,
    MachineEnded,
    MachineEvent,
    MachineFailed,
    MachineReady,
    MachineResult,
    MachineStopped,
    Template,
    Unavailable,
)

START_SECONDS: Final = 10.0
DEATH_SECONDS: Final = 10.0
_READ: Final = 64 * 1024

Broker = Callable[[bytes], bytes | None]


class Outcome(msgspec.Struct, kw_only=True):
    """What was seen of one machine.

    Attributes:
        facts: what the machine said when it was ready; empty when it never was.
        result: what the code said of itself, or None when it was killed or ended without a word.
        failed: why the machine was unusable, or how it ended without a result.
        stdout: bytes kept. stderr: the same. dropped: bytes above the cap, both streams together.
        killed: whether the wall clock ended it.
        start_seconds: request to ready. run_seconds: code sent to result. death_seconds: kill to reaped.

    """

    facts: dict[str, Any] = {}
    result: MachineResult | None = None
    failed: MachineFailed | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    dropped: int = 0
    killed: bool = False
    start_seconds: float = 0.0
    run_seconds: float = 0.0
    death_seconds: float = 0.0


class _Run:
    """The state of one `run_once`."""

    def __init__(self, template: Template, machine: Machine, broker: Broker | None, keep: int) -> None:
        self.template = template
        self.machine = machine
        self.broker = broker
        self.keep = keep
        self.outcome = Outcome()
        self.kept: dict[int, bytearray] = {machine.stdout: bytearray(), machine.stderr: bytearray()}
        self.frames = Decoder()
        self.channel = machine.take_channel()
        self.channel.setblocking(False)
        self.poll = select.poll()
        for one in (template.fileno(), machine.control.fileno(), machine.stdout, machine.stderr):
            self.poll.register(one, select.POLLIN)
        if broker is not None:
            self.poll.register(self.channel, select.POLLIN)

    def turn(self, seconds: float) -> list[MachineEvent] | None:
        """Wait for at most `seconds`; None when nothing came."""
        ready = self.poll.poll(max(seconds, 0) * 1000)
        if not ready:
            return None
        events: list[MachineEvent] = []
        for fd, _ in ready:
            if fd == self.template.fileno():
                for one in self.template.on_readable():
                    if isinstance(one, MachineFailed):
                        events.append(one)
                    else:
                        one.placed()
            elif fd == self.machine.control.fileno():
                events += self.machine.on_control()
            elif fd in self.kept:
                self._drain(fd)
            else:
                self._answer()
        return events

    def _drain(self, fd: int) -> None:
        try:
            data = os.read(fd, _READ)
        except BlockingIOError:
            return
        if not data:
            with contextlib.suppress(KeyError):  # the end was seen before
                self.poll.unregister(fd)
        room = self.keep - len(self.kept[fd])
        self.kept[fd] += data[:room]
        self.outcome.dropped += max(len(data) - room, 0)

    def _answer(self) -> None:
        """Give the code's requests to the stand-in for a broker, one reply each."""
        with contextlib.suppress(BlockingIOError):
            data = self.channel.recv(_READ)
            if not data:
                self.poll.unregister(self.channel)
            for body in self.frames.feed(data):
                reply = self.broker(body) if self.broker else None
                if reply is not None:
                    self.channel.setblocking(True)
                    self.channel.settimeout(START_SECONDS)
                    self.channel.sendall(encode(reply))
                    self.channel.setblocking(False)

    def wait(self, deadline: float, *, flush: bool = False) -> MachineEvent | None:
        """Return the next event, or None at the deadline."""
        while (left := deadline - time.monotonic()) > 0:
            if flush and not self.machine.flush():
                left = min(left, 0.01)
            events = self.turn(left)
            if events:
                return events[0]
        return None

    def bury(self) -> None:
        """Kill the machine and wait until the kernel has reaped all of it, reading what it left in the pipes."""
        self.machine.kill()
        since = time.monotonic()
        try:
            if self.machine.pidfd >= 0:
                dead = select.poll()
                dead.register(self.machine.pidfd, select.POLLIN)
                if not dead.poll(DEATH_SECONDS * 1000):
                    raise HostFault(
                        "a killed sandbox is still alive", next_step="look for a process in state D; restart the host"
                    )
            self.outcome.death_seconds = time.monotonic() - since
            for fd, kept in self.kept.items() if self.machine.stdout >= 0 else ():  # else: closed, it never was born
                while len(kept) < self.keep and select.select([fd], [], [], 0)[0]:
                    before = len(kept)
                    self._drain(fd)
                    if len(kept) == before:
                        break
            self.outcome.stdout, self.outcome.stderr = (bytes(kept) for kept in self.kept.values())
        finally:
            self.channel.close()
            self.machine.close()


def boots(start: Callable[[], Template], seconds: float, fix: Callable[[MachineFailed], str]) -> Unavailable | None:
    """Start a template, run one line in one machine of it, and look; None when that works. For `Runtime.probe`.

    Args:
        start: starts the template; what it raises is the answer.
        seconds: of wall clock for the line.
        fix: the next step for a machine that failed at a step.

    """
    try:
        template = start()
    except (CannotIsolate, HostFault) as error:
        return Unavailable(missing=error.message, fix=error.next_step)
    try:
        outcome = run_once(template, b"6*7", Bounds(wall=seconds))
    except HostFault as error:
        return Unavailable(missing=error.message, fix=error.next_step)
    finally:
        template.close()
    if outcome.result is not None and outcome.result.value == b"42":
        return None
    failed = outcome.failed
    if failed is None:
        return Unavailable(missing="a sandbox that answers in time", fix="look for a host that is out of CPU or memory")
    return Unavailable(
        missing=f"a sandbox that works ({failed.step}: {failed.detail or os.strerror(failed.errno)})", fix=fix(failed)
    )


def run_once(
    template: Template,
    code: bytes,
    bounds: Bounds | None = None,
    *,
    broker: Broker | None = None,
    meanwhile: Callable[[Machine], None] | None = None,
    keep: int = 1 << 20,
    patience: float = START_SECONDS,
) -> Outcome:
    """Take a machine from `template`, run `code` in it, wait for its end.

    Args:
        template: where the machine comes from; nothing else may be waiting for a machine of it.
        code: source, UTF-8.
        bounds: the machine's and the run's; only the wall clock is held here.
        broker: answers the body of a request frame with the body of a reply (None = no reply).
        meanwhile: called with the machine when it is ready, before code is sent.
        keep: bytes kept of each stream.
        patience: seconds that the machine may take until it is ready.

    Raises:
        HostFault: the template ended, or a killed machine would not die.

    """
    bounds = bounds or Bounds()
    since = time.monotonic()
    run = _Run(template, template.request(bounds), broker, keep)
    outcome = run.outcome
    try:
        event = run.wait(since + patience)
        outcome.start_seconds = time.monotonic() - since
        if isinstance(event, MachineReady):
            outcome.facts = event.facts
            if meanwhile is not None:
                meanwhile(run.machine)
            since = time.monotonic()
            run.machine.send_code(code, bounds)
            event = run.wait(since + bounds.wall, flush=True)
            outcome.run_seconds = time.monotonic() - since
            outcome.killed = event is None or isinstance(event, MachineStopped)
        elif event is None:
            event = MachineFailed(step="wait", errno=110, detail="not ready in time")
        if isinstance(event, MachineResult):
            outcome.result = event
        elif isinstance(event, MachineFailed):
            outcome.failed = event
        elif isinstance(event, MachineEnded):
            outcome.failed = MachineFailed(step="ended", errno=0, detail=f"the code's process ended: {event.status}")
    finally:
        run.bury()
    return outcome
