"""One request to a destination and its response back.

Rule 1: the request is whole and judged before its first byte goes up, so nothing of a refused body ever left.
Rule 2: the response is written again, field by field and chunk by chunk; none of its bytes can be taken for another.
Rule 3: whoever does not read or does not write ends its own exchange only: each step has a deadline.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

import msgspec

from lockgate.egress.answer import CONTINUE
from lockgate.egress.body import Framing
from lockgate.egress.duplex import Duplex
from lockgate.egress.http_front import HEAD_SECONDS, Body, End, Event, Front, Head, Refused, Request
from lockgate.egress.response import BadResponse, Response, parse
from lockgate.policy.egress import Verdict
from lockgate.policy.host import Endpoint, Refusal

KEEP_SECONDS: Final = 60.0
BODY_SECONDS: Final = 120.0
RESPONSE_SECONDS: Final = 300.0
SEND_SECONDS: Final = 60.0
BODY_BYTES: Final = 10 * 1024 * 1024
_RAW_BYTES: Final = 256


class Memory:
    """Bounds what all bodies together may hold.

    Args:
        limit: bytes.

    """

    def __init__(self, limit: int) -> None:
        self._left = limit

    def take(self, count: int) -> bool:
        """Take `count` bytes; False when there is no room."""
        if count > self._left:
            return False
        self._left -= count
        return True

    def give(self, count: int) -> None:
        """Give them back."""
        self._left += count


class Requests:
    """The requests of one client connection, one event at a time.

    Args:
        client: where they come from.
        front: what reads them.
        early: bytes that were received already.

    Attributes:
        raw: the first bytes of what was last received, for the row of a refusal.

    """

    def __init__(self, client: Duplex, front: Front, early: bytes = b"") -> None:
        self._client = client
        self._front = front
        self._events: deque[Event] = deque(front.feed(early)) if early else deque()
        self._head_deadline: float | None = None
        self.raw = early[:_RAW_BYTES]

    async def next(self, first: float | None = None) -> Event | None:
        """Return the next event, None when the client is done.

        Args:
            first: loop time until which a first request may begin; None = one may follow within `KEEP_SECONDS`.

        Raises:
            TimeoutError: a head, or a part of a body, did not arrive in time.
            OSError: the connection broke.

        """
        loop = asyncio.get_running_loop()
        idle_until = first if first is not None else loop.time() + KEEP_SECONDS
        while not self._events:
            if self._front.closed:
                return None
            if self._front.idle:
                self._head_deadline = None
                deadline = idle_until
            else:
                self._head_deadline = self._head_deadline or first or loop.time() + HEAD_SECONDS
                deadline = self._head_deadline
            try:
                data = await self._client.receive(deadline)
            except TimeoutError:
                if self._front.idle:
                    return None
                raise
            if not data:
                return None
            if len(self.raw) < _RAW_BYTES or self._front.idle:
                self.raw = (b"" if self._front.idle else self.raw) + data[:_RAW_BYTES]
            self._events.extend(self._front.feed(data))
        event = self._events.popleft()
        if isinstance(event, Request):
            self._head_deadline = None
        return event

    def rest(self) -> bytes:
        """Return the bytes behind a CONNECT head."""
        return self._front.rest

    async def body(self, head: Head, memory: Memory) -> bytes | Refused | Refusal:
        """Return the whole body of `head`; a refusal when it is malformed, too large or too slow.

        The caller gives `len(body)` bytes back to `memory` when it is done with them.
        """
        if head.body == "none":
            await self.next()  # its End
            return b""
        if head.length > BODY_BYTES:
            return _TOO_MUCH
        loop = asyncio.get_running_loop()
        if head.expects and not self._events:
            await self._client.send(CONTINUE, loop.time() + SEND_SECONDS)
        self._head_deadline = loop.time() + BODY_SECONDS
        parts: list[bytes] = []
        held = 0
        kept = False
        try:
            while True:
                event = await self.next()
                if isinstance(event, Refused):
                    return event
                if isinstance(event, Body):
                    if held + len(event.data) > BODY_BYTES or not memory.take(len(event.data)):
                        return _TOO_MUCH
                    held += len(event.data)
                    parts.append(event.data)
                elif isinstance(event, End):
                    kept = True
                    return b"".join(parts)
                else:
                    raise ConnectionError("the client left in the middle of a body")
        finally:
            self._head_deadline = None
            if not kept:
                memory.give(held)


_TOO_MUCH: Final = Refusal("byte_budget", "a request body is at most 10 MiB, and all together have their bound")


class Judged(msgspec.Struct, frozen=True):
    """A request that may be sent: whole, and allowed by `verdict`."""

    head: Head
    body: bytes
    endpoint: Endpoint
    verdict: Verdict


async def exchange(
    request: Judged,
    authority: str,
    upstream: Duplex,
    client: Duplex,
    *,
    keep: bool,
    keep_upstream: bool = False,
    upgrade: bool = False,
) -> Response:
    """Send one request up and its response down; returns the response's head.

    Args:
        request: judged and allowed.
        authority: the canonical Host value.
        upstream: connected to the destination and to nobody else.
        client: who asked.
        keep: whether the client's connection may carry another request.
        keep_upstream: whether the upstream connection may.
        upgrade: the request may change the protocol.

    Raises:
        BadResponse: no plain HTTP came back, or nothing in time; nothing was passed on.
        ConnectionError: one side broke or stopped in the middle of the response: only closing says so.

    """
    try:
        response, data = await _first(request, authority, upstream, keep=keep_upstream, upgrade=upgrade)
    except OSError as error:  # TimeoutError is one
        raise BadResponse from error
    try:
        if response.status == 101:
            head = response.downstream(keep_alive=True, upgrade=True)
            await client.send(head + bytes(data), asyncio.get_running_loop().time() + SEND_SECONDS)
        else:
            await _relay_body(response, data, upstream, client, keep=keep and response.body != "close")
    except TimeoutError:
        raise ConnectionError("one side stopped in the middle of a response") from None
    return response


async def _first(
    request: Judged, authority: str, upstream: Duplex, *, keep: bool, upgrade: bool
) -> tuple[Response, bytearray]:
    """Send the request; returns the head of the final response and what came behind it."""
    loop = asyncio.get_running_loop()
    head, body = request.head, request.body
    length = None if head.body == "none" else len(body)
    raw = head.upstream(authority.encode("ascii"), length=length, keep_alive=keep, upgrade=upgrade)
    await upstream.send(raw + body, loop.time() + SEND_SECONDS + len(body) / 100_000)
    data = bytearray()
    deadline = loop.time() + RESPONSE_SECONDS
    while True:
        response = parse(bytes(data), head.method)
        if response is None:
            part = await upstream.receive(deadline)
            if not part:
                raise BadResponse
            data += part
            continue
        del data[: response.size]
        if response.status >= 200 or (response.status == 101 and upgrade):
            return response, data
        if response.status == 101:
            raise BadResponse  # nobody asked to change the protocol


async def _relay_body(response: Response, data: bytearray, upstream: Duplex, client: Duplex, *, keep: bool) -> None:
    loop = asyncio.get_running_loop()
    head = response.downstream(keep_alive=keep)
    framing = Framing(response.body, 0 if response.body == "none" else response.length, lenient=True)
    chunked = response.body == "chunked"
    while True:
        piece = framing.take(data)
        if isinstance(piece, Refusal):
            raise ConnectionError("the response's chunks are malformed")
        out = head + (b"%x\r\n%b\r\n" % (len(piece), piece) if chunked and piece else piece)
        if framing.complete:
            out += b"0\r\n\r\n" if chunked else b""
        head = b""
        if out:
            await client.send(out, loop.time() + SEND_SECONDS)
        if framing.complete:
            return
        part = await upstream.receive(loop.time() + RESPONSE_SECONDS)
        if not part:
            if framing.finish():
                return
            raise ConnectionError("the response was cut short")
        data += part
