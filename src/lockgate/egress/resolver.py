"""Names to addresses: one absolute question for each family, and every address of the answer vetted.

Rule 1: only names that the policy has already allowed come here, so that no packet carries a name that was refused.
Rule 2: the operator's nameservers are asked and nothing else: no hosts file, no search list, no multicast.
Rule 3: A and AAAA are one set, asked for once for each connection. Empty or failed: refused. One bad address refuses
        the whole set, for the client could otherwise be led to it.
Rule 4: question ids and source ports are random; a reply from elsewhere or to something else is ignored.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from lockgate.contract.errors import ConfigError
from lockgate.egress import aio, dnswire
from lockgate.policy import addresses
from lockgate.policy.egress import EgressPolicy
from lockgate.policy.host import Endpoint, Refusal

RESOLVE_SECONDS: Final = 6.0
_TRY_SECONDS: Final = 2.0
_TRIES: Final = 2
_REPLY_BYTES: Final = 4096
_MAX_ADDRESSES: Final = 32
_MAX_SERVERS: Final = 3

Exchange = Callable[[bytes, bool], Awaitable[bytes | None]]


def vet(answers: Sequence[bytes], endpoint: Endpoint, policy: EgressPolicy) -> tuple[bytes, ...] | Refusal:
    """Return the addresses that may be dialled, or why the set is refused.

    Args:
        answers: 4 or 16 bytes each, of both families together.
        endpoint: what was resolved; the policy may pin its addresses.
        policy: its pins and its NAT64 prefix.

    """
    if not answers or len(answers) > _MAX_ADDRESSES:
        return Refusal("resolve_failed", "the name has no usable set of addresses")
    pinned = policy.pinned(endpoint)
    for packed in answers:
        if pinned is not None:
            if packed not in pinned or _never(packed):
                return _non_public(addresses.refused(packed))
            continue
        judged = packed
        if policy.nat64 is not None:
            judged = addresses.nat64_embedded(packed, *policy.nat64) or packed
        refused = addresses.refused(judged)
        if refused is not None:
            return _non_public(refused)
    return tuple(dict.fromkeys(answers))


async def resolve(
    endpoint: Endpoint, policy: EgressPolicy, exchange: Exchange | Nameservers
) -> tuple[bytes, ...] | Refusal:
    """Return the vetted addresses of an allowed destination, or why there are none.

    Args:
        endpoint: allowed by `policy` before this call.
        policy: see `vet`.
        exchange: sends a question, over TCP when its second argument says so; None when nobody answered.

    """
    literal = endpoint.host.packed
    if literal is not None:
        if policy.pinned(endpoint) is None:
            return Refusal("ip_literal_or_ambiguous", "an address is not a destination here")
        return vet((literal,), endpoint, policy)
    found: Sequence[tuple[bytes, ...] | None] | None = None
    if isinstance(exchange, Nameservers):
        found = await exchange.both(endpoint)
        exchange = exchange.exchange
    if found is None:
        found = await asyncio.gather(
            _ask(endpoint, dnswire.TYPE_A, exchange), _ask(endpoint, dnswire.TYPE_AAAA, exchange)
        )
    answers: list[bytes] = []
    for part in found:
        if part is None:
            return Refusal("resolve_failed", "the nameserver did not answer for this name")
        answers += part
    return vet(answers, endpoint, policy)


class Nameservers:
    """Asks the operator's nameservers.

    Args:
        servers: (packed address, port), asked in their order.

    """

    def __init__(self, servers: Sequence[tuple[bytes, int]]) -> None:
        self._servers = tuple(servers)[:_MAX_SERVERS]

    async def both(self, endpoint: Endpoint) -> tuple[tuple[bytes, ...], tuple[bytes, ...]] | None:
        """Ask the first nameserver for both families at once, over one port; None when that did not give both."""
        if not self._servers:
            return None
        server = self._servers[0]
        deadline = asyncio.get_running_loop().time() + _TRY_SECONDS
        idents = secrets.randbits(32)
        queries = (
            dnswire.encode_query(endpoint.host, dnswire.TYPE_A, idents >> 16),
            dnswire.encode_query(endpoint.host, dnswire.TYPE_AAAA, idents & 0xFFFF),
        )
        found: list[tuple[bytes, ...] | None] = [None, None]
        try:
            with _socket(server, socket.SOCK_DGRAM) as sock:
                sock.connect(_sockaddr(server))
                for query in queries:
                    sock.send(query)
                while found[0] is None or found[1] is None:
                    raw = await aio.receive(sock, deadline, _REPLY_BYTES)
                    for number, query in enumerate(queries):
                        reply = dnswire.decode_reply(query, raw)
                        if reply is not None:
                            if reply.failed or reply.truncated:
                                return None
                            found[number] = reply.addresses
        except (OSError, TimeoutError):
            return None
        return found[0], found[1]

    async def exchange(self, query: bytes, tcp: bool) -> bytes | None:
        """Return the reply to `query` or None; see `resolve`."""
        loop = asyncio.get_running_loop()
        end = loop.time() + RESOLVE_SECONDS
        for _ in range(_TRIES):
            for server in self._servers:
                deadline = min(end, loop.time() + _TRY_SECONDS)
                try:
                    reply = await (_over_tcp if tcp else _over_udp)(server, query, deadline)
                except (OSError, TimeoutError):
                    continue
                if reply is not None:
                    return reply
        return None


def parse_nameserver(text: str) -> tuple[bytes, int]:
    """Read `ADDRESS` or `ADDRESS@PORT` of a nameserver.

    Raises:
        ConfigError: it is neither.

    """
    address, _, port = text.partition("@")
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            packed = socket.inet_pton(family, address)
        except (OSError, ValueError):
            continue
        if not port or (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
            return packed, int(port or 53)
    raise ConfigError(
        f"{text!r} is no nameserver", next_step="write its address, or ADDRESS@PORT; names are not looked up here"
    )


def system_nameservers(path: Path = Path("/etc/resolv.conf")) -> tuple[str, ...]:
    """Return the nameservers that the system names; its search list and options are not ours (resolv.conf(5))."""
    try:
        lines = path.read_text("ascii", "replace").splitlines()
    except OSError:
        return ()
    words = [line.split() for line in lines]
    # A zone ("fe80::1%eth0") is no address that inet_pton reads; such a server is left out.
    return tuple(word[1] for word in words if len(word) > 1 and word[0] == "nameserver" and "%" not in word[1])


async def _ask(endpoint: Endpoint, qtype: int, exchange: Exchange) -> tuple[bytes, ...] | None:
    for tcp in (False, True):
        query = dnswire.encode_query(endpoint.host, qtype, secrets.randbits(16))
        raw = await exchange(query, tcp)
        reply = None if raw is None else dnswire.decode_reply(query, raw)
        if reply is None or reply.failed:
            return None
        if not reply.truncated:
            return reply.addresses
    return None


async def _over_udp(server: tuple[bytes, int], query: bytes, deadline: float) -> bytes | None:
    with _socket(server, socket.SOCK_DGRAM) as sock:
        sock.connect(
            _sockaddr(server)
        )  # a connected UDP socket hears this server alone, on a port of the kernel's choice
        sock.send(query)
        while True:
            reply = await aio.receive(sock, deadline, _REPLY_BYTES)
            if dnswire.decode_reply(query, reply) is not None:
                return reply


async def _over_tcp(server: tuple[bytes, int], query: bytes, deadline: float) -> bytes | None:
    with _socket(server, socket.SOCK_STREAM) as sock:
        if sock.connect_ex(_sockaddr(server)):
            await aio.ready(sock, deadline, write=True)
        await aio.send(sock, len(query).to_bytes(2) + query, deadline)
        data = b""
        while len(data) < 2 or len(data) < 2 + int.from_bytes(data[:2]):
            part = await aio.receive(sock, deadline)
            if not part:
                return None
            data += part
        return data[2 : 2 + int.from_bytes(data[:2])]


def _socket(server: tuple[bytes, int], kind: socket.SocketKind) -> socket.socket:
    family = socket.AF_INET if len(server[0]) == 4 else socket.AF_INET6
    return socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


def _sockaddr(server: tuple[bytes, int]) -> tuple[str, int]:
    family = socket.AF_INET if len(server[0]) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, server[0]), server[1]


def _never(packed: bytes) -> bool:
    """Whether not even a pin can make this address a destination: ourselves, our link, a cloud's metadata."""
    refused = addresses.refused(packed)
    if refused is None:
        return False
    if refused.metadata or (
        len(packed) == 4 and (packed[0] in {0, 127} or packed[:2] == b"\xa9\xfe" or packed[0] >= 224)
    ):
        return True
    return len(packed) == 16 and (
        packed[0] == 0 or packed[0] == 0xFF or (packed[0] == 0xFE and packed[1] & 0xC0 == 0x80)
    )


def _non_public(refused: addresses.Refused | None) -> Refusal:
    if refused is not None and refused.metadata:
        return Refusal("resolved_non_public", "the name leads to a metadata service")
    return Refusal("resolved_non_public", "the name leads to an address that is not public")
