"""Payloads for the render guard, and renderers that are not its own. For tests only.

The strategies make each construct, nest them, and mutate what they made; `renderers` read what the guard emits as
careless clients would, and `live` finds what they would fetch or link.
"""

# ruff: noqa: E501 -- tables of payloads read better unbroken
from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable

import comrak
import markdown_it_pyrs
import mistune
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from selectolax.lexbor import LexborHTMLParser

from lockgate.render import RenderPolicy

OK = re.compile(r"https://wiki\.partner\.example/[\w.~/-]*|https://img\.partner\.example/pub/[\w.~/-]*", re.ASCII)
QUIET = frozenset({"align", "class", "type", "checked", "disabled", "start", "alt", "rel", "referrerpolicy"})
ACTIVE = frozenset(
    ["script", "style", "iframe", "svg", "object", "form", "link", "meta", "video", "embed", "base", "math", "picture"]
)


@functools.cache
def renderers() -> dict[str, Callable[[str], str]]:
    extensions = comrak.ExtensionOptions()
    for name in ("autolink", "table", "strikethrough", "tasklist", "footnotes"):
        setattr(extensions, name, True)
    options = comrak.RenderOptions()
    options.unsafe_ = True
    plugins = ["table", "strikethrough", "footnotes", "task_lists", "url"]
    return {
        "comrak": lambda text: comrak.render_markdown(text, extension_options=extensions, render_options=options),
        "markdown-it.rs": markdown_it_pyrs.MarkdownIt("gfm").enable("linkify").render,
        "mistune": mistune.create_markdown(escape=False, plugins=plugins),  # type: ignore[dict-item]
        "markdown-it-py": MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render,
    }


def live(html: str) -> list[object]:
    found: list[object] = []
    for node in LexborHTMLParser(html).css("*"):
        if node.tag in ACTIVE:
            found.append(node.tag)
        for name, value in node.attributes.items():
            if name == "style" and re.fullmatch(r"text-align: ?\w+;?", value or ""):
                continue
            if name in QUIET or (name in {"href", "src"} and OK.fullmatch(value or "")):
                continue
            found.append((node.tag, name, value))
    return found


URLS = st.sampled_from(
    [
        "https://attacker.example/?d=S",
        "http://attacker.example",
        "//attacker.example/a",
        "/\\attacker.example",
        "data:text/html,x",
        "javascript:alert(1)",
        "mailto:a@attacker.example",
        "smb://attacker.example/x",
        "file://attacker.example/a",
        "vscode://a/b",
        "https://wiki.partner.example@attacker.example/",
        "https://wiki.partner.example.attacker.example/",
        "HTTPS://ATTACKER.EXAMPLE",
        "https://wiki.partner.example/a?x=S",
        "https://wiki.partner.example/a#S",
        "https://img.partner.example/pub/../x",
        "www.attacker.com",
        "https://wiki.partner.example/good",
        "https://img.partner.example/pub/good.png",
        "a@attacker.com",
        "attacker.com/x",
        "https\\://attacker.com",
        "https&#58;//attacker.com",
        "www\\.attacker.com",
        "https://att\u200backer.com",
        "\\\\attacker.com\\a",
    ]
)
LABELS = st.sampled_from(
    [
        "x",
        "",
        "click `here`",
        "*em*",
        "a]b",
        "[",
        "\\",
        "<b>",
        "|",
        "\n",
        "![",
        "https://attacker.com",
        "\u202e",
        "&amp;",
    ]
)


# {u} is a URL, {a} and {b} are payloads themselves.
SHAPES = (
    "![{a}]({u})", "[{a}]({u} 'title')", "[{a}](<{u}>)", "[{a}][r]\n\n[r]: {u}\n", "![r]\n\n[r]:\n {u}\n'{a}'\n",
    "x[^1]\n\n[^1]: {a} ![y]({u})\n", "<img src={u} alt='{a}'>", "<a href='{u}'>{a}</a>", "<{u}>{a}", "{u}{a}",
    "<div style='background:url({u})'>{a}</div>", "<svg><image href='{u}'/></svg>{a}", "| a | b |\n|---|---|\n| {a} | {b} |\n",
    "> {a}\n", "- {a}\n  - {b}\n", "1. {a}\n\n   {b}\n", "# {a}\n", "**{a}**{b}", "*{a}*_{b}_", "~~{a}~~", "`{a}`{b}", "``{a}`` {b}",
    "```\n{a}\n```\n{b}", "```mermaid\n{a}\n```\n", "```a`b\n{a}\n```\n", "~~~\n{a}\n~~~ {b}", "    {a}\n", "${a}$ $${b}$$",
    "<!-- {a} -->{b}", "{a}\n\n{b}", "{a}{b}", "\\{a} &lt;{b}", "[![{a}]({u})]({u})", "<b>{a}</b>", "<pre>{a}</pre>", "- [ ] {a}",
    "<details>\n\n{a}\n\n</details>", "[{a}]: {u}\n\n[{a}]", "{a}  \n{b}", "<picture><source srcset='{u}'>{a}</picture>", "${u}$",
    "<img src=\"{u}\" onerror='{a}'>", "<a\nhref={u}\n>{a}", "<math href={u}>{a}</math>", "|{a}|\n|-|\n|`{b}|`|\n", "{a}\r{b}",
)  # fmt: skip


def _wrap(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    parts = st.tuples(st.sampled_from(SHAPES), URLS, inner, inner)
    return parts.map(lambda p: p[0].replace("{u}", p[1]).replace("{b}", p[3]).replace("{a}", p[2]))


PIECES = st.sampled_from(
    [
        "evil",
        ".com",
        "https:",
        "//",
        "@",
        "www",
        ".",
        ":",
        "`",
        "|",
        "\n",
        "\t",
        "<",
        "(",
        "!",
        "]",
        "*",
        "_",
        "\\",
        "&#58;",
    ]
)
LEAVES = st.one_of(URLS, LABELS, PIECES, st.text(max_size=6))
NESTED = st.recursive(LEAVES, _wrap, max_leaves=8)
TRIGGERS = "![]()<>`|*_~$:@./\\&#;\n\r\t\x00\x1b\u200b\u202e\u2028 '\"=-+0"


def mutate(text: str, seed: int) -> str:
    """Return `text` with one to six small edits: marks put in, parts cut, doubled, moved or turned about."""
    rnd = random.Random(seed)
    for _ in range(rnd.randint(1, 6)):
        at, end = sorted((rnd.randint(0, len(text)), rnd.randint(0, len(text))))
        part = text[at : min(end, at + 24)]
        kind = rnd.randrange(5)
        if kind == 0:
            text = text[:at] + "".join(rnd.choice(TRIGGERS) for _ in range(rnd.randint(1, 3))) + text[at:]
        elif kind == 1:
            text = text[:at] + text[at + len(part) :]
        elif kind == 2:
            text = text[:end] + part + text[end:]
        elif kind == 3:
            text = text[:at] + part[::-1] + text[at + len(part) :]
        else:
            text = text[end:] + text[:end]
    return text


PAYLOADS = st.one_of(NESTED, st.builds(mutate, NESTED, st.integers(0, 2**32)))
POLICY = RenderPolicy.of(
    links=["https://wiki.partner.example/*"], images=["https://img.partner.example/pub/*"], max_images=99, max_urls=999,
    max_run_urls=10**9, check_every=0,
)  # fmt: skip
