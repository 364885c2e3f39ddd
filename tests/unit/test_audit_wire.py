"""Replies of the audit writer survive any chunking, and bytes of anybody else end the link."""

from __future__ import annotations

import pytest

from lockgate.audit import wire
from lockgate.contract.errors import AuditUnavailable

EXISTING = wire.Existing("done", "key", "s-1", "run_1", "a" * 64, "ok", b'{"ok":1}', "s-2")
REPLIES: list[wire.Reply] = [
    wire.Ready(12, 3, b"h" * 32, 1, 0),
    wire.Failed("the disk is full", "free space"),
    wire.Stored(1, 2, b"x" * 32),
    wire.Taken(2, EXISTING),
    wire.Found(3, None),
    wire.Rejected(4, transient=True, message="no", next_step="wait"),
    wire.Health(ok=False, message="no", next_step="wait"),
]


@pytest.mark.parametrize("size", [1, 3, 7, 4096])
def test_replies_come_whole_whatever_the_chunks(size: int) -> None:
    stream = b"".join(map(wire.encode_reply, REPLIES))
    replies = wire.Replies()
    out = [reply for at in range(0, len(stream), size) for reply in replies.feed(stream[at : at + size])]
    assert out == REPLIES


@pytest.mark.parametrize("junk", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\xc1", b"\x00\x00\x00\x04junk"])
def test_what_is_no_reply_ends_the_link(junk: bytes) -> None:
    with pytest.raises(AuditUnavailable):
        wire.Replies().feed(junk)
