"""Interfaces and routes of the network namespace of this process.

Sources: netlink(7) (struct nlmsghdr: u32 length, u16 type, u16 flags, u32 sequence, u32 port), rtnetlink(7) (struct
ifinfomsg: u8 family, pad, u16 type, i32 index, u32 flags, u32 change; struct rtmsg: u8 family, dst_len, src_len, tos,
table, protocol, scope, type, u32 flags; struct rtattr: u16 length, u16 type, then the value padded to 4 bytes).
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

LOOPBACK: Final = 1  # the index of `lo` in every network namespace

_HEADER: Final = struct.Struct("=IHHII")
_IFINFO: Final = struct.Struct("=BxHiII")
_RTMSG: Final = struct.Struct("=BBBBBBBBI")
_ATTRIBUTE: Final = struct.Struct("=HH")

_ERROR: Final = 2
_NEWLINK: Final = 16
_NEWROUTE: Final = 24
_REQUEST_ACK: Final = 0x1 | 0x4
_CREATE_EXCLUSIVE: Final = 0x400 | 0x200
_IFF_UP: Final = 1
_TABLE_LOCAL: Final = 255
_PROTOCOL_STATIC: Final = 4
_SCOPE_HOST: Final = 254
_TYPE_LOCAL: Final = 2
_RTA_DST: Final = 1
_RTA_OIF: Final = 4
_SECONDS: Final = 5.0


def loopback_up() -> None:
    """Switch `lo` on, which gives it 127.0.0.1 (and ::1 where the kernel has IPv6).

    Raises:
        OSError: the kernel refused; without CAP_NET_ADMIN over this namespace it does.

    """
    _ask("set lo up", _NEWLINK, _REQUEST_ACK, _IFINFO.pack(socket.AF_UNSPEC, 0, LOOPBACK, _IFF_UP, _IFF_UP))


def deliver_here(network: bytes, prefix: int) -> None:
    """Have every address of a network delivered to this namespace itself (a route of type local over `lo`).

    Args:
        network: 4 or 16 bytes.
        prefix: number of leading bits that count.

    Raises:
        OSError: the kernel refused, or has no such address family.

    """
    family = socket.AF_INET if len(network) == 4 else socket.AF_INET6
    message = _RTMSG.pack(family, prefix, 0, 0, _TABLE_LOCAL, _PROTOCOL_STATIC, _SCOPE_HOST, _TYPE_LOCAL, 0)
    for kind, value in ((_RTA_DST, network), (_RTA_OIF, struct.pack("=I", LOOPBACK))):
        message += _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value
    _ask("add a local route", _NEWROUTE, _REQUEST_ACK | _CREATE_EXCLUSIVE, message)


def _ask(what: str, kind: int, flags: int, body: bytes) -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as sock:
        sock.settimeout(_SECONDS)
        sock.bind((0, 0))
        sock.send(_HEADER.pack(_HEADER.size + len(body), kind, flags, 1, 0) + body)
        answer = sock.recv(65536)
    _, answered, _, _, _ = _HEADER.unpack_from(answer)
    code = struct.unpack_from("=i", answer, _HEADER.size)[0] if answered == _ERROR else -5
    if code:
        raise OSError(-code, os.strerror(-code), what)
