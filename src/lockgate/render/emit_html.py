"""The tree as HTML of a closed list of tags and attributes.

Rule 1: every tag written here is one of TAGS; the only attributes that hold a URL are `a[href]` and `img[src]`.
Rule 2: the output is a fixed point of a second sanitiser with the same lists (selfcheck.py), byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from lockgate.render.tree import (
    Block,
    Break,
    Code,
    CodeBlock,
    Heading,
    Inline,
    Link,
    List,
    Math,
    Para,
    Quote,
    Rule,
    Span,
    Table,
    Text,
)

_ESCAPES: Final = {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;", ord('"'): "&quot;", ord("'"): "&#39;"}
_INFO: Final = re.compile(r"[a-z0-9+#.-]{1,24}")
REL: Final = "noopener noreferrer nofollow ugc"

Words = Callable[[str], str]


def escape(text: str) -> str:
    """Escape text for element content and quoted attributes."""
    return text.translate(_ESCAPES)


def emit(blocks: list[Block], words: Words = str) -> str:
    """Return a judged tree as HTML; `words` sees each run of words first (e-mail breaks links there)."""
    out: list[str] = []
    _blocks(blocks, out, words)
    return "".join(out)


def _blocks(blocks: list[Block], out: list[str], words: Words) -> None:
    for block in blocks:
        if isinstance(block, Para):
            if not block.inlines:
                continue  # of a refused image without words nothing is left
            if block.tight:
                _inlines(block.inlines, out, words)
                out.append("\n")
            else:
                out.append("<p>")
                _inlines(block.inlines, out, words)
                out.append("</p>\n")
        elif isinstance(block, Heading):
            out.append(f"<h{block.level}>")
            _inlines(block.inlines, out, words)
            out.append(f"</h{block.level}>\n")
        elif isinstance(block, CodeBlock):
            out.append(f"<pre><code>{escape(words(block.text))}</code></pre>\n")
        elif isinstance(block, Quote):
            out.append("<blockquote>\n")
            _blocks(block.blocks, out, words)
            out.append("</blockquote>\n")
        elif isinstance(block, Rule):
            out.append("<hr>\n")
        elif isinstance(block, Table):
            _table(block, out, words)
        else:
            _list(block, out, words)


def _list(block: List, out: list[str], words: Words) -> None:
    tag = "ul" if block.start is None else "ol"
    start = "" if block.start in {None, 1} else f' start="{block.start}"'
    out.append(f"<{tag}{start}>\n")
    for item in block.items:
        out.append("<li>")
        if item.checked is not None:
            out.append("\u2611 " if item.checked else "\u2610 ")
        _blocks(item.blocks, out, words)
        out.append("</li>\n")
    out.append(f"</{tag}>\n")


def _table(table: Table, out: list[str], words: Words) -> None:
    out.append("<table>\n<thead>\n")
    for index, row in enumerate(table.rows):
        if index == 1:
            out.append("<tbody>\n")
        tag = "td" if index else "th"
        out.append("<tr>\n")
        for column, cell in enumerate(row):
            align = table.align[column] if column < len(table.align) else ""
            out.append(f'<{tag} align="{align}">' if align else f"<{tag}>")
            _inlines(cell, out, words)
            out.append(f"</{tag}>\n")
        out.append("</tr>\n" if index else "</tr>\n</thead>\n")
    out.append("</tbody>\n</table>\n" if len(table.rows) > 1 else "</table>\n")


def _inlines(inlines: list[Inline], out: list[str], words: Words) -> None:
    for node in inlines:
        if isinstance(node, Text):
            out.append(escape(words(node.text)))
        elif isinstance(node, Code):
            out.append(f"<code>{escape(words(node.text))}</code>")
        elif isinstance(node, Math):
            mark = "$$" if node.display else "$"
            out.append(escape(words(f"{mark}{node.text}{mark}")))
        elif isinstance(node, Break):
            out.append("<br>\n" if node.hard else "\n")
        elif isinstance(node, Span):
            out.append(f"<{node.kind}>")
            _inlines(node.inlines, out, words)
            out.append(f"</{node.kind}>")
        elif isinstance(node, Link):
            out.append(f'<a href="{escape(node.url)}" rel="{REL}">')
            _inlines(node.inlines, out, words)
            out.append("</a>")
        else:
            out.append(f'<img src="{escape(node.url)}" alt="{escape(node.alt)}" referrerpolicy="no-referrer">')
