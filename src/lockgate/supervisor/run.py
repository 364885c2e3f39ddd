"""One run: ticket -> machine -> attach -> clock armed -> code -> result or kill -> detach -> reap.

Rule 1: the wall clock is armed before a byte of the code is sent, and nothing the machine does can move it.
Rule 2: no code is sent before the broker said that it bound the channel to the ticket.
Rule 3: the first trigger wins and is the only one recorded. Exit codes: 124 wall clock, 137 every other kill.
Rule 4: what is over is told at once (broker, then agent); killing and reaping go on behind it, accounted for.
Rule 5: every wait here has a deadline: machine, attach, wall clock, the exit status of code that left without a result.
"""

from __future__ import annotations

import hashlib
import signal
import time
from collections.abc import Callable
from typing import Final

import msgspec

from lockgate.contract import wire
from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import LockgateError
from lockgate.contract.run import ErrorInfo, KilledBy, RunSpec, Usage
from lockgate.contract.rungs import Weakness
from lockgate.runtimes.protocol import MachineEnded, MachineEvent, MachineFailed, MachineResult, MachineStopped
from lockgate.supervisor import cause, loop, refusals
from lockgate.supervisor.line import Key
from lockgate.supervisor.links import fault_of
from lockgate.supervisor.outcome import Outcome, clean, ended_without_result
from lockgate.supervisor.output import Output
from lockgate.supervisor.pool import Pool
from lockgate.supervisor.slot import Slot, exit_status
from lockgate.supervisor.watch import Watch

ATTACH_SECONDS: Final = 10.0
_STATUS_SECONDS: Final = 2.0
_NO_COUNTS: Final[dict[str, int]] = {}

Attach = Callable[[wire.Attach, "Run"], None]


class Deck(msgspec.Struct, frozen=True):
    """What a run needs of its supervisor.

    Attributes:
        attach: hands the run's channel to the broker, or raises `ProcessDied`; the answer comes to `Run.attached`.
        detach: tells the broker that the run is over.
        send: gives a message to the agent.
        over: called once when the run is over for its caller.
        memory_by: what caps memory here, as `Attach` tells it.
        weaknesses: what the operator accepts for every run (`contract.rungs`).
        hear: takes what the broker has sent by now. It orders a kill before it ends a channel, so that code which ends
            with its channel is still known for what it is.

    """

    reactor: loop.Reactor
    pool: Pool
    attach: Attach
    detach: Callable[[wire.Detach], None]
    send: Callable[[wire.SupervisorToAgent], None]
    over: Callable[[Run], None]
    memory_by: str
    weaknesses: tuple[Weakness, ...] = ()
    hear: Callable[[], object] = lambda: None


class Run:
    """The state machine of one run.

    Args:
        ident: the agent's number for it.
        code: the source, checked and encoded.

    """

    __slots__ = (
        "_bounds",
        "_cancel_wait",
        "_code",
        "_control",
        "_deck",
        "_early",
        "_key",
        "_output",
        "_over",
        "_sent",
        "_spec",
        "_staged",
        "_timer",
        "_watch",
        "ident",
        "slot",
    )

    def __init__(self, deck: Deck, ident: int, spec: RunSpec, code: bytes, key: Key) -> None:
        self.ident = ident
        self.slot: Slot | None = None
        self._deck = deck
        self._spec = spec
        self._code = code
        self._key = key
        self._bounds: Bounds = spec.bounds
        self._over = False
        self._staged = False
        self._sent = 0.0
        self._early: MachineEvent | None = None
        self._timer: loop.Timer | None = None
        self._watch: Watch | None = None
        self._output: Output | None = None
        self._cancel_wait: Callable[[], None] | None = None
        self._control = -1

    @property
    def ticket(self) -> str:
        """The one-use ticket that names this run to the broker."""
        return self._spec.ticket

    # ---- a machine -----------------------------------------------------------------------------------------------
    def begin(self, seconds: float) -> None:
        """Ask for a machine; `seconds` is the longest wait for one."""
        self._cancel_wait = self._deck.pool.acquire(self._key, self._bounds, self._got, self.refuse, seconds=seconds)

    def _got(self, slot: Slot) -> None:
        self.slot = slot
        weakness = slot.home.template.weakness
        if weakness is not None and weakness not in (*self._spec.accept_weaker, *self._deck.weaknesses):
            self.refuse(refusals.not_accepted(self._key.rung, weakness, slot.home.template.lacks))
            return
        machine, reactor = slot.machine, self._deck.reactor
        self._control = machine.control.fileno()
        reactor.handler(self._control, self._on_control)
        reactor.handler(machine.pidfd, self._on_dead)
        push = self._push if self._spec.stream else None
        # From here on: the compiler warns before anything runs.
        self._output = Output(reactor, machine, self._bounds, push=push, flooded=self._on_flood)
        if slot.group is not None and slot.group.oom_fd >= 0:
            reactor.handler(slot.group.oom_fd, self._on_memory)
        if slot.group is not None:
            try:
                slot.group.tighten(self._key.limits(self._bounds))
            except OSError as err:
                self.refuse(refusals.bound_not_set(str(err.strerror)))
                return
        # A clock is armed before the code is sent: this one until the broker answers, the wall clock from then on.
        self._timer = reactor.after(ATTACH_SECONDS, self._attach_late)
        try:
            self._deck.attach(
                wire.Attach(
                    ticket=self._spec.ticket,
                    rung=self._key.rung,
                    shared_kernel=self._shared_kernel(slot),
                    weakness=weakness,
                    memory_by=self._key.memory_by(self._deck.memory_by),
                    code_sha256=hashlib.sha256(self._code).hexdigest(),
                    code_bytes=len(self._code),
                    env=self._spec.env,
                ),
                self,
            )
        except LockgateError as err:
            self.refuse(err)
            return
        # The machine compiles while the broker redeems the ticket; nothing of the code runs before `go`.
        self._staged = True
        if not machine.stage_code(self._code, self._bounds):
            reactor.mask(self._control, loop.IN | loop.OUT)
        self._code = b""

    @staticmethod
    def _shared_kernel(slot: Slot) -> bool:
        return bool(slot.home.template.boundary == "shared kernel")

    def _attach_late(self) -> None:
        self.refuse(refusals.not_bound(ATTACH_SECONDS))

    # ---- the code ------------------------------------------------------------------------------------------------
    def attached(self, *, ok: bool) -> None:
        """The broker's answer: start, or destroy a machine that never saw the code."""
        if self._over or self._sent or self.slot is None:
            return
        if not ok:
            self.refuse(refusals.unknown_ticket())
            return
        slot, deck, bounds = self.slot, self._deck, self._bounds
        machine, reactor = slot.machine, deck.reactor
        if self._timer is not None:
            self._timer.cancel()
        most = self._key.limits(bounds).memory if self._key.nature.maps_files else None
        self._watch = Watch(reactor, slot, bounds, rss=self._key.memory_by_rlimit, on_limit=self._kill, most=most)
        self._sent = time.monotonic()
        self._timer = reactor.at(self._sent + bounds.wall, self._on_wall)
        if not machine.go():
            reactor.mask(self._control, loop.IN | loop.OUT)
        early, self._early = self._early, None
        if slot.group is not None and slot.group.oom_signalled():
            self._kill("memory")
        elif early is not None:
            self._take(early)

    def _push(self, name: str, data: bytes) -> None:
        self._deck.send(wire.Output(id=self.ident, stream=name, data=data))

    # ---- triggers ------------------------------------------------------------------------------------------------
    def _on_flood(self) -> None:
        self._kill("output")

    def _on_memory(self, _mask: int) -> None:
        group = self.slot.group if self.slot is not None else None
        if group is None:
            return
        if not self._sent:  # while compiling: kept in the counter until the broker knows the run
            self._deck.reactor.remove(group.oom_fd)
        elif group.oom_signalled():
            self._kill("memory")

    def _on_wall(self) -> None:
        self._kill("wall")

    def protocol(self) -> None:
        """The broker saw the code break the protocol."""
        if self._sent:
            self._kill("protocol")
        else:
            self.refuse(refusals.taken_back())

    def _on_control(self, mask: int) -> None:
        if self._over or self.slot is None:
            return
        if mask & loop.OUT and self.slot.machine.flush():
            self._deck.reactor.mask(self._control, loop.IN)
        if not mask & (loop.IN | loop.GONE):
            return
        for event in self.slot.machine.on_control():
            if self._staged and not self._sent:
                # The code ended its machine while it was compiled. Whose fault that is, is told once the broker knows
                # the run; until then nobody listens to this end.
                self._early = event
                self._deck.reactor.remove(self._control)
            else:
                self._take(event)
            return

    def _take(self, event: MachineEvent) -> None:
        if isinstance(event, MachineResult):
            self._result(event)
        elif isinstance(event, MachineStopped) and self._sent:
            self._kill(event.by)
        elif isinstance(event, MachineEnded) and self._sent:
            self._ended(event.status)
        elif isinstance(event, MachineFailed) and event.step == "lease":
            self.refuse(refusals.no_lease(event.detail))
        elif isinstance(event, MachineFailed) and event.step in LEFT:
            self._left()
        else:
            self._broke()

    def _broke(self) -> None:
        if self._sent:
            self._kill("protocol")
        else:
            self.refuse(refusals.lost_early())

    def _on_dead(self, _mask: int) -> None:
        if self._over or self.slot is None:
            return
        self._deck.reactor.remove(self.slot.machine.pidfd)
        self.slot.dead = True
        self._on_control(loop.IN)  # a result may have come just before the end
        if self._staged and not self._sent:
            self._early = self._early or MachineFailed("ended", 0, "it ended while its code was compiled")
        elif not self._over:
            self._left()

    # ---- ends ----------------------------------------------------------------------------------------------------
    def _result(self, result: MachineResult) -> None:
        slot = self.slot
        if not self._sent or slot is None:
            self._broke()
            return
        self._deck.hear()
        if self._over:
            return
        outcome = clean(result, self._bounds.value)
        self._end(outcome, cause.of_result(slot, result, outcome, self._key.nature.work))

    def _kill(self, killed_by: KilledBy) -> None:
        if self._over or self.slot is None:
            return
        self._end_now(self.slot)
        self._end(Outcome(), killed_by)

    @staticmethod
    def _end_now(slot: Slot) -> None:
        if not slot.dead:
            if slot.group is not None:
                slot.group.kill()
            slot.machine.kill()

    def _left(self) -> None:
        """The control socket ended without a result: learn why from the kernel, not from the code."""
        slot = self.slot
        if slot is None or self._over:
            return
        if not self._sent:
            self.refuse(refusals.lost_early())
            return
        reached = cause.of_end(slot, self._watch, self._bounds.cpu)
        if reached is not None:
            self._kill(reached)
            return
        if slot.dead:
            self._left_with(exit_status(slot.machine.pidfd))
            return
        self._deck.reactor.remove(self._control)
        if self._timer is not None:
            self._timer.cancel()
        # Its first process is gone or has closed its end; the status is known once the namespace is reaped.
        self._timer = self._deck.reactor.after(_STATUS_SECONDS, self._left_late)

    def _ended(self, status: int) -> None:
        """The code's process is gone, the machine is not: its status is the guest's word."""
        if cause.cpu_spent(self._watch, self._bounds.cpu):
            self._kill("cpu")
        else:
            self._end(ended_without_result(status), None)

    def _left_with(self, status: int | None) -> None:
        if status is not None and status & 0x7F == signal.SIGKILL:
            # From inside nobody can send SIGKILL to a namespace's first process, and no bound of ours was reached.
            self.refuse(refusals.killed_outside())
            return
        self._end(ended_without_result(status), None)

    def _left_late(self) -> None:
        if self.slot is not None:
            self._end_now(self.slot)
            self._end(ended_without_result(None), None)

    def cancel(self) -> None:
        """The caller wants no more of it: end the run; its `Finished` says so."""
        if self._over:
            return
        if self.slot is not None:
            self._end_now(self.slot)
        error = ErrorInfo("Cancelled", "the caller cancelled this run", "")
        self._end(Outcome(exit_code=137, error=error), None)

    def refuse(self, error: LockgateError) -> None:
        """End a run that gave no result for a reason that is not the code's."""
        if self._over:
            return
        self._close(137, None, {})
        self._deck.send(wire.Refused(id=self.ident, fault=fault_of(error)))
        self._bury(hard=self._staged)

    def _end(self, outcome: Outcome, killed_by: KilledBy | None) -> None:
        if self._over:
            return
        now = time.monotonic()
        out = self._output
        dropped = out.finish() if out is not None else _NO_COUNTS
        truncated = {**outcome.truncated, **dropped} if dropped else outcome.truncated
        exit_code = outcome.exit_code if killed_by is None else 124 if killed_by == "wall" else 137
        group = self.slot.group if self.slot is not None else None
        usage = Usage(
            wall=now - self._sent if self._sent else 0.0,
            cpu=self._watch.used() if self._watch is not None else None,
            memory_peak=group.memory_peak() if group is not None else None,
            stdout_bytes=out.stdout.total if out is not None else 0,
            stderr_bytes=out.stderr.total if out is not None else 0,
        )
        self._close(exit_code, killed_by, truncated, usage.wall)
        self._deck.send(
            wire.Finished(
                id=self.ident,
                value=outcome.value,
                text=outcome.text,
                stdout=out.stdout.text() if out is not None else "",
                stderr=out.stderr.text() if out is not None else "",
                exit_code=exit_code,
                error=outcome.error,
                killed_by=killed_by,
                truncated=truncated or _NO_COUNTS,
                usage=usage,
                weakness=self.slot.home.template.weakness if self.slot is not None else None,
            )
        )
        self._bury(hard=killed_by is not None)

    def _close(self, exit_code: int, killed_by: KilledBy | None, truncated: dict[str, int], wall: float = 0.0) -> None:
        """Stop every clock of this run and tell the broker that its channel is over."""
        self._over = True
        for timer in (self._timer, self._watch):
            if timer is not None:
                timer.cancel() if isinstance(timer, loop.Timer) else timer.stop()
        if self._cancel_wait is not None:
            self._cancel_wait()
        if self.slot is not None:
            self._deck.detach(
                wire.Detach(
                    ticket=self._spec.ticket,
                    exit_code=exit_code,
                    killed_by=killed_by,
                    truncated=truncated or _NO_COUNTS,
                    duration=wall,
                )
            )

    def _bury(self, *, hard: bool) -> None:
        slot, self.slot = self.slot, None
        self._deck.over(self)
        if slot is not None:
            self._deck.pool.touch()
            if hard:
                self._deck.pool.done(slot, hard=True)
            else:
                key = self._key
                self._deck.pool.finished(slot, by_rlimit=key.memory_by_rlimit, tasks=key.nature.tasks)


# `MachineFailed.step` of a machine whose control socket simply ended; every other failure is a broken protocol.
LEFT: Final = frozenset({"eof", "ended", "gone", "closed"})
