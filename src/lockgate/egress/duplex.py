"""Two-way byte streams with deadlines: a plain socket, and TLS over one.

Rule 1: a TLS stream that ends without close_notify is an error, not an end: a cut body must not look whole.
Rule 2: no name is resolved here. A server name is for the certificate and the ClientHello alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, TypeVar

from lockgate.egress import aio

T = TypeVar("T")
_CLOSE_SECONDS: Final = 2.0


class Duplex(Protocol):
    """What `Plain` and `Tls` have in common; deadlines are of the loop's clock."""

    async def receive(self, deadline: float) -> bytes:
        """Return what is there, b"" at the end of the stream."""
        ...

    async def send(self, data: bytes, deadline: float) -> None:
        """Send all of it."""
        ...

    async def close(self) -> None:
        """Say the end where the protocol can, and close."""
        ...


class Plain:
    """A connected, non-blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    async def receive(self, deadline: float) -> bytes:
        """Return what is there, b"" at the end of the stream."""
        return await aio.receive(self.sock, deadline)

    async def send(self, data: bytes, deadline: float) -> None:
        """Send all of it."""
        await aio.send(self.sock, data, deadline)

    async def close(self) -> None:
        """Close the socket."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
        self.sock.close()


class Tls:
    """TLS over a connected, non-blocking socket.

    Args:
        sock: owned from here on.
        context: certificates, trust and protocols.
        server_name: whose certificate the other side must show; None = we are the server.
        early: bytes of the other side that were read already.

    """

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, *, server_name: str | None = None, early: bytes = b""
    ) -> None:
        self.sock = sock
        self._in = ssl.MemoryBIO()
        self._out = ssl.MemoryBIO()
        self._in.write(early)
        self._sending = asyncio.Lock()
        self._ssl = context.wrap_bio(self._in, self._out, server_side=server_name is None, server_hostname=server_name)

    async def handshake(self, deadline: float) -> None:
        """Complete the handshake.

        Raises:
            ssl.SSLError: certificate or protocol is wrong. OSError, TimeoutError: the connection is.

        """
        try:
            await self._run(self._ssl.do_handshake, deadline)
        except ssl.SSLError:
            with contextlib.suppress(OSError, TimeoutError):
                await self._flush(deadline)  # the alert that says why
            raise

    @property
    def protocol(self) -> str | None:
        """The protocol that ALPN agreed on."""
        return self._ssl.selected_alpn_protocol()

    async def receive(self, deadline: float) -> bytes:
        """Return what is there, b"" after close_notify.

        Raises:
            OSError: the stream broke, or ended without close_notify.

        """
        try:
            return await self._run(lambda: self._ssl.read(aio.READ_BYTES), deadline)
        except ssl.SSLZeroReturnError:
            return b""

    async def send(self, data: bytes, deadline: float) -> None:
        """Encrypt and send all of it."""
        view = memoryview(data)
        while view:
            written = await self._run(partial(self._ssl.write, view[: aio.READ_BYTES]), deadline)
            view = view[written:]
        await self._flush(deadline)

    async def close(self) -> None:
        """Send close_notify, do not wait for the other one, close."""
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            with contextlib.suppress(ssl.SSLError):
                self._ssl.unwrap()
            await self._flush(asyncio.get_running_loop().time() + _CLOSE_SECONDS)
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
        self.sock.close()

    async def _run(self, step: Callable[[], T], deadline: float) -> T:
        while True:
            try:
                done = step()
            except ssl.SSLWantReadError:
                await self._flush(deadline)
                data = await aio.receive(self.sock, deadline)
                if data:
                    self._in.write(data)
                else:
                    self._in.write_eof()
                continue
            if self._out.pending:
                await self._flush(deadline)
            return done

    async def _flush(self, deadline: float) -> None:
        async with self._sending:
            while self._out.pending:
                await aio.send(self.sock, self._out.read(), deadline)
