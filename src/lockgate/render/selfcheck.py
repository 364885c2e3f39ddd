"""A second and a third opinion on what was emitted.

Rule 1: an alarm, no control: the emitters are safe by construction, and a surprise here is a fault of ours. The caller
        falls back to plain text and alerts as critical.
Rule 2: the walk takes tags and attributes from an allowlist, whole tag by whole tag; there is no list of URL-looking
        attributes to be incomplete.
Rule 3: the parsers are others than the one that made the tree, and both run with raw HTML and linkifiers on.
Rule 4: a parser that crashes is a surprise too. Two of them are Rust, whose panics arrive as BaseException.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, Final

from lockgate.contract.errors import HostFault
from lockgate.render.bounds import need, panicked
from lockgate.render.emit_html import REL
from lockgate.render.tables import OUTPUT_TAGS
from lockgate.render.visible import live_at

_TAG: Final = re.compile(r"<[^>]*>")
_BENIGN: Final = re.compile(
    r"</?(?:p|em|strong|del|s|code|pre|blockquote|ul|ol|li|table|thead|tbody|tr|th|td|h[1-6])>|<(?:br|hr)(?: /)?>|</a>"
    r'|<ol start="[0-9]{1,10}"(?: class="contains-task-list")?>'
    r'|<code class="language-[a-z0-9+#.-]{1,24}">|<pre lang="[a-z0-9+#.-]{1,24}">'
    r'|<t[hd] (?:align="(?:left|right|center)"|style="text-align: ?(?:left|right|center);?")>'
    r'|<input (?:type="checkbox"|checked=""|disabled=""|class="[a-z -]{1,40}"| )+/?>'
    r'|<li class="task-list-item">|<[uo]l class="contains-task-list">'
)
_ANCHOR: Final = re.compile(rf'<a href="(?P<url>[^"]*)"(?: rel="{REL}")?>')
_IMAGE: Final = re.compile(r'<img src="(?P<url>[^"]*)" alt="[^"]*"(?: referrerpolicy="no-referrer")?(?: /)?>')
_QUIET: Final = re.compile(r"<pre[ >].*?</pre>|<code>.*?</code>|<a href=.*?</a>", re.DOTALL)
_ADDRESS: Final = re.compile(r"[\w.+-]@\w")
_TRIGGER: Final = re.compile(r"[:@.]")


def surprise(rendered: str, approved: set[str]) -> str | None:
    """Return the first tag of some HTML that is neither benign nor an approved URL, or None."""
    tags: list[str] = _TAG.findall(rendered)
    if len(tags) != rendered.count("<"):
        return "an unclosed tag"
    for tag in set(tags):
        if _BENIGN.fullmatch(tag):
            continue
        match = _ANCHOR.fullmatch(tag) or _IMAGE.fullmatch(tag)
        if match is None:
            return tag[:200]
        if html.unescape(match["url"]) not in approved:
            return tag[:200]
    return None


def linkable(rendered: str) -> str | None:
    """Return what a linkifier of decoded text would link outside code and approved links, or None."""
    text = html.unescape(_TAG.sub("\x00", _QUIET.sub(" ", rendered))).replace("\x00", "")
    for match in _TRIGGER.finditer(text):
        # A delimiter that one renderer shows as it is makes no name of what stands before it.
        after = text[match.end() : match.end() + 1]
        if after in {"*", "~", "_"}:
            continue
        kind = live_at(text, match.start())
        if kind == "at" and not _ADDRESS.match(text, match.start() - 1):
            continue
        if kind in {"colon", "www", "at"}:
            return text[max(0, match.start() - 20) : match.start() + 20]
    return None


def _crash_is_a_surprise(check: Callable[[str, set[str]], str | None]) -> Callable[[str, set[str]], str | None]:
    @wraps(check)
    def guarded(text: str, approved: set[str]) -> str | None:
        try:
            return check(text, approved)
        except HostFault:  # a missing extra is the host's fault, and says what to install
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the text was not read to its end
            return f"a parser failed: {type(error).__name__}"
        except BaseException as error:
            if not panicked(error):
                raise
            return "a parser panicked"

    return guarded


@_crash_is_a_surprise
def check_markdown(text: str, approved: set[str]) -> str | None:
    """Render Markdown with two other parsers and return the first surprise, or None."""
    known = approved | {html.unescape(_percent(url)) for url in approved}
    first = _comrak()(text)
    found = surprise(first, known)
    if found is not None:
        return f"comrak: {found}"
    found = surprise(_markdown_it().render(text), known)
    if found is not None:
        return f"markdown-it: {found}"
    found = linkable(first)
    return None if found is None else f"linkifier: {found}"


@_crash_is_a_surprise
def check_html(text: str, approved: set[str]) -> str | None:
    """Read HTML with ammonia and lexbor and return the first surprise, or None."""
    found = surprise(text, approved)
    if found is not None:
        return f"own: {found}"
    cleaned = need("nh3").clean(
        text,
        tags=set(OUTPUT_TAGS),
        attributes={
            "a": {"href", "rel"},
            "img": {"src", "alt", "referrerpolicy"},
            "td": {"align"},
            "th": {"align"},
            "ol": {"start"},
        },
        url_schemes={"https", *(url.partition(":")[0].lower() for url in approved)},
        link_rel=None,
        strip_comments=True,
    )
    if _normal(cleaned) != _normal(text):
        return "ammonia changed it"
    body = need("selectolax.lexbor").LexborHTMLParser(text).body
    found = "no body" if body is None else surprise(str(body.inner_html or ""), approved)
    return None if found is None else f"lexbor: {found}"


def _normal(text: str) -> str:
    return html.unescape(text).replace("\u00a0", " ")


def _percent(url: str) -> str:
    return url.replace("[", "%5B").replace("]", "%5D")


@lru_cache(maxsize=1)
def _comrak() -> Any:
    parser = need("comrak")
    extensions = parser.ExtensionOptions()
    for name in ("autolink", "table", "strikethrough", "tasklist", "footnotes"):
        setattr(extensions, name, True)
    options = parser.RenderOptions()
    options.unsafe_ = True

    def render(text: str) -> str:
        return str(parser.render_markdown(text, extension_options=extensions, render_options=options))

    return render


@lru_cache(maxsize=1)
def _markdown_it() -> Any:
    return need("markdown_it_pyrs").MarkdownIt("gfm").enable("linkify")
