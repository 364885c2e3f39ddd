"""Markdown (CommonMark with tables, strikethrough, tasks, footnotes and formulas) to the tree.

Rule 1: the parser decides how faithful the output is, never how safe: a URL found here is judged, a URL missed here
        is words, and words are broken by the emitter.
Rule 2: raw HTML takes the other road (parse_html.py), so there is one place that knows elements.
The parser is pulldown-cmark (Rust), see ADR 0041.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from lockgate.render.bounds import MAX_DEPTH, MAX_NODES, TooComplex, need
from lockgate.render.parse_html import Found, parse_html, text_of_unknown_tags
from lockgate.render.tree import (
    Block,
    Break,
    Code,
    CodeBlock,
    Heading,
    Image,
    Inline,
    Item,
    Link,
    List,
    Math,
    Para,
    Quote,
    Rule,
    Span,
    Table,
    Text,
    plain,
)
from lockgate.render.visible import WIDE_PUNCTUATION

_BARE: Final = re.compile(rf"https://[^\s<>\"'`\\^{{|}}\[\]{WIDE_PUNCTUATION}]+")
_SPANS: Final = {"Emphasis": "em", "Strong": "strong", "Strikethrough": "del"}
# More container marks at the start of one line than any tree may hold: refused before the parser works on them.
_DEEP_LINE: Final = re.compile(r"^(?:[ \t]*+(?:>|[-+*]|[0-9]{1,9}[.)])){40}", re.MULTILINE)


def parse_markdown(text: str, found: Found | None = None) -> list[Block]:
    """Parse Markdown.

    Raises:
        TooComplex: it nests too deep or has too many nodes.
        HostFault: the extra `[render]` is not installed.

    """
    if _DEEP_LINE.search(text):
        raise TooComplex
    parser = need("pyromark")
    options = parser.Options
    flags = (
        options.ENABLE_TABLES
        | options.ENABLE_FOOTNOTES
        | options.ENABLE_STRIKETHROUGH
        | options.ENABLE_TASKLISTS
        | options.ENABLE_MATH
    )
    text = text.encode("utf-8", "replace").decode()
    # Events are taken one by one: a list of them is what the collector would spend its time on.
    blocks = _Builder().build(parser.events(text, options=flags))
    if blocks is not None:
        return blocks
    return parse_html(text_of_unknown_tags(parser.html(text, options=flags)), found)


class _Builder:
    """Turns the event stream into blocks. The stack holds (node, list of children) of what is open."""

    def __init__(self) -> None:
        self.root: list[Block] = []
        self.blocks: list[list[Block]] = [self.root]
        self.inline: list[list[Inline]] = []
        self.open: list[Any] = []
        self.notes: list[list[Block]] = []
        self.note_names: list[str] = []
        self.nodes = 0

    def build(self, events: Iterable[Any]) -> list[Block] | None:
        """Return the blocks of a whole event stream, or None when raw HTML is in it."""
        for event in events:
            self.nodes += 1
            if type(event) is str:
                self._single(event)
                continue
            for kind, value in event.items():
                if kind == "Text":
                    self._target().append(Text(value))
                elif kind == "Start":
                    if value == "HtmlBlock":
                        return None
                    self._start(value)
                elif kind == "End":
                    self._end(value)
                elif kind == "Code":
                    self._target().append(Code(value))
                elif kind in {"InlineMath", "DisplayMath"}:
                    self._target().append(Math(value, kind == "DisplayMath"))
                elif kind == "TaskListMarker":
                    self._item().checked = bool(value)
                elif kind == "FootnoteReference":
                    self._target().append(Text(f"[{value}]"))
                elif kind in {"InlineHtml", "Html"}:
                    return None
            if self.nodes > MAX_NODES:
                raise TooComplex
        if self.notes:
            self.root.append(Rule())
            self.root.extend(block for note in self.notes for block in note)
        return self.root

    def _item(self) -> Item:
        for node in reversed(self.open):
            if isinstance(node, Item):
                return node
        raise TooComplex

    def _target(self) -> list[Inline]:
        """Where inline content goes; a tight list item has no paragraph of its own."""
        if self.inline:
            return self.inline[-1]
        siblings = self.blocks[-1]
        if siblings and isinstance(siblings[-1], Para) and siblings[-1].tight:
            return siblings[-1].inlines
        para = Para(tight=True)
        siblings.append(para)
        return para.inlines

    def _single(self, event: str) -> None:
        if event == "SoftBreak":
            self._target().append(Break(hard=False))
        elif event == "HardBreak":
            self._target().append(Break(hard=True))
        elif event == "Rule":
            self.blocks[-1].append(Rule())

    def _start(self, value: Any) -> None:
        if len(self.open) > MAX_DEPTH * 2:
            raise TooComplex
        name: str = value if isinstance(value, str) else next(iter(value))
        data: Any = None if isinstance(value, str) else value[name]
        node: Any
        if name == "Paragraph":
            node = Para()
            self.blocks[-1].append(node)
            self.inline.append(node.inlines)
        elif name in _SPANS:
            node = Span(_SPANS[name])  # type: ignore[arg-type]
            self._target().append(node)
            self.inline.append(node.inlines)
        elif name == "Link":
            node = Link(("mailto:" if data["link_type"] == "Email" else "") + data["dest_url"])
            self._target().append(node)
            self.inline.append(node.inlines)
        elif name == "Image":
            node = (Image(data["dest_url"]), self._target())
            self.inline.append([])
        elif name == "Heading":
            node = Heading(int(data["level"][1]))
            self.blocks[-1].append(node)
            self.inline.append(node.inlines)
        elif name == "CodeBlock":
            node = CodeBlock("", "" if type(data) is str else data["Fenced"])
            self.blocks[-1].append(node)
            self.inline.append([])
        elif name == "BlockQuote":
            node = Quote()
            self.blocks[-1].append(node)
            self.blocks.append(node.blocks)
        elif name == "List":
            node = List(data)
            self.blocks[-1].append(node)
        elif name == "Item":
            node = Item()
            self.open[-1].items.append(node)
            self.blocks.append(node.blocks)
        elif name == "FootnoteDefinition":
            node = name
            blocks: list[Block] = []
            self.notes.append(blocks)
            self.note_names.append(data)
            self.blocks.append(blocks)
        elif name == "Table":
            node = Table(["" if one == "None" else one.lower() for one in data])
            self.blocks[-1].append(node)
        elif name in {"TableHead", "TableRow"}:
            node = name
            self._table().rows.append([])
        elif name == "TableCell":
            node = name
            cell: list[Inline] = []
            self._table().rows[-1].append(cell)
            self.inline.append(cell)
        else:
            raise TooComplex  # a construct that was not asked for: show the plain form
        self.open.append(node)

    def _table(self) -> Table:
        for node in reversed(self.open):
            if isinstance(node, Table):
                return node
        raise TooComplex

    def _end(self, value: Any) -> None:
        name = value if type(value) is str else next(iter(value))
        node = self.open.pop()
        if name in {"Paragraph", "Heading", "TableCell"} or name in _SPANS:
            inlines = self.inline.pop()
            if name not in _SPANS:
                inlines[:] = bare_links(inlines)
        elif name == "Link":
            self.inline.pop()
        elif name == "Image":
            image, target = node
            image.alt = plain(self.inline.pop())
            target.append(image)
        elif name == "CodeBlock":
            node.text = "".join(part.text for part in self.inline.pop() if isinstance(part, Text))
        elif name == "Item":
            for block in self.blocks.pop():
                if isinstance(block, Para) and block.tight:
                    block.inlines = bare_links(block.inlines)
        elif name in {"BlockQuote", "FootnoteDefinition"}:
            blocks = self.blocks.pop()
            if name == "FootnoteDefinition":
                label = Text(f"[{self.note_names[-1]}] ")
                if blocks and isinstance(blocks[0], Para):
                    blocks[0].inlines.insert(0, label)
                else:
                    blocks.insert(0, Para([label]))


def bare_links(inlines: list[Inline]) -> list[Inline]:
    """Find `https://` URLs in words, as chat clients do, so that the policy decides on them too."""
    if len(inlines) == 1 and type(inlines[0]) is Text and "https://" not in inlines[0].text:
        return inlines
    joined: list[Inline] = []
    for node in inlines:
        # The parser splits words at what could have been markup.
        if isinstance(node, Text) and joined and isinstance(joined[-1], Text):
            joined[-1].text += node.text
        else:
            joined.append(node)
    out: list[Inline] = []
    for node in joined:
        if isinstance(node, Span):
            node.inlines = bare_links(node.inlines)
        if not isinstance(node, Text) or "https://" not in node.text:
            out.append(node)
            continue
        at = 0
        for match in _BARE.finditer(node.text):
            url = match[0].rstrip(".,;:!?*_~")
            while url.endswith(")") and url.count(")") > url.count("("):
                url = url[:-1].rstrip(".,;:!?*_~")
            if match.start() > at:
                out.append(Text(node.text[at : match.start()]))
            out.append(Link(url, [Text(url)]))
            at = match.start() + len(url)
        if at < len(node.text):
            out.append(Text(node.text[at:]))
    return out
