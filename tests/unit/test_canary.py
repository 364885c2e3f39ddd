"""Planted values are found however they are written, and nothing else is (E7)."""

from __future__ import annotations

import base64
import binascii
import codecs
import html
import os
import string
import time
import urllib.parse

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockgate.policy.canary import RANDOM_BYTES, TAIL, Needles, Watch, mint

VALUE = mint(bytes(range(16)))
NEEDLES = Needles.of([VALUE])
RAW = VALUE.encode()
LETTERS = string.ascii_letters.encode()


def base58(raw: bytes) -> bytes:
    digits, number = b"", int.from_bytes(raw)
    while number:
        number, at = divmod(number, 58)
        digits = b"123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"[at : at + 1] + digits
    return digits


def spellings() -> dict[str, bytes]:
    return {
        "raw": RAW,
        "lower": RAW.lower(),
        "upper": RAW.upper(),
        "reversed": RAW[::-1],
        "hex": RAW.hex().encode(),
        "hex with colons": RAW.hex(":").encode(),
        "hex reversed": RAW[::-1].hex().encode(),
        "percent": "".join(f"%{one:02x}" for one in RAW).encode(),
        "percent thrice": "".join(f"%2525{one:02x}" for one in RAW).encode(),
        "entities": "".join(f"&#{one};" for one in RAW).encode(),
        "hex entities": "".join(f"&#x{one:x};" for one in RAW).encode(),
        "json escapes": "".join(f"\\u{one:04x}" for one in RAW).encode(),
        "c escapes": "".join(f"\\x{one:02x}" for one in RAW).encode(),
        "quoted-printable": "".join(f"={one:02X}" for one in RAW).encode(),
        "0x list": ", ".join(f"0x{one:02x}" for one in RAW).encode(),
        "decimal list": " ".join(str(one) for one in RAW).encode(),
        "octal list": " ".join(f"{one:o}" for one in RAW).encode(),
        "binary": " ".join(f"{one:08b}" for one in RAW).encode(),
        "rot13": codecs.encode(VALUE, "rot13").encode(),
        "separators": b"-".join(RAW[at : at + 1] for at in range(len(RAW))),
        "zero width": "\u200b".join(VALUE).encode(),
        "combining joiner": "\u034f".join(VALUE).encode(),
        "full width": "".join(chr(ord(one) + 0xFEE0) for one in VALUE).encode(),
        "utf-16": VALUE.encode("utf-16-le"),
        "labels": f"{VALUE[:9]}.{VALUE[9:20]}.{VALUE[20:]}.pages.partner.example".encode(),
        "ie escapes": "".join(f"%u{one:04x}" for one in RAW).encode(),
        "shifted by 5": RAW.translate(
            bytes.maketrans(LETTERS, b"".join(part[5:] + part[:5] for part in (LETTERS[:26], LETTERS[26:])))
        ),
        "mirrored": RAW.translate(bytes.maketrans(LETTERS, LETTERS[25::-1] + LETTERS[:25:-1])),
        "rot47": RAW.translate(bytes.maketrans(bytes(range(33, 127)), bytes(range(80, 127)) + bytes(range(33, 80)))),
        "calls": "+".join(f"chr({one})" for one in RAW).encode(),
        "sql calls": "||".join(f"CHAR( {one} )" for one in RAW).encode(),
        "tags": "".join(chr(0xE0000 + one) for one in RAW).encode(),
        "base64 of separated": base64.b64encode(b" ".join(RAW[at : at + 1] for at in range(len(RAW)))),
        "base64 thrice": base64.b64encode(base64.b64encode(base64.b64encode(RAW))),
        "base64 of base32": base64.b64encode(base64.b32encode(RAW)),
        "hex of escapes": "".join(f"%{one:02x}" for one in RAW).encode().hex().encode(),
        "base64 of json escapes": base64.b64encode("".join(f"\\u{one:04x}" for one in RAW).encode()),
        "hex backwards": RAW.hex()[::-1].encode(),
        "base64 backwards": base64.b64encode(b"k" + RAW + b"k")[::-1],
        "base64 of capitals": base64.b64encode(RAW.upper()),
        "base64 of lower case": base64.b64encode(b"k" + RAW.lower()),
        "base32 of capitals": base64.b32encode(RAW.upper()),
        "base64 of utf-16": base64.b64encode(f"k{VALUE}".encode("utf-16-le")),
        "hex of utf-16": VALUE.encode("utf-16-be").hex().encode(),
        "base58": base58(RAW),
        "one number": str(int.from_bytes(RAW)).encode(),
        "base85": base64.b85encode(b"kk" + RAW + b"kkk"),
        "ascii85": base64.a85encode(b"k" + RAW + b"kkkk"),
        "uuencode": binascii.b2a_uu(b"k" + RAW),
        "base64 of hex": base64.b64encode(RAW.hex().encode()),
        "hex of base64": base64.b64encode(RAW).hex().encode(),
        "base64 in lines": base64.encodebytes(b"x" * 40 + RAW + b"y" * 40),
        "first half": RAW[:16],
        "second half": RAW[16:],
    }


@pytest.mark.parametrize("name", list(spellings()))
def test_a_spelling_is_found(name: str) -> None:
    data = spellings()[name]
    assert NEEDLES.hit(data)
    assert NEEDLES.hit(b"before it " + data + b" and behind it")
    assert not Needles.of([mint(os.urandom(16))]).hit(data)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=40), st.binary(max_size=40), st.sampled_from(["b64", "url", "b32", "hex", "b64b64"]))
def test_every_alignment_is_found(before: bytes, behind: bytes, how: str) -> None:
    data = before + RAW + behind
    encoded = {
        "b64": base64.b64encode,
        "url": base64.urlsafe_b64encode,
        "b32": base64.b32encode,
        "hex": lambda raw: raw.hex().encode(),
        "b64b64": lambda raw: base64.b64encode(base64.b64encode(RAW + raw)),
    }[how](data)
    assert NEEDLES.hit(encoded)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, len(RAW) - 1), st.sampled_from([b"", b"GET /v1/", b"z" * 50]), st.booleans())
def test_two_requests_hide_nothing(cut: int, noise: bytes, encoded: bool) -> None:
    raw = base64.b64encode(RAW) if encoded else RAW
    cut = min(cut, len(raw) - 1)
    watch = Watch(NEEDLES)
    first = watch.feed(noise + raw[:cut])
    assert first | watch.feed(raw[cut:])


def test_pieces_of_any_size_are_joined() -> None:
    for size in (1, 2, 3, 7):
        watch = Watch(NEEDLES)
        data = b"some words " * 200 + base64.b64encode(b"k" + RAW) + b" more words" * 200
        assert any(watch.feed(data[at : at + size]) for at in range(0, len(data), size))
    assert len(Watch(NEEDLES)._tail) == 0
    watch = Watch(NEEDLES)
    watch.feed(b"x" * 10_000)
    assert len(watch._tail) == TAIL


def test_innocent_text_is_no_hit() -> None:
    words = b"the quick brown fox jumps over the lazy dog; 4417 refunds of 19.99 were paid on 2026-01-31. " * 400
    for data in (
        words,
        os.urandom(50_000),
        os.urandom(30_000).hex().encode(),
        base64.b64encode(os.urandom(50_000)),
        b"",
    ):
        assert not NEEDLES.hit(data)
    assert not NEEDLES.hit(html.escape("<a href='x'>&amp;&#x26;</a>" * 100))
    assert not NEEDLES.hit(urllib.parse.quote("äöü" * 1000))


def test_three_parts_are_not_found_and_the_page_says_so() -> None:
    """Negative control: what the docs call residual really is."""
    watch = Watch(NEEDLES)
    assert not any(watch.feed(b"/v1/" + part + b" " * TAIL) for part in (RAW[:11], RAW[11:22], RAW[22:]))


def test_short_and_odd_values() -> None:
    assert not Needles.of([])
    assert not Needles.of(["short"]).hit("short")
    odd = Needles.of(["+++---===///"])
    assert odd
    assert odd.hit("a +++---===/// b")
    assert Needles.of(["LGCANARY7f3a9c1e5d2b4860"]).hit("lgcanary7f3a9c1e5d2b4860")
    assert Needles.of(["schlüssel-wert-9"]).hit("xx schlüssel-wert-9")


def test_minting() -> None:
    made = {mint(os.urandom(RANDOM_BYTES)) for _ in range(50)}
    assert len(made) == 50
    assert all(len(one) == 32 and one.isalnum() and one.isascii() for one in made)
    with pytest.raises(ValueError, match="16"):
        mint(b"short")


def test_a_scan_is_bounded() -> None:
    data = os.urandom(1 << 20)
    begun = time.monotonic()
    NEEDLES.hit(data)
    assert time.monotonic() - begun < 30
