"""One connection of a confined process, from its token to its end.

Rule 1: order of a request: parse, decide, budgets and canaries, judge, resolve, vet, dial, check the peer, row, and
        only then a byte upstream. A refusal at any step sends nothing further out, a name to a nameserver included.
Rule 2: a denial is a durable row first and an answer after it. Where the row cannot be stored there is no answer.
Rule 3: a refused connection is not read any further.
Rule 4: a hit on a canary ends the run before the answer is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from lockgate.audit.denials import Kind
from lockgate.audit.rows import Value
from lockgate.egress import resolver
from lockgate.egress.answer import ANSWER_SECONDS, refusal_answer, verdict_of
from lockgate.egress.ca import Trust
from lockgate.egress.connect import Connect
from lockgate.egress.denied import LOST, Denied
from lockgate.egress.duplex import Duplex, Plain
from lockgate.egress.exchange import Judged, Memory, Requests, exchange
from lockgate.egress.http_front import HEAD_SECONDS, Front, Head, Refused, Request
from lockgate.egress.record import Recorder, Who
from lockgate.egress.relay import Pump
from lockgate.egress.resolver import Exchange, Nameservers
from lockgate.egress.response import BadResponse, Response
from lockgate.egress.run import Run
from lockgate.policy.egress import HTTP_PORT, EgressPolicy, Verdict
from lockgate.policy.egress_endpoint import Intercepted, judge
from lockgate.policy.host import Endpoint, Refusal

Dial = Callable[[Sequence[bytes], int], Awaitable[socket.socket | Refusal]]

_CANARY: Final = Verdict(False, "canary", None, "a planted value was about to leave")
_SEARCHED: Final = 64 * 1024
_SECRETS: Final = re.compile(rb"(?i)auth|cookie|key|token|secret|passw|credential|bearer")


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What the sessions of one gateway share.

    Attributes:
        policy: in force for all runs.
        recorder: writes rows.
        pump: runs established tunnels.
        ask: sends questions to nameservers.
        dial: connects to vetted addresses.
        trust: contexts for intercepted hosts.
        memory: bounds bodies.

    """

    policy: EgressPolicy
    recorder: Recorder
    pump: Pump
    ask: Exchange | Nameservers
    dial: Dial
    trust: Trust
    memory: Memory


class Session:
    """One connection whose run is known.

    Args:
        parts: of the gateway.
        run: whose connection it is.
        sock: non-blocking; owned from here on, by the pump once a tunnel stands.
        peer: credentials of the caller, for rows.

    Attributes:
        given: whether the pump has taken the connection over.

    """

    def __init__(self, parts: Parts, run: Run, sock: socket.socket, peer: str) -> None:
        self.parts = parts
        self.run = run
        self.peer = peer
        self._sock = sock
        self.given = False

    @property
    def who(self) -> Who:
        """For whom the rows are."""
        return self.run.who

    async def serve(self, began: float) -> bool:
        """Serve the connection until it ends or a tunnel stands; True when the pump has taken it over.

        Args:
            began: loop time of the accept; the first head has `HEAD_SECONDS` from then.

        """
        client = Plain(self._sock)
        requests = Requests(client, Front(self.parts.policy.decide))
        first: float | None = began + HEAD_SECONDS
        try:
            while await self._one(client, requests, first):
                first = None
        except Denied as denied:
            await self.refuse(client, denied, requests.raw)
        except TimeoutError:
            late = Verdict(False, "head_timeout", None, "the request did not arrive in time")
            await self.refuse(client, Denied("http", late), requests.raw)
        except OSError:
            pass  # a side went away: there is nobody to answer
        finally:
            if not self.given:
                await client.close()
        return self.given

    async def refuse_connection(self, refusal: Refusal) -> None:
        """Refuse the connection before anything of it was read."""
        client = Plain(self._sock)
        try:
            await self.refuse(client, Denied("budget", verdict_of(refusal)), b"")
        finally:
            await client.close()

    async def refuse(self, client: Duplex, denied: Denied, raw: bytes) -> None:
        """Store the denial, then answer it; nothing is answered when it cannot be stored."""
        if denied.verdict.reason == "canary":
            self.run.kill("canary", self.parts.pump, spare=asyncio.current_task())
        stored = await self.parts.recorder.deny(
            self.who,
            denied.kind,
            denied.verdict,
            destination=None if denied.endpoint is None else str(denied.endpoint),
            peer=self.peer,
            raw=_before_secrets(raw) if denied.endpoint is None else b"",
            **denied.facts,
        )
        if stored is None:
            return
        with contextlib.suppress(OSError, TimeoutError):
            await client.send(refusal_answer(denied.verdict), asyncio.get_running_loop().time() + ANSWER_SECONDS)

    async def _one(self, client: Plain, requests: Requests, first: float | None) -> bool:
        event = await requests.next(first)
        if event is None:
            return False
        if isinstance(event, Refused):
            raise Denied("http" if event.endpoint is None else "connect", event.verdict, event.endpoint)
        if not isinstance(event, Request) or event.verdict is None or event.head.endpoint is None:
            return False
        if event.head.how == "connect":
            await Connect(self, client, self._sock, event.head.endpoint, event.verdict).serve(requests)
            return False
        return await self._plain(client, requests, event.head, event.head.endpoint, event.verdict)

    def admit(self, endpoint: Endpoint, verdict: Verdict, kind: Kind, *parts: bytes) -> None:
        """Take an allowed request from the budgets, look for canaries, write the row that it is only reported.

        Raises:
            Denied: one of them refuses.

        """
        if self.run.planted(endpoint.host.text.encode("ascii"), *parts):
            raise Denied("canary", _CANARY, endpoint)
        refusal = self.run.request(endpoint, verdict)
        if refusal is not None:
            raise Denied("budget", verdict_of(refusal, verdict.rule), endpoint)
        if verdict.reported and not self.parts.recorder.report(
            self.who, kind, verdict, destination=str(endpoint), peer=self.peer
        ):
            raise Denied("connect", LOST, endpoint)

    async def reach(self, endpoint: Endpoint, verdict: Verdict) -> socket.socket:
        """Resolve, vet and dial an allowed destination.

        Raises:
            Denied: it has no usable address, or did not answer, or somebody else did.

        """
        found = await resolver.resolve(endpoint, self.parts.policy, self.parts.ask)
        if isinstance(found, Refusal):
            raise Denied("resolve", verdict_of(found, verdict.rule), endpoint)
        upstream = await self.parts.dial(found, endpoint.port)
        if isinstance(upstream, Refusal):
            raise Denied("dial", verdict_of(upstream, verdict.rule), endpoint)
        return upstream

    def charge(self, endpoint: Endpoint, verdict: Verdict, count: int) -> None:
        """Take bytes that are about to leave from the budget.

        Raises:
            Denied: it is spent.

        """
        refusal = self.run.charge(endpoint.host, count)
        if refusal is not None:
            raise Denied("budget", verdict_of(refusal, verdict.rule), endpoint)

    def open_row(self, kind: Kind, endpoint: Endpoint, verdict: Verdict, **facts: Value) -> None:
        """Send the row of something allowed before its first byte goes out.

        Raises:
            Denied: rows cannot be stored.

        """
        if not self.parts.recorder.allow(
            self.who, kind, verdict, "open", destination=str(endpoint), peer=self.peer, **facts
        ):
            raise Denied(kind, LOST, endpoint)

    # ---- plain HTTP -----------------------------------------------------------------------------------------
    async def _plain(self, client: Plain, requests: Requests, head: Head, endpoint: Endpoint, verdict: Verdict) -> bool:
        asked = Intercepted(
            connect=endpoint, sni=None, authority=head.value(b"host"), method=head.method, target=head.target,
            fields=head.fields, body=b"",
        )  # fmt: skip
        verdict, body = await self.judged(requests, head, verdict, asked)
        try:
            upstream = Plain(await self.reach(endpoint, verdict))
            try:
                response = await self.forward(Judged(head, body, endpoint, verdict), upstream, client)
            finally:
                await upstream.close()
        finally:
            self.parts.memory.give(len(body))
        return head.keep_alive and response.body != "close"

    async def judged(
        self, requests: Requests, head: Head, verdict: Verdict, asked: Intercepted
    ) -> tuple[Verdict, bytes]:
        """Judge one request by its head, read its body, judge both; the caller gives the body's memory back.

        Raises:
            Denied: a rule, a budget or a canary refuses it.

        """
        endpoint = asked.connect
        kind: Kind = "http" if asked.sni is None else "intercept"
        facts: dict[str, Value] = {"method": head.method[:16], "path": _shown_path(head.target)}
        early = judge(self.parts.policy, asked)
        if not early.allow:
            raise Denied(kind, early, endpoint, **facts)
        self.admit(endpoint, verdict, kind, head.target, *_leaving(head))
        body = await requests.body(head, self.parts.memory)
        if isinstance(body, Refused):
            raise Denied(kind, body.verdict, endpoint, **facts)
        if isinstance(body, Refusal):
            raise Denied("budget", verdict_of(body, verdict.rule), endpoint, **facts)
        refused: tuple[Kind, Verdict] | None = None
        final = early
        if await self._searched(body):
            refused = "canary", _CANARY
        elif not (final := judge(self.parts.policy, msgspec.structs.replace(asked, body=body))).allow:
            refused = kind, final
        elif (spent := self.run.charge(endpoint.host, head.size + len(body))) is not None:
            refused = "budget", verdict_of(spent, verdict.rule)
        if refused is not None:
            self.parts.memory.give(len(body))
            raise Denied(refused[0], refused[1], endpoint, **facts)
        return (verdict if final.rule is None else msgspec.structs.replace(verdict, rule=final.rule)), body

    async def _searched(self, body: bytes) -> bool:
        """Whether a canary is in a body; a large one is searched between the turns of others."""
        for at in range(0, len(body), _SEARCHED):
            if self.run.planted(body[at : at + _SEARCHED]):
                return True
            await asyncio.sleep(0)
        return False

    async def forward(
        self,
        request: Judged,
        upstream: Duplex,
        client: Duplex,
        *,
        keep_upstream: bool = False,
        upgrade: bool = False,
    ) -> Response:
        """Send a judged request up and its response down; returns the head of the response.

        Raises:
            Denied: rows cannot be stored, or what came back is no HTTP.
            OSError, TimeoutError: one side broke or stopped.

        """
        head, body, endpoint, verdict = request.head, request.body, request.endpoint, request.verdict
        plain = endpoint.port == HTTP_PORT
        kind: Kind = "http" if plain else "intercept"
        self.open_row(
            kind, endpoint, verdict, method=head.method[:16], path=_shown_path(head.target), bytes_out=len(body)
        )
        authority = endpoint.host.text if endpoint.port == (HTTP_PORT if plain else 443) else str(endpoint)
        try:
            return await exchange(
                request, authority, upstream, client,
                keep=head.keep_alive, keep_upstream=keep_upstream, upgrade=upgrade,
            )  # fmt: skip
        except BadResponse:
            bad = Verdict(False, "dial_failed", verdict.rule, "the destination gave no plain HTTP/1.1 answer")
            raise Denied("dial", bad, endpoint) from None

    def outgoing(self, endpoint: Endpoint, verdict: Verdict, data: bytes) -> None:
        """Search and count bytes that are about to leave after an upgrade.

        Raises:
            Denied: a canary is in them, or the budget is spent.

        """
        if self.run.planted(data):
            raise Denied("canary", _CANARY, endpoint)
        self.charge(endpoint, verdict, len(data))


def _before_secrets(raw: bytes) -> bytes:
    """Return the start of a malformed head, up to where a credential may stand: no row holds one."""
    found = _SECRETS.search(raw)
    return raw if found is None else raw[: found.start()]


def _leaving(head: Head) -> tuple[bytes, ...]:
    """Return the field values that would go upstream."""
    return (head.method.encode("ascii"), *(part for name, value in head.fields for part in (name, value)))


def _shown_path(target: bytes) -> str:
    """Return the path for a row: without the query, as hexadecimal digits where it is not plain."""
    return target.partition(b"?")[0][:200].decode("ascii", "backslashreplace")
