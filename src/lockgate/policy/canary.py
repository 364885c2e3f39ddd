"""Planted values, and how they are found in whatever is about to leave (E7).

Rule 1: a canary is 128 random bits in the shape of a key, made for one run, and known to nobody who behaves.
Rule 2: needles are made once: the value and its reverse, in hexadecimal, base32, base64, base85 (every alignment,
        without the edge characters that depend on their neighbours), base58, octal, decimal, binary and every letter
        shift; the common ones twice, backwards, and of the value in capitals, in lower case and in UTF-16.
        Each is looked for by its halves, so a value that is cut in two is found in one of the parts.
Rule 3: a haystack is read as letters and digits alone, in lower case: separators, invisible characters and the dots
        between DNS labels do not count. It is read as it stands and after each of three layers of escapes; then what
        its short words hold as base64, base32 or hexadecimal is read the same way, three times.
Rule 4: a hit is not a part of a message to take out: the whole is blocked, and the run is ended.

What is hashed, encrypted or cut into three is not found; the byte budget bounds it.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import html
import re
import string
import unicodedata
from collections.abc import Iterable
from typing import Final, final
from urllib.parse import unquote_to_bytes

RANDOM_BYTES: Final = 16
LEAST: Final = 8
"""Characters below which a value is not looked for: it would stand in innocent text."""
TAIL: Final = 1024
_HALF: Final = 12
_GRAM: Final = 5
_CHARS: Final = 32
_ALPHABET: Final = (string.ascii_letters + string.digits).encode()
_DROPPED: Final = bytes(one for one in range(256) if one not in _ALPHABET)
_BYTE: Final = re.compile(rb"(?:\\x|\\u00|%u00|\\u\{|&#[xX]|0[xX]|=)0*([0-9a-fA-F]{2})[;}]?")
_CHR: Final = re.compile(rb"(?i)\bchr?w?(?:ar)?\(\s*([0-9]{1,3})\s*\)")
_TAGS: Final = {0xE0000 + one: one for one in range(32, 127)}  # invisible twins of ASCII (Unicode, "Tags")
_WORD: Final = re.compile(rb"(?<![A-Za-z0-9+/_=-])[A-Za-z0-9+/_-]{16,4096}={0,6}(?![A-Za-z0-9+/_=-])")
_HEX: Final = re.compile(rb"[0-9a-fA-F]+\Z")
_BASE32: Final = re.compile(rb"(?:[A-Z2-7]+|[a-z2-7]+)\Z")
_URL_SAFE: Final = bytes.maketrans(b"+/", b"-_")
_ROUNDS: Final = 3
_GRAPHIC: Final = bytes(range(33, 127))
_BASE58: Final = b"123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
# An encoding that is half punctuation is looked for whole: a half of it would be too short to be sure of.
_SPARSE: Final = 16


def mint(random: bytes) -> str:
    """Return a canary made of `random`: 16 bytes nobody else knows; 32 letters and digits without a prefix.

    Raises:
        ValueError: it is not 16 bytes.

    """
    if len(random) != RANDOM_BYTES:
        raise ValueError("a canary is made of 16 random bytes")
    value = int.from_bytes(hashlib.sha256(b"lockgate/canary\0" + random).digest())
    made = bytearray()
    for _ in range(_CHARS):
        value, digit = divmod(value, len(_ALPHABET))
        made.append(_ALPHABET[digit])
    return made.decode("ascii")


def squeeze(data: bytes) -> bytes:
    """Return the letters and digits of `data`, in lower case."""
    return data.translate(None, _DROPPED).lower()


@final
class Needles:
    """The forms of planted values that are looked for. True when there are any."""

    __slots__ = ("_by_gram", "_plain", "_stride", "values")

    def __init__(self, values: tuple[str, ...], needles: frozenset[bytes], plain: frozenset[bytes]) -> None:
        self.values = values
        self._plain = plain  # values that are mostly punctuation: looked for as they are
        self._stride = min(map(len, needles), default=_GRAM) - _GRAM + 1
        self._by_gram: dict[bytes, list[bytes]] = {}
        for needle in needles:
            for at in range(self._stride):  # one of these begins where a sample of the haystack does
                self._by_gram.setdefault(needle[at : at + _GRAM], []).append(needle)

    @classmethod
    def of(cls, values: Iterable[str]) -> Needles:
        """Make the needles of `values`, each at least 8 characters."""
        kept = tuple(dict.fromkeys(values))
        needles: set[bytes] = set()
        plain: set[bytes] = set()
        for value in kept:
            raw = value.encode("utf-8", "surrogatepass")
            if len(squeeze(raw)) < LEAST:
                plain |= {raw.lower(), raw[::-1].lower()} if len(raw) >= LEAST else set()
                continue
            for form in _forms(raw):
                text = squeeze(form)
                half = len(text) // 2
                needles |= {text[:half], text[half:]} if half >= _HALF else {text}
            needles |= {text for text in map(squeeze, _sparse(raw)) if len(text) >= _SPARSE}
        return cls(kept, frozenset(one for one in needles if len(one) >= LEAST), frozenset(plain))

    def __bool__(self) -> bool:
        return bool(self._by_gram or self._plain)

    def hit(self, data: bytes | str) -> bool:
        """Whether one of the values is in `data`, in any of the forms."""
        if not self:
            return False
        raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
        for _ in range(_ROUNDS + 1):
            if not raw:
                return False
            raw, found = self._unescaped(raw)
            if found:
                return True
            raw = _opened(raw)
        return False

    def _unescaped(self, raw: bytes) -> tuple[bytes, bool]:
        """Look behind each layer of escapes; returns the text without them, and whether a value was there."""
        for _ in range(_ROUNDS):
            if self._look(raw):
                return raw, True
            decoded = _decode(raw)
            if decoded == raw:
                return raw, False
            raw = decoded
        return raw, self._look(raw)

    def _look(self, raw: bytes) -> bool:
        if any(one in raw.lower() for one in self._plain):
            return True
        by_gram = self._by_gram
        if not by_gram:
            return False
        text = squeeze(raw)
        # Every needle holds one of the samples whole, since they stand no further apart than its length allows.
        samples = {text[at : at + _GRAM] for at in range(0, len(text), self._stride)}
        return any(needle in text for gram in by_gram.keys() & samples for needle in by_gram[gram])


@final
class Watch:
    """Looks for planted values in what one run sends, piece by piece, whatever the pieces are."""

    __slots__ = ("_needles", "_tail")

    def __init__(self, needles: Needles) -> None:
        self._needles = needles
        self._tail = b""

    def feed(self, data: bytes) -> bool:
        """Whether one of the values is in `data`, or in the end of what went before and `data`."""
        if not self._needles:
            return False
        joined = self._tail + data
        self._tail = joined[-TAIL:]
        return self._needles.hit(joined)


def _forms(raw: bytes) -> Iterable[bytes]:
    """All spellings of a value, each one squeezed later."""
    yield from _shifted(raw)
    for value in (raw, raw[::-1]):
        yield value
        yield from _encoded(value)
    # What a program does to text before or after it encodes it.
    for value in (raw.lower(), raw.upper(), _utf16(raw, "le"), _utf16(raw, "be")):
        yield from _common(value)
    for text in _common(raw):
        yield text[::-1]
    for inner in (raw.hex().encode(), *_base64(raw)):
        yield inner.hex().encode()
        yield from _base64(inner)


def _shifted(raw: bytes) -> Iterable[bytes]:
    """Every Caesar shift of the letters, and Atbash."""
    text = raw.decode("utf-8", "replace")
    for by in range(1, 26):
        moved = "".join(one[by:] + one[:by] for one in (string.ascii_lowercase, string.ascii_uppercase))
        yield text.translate(str.maketrans(string.ascii_letters, moved)).encode()
    mirrored = string.ascii_lowercase[::-1] + string.ascii_uppercase[::-1]
    yield text.translate(str.maketrans(string.ascii_letters, mirrored)).encode()


def _utf16(raw: bytes, order: str) -> bytes:
    return raw.decode("utf-8", "replace").encode(f"utf-16-{order}")


def _encoded(raw: bytes) -> Iterable[bytes]:
    yield from _common(raw)
    yield "".join(str(one) for one in raw).encode()
    yield "".join(f"{one:o}" for one in raw).encode()
    yield "".join(f"{one:03o}" for one in raw).encode()
    yield "".join(f"{one:08b}" for one in raw).encode()
    number = int.from_bytes(raw)
    yield str(number).encode()
    yield _digits(number, _BASE58)


def _common(raw: bytes) -> Iterable[bytes]:
    """Hexadecimal, base32 and base64."""
    yield raw.hex().encode()
    for lead in range(5):
        # The first and the last characters hold bits of the neighbours.
        text = base64.b32encode(b"\0" * lead + raw).rstrip(b"=")
        yield text[(lead * 8 + 4) // 5 : len(text) - 1]
    yield from _base64(raw)


def _digits(number: int, alphabet: bytes) -> bytes:
    made = bytearray()
    while number:
        number, digit = divmod(number, len(alphabet))
        made.append(alphabet[digit])
    return bytes(made[::-1])


def _sparse(raw: bytes) -> Iterable[bytes]:
    """Base85 and Ascii85 (groups of 4 bytes), uuencode (groups of 3), without groups that hold a neighbour; ROT47."""
    for lead in range(4):
        whole = raw[-lead % 4 :]
        whole = whole[: len(whole) // 4 * 4]
        yield base64.b85encode(whole)
        yield base64.a85encode(whole)
    for lead in range(3):
        whole = raw[-lead % 3 :]
        yield binascii.b2a_uu(whole[: len(whole) // 3 * 3][:45], backtick=True)[1:-1]
    yield raw.translate(bytes.maketrans(_GRAPHIC, _GRAPHIC[47:] + _GRAPHIC[:47]))


def _base64(raw: bytes) -> Iterable[bytes]:
    for lead in range(3):
        text = base64.b64encode(b"\0" * lead + raw).rstrip(b"=")
        yield text[(lead * 8 + 5) // 6 : len(text) - 1]


def _decode(raw: bytes) -> bytes:
    """Return `raw` with one layer of the usual escapes undone, and compatibility characters made plain."""
    if b"%" in raw:
        raw = unquote_to_bytes(raw)
    if b"&" in raw:
        raw = html.unescape(raw.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
    if b"\\" in raw or b"%u" in raw or b"0x" in raw or b"0X" in raw or b"=" in raw or b"&#" in raw:
        raw = _BYTE.sub(lambda found: bytes((int(found[1], 16),)), raw)
    if b"(" in raw:
        raw = _CHR.sub(lambda found: bytes((int(found[1]) & 0xFF,)), raw)
    if not raw.isascii():
        try:
            raw = unicodedata.normalize("NFKC", raw.decode()).translate(_TAGS).encode()
        except UnicodeDecodeError:
            return raw  # no text, so no compatibility characters
    return raw


def _opened(raw: bytes) -> bytes:
    """Return what the short words of `raw` hold when they are encodings, one behind the other.

    A long one is an image or a file: its values are found by their needles, without this.
    """
    return b"".join(part for word in _WORD.findall(raw) for part in _readings(word.rstrip(b"=")))


def _readings(word: bytes) -> Iterable[bytes]:
    if len(word) % 2 == 0 and _HEX.match(word):
        yield bytes.fromhex(word.decode("ascii"))
        return
    if _BASE32.match(word):
        with contextlib.suppress(ValueError):
            yield base64.b32decode(word + b"=" * (-len(word) % 8), casefold=True)
    if len(word) % 4 != 1:
        yield base64.urlsafe_b64decode(word.translate(_URL_SAFE) + b"=" * (-len(word) % 4))
