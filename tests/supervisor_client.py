"""A real supervisor process, and the smallest agent and broker that can talk to it. For tests only."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

import msgspec

from lockgate.contract import frames, wire
from lockgate.contract.bounds import Bounds
from lockgate.contract.run import Rung, RunSpec

_decoder = msgspec.json.Decoder(wire.SupervisorToAgent)
_orders = msgspec.json.Decoder(wire.SupervisorToBroker)


class BrokerPeer(threading.Thread):
    """Binds every channel it is given, unless told to refuse; keeps what it was told."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(daemon=True)
        self.sock = sock
        self.attached: dict[str, wire.Attach] = {}
        self.channels: dict[str, socket.socket] = {}
        self.detached: dict[str, wire.Detach] = {}
        self.ok = True
        self.silent = False

    def run(self) -> None:
        while True:
            try:
                raw, fds, _, _ = socket.recv_fds(self.sock, 65536, 4)
            except OSError:
                return
            if not raw:
                return
            message = _orders.decode(raw)
            if isinstance(message, wire.Attach):
                self.attached[message.ticket] = message
                self.channels[message.ticket] = socket.socket(fileno=fds[0])
                if not self.silent:
                    self.send(wire.Attached(ticket=message.ticket, ok=self.ok))
            else:
                self.detached[message.ticket] = message
                self.channels.pop(message.ticket).close()

    def send(self, message: wire.BrokerToSupervisor) -> None:
        with contextlib.suppress(OSError):
            self.sock.send(msgspec.json.encode(message))


class Client:
    """Starts a supervisor; `code` runs something in it and returns its `Finished` or `Refused`."""

    def __init__(self, *, prefix: list[str] | None = None, python: str = sys.executable, **settings: Any) -> None:
        self.agent, agent = socket.socketpair()
        ours, broker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.broker = BrokerPeer(ours)
        settings.setdefault("pool", 1)
        self.process = subprocess.Popen(
            [
                *(prefix or []), python, "-I", "-m", "lockgate.supervisor", "--agent-fd", str(agent.fileno()),
                "--broker-fd", str(broker.fileno()), "--settings", msgspec.json.encode(settings).decode(),
            ],
            env={}, pass_fds=(agent.fileno(), broker.fileno()), stdin=subprocess.DEVNULL,
        )  # fmt: skip
        agent.close()
        broker.close()
        self.broker.start()
        self.frames = frames.Decoder(cap=wire.LINK_BYTES)
        self.inbox: list[wire.SupervisorToAgent] = []
        self.ident = 0
        self.ready = self.receive(60)

    def receive(self, seconds: float = 30) -> Any:
        deadline = time.monotonic() + seconds
        while not self.inbox:
            left = deadline - time.monotonic()
            assert left > 0, "the supervisor did not answer"
            if select.select([self.agent], [], [], left)[0]:
                data = self.agent.recv(1 << 20)
                if not data:
                    raise EOFError
                self.inbox += [_decoder.decode(body) for body in self.frames.feed(data)]
        return self.inbox.pop(0)

    def send(self, message: wire.AgentToSupervisor) -> None:
        self.agent.sendall(frames.encode(msgspec.json.encode(message), cap=wire.LINK_BYTES))

    def next_id(self) -> int:
        self.ident += 1
        return self.ident

    def start(
        self,
        code: str,
        *,
        stream: bool = False,
        env: str | None = None,
        accept: bool = True,
        rung: Rung = "container",
        **bounds: Any,
    ) -> int:
        ident = self.next_id()
        spec = RunSpec(
            ticket=f"t{ident}",
            code=code,
            rung=rung,
            bounds=Bounds(**bounds),
            env=env,
            stream=stream,
            accept_shared_kernel=accept,
        )
        self.send(wire.Start(id=ident, spec=spec))
        return ident

    def finish(self, ident: int, seconds: float = 60) -> Any:
        """Wait for the end of run `ident`; its output is dropped, what comes for others stays in order."""
        kept: list[Any] = []
        deadline = time.monotonic() + seconds
        while True:
            message = self.receive(max(0.1, deadline - time.monotonic()))
            if message.id == ident and not isinstance(message, wire.Output):
                self.inbox = kept + self.inbox
                return message
            if message.id != ident:
                kept.append(message)

    def code(self, code: str, **options: Any) -> Any:
        return self.finish(self.start(code, **options))

    def ask(self, kind: type, **fields: Any) -> Any:
        ident = self.next_id()
        self.send(kind(id=ident, **fields))
        return self.finish(ident)

    def stats(self) -> dict[str, Any]:
        return self.ask(wire.Stats).data

    def quiet(self, seconds: float = 20, warm: int | None = None) -> dict[str, Any]:
        """Wait until nothing dies or grows any more; return the counters."""
        deadline = time.monotonic() + seconds
        while True:
            stats = self.stats()
            if not (stats["dying"] or stats["growing"] or stats["runs"]) and (warm is None or stats["warm"] >= warm):
                return stats
            assert time.monotonic() < deadline, stats
            time.sleep(0.01)

    def close(self, seconds: float = 20) -> int:
        self.agent.close()
        try:
            return self.process.wait(seconds)
        finally:
            self.process.kill()
            self.process.wait()
            self.broker.sock.close()
            for channel in self.broker.channels.values():
                channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def descendants(pid: int) -> set[int]:
    """Return the live processes below `pid`."""
    found: set[int] = set()
    todo = [pid]
    while todo:
        one = todo.pop()
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                children = [int(child) for child in (task / "children").read_bytes().split()]
                found.update(children)
                todo += children
    return found


def groups_of(pid: int) -> list[str]:
    """Return the control-group directories that supervisor `pid` made."""
    found: list[str] = []
    for root, directories, _ in os.walk("/sys/fs/cgroup"):
        found += [os.path.join(root, name) for name in directories if name.startswith(f"lockgate-{pid}-")]
    return found
