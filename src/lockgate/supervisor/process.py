"""The supervisor process: links, messages, start and end.

Rule 1: it reads no environment and holds no secret; what it must know comes in argv.
Rule 2: it ends when the agent's link ends, and takes everything it started with it.
Rule 3: a rung that cannot be had does not keep it from starting: every run is then refused with the typed reason, so
        that those who use the capability half alone are served.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
from typing import Any, Final, NoReturn

from lockgate.contract import frames, wire
from lockgate.contract.errors import ConfigError, LockgateError
from lockgate.kernel.process_unsafe import die_with_parent
from lockgate.supervisor.engine import Engine, facts_of
from lockgate.supervisor.line import Key
from lockgate.supervisor.links import AgentLink, BrokerLink, broker_gone, fault_of
from lockgate.supervisor.loop import Reactor
from lockgate.supervisor.run import Run
from lockgate.supervisor.settings import Settings, decode

import msgspec  # isort: skip

START_SECONDS: Final = 60.0
_NICE: Final = -10
_PREWARM_SECONDS: Final = 60.0


class Supervisor:
    """Connects an `Engine` to the agent and the broker."""

    def __init__(self, settings: Settings, agent: socket.socket, broker: socket.socket) -> None:
        self._reactor = Reactor()
        self._engine = Engine(settings, self._reactor, self._attach, self._detach, self._send, hear=self._hear)
        self._broker = BrokerLink(self._reactor, broker, self._on_attached, self._on_kill, self._on_broker_end)
        self._agent = AgentLink(self._reactor, agent, self._on_message, self._reactor.stop)
        self._signals, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        # Handlers, not SIG_IGN: an ignored signal would stay ignored in the templates. ^C is the agent's affair.
        signal.signal(signal.SIGTERM, _noted)
        signal.signal(signal.SIGINT, _noted)
        self._reactor.add(self._signals, self._on_signal)

    def _on_signal(self, _mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            if signal.SIGTERM in os.read(self._signals, 64):
                self._reactor.stop()

    def run(self) -> None:
        """Serve until the agent is gone."""
        try:
            self._ready()
            self._reactor.run()
        finally:
            self._engine.close()
            self._agent.close()
            self._broker.close()
            self._reactor.close()

    def _ready(self) -> None:
        """Warm the first machine, then say Ready; with the reason when there will be none."""
        settings = self._engine.settings
        key: Key | None = None
        outcome: list[LockgateError | None] = []

        def warm(error: LockgateError | None) -> None:
            outcome.append(error)
            self._reactor.leave()

        try:
            key = self._engine.key(settings.rung, settings.env)
        except LockgateError as err:
            outcome.append(err)
        else:
            if settings.pool > 0:
                self._engine.when_warm(key, 1, START_SECONDS, warm)
                self._reactor.run(time.monotonic() + START_SECONDS + 1)
            else:
                outcome.append(None)
        error = outcome[0] if outcome else None
        if key is not None and error is None:
            self._engine.pool.target(key, settings.pool)
        self._engine.settle()
        _go_first()
        self._send(wire.Ready(pid=os.getpid(), facts=facts_of(self._engine, key, error)))

    # ---- broker --------------------------------------------------------------------------------------------------
    def _attach(self, message: wire.Attach, run: Run) -> None:
        if not self._broker.open:
            raise broker_gone()
        assert run.slot is not None  # noqa: S101 - a run attaches the slot it was given
        self._broker.attach(message, run.slot.machine.take_channel())

    def _detach(self, message: wire.Detach) -> None:
        self._broker.detach(message)

    def _on_attached(self, message: wire.Attached) -> None:
        run = self._engine.tickets.get(message.ticket)
        if run is not None:
            run.attached(ok=message.ok)

    def _on_kill(self, message: wire.Kill) -> None:
        run = self._engine.tickets.get(message.ticket)
        if run is not None:
            run.protocol()

    def _hear(self) -> None:
        self._broker.drain()

    def _on_broker_end(self) -> None:
        for run in list(self._engine.runs.values()):
            run.refuse(broker_gone())

    # ---- agent ---------------------------------------------------------------------------------------------------
    def _send(self, message: wire.SupervisorToAgent) -> None:
        self._agent.send(message)

    def _on_message(self, message: wire.AgentToSupervisor) -> None:
        try:
            if isinstance(message, wire.Start):
                if not self._broker.open:
                    raise broker_gone()
                self._engine.start(message.id, message.spec)
            elif isinstance(message, wire.Cancel):
                run = self._engine.runs.get(message.id)
                if run is not None:
                    run.cancel()
            elif isinstance(message, wire.Prewarm):
                self._prewarm(message)
            elif isinstance(message, wire.Doctor):
                self._doctor(message.id)
            else:
                self._answer(message.id, self._engine.stats())
        except LockgateError as err:
            self._send(wire.Refused(id=message.id, fault=fault_of(err)))

    def _answer(self, ident: int, data: Any) -> None:
        self._send(wire.Answer(id=ident, data=data))

    def _prewarm(self, message: wire.Prewarm) -> None:
        if not 0 <= message.count <= 1000:
            raise ConfigError(f"{message.count} warm machines were asked for", next_step="ask for 0 to 1000")
        key = self._engine.key(message.rung, message.env)

        def done(error: LockgateError | None) -> None:
            if error is not None:
                self._send(wire.Refused(id=message.id, fault=fault_of(error)))
            else:
                pool = self._engine.pool
                self._answer(message.id, {"warm": pool.warm(key), "weakness": pool.weakness(key)})

        self._engine.when_warm(key, message.count, _PREWARM_SECONDS + 0.1 * message.count, done)

    def _doctor(self, ident: int) -> None:
        from lockgate.supervisor.doctor import Doctor  # noqa: PLC0415 - not needed to serve runs

        Doctor(self._engine, lambda report: self._answer(ident, report)).begin()


def _go_first() -> None:
    """Let the clocks that end hostile code run before it, where we may (root).

    Nice values are per thread (sched(7)): keeper, starter and what they start keep theirs.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)


def _noted(_number: int, _frame: object) -> None:
    """Signals are acted on in the reactor, through the wake-up pipe."""


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lockgate.supervisor", allow_abbrev=False)
    parser.add_argument("--agent-fd", type=int, required=True)
    parser.add_argument("--broker-fd", type=int, required=True)
    parser.add_argument("--settings", default="{}")
    return parser.parse_args(argv)


def _send_failed(agent: socket.socket, error: LockgateError) -> None:
    body = msgspec.json.encode(wire.Failed(fault=fault_of(error)))
    with contextlib.suppress(OSError):
        agent.sendall(frames.HEADER.pack(len(body)) + body)


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the supervisor until its agent is gone."""
    args = _parse(sys.argv[1:] if argv is None else argv)
    die_with_parent()
    agent = socket.socket(fileno=args.agent_fd)
    broker = socket.socket(fileno=args.broker_fd)
    for sock in (agent, broker):
        sock.set_inheritable(False)  # templates are started from here
    try:
        supervisor = Supervisor(decode(args.settings), agent, broker)
    except LockgateError as err:
        _send_failed(agent, err)
        sys.exit(err.exit_code)
    supervisor.run()
    sys.exit(0)
