"""What an approval is bound to.

Rule 1: a request names one run, one operation and the SHA-256 of its canonical typed arguments. An edited argument is
        another request; one grant never covers a second call.
Rule 2: a grant is spent by the intent row of its call (UNIQUE there), so neither a restart nor a race uses it twice.
"""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple

import msgspec

from lockgate.policy.types import Args

_encode: Final = msgspec.json.Encoder().encode


class ApprovalKey(NamedTuple):
    """What one approval is good for. `args_sha256`: hexadecimal, of `canonical_args`."""

    run: str
    operation: str
    args_sha256: str


def canonical_args(args: Args) -> bytes:
    """Return the JSON of typed arguments: one byte string per value, whatever the caller's spelling was.

    Fields stand in their declared order, and no argument type has keys of its own (checks.py refuses dict and set).
    """
    return _encode(args)


def approval_key(run: str, operation: str, canonical: bytes) -> ApprovalKey:
    """Return what an approval of this exact call is bound to; `canonical` is that of `canonical_args`."""
    return ApprovalKey(run, operation, hashlib.sha256(canonical).hexdigest())
