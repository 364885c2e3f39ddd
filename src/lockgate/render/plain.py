"""Sinks that hold plain characters: messages, titles, terminals, logs, cells, TeX, header values.

Rule 1: the input is taken as it is, not parsed; none of these needs the extra `[render]`.
Rule 2: what the sink's program would execute or link becomes a visible escape; nothing vanishes but the invisible.
"""

from __future__ import annotations

import re
from typing import Final

from lockgate.render.visible import clean, defang, escape_controls

_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,15}(?:[.,][0-9]{1,15})?(?:[eE][+-]?[0-9]{1,3})?%?\Z")
_TRIGGERS: Final = frozenset("=+-@\uff1d\uff0b\uff0d\uff20\u2212\t\r\n|%")
_TEX: Final = {ord(char): "\\" + char for char in "{}$&#%_"} | {
    ord(char): f"\\text{name}{{}}"
    for char, name in {
        "\\": "backslash",
        "^": "asciicircum",
        "~": "asciitilde",
        "`": "asciigrave",
        "'": "quotesingle",
        '"': "quotedbl",
        "<": "less",
        ">": "greater",
        "|": "bar",
    }.items()
}
CELL_CHARS: Final = 32_767  # of one spreadsheet cell
HEADER_CHARS: Final = 200


def text(value: str) -> tuple[str, int]:
    """Plain text for messages, titles and tickets: links broken, invisible characters gone; also how many were."""
    cleaned, removed = clean(escape_controls(value))
    return defang(cleaned), removed


def terminal(value: str) -> tuple[str, int]:
    """Text for a terminal: every control but newline and tab is visible, no escape sequence survives."""
    return text(value)


def log_line(value: str) -> tuple[str, int]:
    """One record on one line."""
    cleaned, removed = clean(escape_controls(value, line=True))
    return defang(cleaned), removed


def cell(value: str) -> str:
    """One spreadsheet cell, never a formula: an apostrophe before anything a program may calculate.

    Source: OWASP CSV injection; the first character counts after white space and quotes too.
    """
    cleaned = clean(value.replace("\r\n", "\n").replace("\r", "\n"))[0][:CELL_CHARS]
    bare = cleaned.lstrip(" \u00a0\u3000\"'\ufeff")
    if _NUMBER.match(cleaned):
        return cleaned
    if cleaned[:1] in _TRIGGERS or bare[:1] in _TRIGGERS or value[:1] in _TRIGGERS:
        return "'" + cleaned
    # A line inside a cell may become a cell of its own in a lenient reader.
    return "\n".join(
        "'" + line if index and line.lstrip(" \"'")[:1] in _TRIGGERS else line
        for index, line in enumerate(cleaned.split("\n"))
    )


def csv_row(values: list[str], delimiter: str = ",") -> str:
    """One row, every cell quoted (RFC 4180), ends in CR LF."""
    return delimiter.join('"' + cell(value).replace('"', '""') + '"' for value in values) + "\r\n"


def latex(value: str) -> str:
    """Words for TeX: every active character is a command that prints it."""
    cleaned = clean(escape_controls(value))[0]
    return defang(cleaned).translate(_TEX)


def header_value(value: str) -> str:
    """One header value: visible ASCII and spaces, one line, 200 characters."""
    cleaned = clean(escape_controls(value, line=True))[0]
    one = " ".join(defang(cleaned).split())
    return "".join(c if " " <= c <= "~" else "?" for c in one)[:HEADER_CHARS]
