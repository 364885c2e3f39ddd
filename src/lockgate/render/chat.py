"""Chat clients: structures with no field that a server would unfurl or fetch.

Rule 1: words are text elements that no parser reads; links are elements of their own, and only approved ones.
Rule 2: unfurling is switched off in the message itself, since a reader cannot switch it off.
Rule 3: a card that came in is rebuilt from its words; images, backgrounds, icons, media and inputs have no place in it.
"""

from __future__ import annotations

from typing import Any, Final

from lockgate.render.bounds import TooComplex
from lockgate.render.judge import Judge, destination
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

_SLACK_CHARS: Final = 3000
DISCORD_CHARS: Final = 2000
_MRKDWN: Final = {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;"}
_FLAGS: Final = {"em": "italic", "strong": "bold", "del": "strike"}


def slack(blocks: list[Block]) -> dict[str, Any]:
    """Arguments of chat.postMessage: rich_text blocks, a plain fallback, unfurling off."""
    elements: list[dict[str, Any]] = []
    _slack_blocks(blocks, elements)
    return {
        "text": defang(_words(blocks))[:_SLACK_CHARS].translate(_MRKDWN),
        "blocks": [{"type": "rich_text", "elements": elements}] if elements else [],
        "unfurl_links": False,
        "unfurl_media": False,
        "parse": "none",
        "link_names": False,
    }


def _slack_blocks(blocks: list[Block], out: list[dict[str, Any]]) -> None:
    for block in blocks:
        if isinstance(block, CodeBlock):
            out.append({"type": "rich_text_preformatted", "elements": [_slack_text(block.text or " ", {}, code=True)]})
        elif isinstance(block, Quote):
            inner = [part for child in _flat(block.blocks) for part in _slack_inlines(child, {})]
            out.append({"type": "rich_text_quote", "elements": inner or [_slack_text(" ", {})]})
        elif isinstance(block, List):
            for number, item in _numbered(block):
                mark = _mark(block, number, item)
                inner = [part for child in _flat(item.blocks) for part in _slack_inlines(child, {})]
                out.append(
                    {"type": "rich_text_section", "elements": [_slack_text(mark, {}), *inner, _slack_text("\n", {})]}
                )
        elif isinstance(block, Table):
            out.append({"type": "rich_text_preformatted", "elements": [_slack_text(_grid(block), {})]})
        elif isinstance(block, Para | Heading):
            style = {"bold": True} if isinstance(block, Heading) else {}
            out.append(
                {
                    "type": "rich_text_section",
                    "elements": [*_slack_inlines(block.inlines, style), _slack_text("\n", {})],
                }
            )


def _slack_inlines(inlines: list[Inline], style: dict[str, bool]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for node in inlines:
        if isinstance(node, Text):
            out.append(_slack_text(node.text, style))
        elif isinstance(node, Code):
            out.append(_slack_text(node.text, {**style, "code": True}))
        elif isinstance(node, Math):
            out.append(_slack_text(plain([node]), style))
        elif isinstance(node, Break):
            out.append(_slack_text("\n", style))
        elif isinstance(node, Link):
            out.append(
                {"type": "link", "url": node.url, "text": defang(plain(node.inlines))}
                | ({"style": style} if style else {})
            )
        elif isinstance(node, Image):
            out.append(_slack_text(node.alt, style))
        else:
            out.extend(_slack_inlines(node.inlines, {**style, _FLAGS[node.kind]: True}))
    return [one for one in out if one["text"]]


def _slack_text(text: str, style: dict[str, bool], *, code: bool = False) -> dict[str, Any]:
    shown = defang(text, code=code or "code" in style)
    return {"type": "text", "text": shown, "style": style} if style else {"type": "text", "text": shown}


def mrkdwn(text: str) -> str:
    """Words for a mrkdwn field: the three escapes, no link, no mention, no formatting a `*` would start by chance."""
    return defang(clean(text)[0]).translate(_MRKDWN)


def discord(words: str) -> dict[str, Any]:
    """A message body of broken words: embeds suppressed (flag 4), nobody mentioned."""
    return {"content": words, "flags": 4, "allowed_mentions": {"parse": []}}


def adaptive_card(blocks: list[Block]) -> dict[str, Any]:
    """An Adaptive Card 1.5 of RichTextBlocks; a TextRun is not parsed as Markdown."""
    body: list[dict[str, Any]] = []
    actions: list[dict[str, Any]] = []
    _card_blocks(blocks, body, actions)
    return _card(body, actions)


def _card(body: list[dict[str, Any]], actions: list[dict[str, Any]]) -> dict[str, Any]:
    card: dict[str, Any] = {"type": "AdaptiveCard", "version": "1.5", "body": body}
    if actions:
        card["actions"] = actions
    return card


def _card_blocks(blocks: list[Block], body: list[dict[str, Any]], actions: list[dict[str, Any]]) -> None:
    for block in blocks:
        if isinstance(block, CodeBlock):
            body.append(_rich([_run(line, mono=True) for line in [block.text]]))
        elif isinstance(block, Table):
            body.append(_rich([_run(_grid(block), mono=True)]))
        elif isinstance(block, Quote):
            _card_blocks(block.blocks, body, actions)
        elif isinstance(block, List):
            for number, item in _numbered(block):
                mark = _mark(block, number, item)
                runs = [part for child in _flat(item.blocks) for part in _runs(child, actions)]
                body.append(_rich([_run(mark), *runs]))
        elif isinstance(block, Para | Heading):
            runs = _runs(block.inlines, actions, bold=isinstance(block, Heading))
            if runs:
                body.append(_rich(runs))


def _rich(inlines: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "RichTextBlock", "inlines": inlines}


def _run(text: str, *, mono: bool = False, bold: bool = False) -> dict[str, Any]:
    run: dict[str, Any] = {"type": "TextRun", "text": defang(text, code=mono)}
    if mono:
        run["fontType"] = "Monospace"
    if bold:
        run["weight"] = "Bolder"
    return run


def _runs(inlines: list[Inline], actions: list[dict[str, Any]], *, bold: bool = False) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for node in inlines:
        if isinstance(node, Text | Math):
            out.append(_run(plain([node]), bold=bold))
        elif isinstance(node, Code):
            out.append(_run(node.text, mono=True, bold=bold))
        elif isinstance(node, Break):
            out.append(_run("\n"))
        elif isinstance(node, Image):
            out.append(_run(node.alt, bold=bold))
        elif isinstance(node, Link):
            label = defang(plain(node.inlines))
            out.append(_run(label, bold=bold))
            actions.append(
                {
                    "type": "Action.OpenUrl",
                    "title": f"{label[:60]} ({destination(node.url) or 'link'})",
                    "url": node.url,
                }
            )
        else:
            out.extend(_runs(node.inlines, actions, bold=bold or node.kind == "strong"))
    return [one for one in out if one["text"]]


def rebuild_card(card: Any, judge: Judge) -> dict[str, Any]:
    """Rebuild a card that came in: its words, and its approved OpenUrl actions."""
    body: list[dict[str, Any]] = []
    actions: list[dict[str, Any]] = []
    _walk_card(card, body, actions, judge, 0)
    return _card(body, actions)


_WORDS: Final = (
    "text", "altText", "title", "value", "label", "placeholder", "fallbackText", "speak", "caption",
    "subtitle", "summary", "activityTitle", "activitySubtitle", "activityText", "description",
)  # fmt: skip
_URLS: Final = ("url", "backgroundImage", "iconUrl", "poster", "src", "resourceUrl", "image", "activityImage", "uri")
_MAX_PARTS: Final = 200


def _walk_card(node: Any, body: list[dict[str, Any]], actions: list[dict[str, Any]], judge: Judge, depth: int) -> None:
    if depth > 24 or len(body) > _MAX_PARTS:
        raise TooComplex
    if isinstance(node, list):
        for one in node:  # pyright: ignore[reportUnknownVariableType]
            _walk_card(one, body, actions, judge, depth + 1)
        return
    if not isinstance(node, dict):
        return
    fields: dict[str, Any] = {str(key): value for key, value in node.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    title = str(fields.get("title") or "")
    opened = None
    for key in _URLS:
        raw = fields.get(key)
        if isinstance(raw, dict):
            raw = raw.get("url")  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        if not isinstance(raw, str) or not raw:
            continue
        if fields.get("type") == "Action.OpenUrl" and key == "url":
            opened = judge.url(raw, "link")
        else:
            judge.deny("no_images", "image", destination(raw))
    if opened is not None:
        shown = defang(clean(title)[0])[:60]
        actions.append({"type": "Action.OpenUrl", "title": f"{shown} ({destination(opened)})", "url": opened})
        return
    words = [clean(fields[key])[0] for key in _WORDS if isinstance(fields.get(key), str)]
    if any(words):
        body.append(_rich([_run(" ".join(word for word in words if word))]))
    for key, value in fields.items():
        if key not in _URLS and isinstance(value, list | dict):
            _walk_card(value, body, actions, judge, depth + 1)


def _flat(blocks: list[Block]) -> list[list[Inline]]:
    """The inline content of nested blocks, a line each."""
    out: list[list[Inline]] = []
    for block in blocks:
        if isinstance(block, Para | Heading):
            out.append([*block.inlines, Text("\n")] if out or len(blocks) > 1 else block.inlines)
        elif isinstance(block, CodeBlock):
            out.append([Code(block.text.rstrip("\n"))])
        elif isinstance(block, Quote):
            out.extend(_flat(block.blocks))
        elif isinstance(block, List):
            for number, item in _numbered(block):
                inner = _flat(item.blocks)
                first = inner[0] if inner else []
                out.extend([[Text("\n  " + _mark(block, number, item)), *first], *inner[1:]])
        elif isinstance(block, Table):
            out.append([Text(_grid(block))])
    return out


def _numbered(block: List) -> enumerate[Item]:
    return enumerate(block.items, 1 if block.start is None else block.start)


def _mark(block: List, number: int, item: Item) -> str:
    box = "" if item.checked is None else "\u2611 " if item.checked else "\u2610 "
    return ("\u2022 " if block.start is None else f"{number}. ") + box


def _grid(table: Table) -> str:
    return "\n".join(" | ".join(plain(cell) for cell in row) for row in table.rows)


def _words(blocks: list[Block]) -> str:
    lines: list[str] = []
    for block in blocks:
        if isinstance(block, CodeBlock):
            lines.append(block.text.rstrip("\n"))
        elif isinstance(block, Rule):
            lines.append("---")
        else:
            lines.extend(plain(inlines).strip("\n") for inlines in _flat([block]))
    return "\n".join(lines)


def words(blocks: list[Block]) -> str:
    """The words of a tree as lines, links broken."""
    return defang(_words(blocks))
