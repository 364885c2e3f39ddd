"""Connects to vetted addresses and looks who answered.

Rule 1: what is dialled is a numeric address that `resolver.vet` returned in this same connection. No name comes here.
Rule 2: the connected peer must be that address and port; rules of the host (NAT, redirects) can say otherwise, and
        then the connection ends before a byte is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from typing import Final

from lockgate.egress import aio
from lockgate.policy.host import Refusal

DIAL_SECONDS: Final = 10.0
_TRY_SECONDS: Final = 4.0
_MAX_TRIES: Final = 6

Place = tuple[bytes, int]


def check_peer(dialled: Place, peer: Place) -> Refusal | None:
    """Refuse a peer that is not what was dialled; both are (4 or 16 bytes, port)."""
    if dialled == peer:
        return None
    return Refusal("peer_mismatch", "the connection ended at another address than the one dialled")


async def dial(addresses: Sequence[bytes], port: int) -> socket.socket | Refusal:
    """Return a connected, non-blocking socket to the first address that answers.

    Args:
        addresses: vetted, 4 or 16 bytes each.
        port: 1 to 65535.

    """
    loop = asyncio.get_running_loop()
    end = loop.time() + DIAL_SECONDS
    for packed in addresses[:_MAX_TRIES]:
        family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
        try:
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except OSError:
            continue
        keep = False
        try:
            await connect(sock, (socket.inet_ntop(family, packed), port), min(end, loop.time() + _TRY_SECONDS))
            refusal = check_peer((packed, port), peer_of(sock))
            if refusal is not None:
                return refusal
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep = True
        except (OSError, TimeoutError):
            continue
        else:
            return sock
        finally:
            if not keep:
                sock.close()
    return Refusal("dial_failed", "no address of the destination answered")


async def connect(sock: socket.socket, sockaddr: tuple[str, int], deadline: float) -> None:
    """Connect to a numeric address.

    Raises:
        OSError: it refused. TimeoutError: it did not answer in time.

    """
    with contextlib.suppress(BlockingIOError):
        sock.connect(sockaddr)
        return
    with contextlib.suppress(OSError):
        sock.getpeername()  # near destinations have answered by now, and a turn of the loop is saved
        return
    await aio.ready(sock, deadline, write=True)
    error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))


def peer_of(sock: socket.socket) -> Place:
    """Return who is at the other end (getpeername(2))."""
    name = sock.getpeername()
    return socket.inet_pton(sock.family, name[0].partition("%")[0]), name[1]
