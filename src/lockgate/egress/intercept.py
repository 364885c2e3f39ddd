"""Tunnels whose TLS is opened here, so that method, path and body can be judged.

Rule 1: the client's handshake ends here with a certificate of the run's own authority; the destination is reached by a
        TLS connection of the gateway's own, verified against the trust store for the host of the CONNECT.
Rule 2: every request is judged anew; nothing is resolved or dialled for a connection whose first request is refused.
Rule 3: the upstream connection belongs to this tunnel alone, and one that broke is made anew from a fresh look-up.
Rule 4: a model vendor is never reached from here: its requests go to the broker, which alone holds the credential.
Rule 5: HTTP/1.1 is the only protocol offered in either direction.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import TYPE_CHECKING, Final

from lockgate.egress.answer import verdict_of
from lockgate.egress.ca import PROTOCOL, Authority
from lockgate.egress.denied import Denied
from lockgate.egress.duplex import Duplex, Tls
from lockgate.egress.exchange import Judged, Requests
from lockgate.egress.http_front import HEAD_SECONDS, Front, Refused, Request
from lockgate.egress.model import ModelRequest
from lockgate.policy.egress import Verdict
from lockgate.policy.egress_endpoint import Intercepted
from lockgate.policy.host import Endpoint, Refusal

if TYPE_CHECKING:
    from lockgate.egress.session import Session

HANDSHAKE_SECONDS: Final = 10.0
UPGRADED_SECONDS: Final = 900.0


class Inside:
    """One opened tunnel.

    Args:
        session: of the connection.
        endpoint: where the CONNECT led. verdict: that allowed it.
        sock: the client's.
        hello: the accepted ClientHello and whatever came with it.

    """

    def __init__(
        self, session: Session, endpoint: Endpoint, verdict: Verdict, sock: socket.socket, hello: bytes
    ) -> None:
        self._session = session
        self._endpoint = endpoint
        self._verdict = verdict
        self._sock = sock
        self._hello = hello
        self._upstream: Tls | None = None

    async def serve(self) -> None:
        """Serve the requests inside until one side is done."""
        session = self._session
        loop = asyncio.get_running_loop()
        run = session.run
        if run.authority is None:
            run.authority = Authority(session.parts.policy.intercepted)
        client = Tls(self._sock, run.authority.context(self._endpoint.host), early=self._hello)
        requests = Requests(client, Front(form="tunnel"))
        try:
            await client.handshake(loop.time() + HANDSHAKE_SECONDS)
            first: float | None = loop.time() + HEAD_SECONDS
            while await self._one(client, requests, first):
                first = None
        except Denied as denied:
            await session.refuse(client, denied, requests.raw)
        except ssl.SSLError:
            failed = Verdict(False, "tls_failed", self._verdict.rule, "the client did not accept our certificate")
            await session.parts.recorder.deny(
                session.who, "intercept", failed, destination=str(self._endpoint), peer=session.peer
            )
        except TimeoutError:
            late = Verdict(False, "head_timeout", self._verdict.rule, "the request did not arrive in time")
            await session.refuse(client, Denied("intercept", late, self._endpoint), requests.raw)
        finally:
            await self._drop()
            await client.close()

    async def _one(self, client: Tls, requests: Requests, first: float | None) -> bool:
        session, endpoint = self._session, self._endpoint
        event = await requests.next(first)
        if event is None:
            return False
        if isinstance(event, Refused):
            raise Denied("intercept", event.verdict, endpoint)
        if not isinstance(event, Request):
            return False
        head = event.head
        asked = Intercepted(
            connect=endpoint,
            sni=endpoint.host if endpoint.host.kind == "name" else None,
            authority=head.value(b"host"),
            method=head.method,
            target=head.target,
            fields=head.fields,
            body=b"",
        )
        verdict, body = await session.judged(requests, head, self._verdict, asked)
        try:
            if session.parts.policy.model(endpoint) is not None:
                return await session.run.model.answer(ModelRequest(endpoint, verdict, head, body), session, client)
            upgrade = bool(head.value(b"upgrade"))
            upstream = await self._reach(fresh=upgrade)
            response = await session.forward(
                Judged(head, body, endpoint, verdict), upstream, client, keep_upstream=True, upgrade=upgrade
            )
        finally:
            session.parts.memory.give(len(body))
        if response.status == 101:
            await self._upgraded(client, upstream)
            return False
        if not response.reusable:
            await self._drop()
        return head.keep_alive and response.body != "close"

    async def _reach(self, *, fresh: bool) -> Tls:
        """Return the upstream connection of this tunnel, new if there is none that can be used."""
        if self._upstream is not None and not fresh and _quiet(self._upstream.sock):
            return self._upstream
        await self._drop()
        session, endpoint = self._session, self._endpoint
        sock = await session.reach(endpoint, self._verdict)
        host = endpoint.host
        upstream = Tls(sock, session.parts.trust.upstream, server_name=host.text.strip("[]"))
        self._upstream = upstream
        try:
            await upstream.handshake(asyncio.get_running_loop().time() + HANDSHAKE_SECONDS)
        except (OSError, TimeoutError):  # ssl.SSLError is an OSError
            await self._drop()
            failed = Refusal("tls_failed", "the destination's certificate or its TLS could not be accepted")
            raise Denied("intercept", verdict_of(failed, self._verdict.rule), endpoint) from None
        if upstream.protocol not in {None, PROTOCOL}:
            await self._drop()
            failed = Refusal("tls_failed", "the destination chose another protocol")
            raise Denied("intercept", verdict_of(failed, self._verdict.rule), endpoint)
        return upstream

    async def _drop(self) -> None:
        if self._upstream is not None:
            upstream, self._upstream = self._upstream, None
            await upstream.close()

    async def _upgraded(self, client: Tls, upstream: Tls) -> None:
        """Pass bytes both ways after a declared upgrade; they are counted and searched, not understood."""
        ways = [
            asyncio.ensure_future(self._one_way(client, upstream, outward=True)),
            asyncio.ensure_future(self._one_way(upstream, client, outward=False)),
        ]
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in done:
                way.result()
        finally:
            for way in ways:
                way.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError, TimeoutError, Denied):
                await asyncio.gather(*ways)

    async def _one_way(self, source: Duplex, sink: Duplex, *, outward: bool) -> None:
        loop = asyncio.get_running_loop()
        while data := await source.receive(loop.time() + UPGRADED_SECONDS):
            if outward:
                self._session.outgoing(self._endpoint, self._verdict, data)
            await sink.send(data, loop.time() + UPGRADED_SECONDS)


def _quiet(sock: socket.socket) -> bool:
    """Whether an idle upstream connection is still there and has said nothing unasked."""
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
