"""What may leave a run as a file (X7): names, order, count and size fail closed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockgate.broker.exports import CHUNK_BYTES, ExportArgs, Refusal, Spool, bad_name, decode
from lockgate.contract.errors import GuestProtocolError


@pytest.fixture
def spool() -> Iterator[Spool]:
    one = Spool(max_bytes=1000, max_files=3)
    yield one
    one.close()


GOOD = ["chart.png", "a", "Zürich 2026.csv", "a..b", "x" * 128, "データ.json", "no-extension_1"]
BAD = [
    "", ".", "..", ".hidden", "../up", "a/b", "/etc/passwd", "a\\b", "a\0b", "a\nb", "a\rb", "a\tb", "a\x1bb", "a\x7fb",
    "a\u202etxt.exe", "a\u2066b", "a\u200bb", "a\u2028b", "a\ufeffb", "a\ue000b", "\ud800", "x" * 129, "é" * 65,
    " a", "a ", "-rf", "~root", "a\u0378b", "a\u00a0b", "a\u3000b", "a\ufe0fb", "a\u3164b",
]  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_a_plain_name_is_taken(name: str) -> None:
    assert bad_name(name) is None


@pytest.mark.parametrize("name", BAD)
def test_a_name_that_walks_hides_or_deceives_is_refused(spool: Spool, name: str) -> None:
    assert bad_name(name) is not None
    with pytest.raises(Refusal):
        spool.take(ExportArgs(name, b"x", last=True))
    assert spool.infos == ()


def test_hidden_files_only_where_allowed() -> None:
    assert bad_name(".env", hidden=True) is None
    assert bad_name("..", hidden=True) is not None


def test_pieces_in_order_make_a_file(spool: Spool) -> None:
    assert spool.take(ExportArgs("a", b"one ", last=False)) is None
    assert spool.take(ExportArgs("b", b"other", last=True)) is not None
    info = spool.take(ExportArgs("a", b"two", last=True))
    assert info is not None
    assert (info.size, info.sha256) == (7, hashlib.sha256(b"one two").hexdigest())
    assert spool.read("a", 0, 100) == (b"one two", True)
    assert spool.read("a", 2, 4) == (b"e tw", False)
    assert spool.read("a", 7, 4) == (b"", True)
    assert spool.read("a", 8, 4) is None
    assert spool.read("a", -1, 4) is None


def test_a_file_without_its_last_piece_does_not_exist(spool: Spool) -> None:
    spool.take(ExportArgs("a", b"half", last=False))
    assert spool.infos == ()
    assert spool.read("a", 0, 10) is None


def test_a_file_is_written_once(spool: Spool) -> None:
    spool.take(ExportArgs("a", b"first", last=True))
    with pytest.raises(Refusal, match="exported before"):
        spool.take(ExportArgs("a", b"second", last=True))
    assert spool.read("a", 0, 100) == (b"first", True)


def test_size_and_count_are_checked_before_anything_is_kept(spool: Spool) -> None:
    spool.take(ExportArgs("a", b"x" * 600, last=True))
    with pytest.raises(Refusal, match="more than 1000 bytes") as caught:
        spool.take(ExportArgs("b", b"x" * 401, last=True))
    assert caught.value.too_large
    spool.take(ExportArgs("b", b"x" * 400, last=True))
    spool.take(ExportArgs("c", b"", last=True))
    with pytest.raises(Refusal, match="more than 3 files"):
        spool.take(ExportArgs("d", b"", last=True))


def test_the_spool_has_no_name(spool: Spool) -> None:
    before = set(os.listdir("/tmp"))
    spool.take(ExportArgs("a", b"x", last=True))
    assert set(os.listdir("/tmp")) - before == set() or all("lockgate" not in name for name in set(os.listdir("/tmp")))
    link = os.readlink(f"/proc/self/fd/{spool._fd}")
    assert "(deleted)" in link


@pytest.mark.parametrize(
    "raw",
    [
        b"{}",
        b'{"name":"a","data":"!","last":true}',
        b'{"name":"a","data":"","last":1}',
        b'{"name":1,"data":"","last":true}',
        b'{"name":"a","data":"","last":true,"path":"/etc"}',
        b'{"name":"a","data":[1],"last":true}',
    ],
)
def test_other_arguments_are_refused(raw: bytes) -> None:
    with pytest.raises(Refusal):
        decode(raw)


def test_a_piece_above_the_protocols_size_is_a_violation() -> None:
    raw = msgspec.json.encode(ExportArgs("a", b"x" * (CHUNK_BYTES + 1), last=True))
    with pytest.raises(GuestProtocolError):
        decode(raw)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.binary(max_size=40)), max_size=12), st.integers(1, 9))
def test_interleaved_files_read_back_as_they_were_written(pieces: list[tuple[str, bytes]], count: int) -> None:
    spool = Spool(max_bytes=10_000, max_files=3)
    wanted: dict[str, bytes] = {}
    for name, data in pieces:
        spool.take(ExportArgs(name, data, last=False))
        wanted[name] = wanted.get(name, b"") + data
    for name, data in wanted.items():
        spool.take(ExportArgs(name, b"", last=True))
        got, last, offset = b"", False, 0
        while not last:
            found = spool.read(name, offset, count)
            assert found is not None
            part, last = found
            got, offset = got + part, offset + len(part)
        assert got == data
        assert spool.fetched(name) == (spool.infos == ())
    spool.close()
