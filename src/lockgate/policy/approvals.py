"""What an approval is bound to.

Rule 1: a request names one run, one operation and the SHA-256 of its canonical typed arguments. An edited argument is
        another request; one grant never covers a second call.
Rule 2: a grant is spent by the intent row of its call (UNIQUE there), so neither a restart nor a race uses it twice.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from lockgate.policy.types import Args

_encode: Final = msgspec.json.Encoder(order="deterministic").encode


class ApprovalKey(msgspec.Struct, frozen=True):
    """What one approval is good for. `args_sha256`: hexadecimal, of `canonical_args`."""

    run: str
    operation: str
    args_sha256: str


def canonical_args(args: Args) -> bytes:
    """Return the JSON of typed arguments: one byte string per value, whatever the caller's spelling was."""
    return _encode(args)


def approval_key(run: str, operation: str, args: Args) -> ApprovalKey:
    """Return what an approval of this exact call is bound to."""
    digest = hashlib.sha256(b"lockgate/args/1\0" + operation.encode() + b"\0" + canonical_args(args)).hexdigest()
    return ApprovalKey(run, operation, digest)
