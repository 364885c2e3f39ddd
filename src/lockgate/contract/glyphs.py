"""Characters that are letters or marks to `unicodedata` and blank to the eye."""

from __future__ import annotations

from typing import Final

# Hangul fillers, Braille blank, the combining grapheme joiner, and variation selectors, which carry hidden data.
BLANK: Final = frozenset(
    {0x034F, 0x115F, 0x1160, 0x2800, 0x3164, 0xFFA0, *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)}
)
