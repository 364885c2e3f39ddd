"""Length-prefixed frames, sans-I/O: u32 big-endian length, then the body.

Rule 1: the length is checked against the cap before a byte of the body is kept, so a header costs nothing.
Rule 2: a violation is final. The decoder never resynchronises: every later byte raises `GuestProtocolError` again.
Rule 3: this file does not know which end it serves, nor what a body means.
"""

from __future__ import annotations

import struct
from typing import Final

from lockgate.contract.bounds import FRAME_BYTES
from lockgate.contract.errors import GuestProtocolError

HEADER: Final = struct.Struct(">I")


def encode(body: bytes, *, cap: int = FRAME_BYTES) -> bytes:
    """Return `body` as one frame.

    Raises:
        GuestProtocolError: the body is empty or longer than `cap` bytes.

    """
    if not 0 < len(body) <= cap:
        raise GuestProtocolError(
            f"a frame of {len(body)} bytes is outside 1..{cap}", next_step="send less in one message"
        )
    return HEADER.pack(len(body)) + body


class Decoder:
    """Feeds on bytes of any chunking and yields whole bodies.

    Args:
        cap: largest body in bytes.

    Attributes:
        pending: whether a frame has begun and not ended (its deadline runs).

    """

    __slots__ = ("_buffer", "_cap", "_dead", "_need")

    def __init__(self, *, cap: int = FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._cap = cap
        self._need = 0
        self._dead: str | None = None

    @property
    def pending(self) -> bool:
        """Whether a frame has begun and not ended."""
        return bool(self._buffer) or self._need > 0

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """Take bytes, return the bodies they complete.

        Raises:
            GuestProtocolError: a length is zero or above the cap, now or earlier.

        """
        if self._dead is not None:
            raise GuestProtocolError(self._dead, next_step="the channel is closed; nothing more is read from it")
        self._buffer += data
        bodies: list[bytes] = []
        while True:
            if self._need == 0:
                if len(self._buffer) < HEADER.size:
                    return bodies
                (need,) = HEADER.unpack_from(self._buffer)
                if not 0 < need <= self._cap:
                    self._dead = f"a frame announces {need} bytes, outside 1..{self._cap}"
                    self._buffer.clear()
                    raise GuestProtocolError(self._dead, next_step="the run is killed; see its audit rows")
                del self._buffer[: HEADER.size]
                self._need = need
            if len(self._buffer) < self._need:
                return bodies
            bodies.append(bytes(self._buffer[: self._need]))
            del self._buffer[: self._need]
            self._need = 0
