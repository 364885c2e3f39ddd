"""The tree that every sink is rebuilt from.

Rule 1: there is no raw node. What a parser found and this file does not name becomes text, or goes.
Rule 2: a Link or an Image in a judged tree (`judge.py`) holds a URL that may live; before that it holds what was found.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Text(msgspec.Struct, gc=False):
    """Words."""

    text: str


class Code(msgspec.Struct, gc=False):
    """A code span."""

    text: str


class Math(msgspec.Struct, gc=False):
    """A formula, in TeX notation without its dollar signs."""

    text: str
    display: bool


class Break(msgspec.Struct, gc=False):
    """A line break; a soft one is where the source had a newline."""

    hard: bool


class Span(msgspec.Struct):
    """Emphasis of one kind."""

    kind: Literal["em", "strong", "del"]
    inlines: list[Inline] = []


class Link(msgspec.Struct):
    """A link; `url` exactly as parsed."""

    url: str
    inlines: list[Inline] = []


class Image(msgspec.Struct, gc=False):
    """An image; `url` exactly as parsed, `alt` as plain text."""

    url: str
    alt: str = ""


Inline = Text | Code | Math | Break | Span | Link | Image


class Para(msgspec.Struct):
    """A paragraph; `tight` when a list item holds it without space around."""

    inlines: list[Inline] = []
    tight: bool = False


class Heading(msgspec.Struct):
    """A heading of level 1 to 6."""

    level: int
    inlines: list[Inline] = []


class CodeBlock(msgspec.Struct, gc=False):
    """A code block; `info` as it was written."""

    text: str
    info: str = ""


class Quote(msgspec.Struct):
    """A block quote."""

    blocks: list[Block] = []


class Item(msgspec.Struct):
    """A list item; `checked` is None when it is no task."""

    blocks: list[Block] = []
    checked: bool | None = None


class List(msgspec.Struct):
    """A list; `start` is None when it is a bullet list."""

    start: int | None = None
    items: list[Item] = []


class Table(msgspec.Struct):
    """A table; the first row is its head, `align` one of "", "left", "center", "right" a column."""

    align: list[str] = []
    rows: list[list[list[Inline]]] = []


class Rule(msgspec.Struct, gc=False):
    """A thematic break."""


Block = Para | Heading | CodeBlock | Quote | List | Table | Rule


def plain(inlines: list[Inline]) -> str:
    """Return the words of inline content, without what they are marked up as."""
    out: list[str] = []
    for node in inlines:
        if isinstance(node, Text | Code):
            out.append(node.text)
        elif isinstance(node, Math):
            mark = "$$" if node.display else "$"  # what stands between may well be a price
            out.append(f"{mark}{node.text}{mark}")
        elif isinstance(node, Break):
            out.append(" ")
        elif isinstance(node, Image):
            out.append(node.alt)
        else:
            out.append(plain(node.inlines))
    return "".join(out)
