"""HTML to the tree, read by lexbor the way browsers read it (WHATWG).

Rule 1: elements are kept by name from a closed list; an element with content that is code for a machine goes with its
        content; of every other element only the words inside stay.
Rule 2: two attributes are read as URLs (`a[href]`, `img[src]`), and both are judged. No other is carried over.
Rule 3: what could have fetched by another way (styles, sources, frames, forms) is reported with its host.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final

from lockgate.render.bounds import MAX_DEPTH, MAX_NODES, TooComplex, need
from lockgate.render.tables import BLOCKS, DROPPED, INLINES, OTHER
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

_SPANS: Final = {"em": "em", "i": "em", "cite": "em", "dfn": "em", "var": "em", "strong": "strong", "b": "strong"} | {
    "del": "del", "s": "del", "strike": "del"
}  # fmt: skip
KNOWN: Final = DROPPED | BLOCKS | INLINES | OTHER
_TAG: Final = re.compile(r"<(/?)([A-Za-z][^\s/>\"'<]*)(?=[\s/>])")
_ANY_TAG: Final = re.compile(r"<(/?)([A-Za-z][A-Za-z0-9]*)")
# Elements that need no end tag.
_OPEN: Final = frozenset(
    "area base br col dd dt hr img input li link meta option p param source td th tr track wbr".split()  # noqa: SIM905
)
# Elements whose loss is told even where they name no host.
_ACTIVE: Final = frozenset(["applet", "embed", "frameset", "iframe", "object", "portal", "script"])
_DEEP: Final = 1000
_FETCHES: Final = re.compile(r"(?i)(?:[a-z][a-z0-9+.-]*:|//|\\\\|url\s*\(|@import)")


@dataclass(slots=True)
class Found:
    """URL-bearing markup that is not in the tree: (element or attribute, what stood there)."""

    markup: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


def text_of_unknown_tags(html: str) -> str:
    """Escape tags that no HTML element has, such as the `<T>` of a generic type: they were meant as words."""
    return _TAG.sub(lambda m: m[0] if m[2].lower() in KNOWN else "&lt;" + m[0][1:], html)


def parse_html(text: str, found: Found | None = None) -> list[Block]:
    """Parse an HTML document or fragment.

    Raises:
        TooComplex: it nests too deep or has too many nodes.
        HostFault: the extra `[render]` is not installed.

    """
    parser = need("selectolax.lexbor")
    if _too_deep(text):
        raise TooComplex
    tree = parser.LexborHTMLParser(text.encode("utf-8", "replace").decode().replace("\0", "\ufffd"))
    builder = _Builder(found if found is not None else Found())
    head = tree.head
    if head is not None:
        builder.report_below(head)
    if tree.body is not None:
        builder.report(tree.body)
        builder.block_children(tree.body, builder.root, 0)
    return builder.root


def _too_deep(text: str) -> bool:
    """Whether elements stand in one another deeper than any tree may: the parser's time grows with depth times size."""
    if text.count("<") < _DEEP:
        return False
    depth = 0
    for match in _ANY_TAG.finditer(text):
        if match[2].lower() in _OPEN:
            continue
        depth = max(0, depth - 1) if match[1] else depth + 1
        if depth > _DEEP:
            return True
    return False


class _Builder:
    def __init__(self, found: Found) -> None:
        self.root: list[Block] = []
        self.found = found
        self.nodes = 0

    def report(self, node: Any) -> None:
        """Note attributes that could have fetched."""
        for name, value in node.attributes.items():
            wanted = (node.tag, name) in {("a", "href"), ("img", "src")}
            if value and not wanted and (name.startswith("on") or _FETCHES.search(value)):
                self.found.markup.append((f"{node.tag}[{name}]", value))

    def report_below(self, node: Any) -> None:
        """Note what stands in an element that goes with its content."""
        known, active = len(self.found.markup), ""
        for one in node.traverse(include_text=True):
            if one.tag == "-text":
                if _FETCHES.search(one.text_content or ""):
                    self.found.markup.append((node.tag, one.text_content))
            elif (one.tag or "")[:1].isalpha():
                active = active or (one.tag if one.tag in _ACTIVE else "")
                self.report(one)
        if active and len(self.found.markup) == known:
            self.found.markup.append((active, ""))

    def _enter(self, depth: int) -> None:
        self.nodes += 1
        if depth > MAX_DEPTH * 2 or self.nodes > MAX_NODES:
            raise TooComplex

    def block_children(self, node: Any, out: list[Block], depth: int) -> None:
        """Walk the children of a block container; runs of inline content become paragraphs."""
        run: list[Inline] = []
        child = node.child
        while child is not None:
            self._block(child, out, run, depth)
            child = child.next
        _flush(run, out)

    def _block(self, node: Any, out: list[Block], run: list[Inline], depth: int) -> None:
        self._enter(depth)
        tag = node.tag or ""  # lexbor has no name for some nodes of broken markup
        if tag == "-text" or not (tag in BLOCKS or tag in OTHER):
            if tag in INLINES and tag != "a" and _has_block(node):
                _flush(run, out)
                self.report(node)
                self.block_children(node, out, depth + 1)
            else:
                self._inline(node, run, depth)
            return
        _flush(run, out)
        self.report(node)
        if tag in BLOCKS:
            self.block_children(node, out, depth + 1)
        elif tag == "hr":
            out.append(Rule())
        elif tag == "pre":
            code = node.css_first("code")
            words = ((code.attributes.get("class") or "") if code is not None else "").split()
            info = next((word[9:] for word in words if word.startswith("language-")), "")
            out.append(CodeBlock(node.text(deep=True), info))
        elif tag == "blockquote":
            quote = Quote()
            out.append(quote)
            self.block_children(node, quote.blocks, depth + 1)
        elif tag in {"ul", "ol"}:
            self._list(node, out, depth)
        elif tag == "table":
            self._table(node, out, depth)
        elif tag in {"h1", "h2", "h3", "h4", "h5", "h6"}:
            out.append(Heading(int(tag[1]), _trim(self._children(node, depth))))
        else:  # a cell or item without its table or list
            self.block_children(node, out, depth + 1)

    def _list(self, node: Any, out: list[Block], depth: int) -> None:
        start = node.attributes.get("start") or "1"
        made = List(
            (int(start) if start.isascii() and start.isdigit() and len(start) < 10 else 1) if node.tag == "ol" else None
        )
        child = node.child
        while child is not None:
            if (child.tag or "")[:1].isalpha():
                self._enter(depth)
                self.report(child)
                item = Item()
                box = child.child
                while box is not None and box.tag == "-text" and not (box.text_content or "").strip():
                    box = box.next
                if box is not None and box.tag == "p":
                    box = box.child
                if box is not None and box.tag == "input" and box.attributes.get("type") == "checkbox":
                    item.checked = "checked" in box.attributes
                self.block_children(child, item.blocks, depth + 2)
                for block in item.blocks:
                    if isinstance(block, Para):
                        block.tight = child.css_first("p") is None
                made.items.append(item)
            child = child.next
        out.append(made)

    def _table(self, node: Any, out: list[Block], depth: int) -> None:
        table = Table()
        for row in node.css("tr"):
            cells: list[list[Inline]] = []
            self.report(row)
            cell = row.child
            while cell is not None:
                if cell.tag in {"td", "th"}:
                    self.report(cell)
                    blocks: list[Block] = []
                    self.block_children(cell, blocks, depth + 3)
                    cells.append(_as_inline(blocks))
                    if not table.rows:
                        align = cell.attributes.get("align") or ""
                        align = (
                            align
                            or (
                                re.search(r"text-align:\s*(left|center|right)", cell.attributes.get("style") or "")
                                or ["", ""]
                            )[1]
                        )
                        table.align.append(align if align in {"left", "center", "right"} else "")
                cell = cell.next
            if cells:
                table.rows.append(cells)
        if table.rows:
            out.append(table)

    def _children(self, node: Any, depth: int) -> list[Inline]:
        out: list[Inline] = []
        child = node.child
        while child is not None:
            self._inline(child, out, depth + 1)
            child = child.next
        return out

    def _inline(self, node: Any, out: list[Inline], depth: int) -> None:
        self._enter(depth)
        tag = node.tag or ""
        if tag == "-text":
            text = re.sub(r"[ \t\r\n\f]+", " ", node.text_content or "")
            if text:
                out.append(Text(text))
            return
        if not tag[:1].isalpha():  # comment, doctype
            return
        self.report(node)
        if tag in DROPPED:
            self.report_below(node)
        elif tag == "br":
            out.append(Break(hard=True))
        elif tag in {"img", "image"}:
            out.append(Image(node.attributes.get("src") or "", node.attributes.get("alt") or ""))
        elif tag == "a":
            url = (node.attributes.get("href") or "").strip(" \t\r\n\f")
            inside = self._children(node, depth)
            out.extend([Link(url, inside)] if url else inside)
        elif tag in _SPANS:
            out.append(Span(_SPANS[tag], self._children(node, depth)))  # type: ignore[arg-type]
        elif tag in {"code", "kbd", "samp", "tt"}:
            out.append(Code(node.text(deep=True).replace("\n", " ")))
        elif tag == "span" and "math" in (node.attributes.get("class") or "").split():
            out.append(Math(node.text(deep=True), "math-display" in (node.attributes.get("class") or "")))
        elif tag not in {"input", "link", "meta", "base", "area", "source", "track", "param", "frame", "wbr"}:
            out.extend(self._children(node, depth))


def _has_block(node: Any) -> bool:
    child = node.child
    while child is not None:
        if child.tag in BLOCKS or child.tag in OTHER:
            return True
        child = child.next
    return False


def _trim(inlines: list[Inline]) -> list[Inline]:
    """Drop white space and breaks at both ends."""
    while inlines and (isinstance(inlines[0], Break) or (isinstance(inlines[0], Text) and not inlines[0].text.strip())):
        del inlines[0]
    while inlines and (
        isinstance(inlines[-1], Break) or (isinstance(inlines[-1], Text) and not inlines[-1].text.strip())
    ):
        del inlines[-1]
    return inlines


def _flush(run: list[Inline], out: list[Block]) -> None:
    if _trim(run):
        out.append(Para(list(run)))
    run.clear()


def _as_inline(blocks: list[Block]) -> list[Inline]:
    """A table cell holds one line."""
    out: list[Inline] = []
    for block in blocks:
        if out:
            out.append(Text(" "))
        if isinstance(block, Para | Heading):
            out.extend(block.inlines)
        elif isinstance(block, CodeBlock):
            out.append(Code(" ".join(block.text.split())))
        elif isinstance(block, Quote):
            out.extend(_as_inline(block.blocks))
        elif isinstance(block, List):
            out.extend(node for item in block.items for node in (*_as_inline(item.blocks), Text(" ")))
        elif isinstance(block, Table):
            out.append(Text(" ".join(plain(cell) for row in block.rows for cell in row)))
    return out
