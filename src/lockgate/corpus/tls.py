"""Writes ClientHellos, good and bad, for cases that describe one (RFC 8446 section 4.1.2, RFC 6066 section 3)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

_NUMBERS: Final = {
    "server_name": 0, "sni": 0, "alpn": 16, "supported_versions": 43, "key_share": 51, "ech": 0xFE0D,
    "encrypted_client_hello": 0xFE0D, "esni": 0xFFCE, "encrypted_server_name": 0xFFCE, "pre_shared_key": 41,
}  # fmt: skip
_LONG: Final = ("encrypted_client_hello", "encrypted_server_name")
_BODIES: Final = {16: b"\x00\x09\x08http/1.1", 43: b"\x04\x03\x04\x03\x03", 51: b"\x00\x00"}


def client_hello(
    names: Sequence[bytes] | None, extensions: Sequence[Any] = (), *, padding: int = 0, name_type: int = 0
) -> bytes:
    """Return the handshake message.

    Args:
        names: server names of one extension; None = no such extension.
        extensions: further ones, by number, as text ("0xfe0d") or by name.
        padding: bytes of a padding extension (RFC 7685).
        name_type: of the server names; 0 = host_name.

    """
    made: list[bytes] = []
    if names is not None:
        entries = b"".join(bytes((name_type,)) + _vector(name, 2) for name in names)
        made.append(_extension(0, _vector(entries, 2)))
    made += [_extension(number, _BODIES[number]) for number in (16, 43, 51)]
    for one in extensions:
        number = extension_number(one)
        body = _vector(b"\x00" + _vector((names or (b"x.example",))[0], 2), 2) if number == 0 else b"\x00" * 32
        made.append(_extension(number, _BODIES.get(number, body)))
    if padding:
        made.append(_extension(21, b"\0" * min(padding, 0xFFFF - 4)))
    body = (
        b"\x03\x03" + bytes(range(32)) + _vector(bytes(32), 1) + _vector(b"\x13\x01\x13\x02\x13\x03", 2) + b"\x01\x00"
    )
    return b"\x01" + _vector(body + _vector(b"".join(made)[:0xFFFF], 2), 3)


def records(handshake: bytes, size: int = 2**14) -> list[bytes]:
    """Return the handshake message in records of at most `size` bytes of it."""
    parts = [handshake[at : at + size] for at in range(0, len(handshake), size)]
    return [b"\x16\x03\x01" + _vector(part, 2) for part in parts]


def extension_number(given: Any) -> int:
    """Return the number of an extension; 0x0a0a (GREASE) for one that is not known."""
    if isinstance(given, int):
        return given & 0xFFFF
    text = str(given).strip().lower()
    found = re.match(r"0x([0-9a-f]{1,4})|([0-9]{1,5})", text) or re.search(r"\b0x([0-9a-f]{4})()\b", text)
    if found is not None:
        return int(found[1], 16) if found[1] else int(found[2]) & 0xFFFF
    name = re.sub(r"[\s-]+", "_", text)
    if name not in _NUMBERS:
        name = next((one for one in ("ech", "esni", *_LONG) if re.search(rf"(?:\A|_){one}(?:\Z|_)", name)), name)
    return _NUMBERS.get(name, 0x0A0A)


def _extension(number: int, body: bytes) -> bytes:
    return number.to_bytes(2) + _vector(body, 2)


def _vector(body: bytes, size: int) -> bytes:
    return len(body).to_bytes(size) + body
