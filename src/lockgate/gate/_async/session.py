"""The processes of one Gate and the conversation with them: start, ask, wait, notice an end, close.

Rule 1: every wait has a deadline. A child that ends fails everything that needs it at once, by name.
Rule 2: what was started is ended, also when the start failed half-way.
"""

from __future__ import annotations

import os
import select
import socket
import time
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from lockgate.alerts.start import wait_ready
from lockgate.config import Config, Render
from lockgate.contract import wire
from lockgate.contract.errors import HostFault, ProcessDied
from lockgate.gate._async.auto import Auto
from lockgate.gate.children import CLOSE_SECONDS, Child, Children, start_from_lasting_thread
from lockgate.gate.core import Core, Peer, unwrap
from lockgate.gate.faults import died
from lockgate.gate.link import Link
from lockgate.gate.pump_async import OnApproval, Pump, Waiter
from lockgate.gate.start import config_file, log_file, make_default_directory, supervisor_settings
from lockgate.gate.values import Approval, Decision
from lockgate.policy.choose import Choice

T = TypeVar("T")
READY_SECONDS: Final = 75.0
ANSWER_SECONDS: Final = 15.0
RESTART_SECONDS: Final = 60.0
MAX_RESTARTS: Final = 5


class Session:
    """Owns the processes.

    Args:
        config: what they are told.
        accept_shared_kernel: the default of every run (X3).
        on_approval: asked when a call needs a person.
        log: file that also takes what they print.

    Attributes:
        facts: what broker and supervisor said of themselves when they were ready.
        pump: waits. core: knows who waits for what.

    """

    pump: Pump

    def __init__(
        self,
        config: Config,
        *,
        accept_shared_kernel: bool,
        on_approval: OnApproval | None,
        log: str | Path | None,
    ) -> None:
        self.config = config
        self.accept_shared_kernel = accept_shared_kernel
        self.facts: dict[str, dict[str, Any]] = {}
        self._on_approval = on_approval
        self._log_path = log
        self._log = -1
        self._pid = 0
        self._children: Children | None = None
        self._core: Core | None = None
        self._child_of: dict[str, Child] = {}
        self._endings: dict[str, Waiter] = {}
        self._told = config
        self._alerter_starts = MAX_RESTARTS  # until it was ready once, its end is an error of the start
        self._alerter_since = 0.0
        self._auto = Auto(self)

    # ---- life ------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Start the processes and wait until they take requests; `Gate.start` names the errors."""
        if self._children is not None:
            raise HostFault("this Gate was started before", next_step="open a new one")
        self._pid = os.getpid()
        make_default_directory(self.config.audit.path)
        self._log = log_file(self._log_path)
        try:
            children = self._children = start_from_lasting_thread(self._spawn)
            self.pump = Pump()
            core = self._core = Core(Link(children.to_broker), Link(children.to_supervisor), self._asked)
            self._child_of = {core.broker.name: children.broker, core.supervisor.name: children.supervisor}
            waiting = [(peer, self.pump.waiter()) for peer in (core.broker, core.supervisor)]
            for peer, waiter in waiting:
                peer.pending[0] = waiter
                self._watch_peer(core, peer)
            for child in children.all:
                self._watch_child(core, child)
            for peer, waiter in waiting:
                ready = unwrap(await self.pump.wait(waiter, READY_SECONDS), wire.Ready, peer, READY_SECONDS)
                self.facts[peer.name] = ready.facts
            children.broker.may_show = False
            if children.life is not None:
                await self._alerter_ready(children.life)
                self._alerter_starts = 0
        except BaseException:
            await self.close()
            raise

    def _spawn(self) -> Children:
        # The guard works in this process: no other is told its rules and canaries.
        config = msgspec.structs.replace(self.config, render=Render())
        if self._on_approval is None:  # nobody will answer, so no call should wait for that
            config = msgspec.structs.replace(config, broker=msgspec.structs.replace(config.broker, approval_wait=0.0))
        self._told = config
        return Children(
            config=config_file(config),
            base=config.base,
            audit_path=config.audit.path,
            settings=supervisor_settings(config.execution, accept_shared_kernel=self.accept_shared_kernel),
            log=self._log,
            alerts=config.alerts.wanted,
        )

    async def _alerter_ready(self, life: socket.socket) -> None:
        """Wait until the alerter follows the log: a denial before that would be history to it."""
        waiter = self.pump.waiter()

        def readable() -> None:
            self.pump.unwatch(life.fileno())
            if not waiter.done():
                waiter.set_result(wait_ready(life, 1.0))

        self.pump.watch(life.fileno(), readable)
        try:
            said = await self.pump.wait(waiter, READY_SECONDS)
        finally:
            self.pump.unwatch(life.fileno())
        if said is None or not said.ready:
            why = "was not ready in time" if said is None else said.error or "ended before it was ready"
            raise HostFault(
                f"the alerter did not start: {why}",
                next_step=(said and said.next_step) or "correct [alerts], or leave it out; see: lockgate alerts test",
            )

    async def close(self) -> None:
        """End the processes in the order of the work: no run without a broker, no broker without its writer."""
        children, self._children = self._children, None
        core, self._core = self._core, None
        try:
            if children is not None and core is not None:
                deadline = time.monotonic() + CLOSE_SECONDS
                for peer in (core.supervisor, core.broker):
                    core.lose(peer, ProcessDied("this Gate is closed", next_step="open a new one"))
                links = {children.supervisor.name: core.supervisor.link, children.broker.name: core.broker.link}
                last = () if children.alerter is None else (children.alerter,)
                for child in (children.supervisor, children.broker, children.writer, *last):
                    if child is children.alerter:  # every row is on the disk now
                        children.close_life()
                    if (link := links.get(child.name)) is not None:
                        self.pump.unwatch(link.fileno())
                        link.close()
                    if child.exited() is None:
                        ended = self._endings[child.name] = self.pump.waiter()
                        await self.pump.wait(ended, deadline - time.monotonic())
        finally:
            if children is not None:
                if core is not None:
                    for child in children.all:
                        self.pump.unwatch(child.pidfd)
                        self.pump.unwatch(child.output)
                    self.pump.close()
                children.kill()
            if self._log >= 0:
                os.close(self._log)
                self._log = -1

    # ---- watching --------------------------------------------------------------------------------------------
    def _watch_peer(self, core: Core, peer: Peer) -> None:
        pump, link = self.pump, peer.link
        fd = link.fileno()
        link.want_write = lambda wanted: pump.watch_write(fd, link.flush if wanted else None)

        def readable() -> None:
            if not core.receive(peer):
                pump.unwatch(fd)
                self._gone(core, peer)

        pump.watch(fd, readable)

    def _watch_child(self, core: Core, child: Child) -> None:
        pump = self.pump

        def printed() -> None:
            if not child.read_output():
                pump.unwatch(child.output)

        def ended() -> None:
            pump.unwatch(child.pidfd)
            child.exited()
            if (waiter := self._endings.pop(child.name, None)) is not None and not waiter.done():
                waiter.set_result(True)
            if self._children is not None and child is self._children.alerter:
                self._alerter_ended(core, self._children)
            for peer in (core.broker, core.supervisor):
                if self._child_of[peer.name] is child:
                    # What it said before it ended counts: the reason may still be in its link.
                    while peer.lost is None and _readable(peer.link.fileno()) and core.receive(peer):
                        pass
                    self._gone(core, peer)

        pump.watch(child.output, printed)
        pump.watch(child.pidfd, ended)

    def _alerter_ended(self, core: Core, children: Children) -> None:
        """Start another: the rows are on the disk, and it goes on where the last one was. Not for ever."""
        if self._alerter_since and time.monotonic() - self._alerter_since > RESTART_SECONDS:
            self._alerter_starts = 0
        if self._alerter_starts >= MAX_RESTARTS:
            return  # the next Gate tells what this one could not
        self._alerter_starts += 1
        self._alerter_since = time.monotonic()
        config = config_file(self._told)
        try:
            self._watch_child(core, children.start_alerter(config))
        finally:
            os.close(config)

    def _gone(self, core: Core, peer: Peer) -> None:
        if peer.lost is not None or self._children is None:
            return
        child = self._child_of[peer.name]
        # EOF comes a moment before the exit status; a child that is gone costs this one short wait, once.
        child.exited(0.1)
        # One child's end makes the others end. The one that a signal took is the cause.
        culprit = next((one for one in self._children.all if (one.exited() or 0) < 0), child)
        status = culprit.exited()
        how = "closed its link" if status is None else f"died (signal {-status})" if status < 0 else f"ended ({status})"
        words = culprit.last_words()
        core.lose(peer, died(culprit.name, f"the {culprit.name} {how}{': ' + words if words else ''}"))

    # ---- asking ----------------------------------------------------------------------------------------------
    def core(self) -> Core:
        """Return the live core.

        Raises:
            HostFault: the Gate is not open, or was opened by another process.

        """
        if self._core is None:
            raise HostFault("this Gate is not open", next_step="use it inside: async with Gate(...) as gate")
        if self._pid != os.getpid():
            raise HostFault("this Gate belongs to the process that opened it", next_step="open one after the fork")
        return self._core

    async def ask_broker(self, message: wire.Message, id_: int, kind: type[T], seconds: float = ANSWER_SECONDS) -> T:
        """Send `message` and return its answer of `kind`, or raise the error it is."""
        broker = self.core().broker
        waiter = self.pump.waiter()
        broker.ask(message, id_, waiter)
        try:
            return unwrap(await self.pump.wait(waiter, seconds), kind, broker, seconds)
        finally:
            broker.pending.pop(id_, None)

    async def ask_supervisor(self, message: wire.Message, id_: int, seconds: float) -> Any:
        """Send `message` and return the data of its answer, or raise the error it is."""
        supervisor = self.core().supervisor
        waiter = self.pump.waiter()
        supervisor.ask(message, id_, waiter)
        try:
            return unwrap(await self.pump.wait(waiter, seconds), wire.Answer, supervisor, seconds).data
        finally:
            supervisor.pending.pop(id_, None)

    async def auto(self, env: str | None) -> Choice:
        """Return what `rung="auto"` means here."""
        return await self._auto.choice(env)

    async def operations(self, run: str | None) -> Any:
        """Return the registry's description, of one run or whole."""
        id_ = self.core().next_id()
        return (await self.ask_broker(wire.ListOperations(id=id_, run=run), id_, wire.Done)).data

    def _asked(self, message: wire.ApprovalAsked) -> None:
        if self._on_approval is None:
            return  # nobody to ask: the broker has said `approval_required` already
        ask = Approval(
            request=message.request,
            run=message.run,
            operation=message.operation,
            arguments=msgspec.json.decode(message.arguments),
            expires_in=message.expires_in,
        )
        core = self.core()

        def answer(decision: Decision) -> None:
            core.broker.tell(
                wire.Decide(
                    id=core.next_id(), request=ask.request, grant=decision.grant is True, approver=decision.approver
                )
            )

        self.pump.decide(self._on_approval, ask, answer)


def _readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))
