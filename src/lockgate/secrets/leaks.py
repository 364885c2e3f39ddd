"""Finds live leases, and their usual encodings, in bytes that are about to leave the broker.

Rule 1: it catches accidents only. A backend that wants to smuggle a secret out needs one step of its own (reversing
        it is enough); what keeps secrets in is that no operation is given more than its own token.
Rule 2: what it looks for is as secret as the secret, so it lives here and dies with the lease.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterable
from typing import Final, Protocol
from urllib.parse import quote

MIN_BYTES: Final = 8
"""A shorter secret would be found in innocent text; the stores refuse such secrets."""
_LINE_BYTES: Final = 24


class Holder(Protocol):
    """Whatever has needles: a lease."""

    @property
    def needles(self) -> tuple[bytes, ...]:
        """What to look for."""
        ...


def needles(secret: str | bytes) -> tuple[bytes, ...]:
    """Return the byte strings that give `secret` away.

    Raw, base64 and base64url at the three alignments, hexadecimal in both cases, percent and JSON escapes; for a
    secret of several lines each long line as well.
    """
    raw = secret.encode() if isinstance(secret, str) else secret
    parts = {raw.strip()}
    if b"\n" in raw:
        parts.update(
            line for part in raw.splitlines() if len(line := part.strip()) >= _LINE_BYTES and b"-----" not in line
        )
    found: set[bytes] = set()
    for part in parts:
        if len(part) >= MIN_BYTES:
            found.update(_encodings(part))
    return tuple(sorted(found, key=len))


def _encodings(raw: bytes) -> Iterable[bytes]:
    yield raw
    for shift in range(3):
        # Only whole groups that hold nothing but the secret's own bits: the first group is skipped when the secret
        # starts inside it, the last one when it ends inside it.
        code = base64.b64encode(bytes(shift) + raw)
        end = (shift + len(raw)) // 3 * 4
        body = code[4 if shift else 0 : end]
        if len(body) >= MIN_BYTES:
            yield body
            yield body.translate(bytes.maketrans(b"+/", b"-_"))
    yield raw.hex().encode()
    yield raw.hex().upper().encode()
    percent = quote(raw, safe="")
    yield percent.encode()
    yield _lower_escapes(percent).encode()
    yield quote(raw, safe="/").encode()
    yield "".join(f"%{byte:02X}" for byte in raw).encode()
    yield "".join(f"%{byte:02x}" for byte in raw).encode()
    text = raw.decode("utf-8", "surrogateescape")
    for plain in (json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]):
        yield plain.encode("utf-8", "surrogateescape")
        yield plain.replace("/", "\\/").encode("utf-8", "surrogateescape")
    yield "".join(f"\\u{ord(char):04x}" for char in text if ord(char) < 0x10000).encode()
    yield "".join(f"\\u{ord(char):04X}" for char in text if ord(char) < 0x10000).encode()


def _lower_escapes(percent: str) -> str:
    parts = percent.split("%")
    return parts[0] + "".join(f"%{part[:2].lower()}{part[2:]}" for part in parts[1:])


class Live:
    """The leases that are alive in this process; any thread may enter and leave."""

    __slots__ = ("_all", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: tuple[Holder, ...] = ()

    def enter(self, holder: Holder) -> None:
        """Look for this lease from now on."""
        with self._lock:
            self._all = (*self._all, holder)

    def leave(self, holder: Holder) -> None:
        """Look for it no longer; idempotent."""
        with self._lock:
            self._all = tuple(one for one in self._all if one is not holder)

    @property
    def leases(self) -> tuple[Holder, ...]:
        """The leases that are alive now."""
        return self._all


LIVE: Final = Live()


def scan(data: bytes, leases: Iterable[Holder] | None = None) -> bool:
    """Whether `data` holds one of `leases` (default: each live one of this process) in a usual encoding."""
    return any(needle in data for one in (LIVE.leases if leases is None else leases) for needle in one.needles)
