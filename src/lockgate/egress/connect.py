"""One CONNECT: admitted, its ClientHello checked, then opened here (`intercept`) or handed to the pump.

Rule 1: where nothing is opened the destination is reached before the client is told that the tunnel stands, so that a
        refusal has an answer; where it is, nothing is reached before the first request in it was judged.
Rule 2: of a tunnel that goes through nothing leaves before its ClientHello named the destination and its row is under
        way; the hello counts towards the budget like every byte behind it.
Rule 3: once the tunnel stands a refusal is a durable row and then a TLS alert: no other form is ours to say it in.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Final

from lockgate.audit.denials import Kind
from lockgate.egress import aio, intercept
from lockgate.egress.answer import ANSWER_SECONDS, ESTABLISHED, verdict_of
from lockgate.egress.client_hello import ALERT, Hello, Reader
from lockgate.egress.denied import LOST, Denied
from lockgate.egress.duplex import Plain
from lockgate.egress.exchange import SEND_SECONDS, Requests
from lockgate.egress.record import Recorder, Who
from lockgate.egress.relay import Ended, Tunnel
from lockgate.policy.egress import Verdict
from lockgate.policy.host import Endpoint, Refusal

if TYPE_CHECKING:
    from lockgate.egress.session import Session


class Connect:
    """One CONNECT that the policy allows.

    Args:
        session: of the connection; told by `given` once the pump has it.
        client: the connection. sock: the socket beneath it.
        endpoint: where it leads. verdict: that allows it.

    """

    def __init__(
        self, session: Session, client: Plain, sock: socket.socket, endpoint: Endpoint, verdict: Verdict
    ) -> None:
        self._session = session
        self._client = client
        self._sock = sock
        self._endpoint = endpoint
        self._verdict = verdict

    async def serve(self, requests: Requests) -> None:
        """Serve the tunnel to its end, or until the pump has it.

        Args:
            requests: that the CONNECT was one of; what came behind its head belongs to the tunnel.

        Raises:
            Denied: it was refused before the client was told that the tunnel stands, or rows cannot be stored.

        """
        session, endpoint, verdict = self._session, self._endpoint, self._verdict
        session.admit(endpoint, verdict, "connect")
        loop = asyncio.get_running_loop()
        if session.parts.policy.rules_for(endpoint) is not None:
            await self._established()
            reader = Reader(endpoint, loop.time(), intercepted=True)
            if await self._hello(reader, requests.rest()):
                await intercept.Inside(session, endpoint, verdict, self._sock, bytes(reader.data)).serve()
            return
        upstream = await session.reach(endpoint, verdict)
        try:
            if not session.parts.recorder.available:
                raise Denied("connect", LOST, endpoint)
            await self._established()
            reader = Reader(endpoint, loop.time())
            if not await self._hello(reader, requests.rest()):
                return
            if not session.parts.recorder.allow(
                session.who, "connect", verdict, "open", destination=str(endpoint), peer=session.peer
            ):
                return  # without its row nothing goes upstream
            refusal = session.run.charge(endpoint.host, len(reader.data))
            if refusal is not None:
                await self._alert("budget", refusal, b"")
                return
            try:
                await aio.send(upstream, bytes(reader.data), loop.time() + SEND_SECONDS)
            except TimeoutError:
                return  # the tunnel stands, so there is no form of ours to say it in
            self._give(upstream, len(reader.data))
        finally:
            if not session.given:
                upstream.close()

    async def _established(self) -> None:
        try:
            await self._client.send(ESTABLISHED, asyncio.get_running_loop().time() + SEND_SECONDS)
        except TimeoutError:
            raise ConnectionError("the client does not read") from None

    async def _hello(self, reader: Reader, early: bytes) -> bool:
        """Read the ClientHello and check it against the destination; False when it was refused."""
        loop = asyncio.get_running_loop()
        found: Hello | Refusal | None = reader.feed(early, loop.time()) if early else None
        while found is None:
            try:
                data = await self._client.receive(reader.deadline)
            except TimeoutError:
                found = reader.tick(reader.deadline)
                continue
            if not data:
                found = Refusal("not_tls", "the tunnel ended before a ClientHello") if reader.data else None
                break
            found = reader.feed(data, loop.time())
        if isinstance(found, Refusal):
            await self._alert("sni", found, bytes(reader.data))
        return isinstance(found, Hello)

    async def _alert(self, kind: Kind, refusal: Refusal, raw: bytes) -> None:
        """Store the denial of a tunnel that already stands, then send TLS alert 49."""
        session = self._session
        stored = await session.parts.recorder.deny(
            session.who, kind, verdict_of(refusal), destination=str(self._endpoint), peer=session.peer, raw=raw
        )
        if stored is not None:
            with contextlib.suppress(OSError, TimeoutError):
                await self._client.send(ALERT, asyncio.get_running_loop().time() + ANSWER_SECONDS)

    def _give(self, upstream: socket.socket, sent: int) -> None:
        """Hand an established tunnel to the pump; its last row follows when it ends."""
        loop = asyncio.get_running_loop()
        session, verdict = self._session, self._verdict
        run, host, destination = session.run, self._endpoint.host, str(self._endpoint)

        def done(ended: Ended) -> None:
            with contextlib.suppress(RuntimeError):  # the gateway is closing: nobody counts any more
                loop.call_soon_threadsafe(closed, ended)

        def closed(ended: Ended) -> None:
            run.drop_tunnel(tunnel)
            run.leave()
            session.parts.recorder.allow(
                session.who,
                "connect",
                verdict,
                "closed",
                destination=destination,
                peer=session.peer,
                bytes_out=ended.sent + sent,
                bytes_in=ended.received,
                cut="" if ended.refusal is None else ended.refusal.reason,
            )
            # A tunnel that stood still is cut and no denial: nobody was refused anything.
            if ended.refusal is not None and ended.refusal.reason != "idle_timeout":
                task = loop.create_task(
                    _row_of_cut(session.parts.recorder, session.who, ended.refusal, destination, session.peer)
                )
                _cuts.add(task)
                task.add_done_callback(_cuts.discard)

        tunnel = Tunnel(self._sock, upstream, lambda count: run.charge(host, count), done)
        session.given = True
        run.hold_tunnel(tunnel)
        session.parts.pump.add(tunnel)


_cuts: Final[set[asyncio.Task[None]]] = set()


async def _row_of_cut(recorder: Recorder, who: Who, refusal: Refusal, destination: str, peer: str) -> None:
    kind: Kind = "budget" if refusal.reason == "byte_budget" else "connect"
    await recorder.deny(who, kind, verdict_of(refusal), destination=destination, peer=peer)
