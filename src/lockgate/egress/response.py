"""Response heads from destinations, read strictly enough that the next one cannot be shifted.

Rule 1: a response whose length is ambiguous is no response: the request ends with an error, the connection closes.
Rule 2: what the client gets is written again: hop-by-hop fields and everything named like a field of ours are dropped.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from lockgate.egress.body import Kind
from lockgate.egress.http_front import HOP, Fields

HEAD_BYTES: Final = 64 * 1024
_MAX_FIELDS: Final = 256

_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([\x20-\x7e\x80-\xff\t]*))?\Z")
_FIELD: Final = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([\x20-\x7e\x80-\xff\t]*)\Z")
_DIGITS: Final = re.compile(rb"[0-9]{1,18}\Z")


class BadResponse(Exception):
    """The destination does not speak plain HTTP/1.1."""


class Response(msgspec.Struct, frozen=True):
    """One parsed response head.

    Attributes:
        status: 100 to 999.
        fields: lower-case names and values.
        body: how the body is framed. length: its bytes when that is "length".
        reusable: the connection may carry another request after the body.
        size: bytes of the head.

    """

    status: int
    phrase: bytes
    fields: Fields
    body: Kind
    length: int
    reusable: bool
    size: int

    def downstream(self, *, keep_alive: bool, upgrade: bool = False) -> bytes:
        """Return the head that goes to the client; chunked and length framings are kept, "close" closes."""
        lines = [b"HTTP/1.1 %d %b" % (self.status, self.phrase)]
        lines += [
            b"%b: %b" % field
            for field in self.fields
            if field[0] not in HOP and not field[0].startswith(b"x-lockgate-")
        ]
        if self.body == "chunked":
            lines.append(b"transfer-encoding: chunked")
        elif self.body == "length":
            lines.append(b"content-length: %d" % self.length)
        elif self.body == "none" and self.length:
            lines.append(b"content-length: %d" % self.length)  # of HEAD and 304: what a GET would have
        if upgrade:
            lines += [b"upgrade: " + value for name, value in self.fields if name == b"upgrade"]
            lines.append(b"connection: upgrade")
        else:
            lines.append(b"connection: " + (b"keep-alive" if keep_alive else b"close"))
        return b"\r\n".join(lines) + b"\r\n\r\n"


def parse(data: bytes, method: str) -> Response | None:
    """Read one response head; None while it is incomplete.

    Args:
        data: everything received since the last response ended.
        method: of the request that it answers: a response to HEAD has no body.

    Raises:
        BadResponse: it is none, or its length is ambiguous.

    """
    end = data.find(b"\r\n\r\n", 0, HEAD_BYTES)
    if end < 0:
        if len(data) >= HEAD_BYTES:
            raise BadResponse
        return None
    lines = data[:end].split(b"\r\n")
    start = _STATUS_LINE.match(lines[0])
    if start is None or len(lines) > _MAX_FIELDS:
        raise BadResponse
    fields: list[tuple[bytes, bytes]] = []
    for line in lines[1:]:
        match = _FIELD.match(line)
        if match is None:
            raise BadResponse
        fields.append((match[1].lower(), match[2].rstrip(b" \t")))
    status = int(start[2])
    body, length = _framing(fields, status, method)
    options = {token.strip().lower() for name, value in fields if name == b"connection" for token in value.split(b",")}
    reusable = body != "close" and b"close" not in options and (start[1] == b"1" or b"keep-alive" in options)
    return Response(status, start[3] or b"", tuple(fields), body, length, reusable, end + 4)


def _framing(fields: list[tuple[bytes, bytes]], status: int, method: str) -> tuple[Kind, int]:
    lengths = {value for name, value in fields if name == b"content-length"}
    codings = [value.lower() for name, value in fields if name == b"transfer-encoding"]
    if len(lengths) > 1 or not all(_DIGITS.match(value) for value in lengths) or (codings and lengths):
        raise BadResponse
    length = int(next(iter(lengths))) if lengths else 0
    if method == "HEAD" or status < 200 or status in {204, 304}:
        return "none", length if status >= 200 and status != 204 else 0
    if codings:
        if codings != [b"chunked"]:
            raise BadResponse
        return "chunked", 0
    return ("length", length) if lengths else ("close", 0)
