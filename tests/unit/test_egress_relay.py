"""The pump: every byte once, in order; ends, budgets and stalls (E1)."""

from __future__ import annotations

import hashlib
import os
import queue
import random
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from lockgate.egress.relay import Ended, Limits, Pump, Tunnel
from lockgate.policy.host import Refusal

WAIT = 30.0


def pair(kind: str) -> tuple[socket.socket, socket.socket]:
    """Return (far end, pump's end)."""
    if kind == "unix":
        far, near = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            far = socket.create_connection(listener.getsockname())
            near, _ = listener.accept()
    near.setblocking(False)
    far.settimeout(WAIT)
    return far, near


class Rig:
    """A pump and the tunnels of one test."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.pump = Pump(limits)
        self.ended: queue.Queue[Ended] = queue.Queue()
        self.far: list[socket.socket] = []

    def tunnel(self, kind: str = "tcp", budget: int | None = None) -> tuple[socket.socket, socket.socket, Tunnel]:
        client, near = pair(kind)
        upstream, other = pair("tcp")
        left = [budget]

        def charge(count: int) -> Refusal | None:
            if left[0] is None:
                return None
            if count > left[0]:
                return Refusal("byte_budget", "spent")
            left[0] -= count
            return None

        tunnel = Tunnel(near, other, charge, self.ended.put)
        self.pump.add(tunnel)
        self.far += [client, upstream]
        return client, upstream, tunnel

    def close(self) -> None:
        self.pump.close(WAIT)
        for sock in self.far:
            sock.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def drain(sock: socket.socket) -> bytes:
    out = bytearray()
    while data := sock.recv(65536):
        out += data
    return bytes(out)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_every_byte_once_and_in_order_both_ways(rig: Rig, kind: str) -> None:
    """E1: large transfers in both directions at once, in pieces of all sizes, then the ends."""
    client, upstream, _ = rig.tunnel(kind)
    rng = random.Random(1)
    sums: dict[str, str] = {}
    sizes = {"out": 6_000_000, "in": 9_000_000}

    def write(sock: socket.socket, name: str) -> None:
        digest = hashlib.sha256()
        left = sizes[name]
        while left:
            data = os.urandom(min(left, rng.choice([1, 100, 5000, 65536, 300_000])))
            digest.update(data)
            sock.sendall(data)
            left -= len(data)
        sock.shutdown(socket.SHUT_WR)
        sums[name] = digest.hexdigest()

    got: dict[str, str] = {}

    def read(sock: socket.socket, name: str) -> None:
        got[name] = hashlib.sha256(drain(sock)).hexdigest()

    threads = [
        threading.Thread(target=write, args=(client, "out")),
        threading.Thread(target=write, args=(upstream, "in")),
        threading.Thread(target=read, args=(upstream, "out")),
        threading.Thread(target=read, args=(client, "in")),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()
    assert got == sums
    ended = rig.ended.get(timeout=WAIT)
    assert (ended.sent, ended.received, ended.refusal) == (sizes["out"], sizes["in"], None)


def test_an_end_is_passed_on_and_the_other_way_stays(rig: Rig) -> None:
    """E1: a client that has said everything still gets its answer."""
    client, upstream, _ = rig.tunnel()
    client.sendall(b"question")
    client.shutdown(socket.SHUT_WR)
    assert drain(upstream) == b"question"
    upstream.sendall(b"answer")
    upstream.close()
    assert drain(client) == b"answer"
    assert rig.ended.get(timeout=WAIT).refusal is None


def test_a_budget_stops_bytes_before_they_leave(rig: Rig) -> None:
    """E1: what exceeds the budget never arrives, and the tunnel is cut with its reason."""
    client, upstream, _ = rig.tunnel(budget=100_000)
    client.sendall(b"a" * 100_000)
    got = b""
    while len(got) < 100_000:
        got += upstream.recv(65536)
    client.sendall(b"b")
    ended = rig.ended.get(timeout=WAIT)
    assert ended.refusal is not None
    assert ended.refusal.reason == "byte_budget"
    assert ended.sent == 100_000
    assert drain(upstream) == b"", "bytes beyond the budget arrived"


def test_a_side_that_does_not_read_stops_nobody_else() -> None:
    """E1: its tunnel waits and is cut; another one is as fast as before."""
    rig = Rig(Limits(stall=1.0, half=60.0, idle=60.0))
    try:
        client, upstream, _ = rig.tunnel()
        other, other_up, _ = rig.tunnel()
        upstream.setblocking(False)
        sent = 0
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:  # the far reader never reads: this fills every buffer
            try:
                sent += upstream.send(b"x" * 65536)
            except BlockingIOError:
                if sent and not rig.ended.empty():
                    break
                time.sleep(0.05)
            except OSError:
                break
            other.sendall(b"ping")
            assert other_up.recv(16).startswith(b"ping")
        ended = rig.ended.get(timeout=WAIT)
        assert ended.refusal is not None
        assert ended.refusal.reason == "idle_timeout"
        other.sendall(b"still")
        assert other_up.recv(16).startswith(b"still")
        del client
    finally:
        rig.close()


def test_half_open_and_idle_tunnels_end() -> None:
    """E1: a tunnel whose one side has ended, and one without traffic, are cut in their time."""
    rig = Rig(Limits(stall=60.0, half=1.0, idle=60.0))
    try:
        client, _, _ = rig.tunnel()
        client.shutdown(socket.SHUT_WR)
        ended = rig.ended.get(timeout=WAIT)
        assert ended.refusal is not None
    finally:
        rig.close()
    rig = Rig(Limits(stall=60.0, half=60.0, idle=1.0))
    try:
        rig.tunnel()
        ended = rig.ended.get(timeout=WAIT)
        assert ended.refusal is not None
        assert ended.refusal.reason == "idle_timeout"
    finally:
        rig.close()


def test_what_waits_costs_no_time(rig: Rig) -> None:
    """E1: half-open, blocked and quiet tunnels are waited for, not polled."""
    client, _, _ = rig.tunnel()
    client.shutdown(socket.SHUT_WR)
    _, blocked, _ = rig.tunnel("unix")
    blocked.setblocking(False)
    quiet = 0
    while quiet < 10:  # full, and nobody takes anything out of it
        try:
            blocked.send(b"x" * 65536)
            quiet = 0
        except BlockingIOError:
            quiet += 1
        time.sleep(0.005)
    for _ in range(20):
        rig.tunnel()
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.5
    assert rig.ended.empty()


def test_a_client_that_vanishes_ends_its_tunnel(rig: Rig) -> None:
    """E1: both sockets are closed, whichever side went and however."""
    for kind in ("tcp", "unix"):
        client, upstream, _ = rig.tunnel(kind)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()  # TCP: a reset
        assert upstream.recv(10) == b""
        upstream.close()
        rig.ended.get(timeout=WAIT)
    client, upstream, tunnel = rig.tunnel()
    rig.pump.cut(tunnel, Refusal("canary", "x"))
    assert rig.ended.get(timeout=WAIT).refusal == Refusal("canary", "x")
    assert client.recv(1) == b""
    assert upstream.recv(1) == b""
    rig.pump.cut(tunnel, None)  # once is enough
    assert rig.pump.count == 0


def test_a_thousand_tunnels_leave_nothing(rig: Rig) -> None:
    """E1: each carries bytes while all are held; afterwards no descriptor is left, and quiet ones hold no pipe."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = min(1000, (hard - 300) // 5)
    try:
        before = len(os.listdir("/proc/self/fd"))
        held = [rig.tunnel("unix") for _ in range(count)]
        for number, (client, _, _) in enumerate(held):
            client.sendall(b"%d" % number)
        for number, (_, upstream, _) in enumerate(held):
            assert upstream.recv(16) == b"%d" % number
        assert rig.pump.count == count
        open_now = len(os.listdir("/proc/self/fd"))
        assert open_now - before <= 4 * count + 100, "quiet tunnels hold more than their sockets"
        for client, upstream, _ in held:
            client.close()
            upstream.close()
        for _ in held:
            rig.ended.get(timeout=WAIT)
        rig.far.clear()
        rig.pump.close(WAIT)
        del held
        assert len(os.listdir("/proc/self/fd")) <= before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
