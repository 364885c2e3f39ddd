"""Where intercepted requests to a model vendor go: to the broker, as a call of the run.

Rule 1: the gateway holds no credential and opens no connection to the vendor. The broker's operation does, after its
        own authorize(), with a key that is leased for that call.
Rule 2: the link was handed over when the run was opened: whoever holds its other end calls as that run and as no other.
        Without a link there is nobody who may call, and the request is refused; it is never sent on as it is.
Rule 3: what the broker denied is a denial here, too; why, stands in its own row.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from lockgate.egress import aio
from lockgate.egress.bridge import FRAME_BYTES, Answer, Question
from lockgate.egress.denied import Denied
from lockgate.egress.duplex import Duplex
from lockgate.egress.http_front import Head
from lockgate.policy.egress import Verdict
from lockgate.policy.egress_reasons import EgressReason
from lockgate.policy.host import Endpoint
from lockgate.policy.model_grammar import Refused
from lockgate.policy.model_rules import Api, call_args

if TYPE_CHECKING:
    from lockgate.egress.session import Session

CALL_SECONDS: Final = 300.0
SEND_SECONDS: Final = 60.0
OPERATIONS: Final[dict[Api, str]] = {"anthropic": "anthropic_messages", "openai": "openai_chat"}
STREAM: Final = "model_stream"
_FOREVER: Final = 10 * 365 * 86400.0
_MOST_CALLS: Final = 64
_UNKNOWN: Final = "no broker link names the run that calls"


class ModelRequest(msgspec.Struct, frozen=True):
    """One judged request to a model vendor."""

    endpoint: Endpoint
    verdict: Verdict
    head: Head
    body: bytes


class ModelLink(Protocol):
    """Answers one judged request."""

    async def answer(self, asked: ModelRequest, session: Session, client: Duplex) -> bool:
        """Write the whole response to `client`; returns whether another request may follow.

        Raises:
            Denied: the call is refused.

        """
        ...

    def close(self) -> None:
        """Let go of the link; idempotent."""
        ...


class NoBroker:
    """The link of a run that was opened without one."""

    async def answer(self, asked: ModelRequest, session: Session, client: Duplex) -> bool:
        """Refuse: there is no identity to call with.

        Raises:
            Denied: always.

        """
        del session, client
        refusal = Verdict(False, "caller_unauthenticated", asked.verdict.rule, _UNKNOWN)
        raise Denied("intercept", refusal, asked.endpoint)

    def close(self) -> None:
        """Do nothing."""


class BrokerLink:
    """Calls the broker as one run, over a link that its launcher handed over.

    Args:
        sock: connected; owned from here on.

    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._last = 0
        self._sending = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None

    async def answer(self, asked: ModelRequest, session: Session, client: Duplex) -> bool:
        """Make the call, write its result as the vendor would; streams come as server-sent events.

        Raises:
            Denied: the broker refused, or could not do it.
            ConnectionError: a stream broke after it had begun.

        """
        rules = session.parts.policy.rules_for(asked.endpoint)
        api: Api = "anthropic" if rules is None or rules.model is None else rules.model
        operation = OPERATIONS[api] if rules is None or rules.operation is None else rules.operation
        try:
            args = call_args(api, asked.body, asked.head.fields)
        except Refused as refused:
            verdict = Verdict(False, "bad_request", asked.verdict.rule, refused.where)
            raise Denied("intercept", verdict, asked.endpoint) from None
        session.open_row("intercept", asked.endpoint, asked.verdict, operation=operation, bytes_out=len(asked.body))
        found = await self._result(asked, operation, args)
        loop = asyncio.get_running_loop()
        keep = asked.head.keep_alive
        ending = b"connection: " + (b"keep-alive" if keep else b"close") + b"\r\n\r\n"
        if not found["stream"] and not found["events"]:
            body = str(found["body"]).encode()
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % len(body)
            await client.send(head + ending + body, loop.time() + SEND_SECONDS)
            return keep
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n" + ending
        try:
            while True:
                events = str(found["events"]).encode()
                chunk = b"%x\r\n%b\r\n" % (len(events), events) if events else b""
                await client.send(head + chunk, loop.time() + SEND_SECONDS)
                head = b""
                if found["done"] or not found["stream"]:
                    break
                found = await self._result(asked, STREAM, {"stream": found["stream"]})
            await client.send(b"0\r\n\r\n", loop.time() + SEND_SECONDS)
        except (Denied, TimeoutError):
            if head:
                raise
            raise ConnectionError("the stream broke") from None
        return keep

    def close(self) -> None:
        """End the link; calls in flight fail."""
        if self._reader is not None:
            self._reader.cancel()
        self._fail()
        self._sock.close()

    async def _result(self, asked: ModelRequest, operation: str, args: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = await self._call(operation, args)
        except (OSError, TimeoutError):
            answer = Answer(id=0, ok=False, reason="unavailable")
        if answer.ok:
            return {"body": "", "stream": "", "events": "", "done": True, **(answer.value or {})}
        denied = answer.reason not in {"backend_failed", "backend_timeout", "unavailable", "outcome_unknown", "busy"}
        reason: EgressReason = "not_allowed" if denied else "dial_failed"
        verdict = Verdict(False, reason, asked.verdict.rule, f"the broker answered {answer.reason or 'nothing'}")
        raise Denied("intercept", verdict, asked.endpoint, broker=answer.reason)

    async def _call(self, operation: str, args: dict[str, Any]) -> Answer:
        loop = asyncio.get_running_loop()
        if len(self._calls) >= _MOST_CALLS:
            return Answer(id=0, ok=False, reason="busy")
        if self._reader is None:
            self._reader = loop.create_task(self._read())
        self._last += 1
        number = self._last
        future: asyncio.Future[Answer] = loop.create_future()
        self._calls[number] = future
        try:
            frame = msgspec.json.encode(Question(id=number, operation=operation, args=args))
            async with self._sending:
                await aio.send(self._sock, len(frame).to_bytes(4) + frame, loop.time() + SEND_SECONDS)
            async with asyncio.timeout(CALL_SECONDS):
                return await future
        finally:
            self._calls.pop(number, None)

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        buffer = bytearray()
        try:
            while data := await aio.receive(self._sock, loop.time() + _FOREVER):
                buffer += data
                while len(buffer) >= 4 and len(buffer) >= 4 + (size := int.from_bytes(buffer[:4])):
                    answer = msgspec.json.decode(buffer[4 : 4 + size], type=Answer)
                    del buffer[: 4 + size]
                    future = self._calls.get(answer.id)
                    if future is not None and not future.done():
                        future.set_result(answer)
                if len(buffer) >= 4 and int.from_bytes(buffer[:4]) > FRAME_BYTES:
                    break
        except (OSError, msgspec.MsgspecError):
            pass
        finally:
            self._fail()

    def _fail(self) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_result(Answer(id=0, ok=False, reason="unavailable"))
