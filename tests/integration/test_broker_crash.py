"""`kill -9` of the broker at any moment: no acknowledged row is lost, writes in flight end as `unknown` (C5)."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker_client import WAIT, Broker, Refused
from lockgate.audit import reader
from lockgate.contract import wire

ROUNDS = 200
SECONDS = 240.0
SCOPE: dict[str, Any] = {"get_order": {}, "refund": {}, "add_note": {}}

_LAUNCHER = """
import json, os, signal, socket, sys
import lockgate.audit.writer, lockgate.broker.process, lockgate.broker.http
sock = socket.socket(fileno=int(sys.argv[1]))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 16)
    if not data:
        os._exit(0)
    module, argv, names, count = json.loads(data)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            sock.close()
            for at in (1, 2):
                os.dup2(fds[-1], at)
            os.environ.clear()
            os.chdir("/")
            for name, fd in zip(names, fds):
                argv += [name, str(fd)]
            status = sys.modules[module].main(argv)
        finally:
            os._exit(status or 0)
    for fd in fds:
        os.close(fd)
    sock.send(str(pid).encode())
"""


class Forked:
    """A process that the launcher forked, with as much of `Popen` as the helper needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return 0 if select.select([self.pidfd], [], [], 0)[0] else None

    def wait(self, seconds: float = WAIT) -> int:
        if not select.select([self.pidfd], [], [], seconds)[0]:
            raise subprocess.TimeoutExpired("forked", seconds)
        return 0

    def send_signal(self, number: int) -> None:
        signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)


class Launcher:
    """Forks brokers and writers from a process that has imported them: 200 of them in the time of 20."""

    def __init__(self) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _LAUNCHER, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )

    def spawn(self, argv: list[str], fds: list[int], log: int) -> Forked:
        """Take the command line of a real start, and fork what it would have executed."""
        module = argv[argv.index("-m") + 1]
        options = argv[argv.index("-m") + 2 :]
        names = [name for name in options[::2] if name.endswith("fd")]
        plain = [
            part
            for name, value in zip(options[::2], options[1::2], strict=True)
            if name not in names
            for part in (name, value)
        ]
        module = {"lockgate.broker": "lockgate.broker.process"}.get(module, module)
        socket.send_fds(self.sock, [json.dumps([module, plain, names, len(fds)]).encode()], [*fds, log])
        return Forked(int(self.sock.recv(100)))

    def close(self) -> None:
        self.sock.close()
        self.process.wait(WAIT)


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    one = Launcher()
    yield one
    one.close()


def call(broker: Broker, run: str, op: str, acknowledged: dict[str, str], **args: Any) -> None:
    answer = broker.start(lambda i: wire.ToolCall(id=i, run=run, op=op, args=msgspec.json.encode(args))).get(
        timeout=WAIT
    )
    if isinstance(answer, wire.CallReply) and answer.reason is None:
        acknowledged[answer.audit_id] = op


def one_round(base: Path, launcher: Launcher, number: int, chance: random.Random) -> dict[str, str]:
    """Start, call from three threads and through a channel, kill at a random moment; returns acknowledged rows."""
    acknowledged: dict[str, str] = {}
    broker = Broker(base, spawn=launcher.spawn)
    assert isinstance(broker.ready, wire.Ready), broker.ready
    run = broker.open_run(SCOPE)
    channel = broker.attach(run.ticket) if number % 2 else None

    def tools(lane: int) -> None:
        try:
            for count in range(100):
                order = f"ord_{number * 1000 + lane * 100 + count}"
                call(broker, run.run, "refund", acknowledged, order_id=order, amount=1)
                call(broker, run.run, "get_order", acknowledged, order_id=order)
                if count % 3 == 0:
                    call(broker, run.run, "add_note", acknowledged, text="note")
        except OSError:
            return

    def code() -> None:
        try:
            for count in range(1000):
                channel.call("get_order", order_id=f"ord_{count}")
                channel.call("refund", order_id=f"ord_{number * 1000 + 900 + count % 100}", amount=1)
        except (OSError, AssertionError):
            return

    threads = [threading.Thread(target=tools, args=[lane]) for lane in range(3)]
    if channel is not None:
        threads.append(threading.Thread(target=code))
    for thread in threads:
        thread.start()
    time.sleep(chance.random() ** 2 * 0.1)
    broker.kill()
    if channel is not None:
        channel.sock.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(WAIT)
    assert not any(thread.is_alive() for thread in threads)
    for one in (broker.process, broker.writer):
        os.close(one.pidfd)
    return acknowledged


def test_kill_9_two_hundred_times(tmp_path: Path, launcher: Launcher) -> None:
    chance = random.Random(9)
    acknowledged: dict[str, str] = {}
    began = time.monotonic()
    rounds = 0
    while rounds < ROUNDS and time.monotonic() - began < SECONDS:
        got = one_round(tmp_path, launcher, rounds, chance)
        rounds += 1
        stored = {row.id: row for row in reader.tail(str(tmp_path / "audit.db"), 3000)}
        assert set(got) <= set(stored), f"round {rounds}: acknowledged rows are gone"
        acknowledged |= got
    assert rounds == ROUNDS, f"only {rounds} rounds fitted into {SECONDS} s"

    last = Broker(tmp_path, spawn=launcher.spawn)  # a writer that starts closes what none could close before
    assert isinstance(last.ready, wire.Ready)
    last.close()
    rows = list(reader.tail(str(tmp_path / "audit.db"), 10_000_000))
    report = reader.verify(str(tmp_path / "audit.db"))
    assert report.ok, report
    assert set(acknowledged) <= {row.id for row in rows}

    writes = {row.id: row for row in rows if row.phase == "intent" and row.effect == "write"}
    ends: dict[str, list[str]] = {ident: [] for ident in writes}
    for row in rows:
        if row.ref in ends and row.phase in {"outcome", "unknown"} and row.status != "replayed":
            ends[row.ref].append(row.phase)
    assert {tuple(phases) for phases in ends.values()} == {("outcome",), ("unknown",)}, Counter(map(str, ends.values()))

    # No effect without its intent, none twice: what the functions noted is covered by the rows.
    ran = [line for line in (tmp_path / "ran.log").read_text().splitlines() if line.startswith("refund ")]
    assert len(ran) == len(set(ran))
    assert len(ran) <= len([row for row in writes.values() if row.operation == "refund"])
    counts = Counter(phases[0] for phases in ends.values())
    assert counts["unknown"] >= 10, "the kills missed every write in flight"
    assert counts["outcome"] >= 100
    assert len(acknowledged) >= 100


def test_a_write_in_flight_when_the_broker_died_is_answered_unknown_afterwards(tmp_path: Path) -> None:
    """After the restart the same request is neither repeated nor denied: its outcome is unknown."""
    broker = Broker(tmp_path)
    run = broker.open_run({"hang_write": {}})
    broker.start(lambda i: wire.ToolCall(id=i, run=run.run, op="hang_write", args=b'{"order_id":"ord_1","amount":1}'))
    deadline = time.monotonic() + WAIT
    while "hang_write" not in broker.ran() and time.monotonic() < deadline:
        time.sleep(0.005)
    broker.kill()
    again = Broker(tmp_path)
    try:
        fresh = again.open_run({"hang_write": {}})
        assert again.tool(fresh.run, "hang_write", order_id="ord_1", amount=1).reason == "outcome_unknown"
        assert again.ran() == ["hang_write"]
        [unknown] = again.rows(phase="unknown")
        assert (unknown.run, unknown.user, unknown.operation) == (run.run, "u1", "hang_write")
    finally:
        again.close()


def test_a_key_is_equal_after_a_restart(tmp_path: Path) -> None:
    """Report 42: the stored result answers the repeat in another process."""
    keys: list[str] = []
    for _ in range(2):
        broker = Broker(tmp_path)
        run = broker.open_run({"refund": {}})
        keys.append(msgspec.json.decode(broker.tool(run.run, "refund", order_id="ord_1", amount=1).ok)["key"])
        broker.close()
    assert keys[0] == keys[1]
    assert (tmp_path / "ran.log").read_text() == "refund t1 ord_1 1\n"


def test_without_the_audit_writer_nothing_runs(tmp_path: Path) -> None:
    """No audit, no call: tools, code, new runs and new channels are refused with a typed answer, and nothing hangs."""
    broker = Broker(tmp_path)
    try:
        run = broker.open_run({"refund": {}, "get_order": {}})
        channel = broker.attach(run.ticket)
        more = broker.ticket(run.run)
        assert channel.reason("get_order", order_id="ord_1") == ""
        broker.writer.kill()
        broker.writer.wait(WAIT)
        began = time.monotonic()
        assert broker.tool(run.run, "refund", order_id="ord_1", amount=1).reason == "unavailable"
        assert broker.tool(run.run, "get_order", order_id="ord_1").reason == "unavailable"
        assert channel.reason("refund", order_id="ord_2", amount=1) == "unavailable"
        assert channel.reason("nothing_of_ours") == "unavailable"
        with pytest.raises(Refused) as caught:
            broker.open_run({})
        assert caught.value.fault.code == "audit_unavailable"
        ours, theirs = socket.socketpair()
        with ours, theirs:
            assert not broker.attach_with(more, [theirs.fileno()])
        broker.detach(run.ticket)
        assert time.monotonic() - began < 10
        assert broker.ran() == []
    finally:
        broker.close()


def test_the_broker_ends_with_its_agent(tmp_path: Path) -> None:
    broker = Broker(tmp_path)
    run = broker.open_run({"hang_write": {}, "get_order": {}})
    channel = broker.attach(run.ticket)
    broker.start(lambda i: wire.ToolCall(id=i, run=run.run, op="hang_write", args=b'{"order_id":"ord_1","amount":1}'))
    deadline = time.monotonic() + WAIT
    while "hang_write" not in broker.ran() and time.monotonic() < deadline:
        time.sleep(0.005)
    began = time.monotonic()
    broker.close()  # the write in flight gets its time, and its row
    assert time.monotonic() - began < 20
    assert channel.read() is None
    rows = list(reader.tail(str(tmp_path / "audit.db"), 1000))
    assert [row.phase for row in rows if row.operation == "hang_write"] == ["intent", "unknown"]
    assert [row.status for row in rows if row.phase == "run" and row.operation is None] == ["opened", "closed"]
