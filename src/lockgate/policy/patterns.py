r"""Patterns that mean one thing and end in time.

Rule 1: `$` admits a trailing newline and `\d`, `\w`, `\s` admit all of Unicode: both are refused, not mended.
Rule 2: a repeated group with a repetition or an alternative inside can take exponential time on hostile text: refused.
"""

from __future__ import annotations

import re
from typing import Final

MAX_LENGTH: Final = 300
_CLASSES: Final = frozenset("dDwWsSbB")
_SETS: Final = frozenset({"--", "&&", "~~", "||"})
_REPEAT: Final = re.compile(r"[*+?]|\{[0-9]*,?[0-9]*\}")

_EXACT: Final = re.compile(r"[0-9]+\}")


def problem(pattern: str) -> str | None:
    """Return what is wrong with a regular expression (Python's `re`), or None."""
    if len(pattern) > MAX_LENGTH:
        return f"is longer than {MAX_LENGTH} characters"
    trouble = _scan(pattern)
    if trouble is not None:
        return trouble
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return "is not a regular expression"
    return None


def _scan(pattern: str) -> str | None:
    variable = [False]  # per open group: whether a repetition or an alternative is inside
    in_class = False
    index = 0
    while index < len(pattern):
        char = pattern[index]
        if char == "\\":
            after = pattern[index + 1 : index + 2]
            if after in _CLASSES:
                return f"uses \\{after}, which admits all of Unicode"
            if after.isdigit():
                return "uses a back-reference"
            index += 2
            continue
        index += 1
        if in_class:
            in_class = char != "]"
            if char == "[" or pattern[index - 1 : index + 1] in _SETS:
                return "has a set within a set, which later versions of re read in another way"
        elif char == "[":
            in_class = True
            # A bracket that comes first in a class is a member of it.
            index += 2 if pattern.startswith("^]", index) else int(pattern.startswith("]", index))
        elif char == "$":
            return "uses $, which admits a trailing newline"
        elif char == "(":
            if pattern[index : index + 1] == "?" and pattern[index : index + 2] != "?:":
                return "uses a (?...) extension"
            index += 2 * (pattern[index : index + 2] == "?:")
            variable.append(False)
        elif char == ")":
            if len(variable) == 1:
                return "is not a regular expression"
            inside = variable.pop()
            repeat = _REPEAT.match(pattern, index)
            if inside and repeat is not None and repeat[0] != "?":
                return "repeats a group that has a repetition or an alternative inside"
            variable[-1] = variable[-1] or inside
        elif char in "*+?|" or (char == "{" and not _EXACT.match(pattern, index)):
            variable[-1] = True
    return None


def anchored(pattern: str) -> bool:
    r"""Whether it begins with \A and ends with \Z, so that a search is a match of the whole."""
    return pattern.startswith(r"\A") and pattern.endswith(r"\Z") and "|" not in pattern.replace(r"\|", "")
