"""DNS messages of our own questions (RFC 1035): written and read without a library.

Rule 1: a question is one absolute name, one type, class IN. There is no search list to append and no option to fill.
Rule 2: an answer counts only if its id, its flags and its question are those of what was asked; else it is nobody's.
Rule 3: aliases are followed inside the answer section alone and at most 8 times; other records are ignored.
Rule 4: every length and every pointer is checked; what does not add up is refused whole.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from lockgate.policy.host import Host

TYPE_A: Final = 1
TYPE_AAAA: Final = 28
MAX_ALIASES: Final = 8

_CNAME: Final = 5
_IN: Final = 1
_HEADER: Final = struct.Struct("!HHHHHH")
_RECORD: Final = struct.Struct("!HHIH")
_MAX_RECORDS: Final = 256
_MAX_JUMPS: Final = 32
_NXDOMAIN: Final = 3


class Reply(msgspec.Struct, frozen=True):
    """What an answer says.

    Attributes:
        truncated: ask again over TCP.
        failed: the server could not or would not answer.
        addresses: 4 or 16 bytes each, in the order of the answer; empty when the name has none.

    """

    truncated: bool = False
    failed: bool = False
    addresses: tuple[bytes, ...] = ()


class _Malformed(Exception):
    pass


def encode_query(host: Host, qtype: int, ident: int) -> bytes:
    """Return the question for a name, absolute as it is on the wire.

    Args:
        host: a name; an address has no question.
        qtype: `TYPE_A` or `TYPE_AAAA`.
        ident: 16 random bits.

    Raises:
        ValueError: `host` is an address, or a label is too long for DNS.

    """
    if host.kind != "name":
        raise ValueError("an address is not looked up")
    name = b"".join(bytes((len(label),)) + label.encode("ascii") for label in host.labels) + b"\0"
    # Flags: recursion desired, nothing else.
    return _HEADER.pack(ident, 0x0100, 1, 0, 0, 0) + name + struct.pack("!HH", qtype, _IN)


def decode_reply(query: bytes, reply: bytes) -> Reply | None:
    """Read the reply to `query`; None when it is not one (another id or question, or malformed)."""
    try:
        return _decode(query, reply)
    except (_Malformed, struct.error, IndexError):
        return None


def _decode(query: bytes, reply: bytes) -> Reply | None:
    ident, flags, questions, answers, _, _ = _HEADER.unpack_from(reply)
    if reply[:2] != query[:2] or not flags & 0x8000 or flags & 0x7800 or questions != 1:
        return None
    at = len(query)
    if len(reply) < at or reply[12:at].lower() != query[12:].lower():
        return None
    del ident
    if flags & 0x0200:
        return Reply(truncated=True)
    code = flags & 0x000F
    if code not in {0, _NXDOMAIN} or answers > _MAX_RECORDS:
        return Reply(failed=True)
    asked, _ = _name(query, 12)
    wanted = int.from_bytes(query[-4:-2])
    aliases: dict[bytes, bytes] = {}
    found: list[tuple[bytes, bytes]] = []
    for _ in range(answers):
        owner, at = _name(reply, at)
        kind, family, _, size = _RECORD.unpack_from(reply, at)
        at += _RECORD.size
        if at + size > len(reply):
            raise _Malformed
        if family == _IN and kind == _CNAME:
            target, end = _name(reply, at)
            if end != at + size or aliases.setdefault(owner, target) != target:
                raise _Malformed
        elif family == _IN and kind == wanted:
            if size != (4 if wanted == TYPE_A else 16):
                raise _Malformed
            found.append((owner, reply[at : at + size]))
        at += size
    name, hops = asked, 0
    while name in aliases:
        name, hops = aliases[name], hops + 1
        if hops > MAX_ALIASES:
            return Reply(failed=True)
    return Reply(addresses=tuple(dict.fromkeys(packed for owner, packed in found if owner == name)))


def _name(data: bytes, at: int) -> tuple[bytes, int]:
    """Return a name in lower case and where what follows it begins; compression is followed backwards only."""
    labels: list[bytes] = []
    end = -1
    size = jumps = 0
    while True:
        length = data[at]
        if length >= 0xC0:
            target = (length & 0x3F) << 8 | data[at + 1]
            end = at + 2 if end < 0 else end
            jumps += 1
            if target >= at or jumps > _MAX_JUMPS:
                raise _Malformed
            at = target
            continue
        if length > 63:
            raise _Malformed
        at += 1
        if length == 0:
            return b".".join(labels), at if end < 0 else end
        label = data[at : at + length]
        size += length + 1
        if len(label) < length or size > 254 or b"." in label:
            raise _Malformed
        labels.append(label.lower())
        at += length
