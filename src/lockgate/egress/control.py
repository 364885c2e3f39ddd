"""The control socket: opens runs, takes rows of what is refused outside the gateway, says when a run must end.

Rule 1: one connection is one run. When it closes, for whatever reason, the run ends: token void, connections cut.
Rule 2: a denial that is sent here is durable before its answer is written.
Rule 3: lines are bounded, answered in order, and read one at a time; a line that is no request ends the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Final, Literal

import msgspec

from lockgate.audit.denials import Kind
from lockgate.egress import aio
from lockgate.egress.gateway import Gateway
from lockgate.egress.model import BrokerLink
from lockgate.egress.record import NOBODY, Who
from lockgate.egress.run import Run
from lockgate.policy.addresses import METADATA_NAMES
from lockgate.policy.egress import Verdict
from lockgate.policy.egress_reasons import SENTENCES, EgressReason
from lockgate.policy.host import Endpoint, Host, Refusal

LINE_BYTES: Final = 64 * 1024
_FOREVER: Final = 10 * 365 * 86400.0
_SEND_SECONDS: Final = 10.0
_BACKLOG_CONNECTIONS: Final = 256
_PEERCRED: Final = struct.Struct("3i")
_encode: Final = msgspec.json.Encoder().encode


class Open(msgspec.Struct, frozen=True, tag="open", tag_field="op", forbid_unknown_fields=True):
    """Begin the run of this connection."""

    user: str
    agent: str
    run: str
    tool: str = ""
    tenant: str = ""
    canaries: tuple[str, ...] = ()


class DeniedRow(msgspec.Struct, frozen=True, tag="denied", tag_field="op", forbid_unknown_fields=True):
    """Record what was refused outside: a DNS question, a packet."""

    kind: Kind
    reason: EgressReason
    rule: str | None = None
    destination: str | None = None
    raw_hex: str = ""
    report: bool = False
    more: dict[str, str] = {}


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `Open`; see `client.Opened`."""

    ok: Literal[True] = True
    token: str
    policy: str
    policy_hash: str
    mode: str
    data: str
    ca_pem: str | None


_requests: Final = msgspec.json.Decoder(Open | DeniedRow)


class Control:
    """Serves the control socket.

    Args:
        gateway: where runs are opened.
        data: path of the data socket, told to launchers.
        uids: users that may open runs; empty = whoever the file's mode lets connect.

    """

    def __init__(self, gateway: Gateway, data: str, uids: frozenset[int] = frozenset()) -> None:
        self._gateway = gateway
        self._data = data
        self._uids = uids
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self, listener: socket.socket) -> None:
        """Begin to accept on a listening unix socket; owned from here on."""
        listener.setblocking(False)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)

    def adopt(self, sock: socket.socket) -> None:
        """Serve a connected socket that was inherited."""
        sock.setblocking(False)
        task = asyncio.get_running_loop().create_task(self._serve(sock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop accepting and end all connections; idempotent."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)

    def _accept(self) -> None:
        if self._listener is None:
            return
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            uid = _PEERCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))[1]
            if (self._uids and uid not in self._uids) or len(self._tasks) >= _BACKLOG_CONNECTIONS:
                sock.close()
                return
            self.adopt(sock)

    async def _serve(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        pid, uid, _ = _PEERCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))
        link = _Link(sock, f"{pid}/{uid}")
        buffer = bytearray()
        try:
            while True:
                end = buffer.find(b"\n")
                if end < 0:
                    if len(buffer) > LINE_BYTES:
                        return
                    data = await link.receive(loop.time() + _FOREVER)
                    if not data:
                        return
                    buffer += data
                    continue
                line = bytes(buffer[:end])
                del buffer[: end + 1]
                if not await self._answer(link, line):
                    return
        except (OSError, TimeoutError):
            pass
        finally:
            if link.run is not None:
                self._gateway.close_run(link.run)
            for task in list(link.events):
                task.cancel()
            link.close()

    async def _answer(self, link: _Link, line: bytes) -> bool:
        try:
            asked = _requests.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            await link.send(_failed("this is no request of the control socket", "use lockgate.egress.client"))
            return False
        if isinstance(asked, Open):
            await link.send(self._open(link, asked))
            return True
        await link.send(await self._deny(link, asked))
        return True

    def _open(self, link: _Link, asked: Open) -> bytes:
        if link.run is not None:
            return _failed("this connection has a run already", "open another connection for another run")
        if not (asked.user and asked.agent and asked.run):
            return _failed("a run has a user, an agent and a name", "give all three")
        who = Who(asked.user, asked.agent, asked.run, asked.tool, asked.tenant)
        broker = link.take_broker()
        model = None if broker is None else BrokerLink(broker)
        link.run, token = self._gateway.open_run(who, asked.canaries, link.killed, model)
        policy = self._gateway.policy
        return _encode(
            Opened(
                token=token,
                policy=_encode(policy.spec).decode(),
                policy_hash=policy.hash,
                mode=policy.mode,
                data=self._data,
                ca_pem=self._gateway.authority(link.run),
            )
        )

    async def _deny(self, link: _Link, asked: DeniedRow) -> bytes:
        try:
            raw = bytes.fromhex(asked.raw_hex)
        except ValueError:
            raw = b""
        who = NOBODY if link.run is None else link.run.who
        if asked.reason not in SENTENCES:
            return _failed("the reason is not of the closed list", "use lockgate.policy.egress_reasons")
        recorder = self._gateway.recorder
        destination = _canonical(asked.destination)
        metadata = (destination or "").partition(":")[0] in METADATA_NAMES
        verdict = Verdict(False, asked.reason, asked.rule, metadata=metadata)
        more = {name[:32]: value[:256] for name, value in list(asked.more.items())[:8] if name not in _TAKEN}
        if asked.report:
            sent = recorder.report(who, asked.kind, verdict, destination=destination, peer=link.peer, **more)
            stored = "reported" if sent else None
        else:
            stored = await recorder.deny(
                who, asked.kind, verdict, destination=destination, peer=link.peer, raw=raw, **more
            )
        if stored is None:
            return _failed("the row could not be stored", "answer nothing; look at the audit file's disk")
        if asked.reason == "canary" and link.run is not None:
            self._gateway.kill_run(link.run, "canary")
        return _encode({"ok": True, "audit_id": stored})


_TAKEN: Final = frozenset(("kind", "verdict", "destination", "peer", "raw", "who", "self", "reported", "metadata"))


class _Link:
    """One control connection."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.peer = peer
        self.run: Run | None = None
        self.events: set[asyncio.Task[None]] = set()
        self._sock = sock
        self._broker = -1
        self._lock = asyncio.Lock()

    async def receive(self, deadline: float) -> bytes:
        """Return what is there; a descriptor that came along is kept: the link to the broker."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, aio.READ_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                await aio.ready(self._sock, deadline)
                continue
            for fd in fds:
                if self._broker >= 0:
                    socket.close(self._broker)
                self._broker = fd
            return data

    def take_broker(self) -> socket.socket | None:
        """Return the link to the broker that came along, if it is a connected stream."""
        if self._broker < 0:
            return None
        found, self._broker = socket.socket(fileno=self._broker), -1
        if found.family == socket.AF_UNIX and found.type == socket.SOCK_STREAM:
            return found
        found.close()
        return None

    def close(self) -> None:
        """Let go of everything."""
        if self._broker >= 0:
            socket.close(self._broker)
            self._broker = -1
        self._sock.close()

    async def send(self, line: bytes) -> None:
        async with self._lock:
            await aio.send(self._sock, line + b"\n", asyncio.get_running_loop().time() + _SEND_SECONDS)

    def killed(self, reason: str) -> None:
        """Tell the launcher that its run was killed."""
        task = asyncio.get_running_loop().create_task(self._tell(reason))
        self.events.add(task)
        task.add_done_callback(self.events.discard)

    async def _tell(self, reason: str) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            await self.send(_encode({"event": "kill", "reason": reason}))


def _failed(error: str, next_step: str) -> bytes:
    return _encode({"ok": False, "error": error, "next_step": next_step})


def _canonical(text: str | None) -> str | None:
    """Return a destination only if it is one: rows hold no free text of the other side."""
    if text is None:
        return None
    raw = text.encode("ascii", "replace")
    endpoint = Endpoint.parse(raw)
    if not isinstance(endpoint, Refusal):
        return str(endpoint)
    host = Host.parse(raw)
    return None if isinstance(host, Refusal) else host.text
