"""C5: the chain's definition, against digests that coreutils' sha256sum computed from the same bytes."""

from __future__ import annotations

import subprocess

import pytest

from lockgate.audit.chain import EMPTY, GENESIS, Head, link

FIRST = "d92b1192964ef0d5972f92168bfddbc2b7a29abbfe5ddf6a419a4bd1bbb723c6"
SECOND = "b538f7b89ff567d8d92244c66e10c130900605a5073d0d9ed03613408bd91a1c"
LARGE = "2c1d6a831f0fe61f600aac7a38f4306e03e44a02309066634e3c9c0dcfd8132e"


def test_vectors_of_the_chain() -> None:
    assert link(GENESIS, 1, b'{"a":1}').hex() == FIRST
    assert link(bytes.fromhex(FIRST), 2, '{"b":"é"}'.encode()).hex() == SECOND
    assert link(b"\xff" * 32, 0x0102030405060708, b"").hex() == LARGE


def test_another_program_computes_the_same_link() -> None:
    body = b'{"id":"x","user":"u1"}'
    bytes_of_it = b"lockgate/row/1" + b"\x00" + b"\x07" * 32 + b"\x00\x00\x00\x00\x00\x01\x00\x00" + body
    told = subprocess.run(["sha256sum"], input=bytes_of_it, capture_output=True, check=True, timeout=10).stdout
    assert told.split()[0].decode() == link(b"\x07" * 32, 65536, body).hex()


@pytest.mark.parametrize(
    "other",
    [link(GENESIS, 2, b'{"a":1}'), link(b"\1" * 32, 1, b'{"a":1}'), link(GENESIS, 1, b'{"a":2}')],
    ids=["place", "predecessor", "body"],
)
def test_place_predecessor_and_body_are_all_under_the_hash(other: bytes) -> None:
    assert other.hex() != FIRST


def test_a_head_is_read_as_it_is_written() -> None:
    head = Head(17, bytes.fromhex(FIRST))
    assert str(head) == f"17:{FIRST}"
    assert Head.parse(str(head)) == head
    assert Head.parse(f" {EMPTY}\n") == EMPTY


@pytest.mark.parametrize("text", ["", "17", f"-1:{FIRST}", f"²:{FIRST}", "1:abcd", f"1:{FIRST[:-1]}g", FIRST])
def test_what_is_no_head_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Head.parse(text)
