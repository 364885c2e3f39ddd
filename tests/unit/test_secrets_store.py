"""Where secrets may be read from, and what an error about it may say (C4, C6)."""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path

import pytest

from lockgate.secrets import FileStore, SecretUnavailable, open_store
from lockgate.secrets.leaks import LIVE
from lockgate.secrets.store import MAX_BYTES

VALUE = "sk-synthetic-51d0c3b2a1"


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    path = tmp_path / "secrets.toml"
    path.write_text(f'payments = "{VALUE}"\nshort = "abc"\nnumber = 5\npem = """\nline one of it\nline two\n"""\n')
    path.chmod(0o600)
    return path


def refused(store: FileStore, ref: str) -> str:
    """The text of the refusal, whole, with every frame's local text that Python would print."""
    with pytest.raises(SecretUnavailable) as caught:
        store.get(ref, purpose="test")
    text = "".join(traceback.format_exception(caught.value)) + str(caught.value)
    assert VALUE not in text
    assert "Next step" in str(caught.value)
    return str(caught.value)


def test_a_key_of_a_file_is_lent(kept: Path) -> None:
    with open_store(f"file://{kept}#payments").get(f"file://{kept}#payments", purpose="test") as lease:
        assert lease.value.reveal() == VALUE
        assert lease.purpose == "test"
        assert lease.expires - time.monotonic() <= 30


def test_a_whole_file_is_lent_without_its_last_line_end(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(VALUE + "\n")
    path.chmod(0o400)
    with FileStore().get(f"file://{path}", purpose="test") as lease:
        assert lease.value.reveal() == VALUE


def test_text_of_many_lines(kept: Path) -> None:
    with FileStore().get(f"file://{kept}#pem", purpose="test") as lease:
        assert lease.value.reveal() == "line one of it\nline two\n"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o644, 0o777])
def test_a_file_that_others_may_use_is_refused(kept: Path, mode: int) -> None:
    kept.chmod(mode)
    assert "open to its group or to others" in refused(FileStore(), f"file://{kept}#payments")
    kept.chmod(0o600)
    FileStore().get(f"file://{kept}#payments", purpose="test").end()  # the negative control


def test_a_link_is_not_followed(kept: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(kept)
    assert "cannot be opened" in refused(FileStore(), f"file://{link}#payments")


def test_a_fifo_a_directory_and_a_device_are_refused_at_once(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    began = time.monotonic()
    assert "not a regular file" in refused(FileStore(), f"file://{fifo}#payments")
    assert time.monotonic() - began < 10
    assert "not a regular file" in refused(FileStore(), f"file://{tmp_path}#payments")
    assert "not a regular file" in refused(FileStore(), "file:///dev/zero")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(kept: Path) -> None:
    os.chown(kept, 12345, 12345)
    assert "belongs to another user" in refused(FileStore(), f"file://{kept}#payments")


@pytest.mark.parametrize(
    ("ref", "says"),
    [
        ("file://{0}#absent", "no text under that key"),
        ("file://{0}#number", "no text under that key"),
        ("file://{0}#short", "shorter than"),
        ("file://{0}.gone#payments", "cannot be opened"),
        ("file://relative#payments", "no reference to a file"),
        ("payments", "no reference to a file"),
        ("file://{0}\0#payments", "no reference to a file"),
    ],
)
def test_what_is_no_secret_says_why(kept: Path, ref: str, says: str) -> None:
    assert says in refused(FileStore(), ref.format(kept))


@pytest.mark.parametrize("text", [f"payments = {VALUE}", f'payments = "{VALUE}"\npayments = "{VALUE}"', f"{VALUE}"])
def test_a_parser_is_not_quoted(kept: Path, text: str) -> None:
    kept.write_text(text)
    assert "is not TOML" in refused(FileStore(), f"file://{kept}#payments")


def test_bytes_that_are_no_text_are_not_quoted(kept: Path) -> None:
    kept.write_bytes(VALUE.encode() + b"\xff")
    assert "is not UTF-8" in refused(FileStore(), f"file://{kept}#payments")


def test_a_file_without_end_is_refused(kept: Path) -> None:
    kept.write_text("a" * (MAX_BYTES + 1))
    assert "is over" in refused(FileStore(), f"file://{kept}")


def test_no_other_store_exists() -> None:
    with pytest.raises(SecretUnavailable, match="no secret store for 'env'"):
        open_store("env://PAYMENTS")


def test_a_rotated_secret_is_taken_up(kept: Path) -> None:
    ref = f"file://{kept}#payments"
    store, brief = FileStore(cache=60), FileStore(cache=0.2)
    for one in (store, brief):
        one.get(ref, purpose="test").end()
    kept.write_text('payments = "sk-synthetic-rotated-77"\n')
    with store.get(ref, purpose="test") as cached:
        assert cached.value.reveal() == VALUE
    time.sleep(0.25)
    with brief.get(ref, purpose="test") as fresh:
        assert fresh.value.reveal() == "sk-synthetic-rotated-77"
    kept.write_text('payments = "sk-synthetic-rotated-88"\n')
    store.reload()
    with store.get(ref, purpose="test") as reloaded:
        assert reloaded.value.reveal() == "sk-synthetic-rotated-88"
    for one in (store, brief):
        one.reload()
    assert not [lease for lease in LIVE.leases if any(b"rotated" in needle for needle in lease.needles)]
