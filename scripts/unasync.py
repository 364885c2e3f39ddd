"""Generate the blocking twin of the Gate from the written, asynchronous one.

Rule 1: `gate/_async/` is written; `gate/_sync/` follows from it word for word, and `--check` fails on any drift.
Rule 2: only the words below change. What differs for real, waiting, lives in `pump_async.py` and `pump_sync.py`, which
        have the same names.
"""

from __future__ import annotations

import argparse
import io
import sys
import tokenize
from pathlib import Path
from typing import Final

GATE: Final = Path(__file__).resolve().parent.parent / "src" / "lockgate" / "gate"
SOURCE: Final = GATE / "_async"
TARGET: Final = GATE / "_sync"
HEADER: Final = "# Generated from gate/_async/{name} by scripts/unasync.py. Edit that file, then run the script.\n"
DROPPED: Final = frozenset({"async", "await"})
NAMES: Final = {"__aenter__": "__enter__", "__aexit__": "__exit__", "_async": "_sync", "pump_async": "pump_sync"}
TEXT: Final = (("async with ", "with "), ("await ", ""))


def generate(name: str, source: str) -> str:
    """Return the blocking form of `source`; everything but the listed words stays byte for byte."""
    lines = source.splitlines(keepends=True)
    edits: list[tuple[int, int, int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        row, column = token.start
        if token.type == tokenize.NAME and token.string in DROPPED:
            end = token.end[1]
            end += len(lines[row - 1][end:]) - len(lines[row - 1][end:].lstrip(" "))
            edits.append((row, column, end, ""))
        elif token.type == tokenize.NAME and token.string in NAMES:
            edits.append((row, column, token.end[1], NAMES[token.string]))
    for row, start, end, text in sorted(edits, reverse=True):
        line = lines[row - 1]
        lines[row - 1] = line[:start] + text + line[end:]
    text = "".join(lines)
    for old, new in TEXT:
        text = text.replace(old, new)
    return HEADER.format(name=name) + text


def main() -> int:
    """Write the twin, or with `--check` say whether it is the one that would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when the twin is out of date")
    options = parser.parse_args()
    wanted = {path.name: generate(path.name, path.read_text("utf-8")) for path in sorted(SOURCE.glob("*.py"))}
    present = {path.name: path.read_text("utf-8") for path in sorted(TARGET.glob("*.py"))}
    drifted = sorted(name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name))
    if options.check:
        if drifted:
            print(f"error: out of date: {', '.join(drifted)}\nnext step: python scripts/unasync.py", file=sys.stderr)
        return 1 if drifted else 0
    for name in drifted:
        if name in wanted:
            (TARGET / name).write_text(wanted[name], "utf-8")
        else:
            (TARGET / name).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
