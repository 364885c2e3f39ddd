"""What a caller gave the guard: of the right type or an error, and what plain text held that is denied.

Rule 1: what is no text is a ConfigError that says what to give, never an AttributeError from inside.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import Any, Final, TypeVar

from lockgate.contract.errors import ConfigError
from lockgate.render.judge import destination
from lockgate.render.policy import Denial
from lockgate.render.visible import SCHEMES

_NOTICES: Final = 10
_URL: Final = re.compile(
    rf"(?i)(?:\b[a-z][a-z0-9+.-]{{1,20}}:[/\\]{{2}}|(?<![0-9a-z])(?:(?:{SCHEMES}):|www\.)(?=\S))[^\s<>\"']{{1,300}}"
)
_SEQUENCE: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\\n)")
_FORMULA: Final = re.compile(
    r"(?m)(?:^|\")'[^\S\n]{0,64}[\"'\u2018\u2019\u201c\u201d]{0,8}[=+@\uff1d\uff0b\uff20\u2212-]"
)

_T = TypeVar("_T")


def only(value: Any, *kinds: type[_T]) -> _T:
    """Return `value`, or say what was expected."""
    if isinstance(value, kinds):
        return value
    names = " or ".join(kind.__name__ for kind in kinds)
    raise ConfigError(f"the guard was given a {type(value).__name__}", next_step=f"give it {names}")


def _row(row: Any) -> list[str]:
    return ["" if one is None else str(only(one, str, int, float)) for one in _many(row)]


def _many(value: Any) -> list[Any]:
    return list(only(value, list, tuple))  # pyright: ignore[reportUnknownArgumentType]


def table_of(rows: Any) -> list[list[str]]:
    """Return rows of cells as text.

    Raises:
        ConfigError: they are no rows of text, numbers and None.

    """
    return [_row(row) for row in _many(rows)]


def noticed(text: str, sink: str, made: str) -> list[Denial]:
    """What plain text held that its sink's program would have executed or linked; a few of each."""
    found: list[Denial] = []
    for match in islice(_URL.finditer(text) if sink != "csv" else (), _NOTICES):
        url = f"//{match[0]}" if match[0].lower().startswith("www.") else match[0]
        found.append(Denial("url_defanged", sink, "link", destination(url), "medium"))
    if _SEQUENCE.search(text):
        found.append(Denial("control_sequence", sink, "text"))
    if sink == "csv" and _FORMULA.search(made):
        first = _URL.search(text)
        found.append(Denial("formula", sink, "text", destination(first[0]) if first else None))
    return found
