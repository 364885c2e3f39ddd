r"""The tree as Markdown that no renderer of a chat client reads more from than it holds.

Rule 1: links are `[label](<url>)`, or `<url>` when that is its label; images are `![alt](<url>)`; no HTML.
Rule 2: breaks are found on the visible text of a whole block, since names run across nodes; then words are escaped.
Rule 3: a backslash does not stop linkifiers that search decoded text, so a scheme's colon, the dot after `www` and the
        `@` of an address are broken visibly: `\[:\]`, `\[.\]`, `\[at\]`.
Rule 4: code that could break out of its delimiters becomes escaped words.
"""

from __future__ import annotations

import re
from typing import Final

from lockgate.render.tables import COMMANDS, DIAGRAMS
from lockgate.render.tree import (
    Block,
    Break,
    Code,
    CodeBlock,
    Heading,
    Image,
    Inline,
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
from lockgate.render.visible import live_at

_SPECIAL: Final = re.compile(r"[\\`*_{}\[\]#|~<>&$^=]|[:@.](?!\s)|(?<=[wW]{3})\.|[\u3002\uff0e\uff61]|(?<=/)/")
_ALWAYS: Final = frozenset("\\`*_{}[]#|~<>&$^=/")
_LINE_START: Final = re.compile(r"(?:[-+](?=[\s\-+]|\Z)|[0-9]{1,9}[.)](?=\s|\Z)|\()")
_INFO: Final = re.compile(r"[a-z0-9+#.-]{1,24}")
_RUN: Final = re.compile(r"`+")
_SAFE_MATH: Final = re.compile(
    r"(?:[0-9A-Za-z +\-*/=,()'^_{}|]|(?<![.])\.(?=[0-9])|\\[ ,;%&|{}]|\\(?P<cmd>[a-zA-Z]+)|[<>](?= ))+"
)
_TAG_INFO: Final = "text"
# What is passed over comes first: an escape, a fence, a code span, a live URL. Emitted code spans have one backtick.
_FORGE: Final = re.compile(
    r"\\#(?=[0-9])|\\.|(?P<fence>`{3,}+)[^`\n]*\n(?s:.*?)\n[> \t]*(?P=fence)(?=\n|\Z)|`[^`\n]*`|<https?://[^>\n]*>|"
    r"(?<![\w/])@(?=\w)"
)
_REPOSITORY: Final = re.compile(r"[\w.-]+/(?:[\w.-]|\\[._])+\Z")


def emit(blocks: list[Block], *, mentions: bool = True) -> str:
    """Return a judged tree as Markdown that ends with a newline; empty when there is nothing.

    Without `mentions`, the `@` of a name is broken too (forges notify people), and the number of an issue of another
    repository (its owner is told). Code stays as it is: forges do not look there.
    """
    text = "\n".join(_blocks(blocks))
    if not mentions:
        text = _FORGE.sub(_unmention, text)
    return text + "\n" if text else ""


def _unmention(match: re.Match[str]) -> str:
    found = match[0]
    if found == "@":
        return "\\[at\\]"
    if found == "\\#" and _REPOSITORY.search(match.string, max(0, match.start() - 160), match.start()):
        return "\\[\\#\\]"
    return found


def _blocks(blocks: list[Block], *, tight: bool = False) -> list[str]:
    out: list[str] = []
    bullets = 0
    previous: Block | None = None
    for block in blocks:
        if isinstance(block, List):
            # Another mark keeps two neighbours of one kind apart.
            twin = isinstance(previous, List) and (previous.start is None) == (block.start is None)
            bullets = bullets + 1 if twin else 0
            lines = _list(block, odd=bool(bullets % 2))
        else:
            lines = _block(block)
        if not lines:
            continue
        if out and not (
            tight and isinstance(block, List | Para) and not (isinstance(previous, Para) and isinstance(block, Para))
        ):
            out.append("")
        out.extend(lines)
        previous = block
    return out


def _block(block: Block) -> list[str]:
    if isinstance(block, Para):
        return _lines(inline(block.inlines))
    if isinstance(block, Heading):
        text = inline(block.inlines, one_line=True).strip()
        return [f"{'#' * block.level} {text}".rstrip()]
    if isinstance(block, CodeBlock):
        return _fence(block)
    if isinstance(block, Quote):
        return [f"> {line}".rstrip() for line in _blocks(block.blocks)] or [">"]
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Rule):
        return ["***"]
    return _list(block, odd=False)


def _lines(text: str) -> list[str]:
    """Split a paragraph into lines that begin no block."""
    out: list[str] = []
    for raw in text.split("\n"):
        line = raw.strip(" \t") if not raw.endswith("\\") else raw.lstrip(" \t")
        if not line:
            continue
        match = _LINE_START.match(line)
        if match and line[0] != "(":
            at = match.end() - 1
            line = f"{line[:at]}\\{line[at:]}"
        out.append(line)
    if out and out[-1].endswith("\\") and (len(out[-1]) - len(out[-1].rstrip("\\"))) % 2:
        out[-1] = out[-1][:-1]  # a hard break at the end of a block is a backslash there
    return out


def _list(block: List, *, odd: bool) -> list[str]:
    out: list[str] = []
    loose = any(isinstance(child, Para) and not child.tight for item in block.items for child in item.blocks)
    number = min(block.start, 999_999_000) if block.start is not None else 0
    for item in block.items:
        mark = ("*" if odd else "-") if block.start is None else f"{number}{')' if odd else '.'}"
        number += 1
        pad = " " * (len(mark) + 1)
        lines = _blocks(item.blocks, tight=not loose)
        if item.checked is not None:
            box = "[x]" if item.checked else "[ ]"
            first = item.blocks[0] if item.blocks else None
            if isinstance(first, Para) and _block(first):
                lines = [f"{box} {lines[0]}", *lines[1:]]
            else:  # behind the box a fence begins no block, and what it should hold inert would be read
                lines = [box, "", *lines] if lines else [box]
        if out and loose:
            out.append("")
        out.append(f"{mark} {lines[0]}".rstrip() if lines else mark)
        out.extend((pad + line).rstrip(" ") if line else "" for line in lines[1:])
    return out


def _fence(block: CodeBlock) -> list[str]:
    ticks = "`" * max(3, max((len(run) for run in _RUN.findall(block.text)), default=0) + 1)
    words = block.info.split()
    info = words[0].lower() if words else ""
    if not _INFO.fullmatch(info):
        info = ""
    if info in DIAGRAMS:
        info = _TAG_INFO
    return [ticks + info, *block.text.removesuffix("\n").split("\n"), ticks]


def _table(table: Table) -> list[str]:
    columns = max(len(row) for row in table.rows)
    align = (table.align + [""] * columns)[:columns]
    marks = {"left": ":--", "right": "--:", "center": ":-:", "": "---"}
    out: list[str] = []
    for index, row in enumerate(table.rows):
        cells = [inline(cell, one_line=True, cell=True).strip() for cell in row] + [""] * (columns - len(row))
        out.append("| " + " | ".join(cells) + " |")
        if index == 0:
            out.append("| " + " | ".join(marks[one] for one in align) + " |")
    return out


# ---- inline content --------------------------------------------------------------------------------------------------
# A piece is (visible text, output). Output None: the visible text is words, to be escaped in its context.
_Piece = tuple[str, str | None]


def inline(inlines: list[Inline], *, one_line: bool = False, cell: bool = False) -> str:
    """Return inline content escaped as a whole."""
    if len(inlines) == 1 and isinstance(first := inlines[0], Text):
        only = first.text
        return escape(only.replace("\n", " ") if "\n" in only else only)
    pieces: list[_Piece] = []
    _pieces(inlines, pieces, one_line=one_line, cell=cell)
    if not pieces:
        return ""
    visible = "".join(seen for seen, _ in pieces)
    out: list[str] = []
    at = 0
    for seen, raw in pieces:
        end = at + len(seen)
        if raw is None or (
            raw[:1] == "`"
            and (visible[at - 1 : at] == "`" or visible[end : end + 1] == "`" or (out and out[-1][-1:] == "`"))
        ):
            out.append(escape(visible, at, end))
        else:
            if raw[:1] == "[" and out and out[-1][-1:] == "!" and out[-1][-2:] != "\\!":
                out[-1] = out[-1][:-1] + "\\!"
            out.append(raw)
        at = end
    return "".join(out)


def _pieces(inlines: list[Inline], out: list[_Piece], *, one_line: bool, cell: bool) -> None:
    for node in inlines:
        if isinstance(node, Text):
            out.append((" ".join(node.text.split("\n")) if "\n" in node.text else node.text, None))
        elif isinstance(node, Code):
            out.append(_code(node.text, cell=cell))
        elif isinstance(node, Break):
            out.append((" ", " ") if one_line else ("\n", "\\\n" if node.hard else "\n"))
        elif isinstance(node, Math):
            out.append(_math(node, cell=cell))
        elif isinstance(node, Span):
            mark = {"em": "*", "strong": "**", "del": "~~"}[node.kind]
            inner = [
                part
                for child in node.inlines
                for part in (child.inlines if isinstance(child, Span) and child.kind == node.kind else [child])
            ]
            pieces: list[_Piece] = []
            _pieces(inner, pieces, one_line=one_line, cell=cell)
            # marked (16.4) ends a deletion at any tildes, in code and in addresses too, and leaves a half of these.
            cut = node.kind == "del" and any("~" in (raw or "") for _, raw in pieces)
            marked = not cut and (plain(inner).strip() or any(isinstance(child, Image) for child in inner))
            out += [("", mark), *pieces, ("", mark)] if marked else pieces
        elif isinstance(node, Image):
            # marked (16.4) writes an alt as it stands between quotes: a quote in it would begin attributes.
            alt = inline([Text(node.alt)], one_line=True).replace('"', "&quot;")
            out.append(("", f"![{alt}]({_target(node.url, cell=cell)})"))
        else:
            label = plain(node.inlines)
            if label == node.url and label.startswith("https://"):
                out.append((label, f"<{node.url}>"))
            else:
                text = inline(node.inlines, one_line=True, cell=cell)
                out.append((label, f"[{text}]({_target(node.url, cell=cell)})"))


def _target(url: str, *, cell: bool) -> str:
    safe = re.sub(r"&(?=[#0-9A-Za-z]+;)", "&amp;", url)
    return f"<{safe.replace('|', '%7C') if cell else safe}>"


def _code(text: str, *, cell: bool) -> _Piece:
    seen = text.replace("\n", " ")
    if "`" in seen or not seen.strip() or (cell and "\\" in seen and "|" in seen):
        return (seen, None)
    body = seen.replace("|", "\\|") if cell else seen
    if body[0] == " " and body[-1] == " ":
        body = f" {body} "
    return (seen, f"`{body}`")


def _math(node: Math, *, cell: bool) -> _Piece:
    text = node.text
    fits = _SAFE_MATH.fullmatch(text) is not None and "www" not in text.lower() and not (cell and "|" in text)
    if fits and text == text.strip() and all(name in COMMANDS for name in re.findall(r"\\([a-zA-Z]+)", text)):
        mark = "$$" if node.display else "$"
        return (text, f"{mark}{text}{mark}")
    mark = "$$" if node.display else "$"
    return (" ".join(f"{mark}{text}{mark}".split("\n")), None)


def escape(visible: str, start: int = 0, end: int | None = None) -> str:
    """Escape the words of a block between two positions, looking at what stands around them."""
    stop = len(visible) if end is None else end
    if _SPECIAL.search(visible, start, stop) is None:
        return visible[start:stop]
    out: list[str] = []
    at = start
    # The pattern looks behind, and ahead only for white space: the end of the search hides nothing that matters.
    for match in _SPECIAL.finditer(visible, start, stop):
        where = match.start()
        out.append(visible[at:where])
        out.append(_escaped(visible, where, start, stop))
        at = where + 1
    out.append(visible[at:stop])
    return "".join(out)


def _escaped(visible: str, at: int, start: int, stop: int) -> str:
    char = visible[at]
    if char in _ALWAYS:
        return "\\" + char
    if char == ":":
        kind = live_at(visible, at, start)
        if kind == "colon":
            return "\\[:\\]"
        around = visible[at - 1 : at].strip() and visible[at + 1 : at + 2].strip()
        return "\\:" if around or visible[at + 1 : at + 2] == ":" else ":"
    if char == "@":
        # At the end of a run the delimiters that follow may be words to another renderer.
        edge = at + 1 == stop and visible[at - 1 : at].strip()
        return "\\[at\\]" if edge or live_at(visible, at) == "at" else "@"
    if char == ".":
        if visible[max(0, at - 3) : at].lower() == "www":  # remark-gfm links the bare name too
            return "\\[.\\]"
        return "\\." if visible[max(0, at - 1) : at].strip() and visible[at + 1 : at + 2].isalnum() else "."
    return f"\\[{char}\\]" if live_at(visible, at) else char
