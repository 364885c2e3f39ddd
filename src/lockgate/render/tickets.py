"""Trackers: Jira documents and wiki markup, and one approved link form of their own each.

Rule 1: Jira gets an Atlassian document of text nodes; where only wiki markup is taken, every mark of it is escaped.
"""

from __future__ import annotations

from typing import Any, Final

from lockgate.render.chat import words
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
    Table,
    Text,
    plain,
)
from lockgate.render.visible import clean, defang

_WIKI: Final = {ord(c): "\\" + c for c in "{}[]!|*_^~-+?\\#&"}
_MARKS: Final = {"em": "em", "strong": "strong", "del": "strike"}


def wiki(text: str) -> str:
    """Words for Jira wiki markup."""
    return defang(clean(text)[0]).translate(_WIKI)


def document(blocks: list[Block]) -> dict[str, Any]:
    """An Atlassian Document Format document: text nodes, and links as marks of approved URLs."""
    return {"version": 1, "type": "doc", "content": [one for block in blocks for one in _block(block)]}


def _block(block: Block) -> list[dict[str, Any]]:
    if isinstance(block, Para):
        return [_para(block.inlines)]
    if isinstance(block, Heading):
        return [{"type": "heading", "attrs": {"level": block.level}, "content": _inlines(block.inlines, [])}]
    if isinstance(block, CodeBlock):
        return [{"type": "codeBlock", "content": [{"type": "text", "text": block.text or " "}]}]
    if isinstance(block, Quote):
        return [{"type": "blockquote", "content": [_lines(child) for child in block.blocks]}]
    if isinstance(block, List):
        kind = "bulletList" if block.start is None else "orderedList"
        items = [{"type": "listItem", "content": _item(item)} for item in block.items]
        order = {"attrs": {"order": block.start}} if block.start not in {None, 1} else {}
        return [{"type": kind, **order, "content": items}]
    if isinstance(block, Rule):
        return [{"type": "rule"}]
    return [_table(block)]


def _item(item: Item) -> list[dict[str, Any]]:
    out = [
        one
        for child in item.blocks
        for one in (_block(child) if isinstance(child, Para | CodeBlock | List) else [_lines(child)])
    ]
    if item.checked is None and out:
        return out
    box = "" if item.checked is None else "\u2611 " if item.checked else "\u2610 "
    if not out or out[0]["type"] != "paragraph":
        out.insert(0, {"type": "paragraph", "content": []})
    out[0]["content"] = [*([_text(box, [])] if box else []), *out[0]["content"]]
    return out


def _lines(block: Block) -> dict[str, Any]:
    """A paragraph of a block that has no place where it stands."""
    return _para(block.inlines if isinstance(block, Para | Heading) else [Text(words([block]))])


def _para(inlines: list[Inline]) -> dict[str, Any]:
    return {"type": "paragraph", "content": _inlines(inlines, [])}


def _table(table: Table) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for index, row in enumerate(table.rows):
        kind = "tableCell" if index else "tableHeader"
        rows.append({"type": "tableRow", "content": [{"type": kind, "content": [_para(cell)]} for cell in row]})
    return {"type": "table", "content": rows}


def _inlines(inlines: list[Inline], marks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for node in inlines:
        if isinstance(node, Text | Math):
            out.append(_text(defang(plain([node])), marks))
        elif isinstance(node, Code):
            out.append(_text(node.text, [*marks, {"type": "code"}]))
        elif isinstance(node, Break):
            out.append({"type": "hardBreak"} if node.hard else _text(" ", marks))
        elif isinstance(node, Image):
            out.append(_text(defang(node.alt), marks))
        elif isinstance(node, Link):
            out.append(_text(defang(plain(node.inlines)), [*marks, {"type": "link", "attrs": {"href": node.url}}]))
        else:
            out.extend(_inlines(node.inlines, [*marks, {"type": _MARKS[node.kind]}]))
    return [one for one in out if one.get("text", "x")]


def _text(text: str, marks: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "text", "text": text, "marks": marks} if marks else {"type": "text", "text": text}
