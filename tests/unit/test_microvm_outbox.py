"""What a machine sends to its supervisor leaves in one order (X9, X10)."""

from __future__ import annotations

import os
import socket

import pytest

from lockgate.runtimes.microvm.outbox import Outbox


def test_a_descriptor_without_room_holds_up_all_behind_it() -> None:
    """A result must not overtake the output before it, and everything leaves once there is room."""
    stream, pipe = os.pipe()
    control, theirs = socket.socketpair()
    os.set_blocking(pipe, False)
    control.setblocking(False)
    theirs.setblocking(False)
    try:
        flood = os.urandom(1 << 20)
        box = Outbox()
        box.put(pipe, flood)
        box.put(control.fileno(), b"result")
        got = b""
        while box.flush() == pipe:
            assert box.waiting
            with pytest.raises(BlockingIOError):
                theirs.recv(1)
            got += os.read(stream, 1 << 16)
        assert not box.waiting
        assert theirs.recv(16) == b"result"
        os.close(pipe)
        pipe = -1
        while piece := os.read(stream, 1 << 16):
            got += piece
        assert got == flood
    finally:
        for fd in (stream, pipe):
            if fd >= 0:
                os.close(fd)
        control.close()
        theirs.close()


def test_what_nobody_takes_is_dropped_and_the_rest_leaves() -> None:
    stream, pipe = os.pipe()
    control, theirs = socket.socketpair()
    os.close(stream)
    try:
        box = Outbox()
        box.put(pipe, b"lost")
        box.put(control.fileno(), b"kept")
        assert box.flush() == -1
        assert theirs.recv(16) == b"kept"
    finally:
        os.close(pipe)
        control.close()
        theirs.close()


def test_a_descriptor_that_fails_otherwise_is_an_error() -> None:
    box = Outbox()
    box.put(1 << 20, b"nobody's")
    with pytest.raises(OSError, match="Bad file descriptor"):
        box.flush()
    assert box.waiting
