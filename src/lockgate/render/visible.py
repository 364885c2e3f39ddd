"""What a reader cannot see, and what a program would make a link of.

Rule 1: a URL is judged before anything is removed from it (judge.py); this file only ever sees words.
Rule 2: `defang` leaves nothing that a linkifier of plain text takes for a link, and stays readable.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, Literal
from unicodedata import category, combining

from lockgate.render.tables import ENDINGS, FIELDS
from lockgate.render.tlds import TLDS

# Default-ignorable, format, bidirectional and control characters, variation selectors, tags, fillers, private use.
_INVISIBLE_SET: Final = (
    "\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff\ufdd0-\ufdef\U00013430-\U0001345f"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff\ue000-\uf8ff\U000f0000-\U0010ffff\ud800-\udfff"
    + "".join(f"{chr(plane << 16 | 0xFFFE)}{chr(plane << 16 | 0xFFFF)}" for plane in range(1, 15))
)
INVISIBLE: Final = re.compile(f"[{_INVISIBLE_SET}]")
# Pictures only: a selector or joiner after any other character is seen by nobody and carries a bit.
_EMOJI: Final = re.compile(
    "[\u00a9\u00ae\u203c\u2049\u2122\u2139\u2194-\u21aa\u231a-\u23fa\u24c2\u25aa-\u25fe\u2600-\u27bf\u2934\u2935\u2b05-\u2b55"
    "\u3030\u303d\u3297\u3299\U0001f000-\U0001faff]"
)
_KEYCAP: Final = frozenset("#*0123456789")
_JOINING: Final = re.compile("[\u0600-\u08ff\u0900-\u0dff\ufb50-\ufdff\ufe70-\ufefc]")
_CONTROL: Final = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f]")
_CONTROL_LINE: Final = re.compile("[\\x00-\\x08\\x0a-\\x1f\\x7f-\\x9f\u2028\u2029]")

# Schemes that clients act on without slashes; every other is broken where a slash follows it.
SCHEMES: Final = (
    "mailto|xmpp|tel|sms|javascript|vbscript|magnet|callto|sips?|facetime|whatsapp|skype|view-source|intent|feed|"
    "ms-[a-z-]{1,24}|web\\+[a-z]{1,24}|itms[a-z-]{0,12}"
)
_SCHEME_BEFORE: Final = re.compile(rf"(?<![0-9A-Za-z])(?:{SCHEMES})\Z", re.IGNORECASE)
_DATA_URL: Final = re.compile(r"[\w.+-]{0,40}[/,;]")
_TRIGGER: Final = re.compile(r"[:@.\u3002\uff0e\uff61]|//|\\\\")
_LABEL: Final = re.compile(r"[0-9A-Za-z-]+")
_PROGRAM: Final = ENDINGS | FIELDS
_NAME_CHARS: Final = 253  # of a host name (RFC 1035 section 2.3.4)
# Punctuation beyond ASCII, as a set of a pattern: a URL that is found in words ends before it.
WIDE_PUNCTUATION: Final = (
    "\u00a1\u00ab\u00b7\u00bb\u00bf\u060c\u061b\u061f\u0964\u0965\u2010-\u2027\u2030-\u205e\u3000-\u3003\u3008-\u3011\u3014-\u301f"
    "\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65"
)
_VIRAMA: Final = 9  # canonical combining class (UAX 44)
_FULL_STOPS: Final = frozenset("\u3002\uff0e\uff61")
_LABEL_CHARS: Final = 64  # RFC 1035 section 2.3.4, and one to see that it is longer
_WINDOW: Final = 40  # longest scheme name that is looked for, and then some

Live = Literal["colon", "dot", "www", "at"]


def clean(text: str) -> tuple[str, int]:
    """Return `text` without invisible characters, and how many were removed.

    Kept: a joiner between two emoji, one variation selector after an emoji, joiners inside Arabic and Indic words.
    U+2028 and U+2029 become a space.
    """
    if INVISIBLE.search(text) is None:
        return text, 0
    removed = 0

    def one(match: re.Match[str]) -> str:
        nonlocal removed
        char, at = match[0], match.start()
        before = text[at - 1] if at else ""
        after = text[at + 1] if at + 1 < len(text) else ""
        if char == "\ufe0f" and (_EMOJI.match(before) or (before in _KEYCAP and after == "\u20e3")):
            return char
        if char == "\u200d" and _EMOJI.match(after):
            picture = text[at - 2 : at - 1] if before == "\ufe0f" else before
            if _EMOJI.match(picture):
                return char
        # A joiner behind the sign that kills a vowel decides on the letter's form, at the end of a word too.
        if (
            char in "\u200c\u200d"
            and _JOINING.match(before)
            and (_JOINING.match(after) or combining(before) == _VIRAMA)
        ):
            return char
        removed += 1
        return " " if char in "\u2028\u2029" else ""

    return INVISIBLE.sub(one, text), removed


def live_at(text: str, at: int, start: int = 0) -> Live | None:
    """Say what a linkifier would see in the trigger character at `at`, or None when it is only punctuation.

    `start` is where a run of words began that a renderer may look at alone.
    """
    char = text[at]
    before = text[at - 1] if at else " "
    after = text[at + 1] if at + 1 < len(text) else " "
    if char == ":":
        if after in "/\\" and (before.isalnum() or before in "+.-"):
            # One letter alone is a drive, and no scheme.
            return "colon" if at > 1 and (text[at - 2].isalnum() or text[at - 2] in "+.-") else None
        if after.isspace() or not before.isalnum():
            return None
        if text[max(0, at - 4) : at].lower() in {"data", "blob"} and _DATA_URL.match(text, at + 1):
            return "colon"
        low = max(0, at - _WINDOW)
        if _SCHEME_BEFORE.search(text[low:at]) or (start > low and _SCHEME_BEFORE.search(text[start:at])):
            return "colon"
        return None
    if char == "@":
        return None if before.isspace() or after.isspace() else "at"
    if text[max(0, at - 3) : at].lower() == "www" and not after.isspace():
        return "www"
    if not _in_name(before) or not after.isalnum():
        return None
    label = _LABEL.match(text, at + 1)
    if label is not None and (label[0].lower() in TLDS or label[0].lower().startswith("xn--")):
        return "dot"
    # The full stop of Chinese and Japanese stands between two sentences without a space: only an ASCII name ends there.
    return "dot" if char not in _FULL_STOPS and _wide_label(text, at + 1) in wide_tlds() else None


def _in_name(char: str) -> bool:
    """Whether a linkifier takes a character for part of a host name: letters, marks and pictures of any script."""
    if char.isascii() or char.isalnum():
        return char.isalnum() or char in "-_"
    return not char.isspace() and category(char)[0] != "P"


def _wide_label(text: str, at: int) -> str:
    end = at
    while end < len(text) and end - at < _LABEL_CHARS and (text[end].isalnum() or category(text[end])[0] == "M"):
        end += 1
    return text[at:end].lower()


@lru_cache(maxsize=1)
def wide_tlds() -> frozenset[str]:
    """Top-level domains that are written in other letters than ASCII (RFC 5891, section 4.4)."""
    return frozenset(name[4:].encode().decode("punycode") for name in TLDS if name.startswith("xn--"))


def defang(text: str, *, code: bool = False) -> str:
    """Break every URL, `www.` name, address and host name visibly: `https[:]//`, `[at]`, `evil[.]com`.

    Where `code` is shown nothing links a bare name: `setup.py` and `user.name` stay.
    """

    def mark(match: re.Match[str]) -> str:
        start = match.start()
        if len(match[0]) == 2:
            return f"[{match[0]}]" if _double(text, start) else match[0]
        kind = live_at(text, start)
        if kind is None or (code and kind == "dot" and _of_program(text, start)):
            return match[0]
        return {"colon": "[:]", "at": "[at]"}.get(kind, "[.]")

    return _TRIGGER.sub(mark, text)


def _double(text: str, at: int) -> bool:
    """Whether a protocol-relative URL or a UNC path begins at `at`."""
    before = text[at - 1] if at else " "
    after = text[at + 2] if at + 2 < len(text) else " "
    return not (before.isalnum() or before in ":/\\]") and not (after.isspace() or after in "/\\]")


def _of_program(text: str, at: int) -> bool:
    """Whether the dot at `at` stands before a file ending or a field, in no URL and no address."""
    label = _LABEL.match(text, at + 1)
    if label is None or label[0].lower() not in _PROGRAM or not text[at - 1 : at].isascii():
        return False
    if text[label.end() : label.end() + 1] in {"/", "\\", "@"}:
        return False
    words = text[max(0, at - _NAME_CHARS) : at].split()
    return not words or not any(mark in words[-1] for mark in ("//", "\\\\", "@", "www."))


def find_live(text: str, *, code: bool = False) -> str | None:
    """Return the first thing in plain text that a linkifier may take for a link, or None."""
    for match in _TRIGGER.finditer(text):
        start = match.start()
        if len(match[0]) == 2:
            found = _double(text, start)
        else:
            kind = live_at(text, start)
            found = kind is not None and not (code and kind == "dot" and _of_program(text, start))
        if found:
            return text[max(0, start - 16) : start + 17]
    return None


def escape_controls(text: str, *, line: bool = False) -> str:
    r"""Make C0, DEL and C1 visible as `\xNN`; CR LF is a newline. A `line` has no newline and no separators either."""
    text = text.replace("\r\n", "\n")
    pattern = _CONTROL_LINE if line else _CONTROL
    return pattern.sub(lambda m: f"\\x{ord(m[0]):02x}" if ord(m[0]) < 256 else f"\\u{ord(m[0]):04x}", text)


def shown_host(host: str) -> str:
    """Return a host as it may be shown anywhere: defanged, visible ASCII, at most 80 characters."""
    safe = "".join(c if "!" <= c <= "~" and c not in "<>\"'`\\@/" else "?" for c in host[:80])
    return safe.replace(".", "[.]").replace(":", "[:]")
