"""Clients and destinations that are slow, half-open or never read: cut, without starving anybody (E1).

The gateway's own code, in this process, with its waits shortened and one destination that the test plays.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from egress_client import connect, get, hello, reason
from lockgate.audit.rows import Row
from lockgate.contract.errors import AuditUnavailable
from lockgate.egress import client_hello, exchange, session
from lockgate.egress import gateway as gateways
from lockgate.egress.gateway import Gateway
from lockgate.egress.preface import preface
from lockgate.egress.record import Who
from lockgate.egress.relay import Limits
from lockgate.egress.run import Run
from lockgate.policy.egress import EgressPolicy
from lockgate.policy.host import Refusal

WAIT = 60.0
SHORT = 2.0  # long enough for a machine that is busy with other things, short enough to wait for
POLICY = """[egress]
allow = ["api.allowed.example:443", "plain.example:80"]
[egress.limits]
connections = 40
requests = 100000
"""


class Rows:
    """Keeps rows; can be made to fail."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.fails = False

    @property
    def available(self) -> bool:
        return not self.fails

    def append(self, row: Row) -> str:
        if self.fails:
            raise AuditUnavailable("full", next_step="free space")
        self.rows.append(row)
        return f"test-{len(self.rows)}"

    commit = append

    def reasons(self, verdict: str = "deny") -> list[str | None]:
        return [row.reason for row in self.rows if row.verdict == verdict]


class Rig:
    """One gateway, one run, one destination."""

    def __init__(self, folder: str, destination: Any, **options: Any) -> None:
        self.rows = Rows()
        self.destination = destination
        self.asked: list[bytes] = []
        self.dialled = 0
        self.upstream: list[socket.socket] = []
        self.gateway = Gateway(
            EgressPolicy.load(options.pop("policy", POLICY)), self.rows, ask=self._ask, dial=self._dial, **options
        )
        self.run: Run
        self.run, self.token = self.gateway.open_run(Who("u1", "atlas", "r1"))
        self.path = str(Path(folder) / "data")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.path)
        listener.listen(512)
        self.gateway.listen(listener)

    async def _ask(self, query: bytes, tcp: bool) -> bytes | None:
        self.asked.append(query)
        tail = b"\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4" + socket.inet_aton("93.184.216.34")
        wanted = query[-4:-2] == b"\0\1"
        return query[:2] + b"\x84\0\0\1\0" + (b"\1" if wanted else b"\0") + b"\0" * 4 + query[12:] + tail * wanted

    async def _dial(self, addresses: Any, port: int) -> socket.socket | Refusal:
        self.dialled += 1
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = socket.create_connection(listener.getsockname())
            far, _ = listener.accept()
        near.setblocking(False)
        far.setblocking(False)
        self.upstream.append(far)
        if self.destination is not None:
            task = asyncio.get_running_loop().create_task(self.destination(far))
            self.gateway._tasks.add(task)
            task.add_done_callback(self.gateway._tasks.discard)
        return near

    async def dial(self, first: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(self.path)
        writer.write(preface(self.token) + first)
        return reader, writer

    async def ask(self, raw: bytes) -> bytes:
        reader, writer = await self.dial(raw)
        try:
            return await asyncio.wait_for(_all(reader), WAIT)
        finally:
            writer.close()

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = asyncio.get_running_loop().time() + WAIT
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, self.rows.rows
            await asyncio.sleep(0.02)


async def _all(reader: asyncio.StreamReader) -> bytes:
    out = b""
    try:
        while data := await reader.read(65536):
            out += data
    except ConnectionResetError:
        pass
    return out


async def _answers(sock: socket.socket) -> None:
    """A destination that answers each request with two bytes."""
    loop = asyncio.get_running_loop()
    while await loop.sock_recv(sock, 65536):
        await loop.sock_sendall(sock, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
    sock.close()


def scene(test: Callable[[Rig], Awaitable[None]], destination: Any = _answers, **options: Any) -> Rig:
    """Run one test against a fresh gateway; no descriptor may be left."""
    kept: list[Rig] = []

    async def play() -> None:
        with tempfile.TemporaryDirectory() as folder:
            rig = Rig(folder, destination, **options)
            kept.append(rig)
            try:
                await asyncio.wait_for(test(rig), 100)
            finally:
                await rig.gateway.close()
                for sock in rig.upstream:
                    sock.close()

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(play())
    assert len(os.listdir("/proc/self/fd")) <= before, "a descriptor is left"
    return kept[-1]


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    """Make once what is made once, so that `scene` can count."""

    async def nothing(rig: Rig) -> None:
        assert reason(await rig.ask(connect("evil.test"))) == "not_allowed"

    with contextlib.suppress(AssertionError):
        scene(nothing)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "HEAD_SECONDS", SHORT)
    monkeypatch.setattr(exchange, "HEAD_SECONDS", SHORT)
    monkeypatch.setattr(exchange, "KEEP_SECONDS", SHORT)
    monkeypatch.setattr(exchange, "BODY_SECONDS", SHORT)
    monkeypatch.setattr(exchange, "RESPONSE_SECONDS", SHORT)
    monkeypatch.setattr(exchange, "SEND_SECONDS", SHORT)
    monkeypatch.setattr(client_hello, "HELLO_SECONDS", SHORT)
    monkeypatch.setattr(gateways, "PREFACE_SECONDS", SHORT)


def test_slow_heads_are_cut_and_others_served() -> None:
    """E1: thirty clients that drip their heads hold nobody up, and each ends with a row and an answer."""

    async def test(rig: Rig) -> None:
        loop = asyncio.get_running_loop()
        slow = [socket.socket(socket.AF_UNIX) for _ in range(30)]
        for sock in slow:
            sock.setblocking(False)
            await loop.sock_connect(sock, rig.path)
            await loop.sock_sendall(sock, preface(rig.token) + b"GET http://plain.example/ HTTP/1.1\r\nHo")

        async def drip() -> None:
            while True:
                for sock in slow:
                    with contextlib.suppress(OSError):
                        sock.send(b"s")
                await asyncio.sleep(0.1)

        dripping = asyncio.ensure_future(drip())
        for _ in range(5):
            assert b"hi" in await rig.ask(get("http://plain.example/", "Connection: close"))
        for sock in slow:
            assert reason(await asyncio.wait_for(loop.sock_recv(sock, 65536), WAIT)) == "head_timeout"
        dripping.cancel()
        for sock in slow:
            sock.close()
        assert rig.rows.reasons().count("head_timeout") == 30

    scene(test)


def test_slow_hellos_and_slow_bodies_are_cut() -> None:
    """E1: a ClientHello one byte at a time, a body that never ends, a body that is announced and never sent."""

    async def test(rig: Rig) -> None:
        reader, writer = await rig.dial(connect("api.allowed.example"))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        for byte in hello("api.allowed.example")[:8]:
            writer.write(bytes((byte,)))
            await asyncio.sleep(0.05)
        assert await asyncio.wait_for(_all(reader), WAIT) == b"\x15\x03\x03\x00\x02\x02\x31"
        writer.close()
        for body in (b"", b"abc"):
            answer = await rig.ask(get("http://plain.example/", "Content-Length: 100", method="POST") + body)
            assert reason(answer) == "head_timeout"
        assert rig.rows.reasons() == ["sni_timeout", "head_timeout", "head_timeout"]
        assert rig.dialled == 1, "a body that never came was sent somewhere"

    scene(test)


def test_silent_callers_and_kept_connections_end() -> None:
    """E1: no preface, half a preface, nothing behind it, nothing more on a kept connection."""

    async def test(rig: Rig) -> None:
        for first in (b"", b"LGE1 abc"):
            reader, writer = await asyncio.open_unix_connection(rig.path)
            writer.write(first)
            assert await asyncio.wait_for(_all(reader), WAIT) == b""
            writer.close()
        reader, writer = await rig.dial()
        assert await asyncio.wait_for(_all(reader), WAIT) == b""
        writer.close()
        reader, writer = await rig.dial(get("http://plain.example/"))
        assert (await asyncio.wait_for(_all(reader), WAIT)).endswith(b"hi")
        writer.close()
        await rig.until(lambda: rig.gateway.count == 0)

    scene(test)


def test_a_destination_that_never_answers_ends_its_request() -> None:
    """E1: silence after the request, half a head, half a body."""

    async def silent(sock: socket.socket) -> None:
        await asyncio.get_running_loop().sock_recv(sock, 65536)

    async def half_body(sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_recv(sock, 65536)
        await loop.sock_sendall(sock, b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
        sock.close()

    async def stalls(sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_recv(sock, 65536)
        await loop.sock_sendall(sock, b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")

    async def nothing(rig: Rig) -> None:
        answer = await rig.ask(get("http://plain.example/"))
        assert reason(answer) == "dial_failed"
        assert answer.startswith(b"HTTP/1.1 502 ")

    async def cut(rig: Rig) -> None:
        answer = await rig.ask(get("http://plain.example/"))
        assert answer.endswith(b"\r\n\r\nhalf"), "something of ours stands in the middle of an answer"
        assert rig.rows.reasons() == []

    scene(nothing, silent)
    scene(cut, half_body)
    scene(cut, stalls)


def test_a_client_that_never_reads_is_cut() -> None:
    """E1: a plain answer and a tunnel whose client takes nothing; another client is served meanwhile."""

    async def floods(sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        first = await loop.sock_recv(sock, 65536)
        if first.startswith(b"GET /small"):
            await loop.sock_sendall(sock, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
            return
        try:
            await loop.sock_sendall(sock, b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n")
            while True:
                await loop.sock_sendall(sock, b"x" * 65536)
        except OSError:
            sock.close()

    async def test(rig: Rig) -> None:
        plain, never = await rig.dial(get("http://plain.example/"))
        tunnel_reader, tunnel = await rig.dial(connect("api.allowed.example"))
        await tunnel_reader.readuntil(b"\r\n\r\n")
        tunnel.write(hello("api.allowed.example"))
        plain._transport.pause_reading()  # type: ignore[attr-defined]
        tunnel_reader._transport.pause_reading()  # type: ignore[attr-defined]
        assert b"hi" in await rig.ask(get("http://plain.example/small", "Connection: close"))
        await rig.until(lambda: rig.gateway.count <= len(rig.upstream))
        await rig.until(lambda: any(row.detail.get("cut") == "idle_timeout" for row in rig.rows.rows))
        assert rig.rows.reasons() == []
        never.transport.abort()
        tunnel.transport.abort()

    scene(test, floods, limits=Limits(stall=1.0, half=1.0, idle=30.0))


def test_the_connection_budget_is_the_runs_own() -> None:
    """E1: the forty-first connection of one run is refused with its row; another run is not affected."""

    async def test(rig: Rig) -> None:
        held = [await rig.dial(connect("api.allowed.example")) for _ in range(40)]
        for reader, _ in held:
            await reader.readuntil(b"\r\n\r\n")
        assert reason(await rig.ask(connect("api.allowed.example"))) == "connection_budget"
        other, token = rig.gateway.open_run(Who("u2", "other", "r2"))
        reader, writer = await asyncio.open_unix_connection(rig.path)
        writer.write(preface(token) + get("http://plain.example/", "Connection: close"))
        assert b"hi" in await asyncio.wait_for(_all(reader), WAIT)
        writer.close()
        rig.gateway.close_run(other)
        for _, writer in held:
            writer.close()
        await rig.until(lambda: rig.gateway.count <= 40)

    scene(test)


def test_without_rows_nothing_leaves() -> None:
    """E4: a store that takes no rows: no answer to a denial, no byte to a destination."""

    async def test(rig: Rig) -> None:
        rig.rows.fails = True
        assert await rig.ask(connect("evil.test")) == b""
        assert await rig.ask(get("http://plain.example/")) == b""
        assert await rig.ask(connect("api.allowed.example")) == b""
        for sock in rig.upstream:
            with contextlib.suppress(OSError):
                assert sock.recv(1) == b"", "a byte went out without a row"

    scene(test, None)


def test_thousands_of_connections_leave_nothing() -> None:
    """E1: refused, malformed, plain, abandoned and tunnelled ones; `scene` counts the descriptors."""

    async def test(rig: Rig) -> None:
        async def one(number: int) -> None:
            kind = number % 5
            if kind == 0:
                assert reason(await rig.ask(connect("evil.test"))) == "not_allowed"
            elif kind == 1:
                assert reason(await rig.ask(b"\n\n")) == "bad_request"
            elif kind == 2:
                assert b"hi" in await rig.ask(get("http://plain.example/", "Connection: close"))
            elif kind == 3:
                _, writer = await rig.dial(b"CONNECT api")
                writer.transport.abort()
            else:
                reader, writer = await rig.dial(connect("api.allowed.example"))
                await reader.readuntil(b"\r\n\r\n")
                writer.write(hello("api.allowed.example"))
                await reader.read(16)
                writer.close()

        for batch in range(40):
            await asyncio.gather(*(one(batch * 20 + number) for number in range(20)))
        await rig.until(lambda: rig.gateway._pump.count == 0)

    scene(test)
