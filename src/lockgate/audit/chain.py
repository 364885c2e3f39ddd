"""The hash chain over stored rows.

Rule 1: a link covers the bytes as they are stored, never a re-encoding of them: nothing is canonicalised later.
Rule 2: the sequence number is under the hash, so a row cannot be moved and the chain restarted behind it.
Rule 3: a local chain does not stop whoever owns the machine; a head kept elsewhere does (`--expect`).
"""

from __future__ import annotations

import struct
from hashlib import sha256
from typing import Final, Self

import msgspec

DOMAIN: Final = b"lockgate/row/1\0"
HASH_BYTES: Final = 32
GENESIS: Final = bytes(HASH_BYTES)
_SEQ: Final = struct.Struct(">Q")


def link(prev: bytes, seq: int, body: bytes) -> bytes:
    """Return SHA-256(`DOMAIN` ‖ `prev` ‖ `seq` as u64 big-endian ‖ `body`).

    Args:
        prev: 32 bytes, the link of the row before; `GENESIS` for the first.
        seq: number of the row, from 1.
        body: the row as it is stored.

    """
    return sha256(DOMAIN + prev + _SEQ.pack(seq) + body).digest()


class Head(msgspec.Struct, frozen=True):
    """The end of a chain: number and link of its last row (0 and 32 zero bytes when there is none)."""

    seq: int
    hash: bytes

    def __str__(self) -> str:
        return f"{self.seq}:{self.hash.hex()}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `SEQ:HASH` as `str()` writes it.

        Raises:
            ValueError: it is not a decimal number, a colon and 64 hexadecimal digits.

        """
        number, colon, digest = text.strip().partition(":")
        if not (colon and number.isascii() and number.isdigit() and len(digest) == 2 * HASH_BYTES):
            raise ValueError(f"{text!r} is not SEQ:HASH; give a row number, a colon and 64 hexadecimal digits")
        return cls(int(number), bytes.fromhex(digest))


EMPTY: Final = Head(0, GENESIS)
