"""Judges a file of render cases against the real guard, with eyes of its own.

Rule 1: what is live is decided by other parsers and by the walk of the output, never by what the guard says it did.
Rule 2: the policy is read from the case's `policy_text`, and nothing else is allowed.
Rule 3: an expectation that is not known fails the case; a sink that is not known is held to the rules of plain text.
"""

from __future__ import annotations

import base64
import binascii
import csv
import html
import io
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from lockgate.contract.errors import ConfigError
from lockgate.contract.run import Principal
from lockgate.policy import Operations, Scope, authorize, request
from lockgate.render import emit_markdown, selfcheck, tree
from lockgate.render.corpus_office import office_sample
from lockgate.render.guard import Guard
from lockgate.render.judge import Budget, Judge
from lockgate.render.parse_html import parse_html
from lockgate.render.parse_markdown import parse_markdown
from lockgate.render.plain import HARMLESS_CELL, csv_rows
from lockgate.render.policy import Denial, Provenance, Rendered, RenderPolicy
from lockgate.render.tables import DIAGRAMS
from lockgate.render.visible import clean, defang, find_live

_IMAGES: Final = re.compile(r"images only (https://[^\s*,;]+)\*")
_LINKS: Final = re.compile(r"links only (https://[^\s*,;]+)\*")
_CANARY: Final = re.compile(r"LGCANARY[0-9a-f]{16}")
_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_REMOTE: Final = re.compile(
    r"(?i)(?:https?|ftp|file|smb|data|javascript):|(?<![:\w\]])//[\w]|\\\\\\\\\w|<!DOCTYPE|<!ENTITY|<\?(?!xml )"
)
_STARTS: Final = frozenset("=+-@\t\r\uff1d\uff0b\uff0d\uff20")
_NAMESPACE: Final = "http://www.w3.org/2000/svg"
_FETCHED: Final = re.compile(
    r"""(?im)["']?(?:\$?schema|\$id|\$ref|@context|externalDocs|extends|\$include|\$import)["']?\s*:.*|#.*schema.*|!\S+"""
)
_SINKS: Final = (
    ("markdown", "markdown"), ("chat-html", "html"), ("html", "html"), ("terminal", "terminal"), ("tty", "terminal"),
    ("log", "log"), ("slack", "slack"), ("discord", "discord"), ("teams", "teams"), ("adaptive", "teams"),
    ("header", "header"), ("mail", "email"), ("github", "github"), ("gitlab", "github"), ("jira", "jira"),
    ("confluence", "jira"), ("csv", "csv"), ("tsv", "csv"), ("xlsx-cell", "csv"), ("sheet", "csv"), ("svg", "svg"),
    ("xml", "xml"), ("ipynb", "ipynb"), ("notebook", "ipynb"), ("docx", "office"), ("pptx", "office"),
    ("xlsx", "office"),
    ("odt", "office"), ("office", "office"), ("pdf", "pdf"), ("json", "json"), ("yaml", "yaml"), ("yml", "yaml"),
    ("rss", "xml"), ("atom", "xml"), ("console", "terminal"), ("shell", "terminal"), ("ansi", "terminal"),
    ("rtf", "pdf"),
    ("ods", "office"), ("odp", "office"), ("xls", "office"), ("epub", "pdf"),
    ("react", "markdown"), ("mermaid", "markdown"),
    ("wiki", "jira"), ("notion", "markdown"), ("readme", "markdown"),
    ("tex", "latex"), ("chat", "markdown"), ("sms", "text"), ("push", "text"), ("title", "text"), ("calendar", "text"),
    ("ics", "text"), ("text", "text"), ("ticket", "text"), ("plain", "text"), ("notification", "text"),
)  # fmt: skip


class Outcome(msgspec.Struct, frozen=True):
    """What became of one case; `reason` is empty when it passed."""

    id: str
    expected: str
    got: str
    reason: str

    @property
    def passed(self) -> bool:
        """Whether the case held."""
        return not self.reason


def is_render_case(case: dict[str, Any]) -> bool:
    """Whether a case is about something that is shown, exported or passed to a tool."""
    return "sink" in case and "input" in case


def policy_of(case: dict[str, Any]) -> RenderPolicy:
    """Return the policy that a case's `policy_text` describes."""
    text = str(case.get("policy_text", ""))
    whole = json.dumps(case.get("input"), ensure_ascii=False) + str(case.get("why", ""))
    given = case.get("input")
    joined = "".join(map(str, given)) if isinstance(given, list) else str(given)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    bare = re.sub(r"<[^>]*>|[^0-9A-Za-z]", "", html.unescape(clean(joined)[0]))  # markup may split a planted value
    forms = [whole, whole[::-1], joined, bare, bare[::-1], *_decoded(f"{whole} {joined}")]
    canaries = tuple(dict.fromkeys(found for form in forms for found in _CANARY.findall(form)))
    return RenderPolicy.of(
        images=[f"{found}*" for found in _IMAGES.findall(text)],
        links=[f"{found}*" for found in _LINKS.findall(text)],
        canaries=canaries,
    )


def _decoded(text: str) -> Iterable[str]:
    for word in re.findall(r"[0-9A-Za-z+/=_-]{16,}", text) + re.findall(r"[0-9A-Za-z]{16,}", text):
        for decode in (bytes.fromhex, base64.urlsafe_b64decode, base64.b64decode, base64.b32decode):
            try:
                yield decode(word).decode("latin-1")
            except (ValueError, binascii.Error):
                continue


def check(case: dict[str, Any]) -> Outcome:
    """Run one case.

    Raises:
        ConfigError: it has not the shape of a case.

    """
    try:
        name, sink, expected, given = str(case["id"]), str(case["sink"]), str(case["expected"]), case["input"]
    except KeyError as error:
        raise ConfigError(f"a case has no {error.args[0]!r}", next_step="give id, sink, input and expected") from None
    chunks = [str(one) for one in given] if isinstance(given, list) else [str(given)]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    text = "".join(chunks)
    if sink.lower().startswith("tool-arg"):
        return _tool(name, sink, expected, text)
    kind = next((known for word, known in _SINKS if word in sink.lower()), "text")
    if expected == "prefix_apostrophe":
        kind = "csv"
    policy = policy_of(case)
    guard = Guard(policy)
    if kind in {"office", "pdf"}:
        return _file(name, expected, kind, text, guard)
    try:
        outputs = _outputs(guard, kind, text, chunks)
    except ConfigError as error:
        return Outcome(name, expected, "error", error.message)
    reason = ""
    got = ""
    for shown, made in outputs:
        got = _got(made)
        reason = reason or _judge(expected, kind, shown, text, made, policy)
    return Outcome(name, expected, got, reason)


def _outputs(guard: Guard, kind: str, text: str, chunks: list[str]) -> list[tuple[str, Rendered]]:
    if kind == "html":
        again = Guard(guard.policy)
        return [("html", guard.html(text, source="html")), ("markdown", again.markdown(text, source="html"))]
    if kind == "markdown":
        stream = Guard(guard.policy).stream()
        streamed = "".join(stream.feed(chunk) for chunk in chunks) + stream.close()
        whole = guard.markdown(text)
        if stream.withheld:
            streamed = ""
        page = Guard(guard.policy).html(text)
        return [("markdown", whole), ("html", page), ("markdown", Rendered(streamed, tuple(stream.denials)))]
    if kind == "email":
        return [(kind, guard.email_html(text, source="html" if "<" in text else "markdown"))]
    if kind == "jira":
        return [(kind, guard.jira(text)), ("text", guard.jira_wiki(text))]
    if kind == "slack":
        return [(kind, guard.slack(text)), ("text", guard.slack_mrkdwn(text))]
    names = {"teams": "adaptive_card", "log": "log_line"}
    method: Callable[[str], Rendered] = getattr(guard, names.get(kind, kind))
    return [(kind, method(text))]


def _got(made: Rendered) -> str:
    if made.withheld:
        return "block_canary"
    return ",".join(dict.fromkeys(denial.reason for denial in made.denials)) or "rendered"


def _judge(  # noqa: PLR0917 -- the case, its output and the policy
    expected: str, source: str, kind: str, text: str, made: Rendered, policy: RenderPolicy
) -> str:
    if expected == "block_canary":
        return "" if made.withheld and not policy_hit(made.text, policy) else "the canary was shown"
    if made.withheld:
        return "it was withheld"
    live = _live(kind, made.text, policy)
    if live:
        return live
    if expected in {"allow", "allow_inert", "inert_code"}:
        return _kept(source, kind, text, made, exact=expected != "inert_code")
    if expected == "limit_images":
        shown = len(re.findall(r"<img " if kind == "html" else r"!\[[^\]]*\]\(<", made.text))
        if shown > policy.max_images:
            return f"{shown} images are shown"
    if expected in {"strip_keep_alt", "limit_images", "defang", "defang_and_no_unfurl"} or expected.startswith(
        "defang"
    ):
        lost = _labels_lost(source, kind, text, made)
        return f"a label was lost: {lost!r}" if lost else ""
    if expected == "escape":
        controls = [char for char in text if _CONTROL.match(char)]
        wanted = {f"\\x{ord(char):02x}" for char in controls if char != "\r" or "\r\n" not in text}
        return "" if all(one in made.text for one in wanted) else "a control was not shown as an escape"
    if expected == "prefix_apostrophe":
        return ""
    if expected.startswith(("strip", "deny", "drop", "refuse", "block")):
        return "" if expected.startswith("strip") or made.denials else "there is no denial"
    return f"unknown expectation {expected!r}"


def policy_hit(text: str, policy: RenderPolicy) -> bool:
    """Whether a canary is in `text` as it stands."""
    return any(value in text for value in policy.canaries)


def _approved(urls: Iterable[str], kind: str, policy: RenderPolicy) -> set[str]:
    judge = Judge(policy, Provenance(), kind, Budget())
    wide = msgspec.structs.replace(policy, max_images=10**6, max_urls=10**6, max_run_urls=10**6)
    judge.policy = wide
    return {url for url in urls if judge.url(url, "link") == url or judge.url(url, "image") == url}


def _live(kind: str, out: str, policy: RenderPolicy) -> str:
    """Say what is live in the output of a sink, or return an empty string."""
    if clean(out.replace("\r\n", "\n") if kind == "csv" else out)[1]:
        return "an invisible character is left"
    if kind in {"markdown", "github"}:
        urls = _approved(re.findall(r"<(https://[^>]*|mailto:[^>]*)>", out), kind, policy)
        return selfcheck.check_markdown(out, urls) or _third(out, urls)
    if kind in {"html", "email"}:
        urls = _approved(re.findall(r'(?:href|src)="([^"]*)"', out), kind, policy)
        if kind == "email" and ("<img" in out or selfcheck.linkable(out)):
            return "mail would load or link something"
        return selfcheck.check_html(out, urls) or ""
    if kind in {"slack", "teams", "jira", "discord"} and out[:1] == "{":
        return _live_json(json.loads(out), kind, policy)
    if kind == "csv":
        rows = list(csv.reader(io.StringIO(out)))
        bad = [
            cell
            for row in rows
            for cell in row
            if cell and cell.lstrip(" \"'")[:1] in _STARTS and cell[:1] != "'" and not HARMLESS_CELL.match(cell)
        ]
        return f"a cell is a formula: {bad[0][:40]!r}" if bad else ""
    if kind in {"svg", "xml", "json", "yaml", "ipynb"}:
        found = _REMOTE.search(_reaching(kind, out))
        return f"it reaches out: {found[0]!r}" if found else ""
    if _CONTROL.search(out) or (kind in {"log", "header"} and "\n" in out):
        return "a control character is left"
    if kind == "latex" and re.search(r"\\(?!text|[{}$&#%_])", out):
        return "a TeX command is left"
    found_link = find_live(out, code=kind in {"terminal", "log"})
    return f"a linkifier links {found_link!r}" if found_link else ""


def _reaching(kind: str, out: str) -> str:
    """What of a file a program would follow: not the words of an element, a value that is only data, or code."""
    if kind in {"svg", "xml"}:
        return "".join(re.findall(r"<[^>]*>", out.replace(_NAMESPACE, "")))
    if kind == "ipynb":
        cells: list[dict[str, Any]] = json.loads(out)["cells"] if out else []
        for cell in cells:
            if cell["cell_type"] == "code":
                cell["source"] = ""
            elif cell["source"].startswith("```"):
                cell["source"] = ""  # inert, and longer fenced than what it holds
        return json.dumps(cells)
    return "\n".join(_FETCHED.findall(out))


def _third(out: str, urls: set[str]) -> str:
    """Our own parser's reading of the output, as a third opinion."""
    found = [node.url for node in _links(parse_markdown(out)) if node.url not in urls]
    return f"a link is live: {found[0]!r}" if found else ""


def _live_json(node: Any, kind: str, policy: RenderPolicy, key: str = "", *, loose: bool = False) -> str:
    if isinstance(node, dict):
        fields: dict[str, Any] = node  # pyright: ignore[reportUnknownVariableType]
        if kind == "slack" and "blocks" in fields and (fields.get("unfurl_links") or fields.get("unfurl_media")):
            return "unfurling is on"
        code = fields.get("type") == "codeBlock" or {"type": "code"} in (fields.get("marks") or [])
        style: dict[str, Any] = fields.get("style") or {}
        shown = loose or fields.get("type") == "rich_text_preformatted" or "code" in style or "fontType" in fields
        for name, value in fields.items():
            found = "" if code and name in {"text", "content"} else _live_json(value, kind, policy, name, loose=shown)
            if found:
                return found
        return ""
    if isinstance(node, list):
        return next((found for one in node if (found := _live_json(one, kind, policy, key, loose=loose))), "")  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(node, str):
        return ""
    if key in {"url", "href", "iconUrl", "backgroundImage", "image_url", "thumb_url", "src", "poster"}:
        return "" if _approved([node], kind, policy) else f"{key} is live"
    found_link = find_live(node, code=loose)
    return f"a linkifier links {found_link!r}" if found_link else ""


def _tool(name: str, sink: str, expected: str, text: str) -> Outcome:
    """Tool arguments are decided in authorize(): the case's policy grants no tool, so nothing may be called."""
    scope = Scope(user="u", agent="a", tenant="t", expires=60.0, allow={}).compile(Operations().seal(), 0.0)
    asked = request(scope, sink.partition(":")[2] or "tool", msgspec.json.encode({"text": text}), 1.0)
    verdict = authorize(Principal(user="u", agent="a", tenant="t", run="r"), asked, scope)
    held = (verdict.effect == "allow") == expected.startswith("allow")
    return Outcome(name, expected, verdict.visible or "allow", "" if held else f"expected {expected}")


def _words(kind: str, text: str) -> str:
    if kind in {"slack", "teams", "jira", "discord"}:
        return (
            " ".join(re.findall(r'"(?:text|content)": "((?:[^"\\]|\\.)*)"', text))
            .replace('\\"', '"')
            .replace("\\n", " ")
        )
    if kind in {"html", "email"}:
        return _tree_words(parse_html(text))
    if kind == "csv":
        return " ".join(cell for row in csv_rows(text) for cell in row)
    return _tree_words(parse_markdown(text)) if kind in {"markdown", "github"} else text


def _tree_words(blocks: list[tree.Block]) -> str:
    out: list[str] = []
    for block in blocks:
        if isinstance(block, tree.Para | tree.Heading):
            out.append(tree.plain(block.inlines).lstrip("\u2610\u2611 "))
        elif isinstance(block, tree.CodeBlock):
            out.append(block.text)
        elif isinstance(block, tree.Quote):
            out.append(_tree_words(block.blocks))
        elif isinstance(block, tree.List):
            out.extend(_tree_words(item.blocks) for item in block.items)
        elif isinstance(block, tree.Table):
            out.extend(tree.plain(cell) for row in block.rows for cell in row)
    return " ".join(out)


def _kept(source: str, kind: str, text: str, made: Rendered, *, exact: bool) -> str:
    if made.fell_back:
        return "it fell back to plain text"
    before = _words(source, text).split() if source in {"markdown", "html", "csv"} else text.split()
    after = _words(kind, made.text).split()
    if before != after and defang(" ".join(before)) != " ".join(after):
        return f"the words changed: {' '.join(after)[:80]!r}"
    if exact:
        return f"something was denied: {made.denials[0].reason}" if made.denials else ""
    infos = {
        line.strip("`~ ").split(" ")[0].lower()
        for line in made.text.splitlines()
        if line.lstrip("> ").startswith("```")
    }
    return "a client would draw the code" if infos & DIAGRAMS else ""


def _labels_lost(source: str, kind: str, text: str, made: Rendered) -> str:
    if source not in {"markdown", "html", "github", "slack"}:
        return ""
    seen = " ".join(_words(kind, made.text).split())
    for node in _links(parse_html(text) if source == "html" else parse_markdown(text)):
        label = node.alt if isinstance(node, tree.Image) else tree.plain(node.inlines)
        want = " ".join(clean(label)[0].split())
        shown = " ".join(_words("markdown", emit_markdown.inline([tree.Text(want)])).split())
        if want and want not in seen and shown not in seen and defang(want) not in seen:
            return want[:60]
    return ""


def _links(blocks: list[tree.Block]) -> Iterable[tree.Link | tree.Image]:
    def inside(inlines: list[tree.Inline]) -> Iterable[tree.Link | tree.Image]:
        for node in inlines:
            if isinstance(node, tree.Link | tree.Image):
                yield node
            elif isinstance(node, tree.Span):
                yield from inside(node.inlines)

    for block in blocks:
        if isinstance(block, tree.Para | tree.Heading):
            yield from inside(block.inlines)
        elif isinstance(block, tree.Quote):
            yield from _links(block.blocks)
        elif isinstance(block, tree.List):
            for item in block.items:
                yield from _links(item.blocks)
        elif isinstance(block, tree.Table):
            for row in block.rows:
                for cell in row:
                    yield from inside(cell)


def _file(name: str, expected: str, kind: str, text: str, guard: Guard) -> Outcome:
    """Office files are described in words: the described construct is built for real and inspected."""
    denials = (Denial("pdf_not_trusted", "office", "file"),) if kind == "pdf" else guard.office(office_sample(text))
    got = ",".join(denial.reason for denial in denials) or "unchanged"
    wanted = not expected.startswith("allow")
    return Outcome(name, expected, got, "" if wanted == bool(denials) else f"expected {expected}")
