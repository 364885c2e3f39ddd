"""How long a message body is: the three framings of HTTP/1.1 (RFC 9112 section 6), read strictly.

Rule 1: chunk sizes are 1 to 8 hexadecimal digits and nothing else; extensions and trailers are refused, for two
        programs that disagree about them see two different next requests.
Rule 2: nothing is taken beyond the end of the body.
"""

from __future__ import annotations

import re
from typing import Final, Literal

from lockgate.policy.host import Refusal

Kind = Literal["none", "length", "chunked", "close"]

_CHUNK: Final = re.compile(rb"[0-9A-Fa-f]{1,8}\Z")
_LINE: Final = 10
_TAIL_LINE: Final = 1024


class Framing:
    """Takes the bytes of one body out of a buffer.

    Args:
        kind: "none", "length", "chunked", or "close" (a response that ends with its connection).
        length: bytes when `kind` is "length".
        lenient: take chunk extensions and drop them (responses only: there is nobody behind them to confuse).

    Attributes:
        complete: the last byte was taken.

    """

    def __init__(self, kind: Kind, length: int = 0, *, lenient: bool = False) -> None:
        self._kind: Kind = kind
        self._left = length
        self._state: Literal["size", "data", "data-end", "last"] = "size"
        self._lenient = lenient
        self.complete = kind == "none" or (kind == "length" and length == 0)

    def take(self, buffer: bytearray) -> bytes | Refusal:
        """Move the body's bytes out of `buffer`; what is left there is not its own, or not yet a whole chunk line."""
        if self.complete:
            return b""
        if self._kind == "close":
            out = bytes(buffer)
            buffer.clear()
            return out
        if self._kind == "length":
            out = bytes(buffer[: self._left])
            del buffer[: len(out)]
            self._left -= len(out)
            self.complete = self._left == 0
            return out
        return self._chunks(buffer)

    def finish(self) -> bool:
        """Take note that the connection ended; returns whether the body is whole."""
        if self._kind == "close":
            self.complete = True
        return self.complete

    def _chunks(self, buffer: bytearray) -> bytes | Refusal:
        out = bytearray()
        while not self.complete:
            if self._state == "data":
                part = buffer[: self._left]
                out += part
                del buffer[: len(part)]
                self._left -= len(part)
                if self._left:
                    break
                self._state = "data-end"
            line = self._line(buffer)
            if isinstance(line, Refusal):
                return line
            if line is None:
                break
            if self._state == "size":
                size = line.partition(b";")[0].rstrip(b" \t") if self._lenient else line
                if not _CHUNK.match(size):
                    return Refusal("smuggling", "a chunk begins with its size in hexadecimal digits alone")
                self._left = int(size, 16)
                self._state = "data" if self._left else "last"
            elif self._state == "data-end":
                if line:
                    return Refusal("smuggling", "a chunk ends with CR LF")
                self._state = "size"
            elif not line:
                self.complete = True
            elif not self._lenient:
                return Refusal("smuggling", "a chunked body has no trailer")
        return bytes(out)

    def _line(self, buffer: bytearray) -> bytes | Refusal | None:
        cap = _TAIL_LINE if self._lenient else _LINE
        end = buffer.find(b"\r\n", 0, cap + 2)
        if end < 0:
            if len(buffer) >= cap + 2 or b"\n" in buffer:
                return Refusal("smuggling", "a chunk line is too long or does not end with CR LF")
            return None
        line = bytes(buffer[:end])
        if b"\n" in line or b"\r" in line:
            return Refusal("smuggling", "a chunk line ends with CR LF")
        del buffer[: end + 2]
        return line
