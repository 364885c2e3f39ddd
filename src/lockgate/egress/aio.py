"""Waiting on raw sockets with deadlines: what the gateway uses in place of asyncio streams.

Rule 1: every wait has a deadline, armed before it begins; `TimeoutError` when it passes.
Rule 2: no function here takes a name. Sockets come connected, or are connected to a numeric address by `dial`.
Rule 3: the event loop is the standard one: uvloop cuts names at NUL, so it has no place where a name can appear.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

READ_BYTES: Final = 64 * 1024


async def ready(sock: socket.socket, deadline: float, *, write: bool = False) -> None:
    """Wait until `sock` can be read, or written.

    Args:
        sock: non-blocking, and watched by nobody else in this direction.
        deadline: of the loop's clock, seconds.
        write: wait for room instead of data.

    Raises:
        TimeoutError: neither happened in time.

    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[bool] = loop.create_future()
    fd = sock.fileno()
    timer = loop.call_at(deadline, _settle, done, False)
    (loop.add_writer if write else loop.add_reader)(fd, _settle, done, True)
    try:
        if not await done:
            raise TimeoutError
    finally:
        timer.cancel()
        (loop.remove_writer if write else loop.remove_reader)(fd)


async def receive(sock: socket.socket, deadline: float, count: int = READ_BYTES) -> bytes:
    """Return what is there, at most `count` bytes; b"" at the end of the stream.

    Raises:
        TimeoutError: nothing came in time.
        OSError: the connection broke.

    """
    while True:
        try:
            return sock.recv(count)
        except BlockingIOError:
            await ready(sock, deadline)


async def send(sock: socket.socket, data: bytes | memoryview, deadline: float) -> None:
    """Send all of `data`.

    Raises:
        TimeoutError: the other side did not take it in time.
        OSError: the connection broke.

    """
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view) :]
        except BlockingIOError:
            await ready(sock, deadline, write=True)


def _settle(done: asyncio.Future[bool], value: bool) -> None:
    if not done.done():
        done.set_result(value)
