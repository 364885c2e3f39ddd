"""The signature of a webhook: HMAC-SHA-256 over the time and the body.

A receiver calls `verify`; it is three lines in any language: hex(HMAC-SHA-256(key, timestamp + "." + body)) equals the
part of `X-Lockgate-Signature` behind `v1=`, compared in constant time, and the timestamp is some minutes old at most.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Final

TIMESTAMP: Final = "X-Lockgate-Timestamp"
SIGNATURE: Final = "X-Lockgate-Signature"
UID: Final = "X-Lockgate-Uid"


def sign(key: bytes, body: bytes, at: float) -> dict[str, str]:
    """Return the two fields that sign `body`, sent at `at` (seconds since the epoch)."""
    stamp = str(int(at))
    return {TIMESTAMP: stamp, SIGNATURE: f"v1={_mac(key, stamp, body)}"}


def verify(key: bytes, fields: Mapping[str, str], body: bytes, *, now: float, tolerance: float = 300.0) -> bool:
    """Whether `body` came from who holds `key`, and not too long ago.

    Args:
        key: the shared key.
        fields: of the request; names in any case.
        body: as it came.
        now: seconds since the epoch. tolerance: how old or how early a request may be, seconds.

    """
    lower = {name.lower(): value for name, value in fields.items()}
    stamp = lower.get(TIMESTAMP.lower(), "")
    version, _, given = lower.get(SIGNATURE.lower(), "").partition("=")
    if version != "v1" or not (stamp.isascii() and stamp.isdigit() and len(stamp) <= 12):
        return False
    same = hmac.compare_digest(given.encode("utf-8", "replace"), _mac(key, stamp, body).encode())
    return same and abs(now - int(stamp)) <= tolerance


def _mac(key: bytes, stamp: str, body: bytes) -> str:
    return hmac.digest(key, stamp.encode() + b"." + body, "sha256").hex()
