"""Decides on every link and image of one tree, exactly as it was parsed, and cleans the words after.

Rule 1: judge first, clean after: removing an invisible character first would turn a refused URL into an allowed one.
Rule 2: a refused image leaves its alt text, a refused link its label; the host is shown defanged, nothing else of it.
Rule 3: the caps bound what an ordered choice among allowed URLs can carry.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, Literal

from lockgate.policy.host import Host, Refusal
from lockgate.policy.url import Url, first_refusal
from lockgate.render.bounds import MAX_DEPTH, TooComplex
from lockgate.render.policy import Denial, Provenance, RenderPolicy
from lockgate.render.tables import ENDINGS
from lockgate.render.tlds import TLDS
from lockgate.render.tree import (
    Block,
    Break,
    Code,
    CodeBlock,
    Heading,
    Image,
    Inline,
    Link,
    List,
    Math,
    Para,
    Quote,
    Table,
    Text,
    plain,
)
from lockgate.render.visible import clean, shown_host

_UNRESERVED: Final = re.compile(r"[0-9A-Za-z._~/-]*\Z")
_QUERY: Final = re.compile(r"[0-9A-Za-z._~=&-]*\Z")
_ANY_HOST: Final = re.compile(r"(?i)(?:[a-z][a-z0-9+.-]*:)?[/\\]{2,}(?:[^/?#\\@\s]*@)?([^/?#\\:@\s\"'()<>,;]{1,253})")
_LABEL_URL: Final = re.compile(
    r"\s*(?:[a-z][a-z0-9+.-]*:/*|//)?(?:[^/@\s]*@)?([^/?#:@\s]+)(:[0-9]+)?([/?#]\S*)?\s*\Z", re.IGNORECASE
)
_WORDS: Final = (Text, Code, Math)
_INLINE_BLOCKS: Final = (Para, Heading)
MAX_INVISIBLE: Final = 8
MAX_SPANS: Final = 4096  # in one paragraph or cell: the time of some clients' parsers grows with their square


@dataclass(slots=True)
class Budget:
    """What one message, and one run, has made live so far. Shared by the pieces of a stream."""

    images: int = 0
    urls: set[str] = field(default_factory=set[str])
    run_urls: set[str] = field(default_factory=set[str])


class Judge:
    """Judges the trees of one message for one sink.

    Attributes:
        approved: URLs that this call made live; the self-check takes no other.
        denials: what was refused, in order.

    """

    def __init__(
        self,
        policy: RenderPolicy,
        provenance: Provenance,
        sink: str,
        budget: Budget,
        *,
        latched: bool = False,
        images: bool = True,
        notes: bool = True,
    ) -> None:
        self.policy = policy
        self.provenance = provenance
        self.sink = sink
        self.budget = budget
        self.latched = latched
        self.images = images
        self.notes = notes
        self.approved: set[str] = set()
        self.denials: list[Denial] = []
        self.invisible = 0
        self.spans = 0

    def deny(self, reason: str, kind: Literal["link", "image", "markup", "text"], host: str | None) -> None:
        """Note a denial."""
        self.denials.append(Denial(reason, self.sink, kind, host))

    def url(self, raw: str, kind: Literal["link", "image"]) -> str | None:
        """Return the URL that may live in place of `raw`, or None after noting the denial."""
        found = self._decide(raw, kind)
        if isinstance(found, Refusal):
            self.deny(found.reason, kind, destination(raw))
            return None
        if kind == "image":
            if self.budget.images >= self.policy.max_images:
                self.deny("cap_images", kind, destination(raw))
                return None
            self.budget.images += 1
        if found not in self.budget.urls:
            full = len(self.budget.urls) >= self.policy.max_urls
            if full or (found not in self.budget.run_urls and len(self.budget.run_urls) >= self.policy.max_run_urls):
                self.deny("cap_urls", kind, destination(raw))
                return None
            self.budget.urls.add(found)
            self.budget.run_urls.add(found)
        self.approved.add(found)
        return found

    def _decide(self, raw: str, kind: Literal["link", "image"]) -> str | Refusal:
        if raw in self.policy.exact:
            return raw
        url = Url.parse(raw.encode("utf-8", "surrogatepass"))
        if isinstance(url, Refusal):
            return url
        origins = self.provenance.origins(raw)
        if origins and (kind == "link" or origins & {"operator", "field"}):
            return raw
        if self.latched:
            return Refusal("trifecta", "the run has read private and untrusted data")
        refusal = first_refusal(url, self.policy.images if kind == "image" else self.policy.links)
        if refusal is not None:
            return Refusal("url_not_allowed", refusal.detail) if refusal.reason == "arg_host_not_allowed" else refusal
        if not _UNRESERVED.match(url.path) or (url.query is not None and not _QUERY.match(url.query)):
            return Refusal("path_not_canonical", "a path under a rule holds unreserved characters only")
        return url.text

    # ---- the tree ----------------------------------------------------------------------------------------------
    def blocks(self, blocks: list[Block], depth: int = 0) -> None:
        """Judge and clean a whole tree in place.

        Raises:
            TooComplex: it nests deeper than MAX_DEPTH.

        """
        if depth > MAX_DEPTH:
            raise TooComplex
        for block in blocks:
            if isinstance(block, _INLINE_BLOCKS):
                block.inlines = self._whole(block.inlines, depth)
            elif isinstance(block, Quote):
                self.blocks(block.blocks, depth + 1)
            elif isinstance(block, List):
                for item in block.items:
                    self.blocks(item.blocks, depth + 1)
            elif isinstance(block, Table):
                block.rows = [[self._whole(cell, depth) for cell in row] for row in block.rows]
            elif isinstance(block, CodeBlock):
                block.text = self._clean(block.text)

    def _whole(self, inlines: list[Inline], depth: int) -> list[Inline]:
        self.spans = 0
        return self.inlines(inlines, depth)

    def inlines(self, inlines: list[Inline], depth: int = 0) -> list[Inline]:
        """Return inline content in which every link and image may live."""
        if depth > MAX_DEPTH:
            raise TooComplex
        out: list[Inline] = []
        for node in inlines:
            if isinstance(node, _WORDS):
                node.text = self._clean(node.text)
                if node.text:
                    out.append(node)
            elif isinstance(node, Break):
                out.append(node)
            elif isinstance(node, Image):
                url = None
                if self.images:
                    url = self.url(node.url, "image")
                else:
                    self.deny("no_images", "image", destination(node.url))
                alt = self._clean(node.alt)
                if url is not None:
                    out.append(Image(url, alt))
                elif alt:
                    out.append(Text(alt))
            elif isinstance(node, Link):
                self._link(node, out, depth)
            else:
                self.spans += 1
                if self.spans > MAX_SPANS:
                    raise TooComplex
                node.inlines = self.inlines(node.inlines, depth + 1)
                out.append(node)
        return out

    def _link(self, node: Link, out: list[Inline], depth: int) -> None:
        raw = node.url
        inside = self.inlines(_flat(node.inlines), depth + 1)
        if not raw or raw.startswith("#"):  # a place in the document itself
            out.extend(inside)
            return
        label = plain(inside)
        target = None
        if _poses(label, raw):
            self.deny("label_names_other_host", "link", destination(raw))
        else:
            target = self.url(raw, "link")
        if target is not None:
            out.append(Link(target, inside or [Text(destination(target) or "link")]))
            return
        out.extend(inside)
        host = destination(raw)
        if self.notes and (host is None or host.replace("[.]", ".").replace("[:]", ":") not in label):
            out.append(Text(f"{' ' if inside else ''}(link removed{': ' + host if host else ''})"))

    def _clean(self, text: str) -> str:
        if text.isascii() and text.isprintable():
            return text
        cleaned, removed = clean(text)
        if removed:
            before, self.invisible = self.invisible, self.invisible + removed
            if before <= MAX_INVISIBLE < self.invisible:
                self.deny("invisible_text", "text", None)
        return cleaned


def destination(raw: str) -> str | None:
    """Return the host that most readers would see in a URL, defanged, or None."""
    url = Url.parse(raw.encode("utf-8", "replace"), ("https", "http"))
    if isinstance(url, Url):
        return shown_host(url.host.text)
    match = _ANY_HOST.search(raw)
    if match is None:
        return None
    host = Host.parse(match[1].encode("utf-8", "replace"))
    return shown_host(host.text) if isinstance(host, Host) else None


def _flat(inlines: list[Inline]) -> list[Inline]:
    """A link inside a link is only its label."""
    if not any(isinstance(node, Link) for node in inlines):
        return inlines
    out: list[Inline] = []
    for node in inlines:
        out.extend(_flat(node.inlines) if isinstance(node, Link) else [node])
    return out


def _poses(label: str, raw: str) -> bool:
    """Whether a label looks like a URL or a host and is not the target's."""
    match = _LABEL_URL.match(label)
    if match is None:
        return False
    has_scheme = "://" in label or label.lstrip().lower().startswith(("www.", "//"))
    host = match[1].rstrip(".").lower()
    top = host.rpartition(".")[2]
    if not has_scheme and (
        "." not in host or top not in TLDS or (top in ENDINGS and match[3] is None) or not host.isascii()
    ):
        return False
    url = Url.parse(raw.encode("utf-8", "replace"))
    if not isinstance(url, Url):
        return False  # refused for itself
    return host.removeprefix("www.") != url.host.text.removeprefix("www.")
