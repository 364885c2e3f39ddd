"""Sinks that hold plain characters: messages, titles, terminals, logs, cells, TeX, header values.

Rule 1: the input is taken as it is, not parsed; none of these needs the extra `[render]`.
Rule 2: what the sink's program would execute or link becomes a visible escape; nothing vanishes but the invisible.
"""

from __future__ import annotations

import re
from typing import Final

from lockgate.render.visible import clean, defang, escape_controls

# What no program calculates with: a number or an amount, with groups of thousands or not, or a telephone number.
HARMLESS_CELL: Final = re.compile(
    r"[+\u2212-]?[$\u20ac\u00a3\u00a5]?"
    r"(?:[0-9]{1,15}|[0-9]{1,3}(?:,[0-9]{3}){1,4}|[0-9]{1,3}(?:[. \u00a0][0-9]{3}){1,4})?"
    r"(?:[.,][0-9]{1,15})?(?<=[0-9])(?:[eE][+-]?[0-9]{1,3})?(?:[ \u00a0]?(?:[%$\u20ac\u00a3\u00a5]|\u00b0[CFK]?))?\Z"
    r"|\+[0-9]{1,3}(?: \(?[0-9]{1,8}\)?){1,6}\Z|--?\Z"
)
_TRIGGERS: Final = frozenset("=+-@\uff1d\uff0b\uff0d\uff20\u2212\ufe62\ufe63\ufe66\ufe6b\t\r\n")
_QUOTES: Final = frozenset("\"'\u2018\u2019\u201c\u201d\u00ab\u00bb`")
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
_CELL: Final = re.compile(r'(?:"((?:[^"]++|"")*+)(?:"|\Z))?([^,\r\n]*)(,|\r\n|\r|\n|\Z)')
CELL_CHARS: Final = 32_767  # of one spreadsheet cell
HEADER_CHARS: Final = 200


def text(value: str) -> tuple[str, int]:
    """Plain text for messages, titles and tickets: links broken, invisible characters gone; also how many were."""
    cleaned, removed = clean(escape_controls(value))
    return defang(cleaned), removed


def terminal(value: str) -> tuple[str, int]:
    """Text for a terminal: every control but newline and tab is visible, no escape sequence survives."""
    cleaned, removed = clean(escape_controls(value))
    return defang(cleaned, code=True), removed


def log_line(value: str) -> tuple[str, int]:
    """One record on one line."""
    cleaned, removed = clean(escape_controls(value, line=True))
    return defang(cleaned, code=True), removed


def cell(value: str) -> str:
    """One spreadsheet cell, never a formula: an apostrophe before anything a program may calculate.

    Source: OWASP CSV injection; the first character counts after white space and quotes too.
    """
    cleaned = clean(value.replace("\r\n", "\n").replace("\r", "\n"))[0]
    if HARMLESS_CELL.match(cleaned):
        return cleaned
    if cleaned[:1] in _TRIGGERS or _first(cleaned) in _TRIGGERS or value[:1] in _TRIGGERS:
        return "'" + cleaned
    # A line inside a cell may become a cell of its own in a lenient reader.
    return "\n".join(
        "'" + line if index and _first(line) in _TRIGGERS and not HARMLESS_CELL.match(line) else line
        for index, line in enumerate(cleaned.split("\n"))
    )


def _first(line: str) -> str:
    """The first character after white space and quotes."""
    return next((char for char in line if not char.isspace() and char not in _QUOTES), "")


def csv_rows(value: str) -> list[list[str]]:
    """Read CSV (RFC 4180) leniently: any line end, an open quote runs to the end, empty lines are no rows."""
    rows: list[list[str]] = []
    row: list[str] = []
    at = 0
    while at < len(value):
        match = _CELL.match(value, at)
        if match is None:
            break
        row.append((match[1].replace('""', '"') if match[1] is not None else "") + match[2])
        at = match.end()
        if match[3] != ",":
            if row != [""]:
                rows.append(row)
            row = []
        elif at == len(value):
            row.append("")
    return [*rows, row] if row else rows


def over(rows: list[list[str]]) -> int:
    """How many bytes of these cells do not fit into a spreadsheet's."""
    return sum(len(value[CELL_CHARS:].encode("utf-8", "replace")) for row in rows for value in row)


def csv_row(values: list[str], delimiter: str = ",") -> str:
    """One row, every cell quoted (RFC 4180), ends in CR LF."""
    return delimiter.join('"' + cell(value)[:CELL_CHARS].replace('"', '""') + '"' for value in values) + "\r\n"


def latex(value: str) -> str:
    """Words for TeX: every active character is a command that prints it."""
    cleaned = clean(escape_controls(value))[0]
    return defang(cleaned).translate(_TEX)


def header_value(value: str) -> str:
    """One header value: visible ASCII and spaces, one line; never an encoded word (RFC 2047)."""
    return "".join(c if " " <= c <= "~" else "?" for c in subject(value))


def subject(value: str) -> str:
    """One line of words in any script; what looks like an encoded word is none any more."""
    cleaned = clean(escape_controls(value, line=True))[0].replace("=?", "= ?")
    return " ".join(defang(cleaned).split())


def encoded(line: str) -> str:
    """Return a line as it stands in a mail's header: as it is in ASCII, else as encoded words (RFC 2047 section 2)."""
    if line.isascii():
        return line
    from email.header import Header  # noqa: PLC0415 - more than half of what this module took to load

    return " ".join(Header(line, "utf-8", maxlinelen=75).encode().split())
