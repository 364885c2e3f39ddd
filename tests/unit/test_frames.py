"""Frames: the length is believed only within the cap, and a violation is final (broker boundary, X4)."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockgate.contract.errors import GuestProtocolError
from lockgate.contract.frames import Decoder, encode


def test_a_frame_is_its_length_and_its_body() -> None:
    assert encode(b"ab") == b"\0\0\0\2ab"
    assert Decoder().feed(b"\0\0\0\2ab") == [b"ab"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.data())
def test_bodies_do_not_depend_on_how_the_bytes_arrive(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(encode, bodies))
    decoder, found = Decoder(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += decoder.feed(stream[:size])
        stream = stream[size:]
    assert found == bodies
    assert not decoder.pending


def test_pending_says_that_a_frame_has_begun() -> None:
    decoder = Decoder()
    assert not decoder.pending
    for piece, after in ((b"\0", True), (b"\0\0\1", True), (b"x", False)):
        decoder.feed(piece)
        assert decoder.pending is after


@pytest.mark.parametrize("header", [b"\0\0\0\0", b"\0\0\0\x09", b"\x80\0\0\0", b"\xff\xff\xff\xff"])
def test_a_length_outside_the_cap_ends_the_stream_for_good(header: bytes) -> None:
    decoder = Decoder(cap=8)
    with pytest.raises(GuestProtocolError, match=r"outside 1\.\.8"):
        decoder.feed(header + b"x" * 20)
    for _ in range(2):
        with pytest.raises(GuestProtocolError):
            decoder.feed(encode(b"ok"))
    assert not decoder.pending


def test_the_cap_itself_passes() -> None:
    assert Decoder(cap=8).feed(encode(b"x" * 8, cap=8)) == [b"x" * 8]


def test_a_header_costs_nothing() -> None:
    """X9: an announced gibibyte allocates nothing."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[1]
        for size in (2**30, 2**31, 2**32 - 1):
            with pytest.raises(GuestProtocolError):
                Decoder().feed(struct.pack(">I", size))
        assert tracemalloc.get_traced_memory()[1] - before < 64 * 1024
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("body", [b"", b"x" * 9])
def test_what_could_not_be_read_is_not_written(body: bytes) -> None:
    with pytest.raises(GuestProtocolError):
        encode(body, cap=8)
