"""Questions to the Public Suffix List, the private section included.

Rule 1: an unknown top-level domain is a suffix (the list's default rule), so nothing is broad because it is new.
Rule 2: a suffix of the private section is one whose names belong to customers: buckets, pages, applications.
Source: publicsuffix.org/list, "Formal Algorithm".
"""

from __future__ import annotations

from functools import cache
from typing import Final, Literal

from lockgate.policy import suffix_data

Section = Literal["icann", "private"]


@cache
def _rules() -> dict[str, Section]:
    rules: dict[str, Section] = dict.fromkeys(suffix_data.ICANN.split(), "icann")
    rules.update(dict.fromkeys(suffix_data.PRIVATE.split(), "private"))
    return rules


@cache
def _shared() -> dict[str, tuple[str, ...]]:
    """The suffixes of the private section by the name one label above them."""
    found: dict[str, list[str]] = {}
    for rule, section in _rules().items():
        if section == "private" and rule[0] != "!":
            found.setdefault(rule.partition(".")[2], []).append(rule)
    return {parent: tuple(rules) for parent, rules in found.items()}


def _match(labels: list[str]) -> tuple[int, Section]:
    """Return how many labels at the end of a name are its public suffix, and by which section."""
    rules = _rules()
    for start in range(len(labels)):
        name = ".".join(labels[start:])
        if (section := rules.get("!" + name)) is not None:
            return len(labels) - start - 1, section
        if (section := rules.get(name)) is not None:
            return len(labels) - start, section
        parent = ".".join(labels[start + 1 :])
        if parent and (section := rules.get("*." + parent)) is not None:
            return len(labels) - start, section
    return 1, "icann"


def suffix_section(name: str) -> Section | None:
    """Return the section that makes `name` a public suffix, or None when it is below one."""
    labels = name.split(".")
    size, section = _match(labels)
    return section if size >= len(labels) else None


def wildcard_section(parent: str) -> Section | None:
    """Return the section that makes `*.parent` too broad: `parent` is a suffix, or what it matches is.

    `*.amazonaws.com` matches `s3.amazonaws.com`, under which anybody may have a bucket.
    """
    section = suffix_section(parent)
    if section is not None:
        return section
    if (whole := _rules().get("*." + parent)) is not None:
        return whole
    return "private" if parent in _shared() else None


def registrable(name: str) -> str:
    """Return the registrable domain of a name (its public suffix and one label), or the name when it is a suffix."""
    labels = name.split(".")
    size, _ = _match(labels)
    return ".".join(labels[-(size + 1) :])


_END: Final = "."


def below(name: str, parent: str) -> bool:
    """Whether `name` is `parent` or below it, on a label boundary."""
    return name == parent or name.endswith(_END + parent)
