"""Text from a run, a child or a service, as a person's terminal may see it.

Rule 1: what can act (controls, ESC, CSI and OSC in 7 and 8 bits, bidi and other invisible format characters, line and
        paragraph separators, lone surrogates) becomes visible as its own escape. Nothing is dropped in silence.
Rule 2: a newline and a tab stay when `keep_lines` is set; a carriage return never does (it overwrites what was shown).
"""

from __future__ import annotations

import unicodedata
from typing import Final

from lockgate.contract.glyphs import BLANK

_INVISIBLE: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def escape(text: str, *, keep_lines: bool = False) -> str:
    r"""Return `text` with every character that acts or hides written as `\x..`, `\u....` or `\U........`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if _plain(c, keep_lines) else _written(c) for c in text)


def _plain(char: str, keep_lines: bool) -> bool:
    if " " <= char <= "~" or (keep_lines and char in "\n\t"):
        return True
    return unicodedata.category(char) not in _INVISIBLE and ord(char) not in BLANK


def _written(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
