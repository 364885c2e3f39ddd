"""The tree that every sink is rebuilt from.

Rule 1: there is no raw node. What a parser found and this file does not name becomes text, or goes.
Rule 2: a Link or an Image in a judged tree (`judge.py`) holds a URL that may live; before that it holds what was found.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(slots=True)
class Text:
    """Words."""

    text: str


@dataclass(slots=True)
class Code:
    """A code span."""

    text: str


@dataclass(slots=True)
class Math:
    """A formula, in TeX notation without its dollar signs."""

    text: str
    display: bool


@dataclass(slots=True)
class Break:
    """A line break; a soft one is where the source had a newline."""

    hard: bool


@dataclass(slots=True)
class Span:
    """Emphasis of one kind."""

    kind: Literal["em", "strong", "del"]
    inlines: list[Inline] = field(default_factory=list["Inline"])


@dataclass(slots=True)
class Link:
    """A link; `url` exactly as parsed."""

    url: str
    inlines: list[Inline] = field(default_factory=list["Inline"])


@dataclass(slots=True)
class Image:
    """An image; `url` exactly as parsed, `alt` as plain text."""

    url: str
    alt: str = ""


Inline = Text | Code | Math | Break | Span | Link | Image


@dataclass(slots=True)
class Para:
    """A paragraph; `tight` when a list item holds it without space around."""

    inlines: list[Inline] = field(default_factory=list["Inline"])
    tight: bool = False


@dataclass(slots=True)
class Heading:
    """A heading of level 1 to 6."""

    level: int
    inlines: list[Inline] = field(default_factory=list["Inline"])


@dataclass(slots=True)
class CodeBlock:
    """A code block; `info` as it was written."""

    text: str
    info: str = ""


@dataclass(slots=True)
class Quote:
    """A block quote."""

    blocks: list[Block] = field(default_factory=list["Block"])


@dataclass(slots=True)
class Item:
    """A list item; `checked` is None when it is no task."""

    blocks: list[Block] = field(default_factory=list["Block"])
    checked: bool | None = None


@dataclass(slots=True)
class List:
    """A list; `start` is None when it is a bullet list."""

    start: int | None = None
    items: list[Item] = field(default_factory=list[Item])


@dataclass(slots=True)
class Table:
    """A table; the first row is its head, `align` one of "", "left", "center", "right" a column."""

    align: list[str] = field(default_factory=list[str])
    rows: list[list[list[Inline]]] = field(default_factory=list["list[list[Inline]]"])


@dataclass(slots=True)
class Rule:
    """A thematic break."""


Block = Para | Heading | CodeBlock | Quote | List | Table | Rule


def plain(inlines: list[Inline]) -> str:
    """Return the words of inline content, without what they are marked up as."""
    out: list[str] = []
    for node in inlines:
        if isinstance(node, Text | Code | Math):
            out.append(node.text)
        elif isinstance(node, Break):
            out.append(" ")
        elif isinstance(node, Image):
            out.append(node.alt)
        else:
            out.append(plain(node.inlines))
    return "".join(out)
