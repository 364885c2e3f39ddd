"""How an error of the configuration names a place: file, line, key, and the nearest valid name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class Where:
    """Says in which file and line a key stands."""

    def __init__(self, name: str, text: str = "", prefix: str = "") -> None:
        self.name, self._text, self._prefix = name, text, prefix

    def __call__(self, path: str) -> str:
        """Return "FILE line N" for the key `path`, or "FILE" where no line is known."""
        line = line_of(self._text, self._prefix + path)
        return f"{self.name} line {line}" if line else self.name


def line_of(text: str, path: str) -> int | None:
    """Return the line of a TOML text where the table `path` begins or the key `path` is assigned; best effort."""
    table = ""
    for number, raw in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[+([^\[\]]+)\]+\s*(#.*)?$", raw)
        if header:
            table = re.sub(r"[\s\"']", "", header[1])
            if table == path:
                return number
            continue
        key = re.match(r"\s*([\w.\"' -]+?)\s*=", raw)
        if key:
            full = re.sub(r"[\s\"']", "", key[1])
            full = f"{table}.{full}" if table else full
            if full == path or path.startswith(full + "."):
                return number
    return None


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return `did you mean "x"` for the nearest of `valid`, else the list of all."""
    names = list(valid)
    close = difflib.get_close_matches(name, names, 1, 0.5)
    return f'did you mean "{close[0]}"?' if close else "use one of: " + ", ".join(names)


def shown(text: str) -> str:
    """A key as an error may show it: bounded, and without a character that could act on a terminal."""
    clean = "".join(c if c.isprintable() else "?" for c in text[:80])
    return clean if len(text) <= 80 else clean + "..."
