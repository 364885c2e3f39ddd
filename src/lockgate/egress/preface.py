"""The first bytes of each connection to the gateway: whose it is.

Rule 1: exactly `PREFACE_BYTES` bytes, so that not one byte of the conversation is read with them.
Rule 2: whoever writes them is the launcher of the run, never a confined process: that one talks to a forwarder.
"""

from __future__ import annotations

import re
from typing import Final

TOKEN_CHARS: Final = 43
PREFACE_BYTES: Final = 5 + TOKEN_CHARS + 2
_PREFACE: Final = re.compile(rb"LGE1 ([A-Za-z0-9_-]{43})\r\n\Z")


def preface(token: str) -> bytes:
    """Return the first bytes of a connection of the run that has `token`."""
    return b"LGE1 " + token.encode("ascii") + b"\r\n"


def parse_preface(data: bytes) -> bytes:
    """Return the token; b"" when these bytes are no preface, which names no run."""
    match = _PREFACE.match(data)
    return b"" if match is None else match[1]
