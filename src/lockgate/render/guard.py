"""The render guard: one object per run, one method per sink.

Rule 1: rebuild, never filter. Every method parses, judges, cleans and emits; nothing of the input is passed on.
Rule 2: when in doubt the plain form is shown (`fell_back`), never the rich one.
Rule 3: pure. Denials are values; the caller audits and alerts on them before it shows the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import msgspec

from lockgate.contract.errors import ConfigError, HostFault
from lockgate.policy.canary import Needles
from lockgate.render import chat, emit_html, emit_markdown, files, office, plain, selfcheck, tickets
from lockgate.render.bounds import TooComplex, panicked
from lockgate.render.given import noticed, only, table_of
from lockgate.render.headers import headers
from lockgate.render.judge import Budget, Judge, destination
from lockgate.render.parse_html import Found, parse_html
from lockgate.render.parse_markdown import parse_markdown
from lockgate.render.policy import Denial, Provenance, Rendered, RenderPolicy, Sink
from lockgate.render.stream import Stream
from lockgate.render.tree import Block, Para, Text
from lockgate.render.visible import defang

Source = Literal["markdown", "html"]
STREAMS: Final = ("markdown", "html", "github", "email", "text", "terminal", "log", "latex")
_WITHHELD: Final = "[withheld: this message held a value that must not leave]"
_MARKER: Final = "[{} bytes dropped]"
_WINDOW: Final = 8192

_CARD: Final = re.compile(
    r"(?i)\"(?:adaptivecard|messagecard|application/vnd\.microsoft\.[a-z.]{0,20}card[a-z.]{0,20})\""
)


class Guard:
    """Renders what a run's model wrote for the places it is shown at.

    Args:
        policy: the operator's rules and caps.
        provenance: URLs known before the model spoke; one per run.

    Attributes:
        latched: set it when the run has read private and untrusted data (E7): prefix rules stop, provenance stays.

    """

    def __init__(self, policy: RenderPolicy | None = None, provenance: Provenance | None = None) -> None:
        self.policy: RenderPolicy = only(policy if policy is not None else RenderPolicy(), RenderPolicy)
        self.provenance: Provenance = only(provenance if provenance is not None else Provenance(), Provenance)
        self.latched = False
        self._run_urls: set[str] = set()
        self._needles = Needles.of(self.policy.canaries)
        self._count = 0

    # ---- documents -----------------------------------------------------------------------------------------------
    def markdown(self, text: str | bytes, *, source: Source = "markdown") -> Rendered:
        """Markdown for a chat client."""
        return self._document(text, "markdown", source)

    def html(self, text: str | bytes, *, source: Source = "markdown") -> Rendered:
        """HTML for a page; `source` says what the text is written in."""
        return self._document(text, "html", source)

    def email_html(self, text: str | bytes, *, source: Source = "markdown") -> Rendered:
        """The HTML part of a mail: no images, links broken in words, since mail clients link and load."""
        return self._document(text, "email", source)

    def github(self, text: str | bytes) -> Rendered:
        """A comment on a forge: Markdown without images (its proxy still fetches) and without mentions."""
        return self._document(text, "github", "markdown")

    def slack(self, text: str | bytes) -> Rendered:
        """Arguments of Slack's chat.postMessage, as JSON."""
        return self._document(text, "slack", "markdown")

    def slack_mrkdwn(self, text: str | bytes) -> Rendered:
        """Words for one mrkdwn field."""
        return self._words(text, "slack", lambda value: (chat.mrkdwn(value), 0))

    def discord(self, text: str | bytes) -> Rendered:
        """A Discord message body, as JSON."""
        return self._words(
            text, "discord", plain.text, most=chat.DISCORD_CHARS, wrap=lambda words: _dump(chat.discord(words))
        )

    def adaptive_card(self, text: str | bytes) -> Rendered:
        """An Adaptive Card, as JSON, from Markdown or from a card."""
        return self._document(text, "teams", "markdown")

    def teams(self, text: str | bytes) -> Rendered:
        """The same as adaptive_card()."""
        return self.adaptive_card(text)

    def jira(self, text: str | bytes) -> Rendered:
        """A comment in Atlassian Document Format, as JSON."""
        return self._document(text, "jira", "markdown")

    def jira_wiki(self, text: str | bytes) -> Rendered:
        """Words for Jira wiki markup."""
        return self._words(text, "jira", lambda value: (tickets.wiki(value), 0))

    # ---- plain characters ------------------------------------------------------------------------------------------
    def text(self, text: str | bytes) -> Rendered:
        """Plain text for messages, titles, push, tickets, calendars."""
        return self._words(text, "text", plain.text)

    def terminal(self, text: str | bytes) -> Rendered:
        """Text for a terminal."""
        return self._words(text, "terminal", plain.terminal)

    def log_line(self, text: str | bytes) -> Rendered:
        """One log record on one line."""
        return self._words(text, "log", plain.log_line)

    def latex(self, text: str | bytes) -> Rendered:
        """Words for a TeX document."""
        return self._words(text, "latex", lambda value: (plain.latex(value), 0))

    def header(self, text: str | bytes) -> Rendered:
        """One header value, in ASCII."""
        return self._words(text, "header", lambda value: (plain.header_value(value), 0), most=plain.HEADER_CHARS)

    def subject(self, text: str | bytes) -> Rendered:
        """A mail's subject, or another of its fields that are words: encoded where it is not ASCII."""
        return self._words(
            text, "header", lambda value: (plain.subject(value), 0), most=plain.HEADER_CHARS, wrap=plain.encoded
        )

    def cell(self, text: str | bytes) -> Rendered:
        """One spreadsheet cell (CSV and xlsx), never a formula."""
        return self._words(text, "csv", lambda value: (plain.cell(value), 0), most=plain.CELL_CHARS)

    def csv(self, rows: Sequence[Sequence[str | float | None]] | str | bytes) -> Rendered:
        """A CSV file from rows, or from CSV text, every cell quoted and inert.

        Raises:
            ConfigError: `rows` is neither text nor rows of text, numbers and None.

        """
        if isinstance(rows, str | bytes):
            return self._rows(rows, plain.csv_rows)
        table = table_of(rows)
        return self._rows("\n".join("\t".join(row) for row in table), lambda _: table, whole=True)

    def _rows(self, raw: str | bytes, read: Callable[[str], list[list[str]]], *, whole: bool = False) -> Rendered:
        over = 0

        def method(value: str) -> tuple[str, int]:
            nonlocal over
            table = read(value)
            over = plain.over(table)
            return "".join(map(plain.csv_row, table)), 0

        made = self._words(raw, "csv", method, whole=whole)
        return msgspec.structs.replace(made, truncated=made.truncated + over)

    # ---- files -------------------------------------------------------------------------------------------------------
    def svg(self, text: str | bytes) -> Rendered:
        """An SVG file, rebuilt."""
        return self._file(text, "svg", files.svg)

    def xml(self, text: str | bytes) -> Rendered:
        """An XML file that fetches nothing."""
        return self._file(text, "xml", files.xml)

    def json(self, text: str | bytes) -> Rendered:
        """A JSON file without schema and remote references."""
        return self._file(text, "json", files.json_file)

    def yaml(self, text: str | bytes) -> Rendered:
        """A YAML file without schema, tags and remote references."""
        return self._file(text, "yaml", files.yaml_file)

    def ipynb(self, text: str | bytes) -> Rendered:
        """A notebook with text and PNG outputs only."""
        return self._file(text, "ipynb", lambda value, report: files.notebook(value, report, self._cell_markdown))

    def office(self, data: bytes) -> tuple[Denial, ...]:
        """Inspect a docx, pptx, xlsx or ODF file; an empty answer lets it leave unchanged."""
        found = office.refuse(bytes(only(data, bytes, bytearray, memoryview)))
        if found is None:
            return ()
        reason, where = found
        return (Denial(reason, "office", "file", destination(where.decode("utf-8", "replace"))),)

    def headers(self) -> dict[str, str]:
        """Headers for the page that shows the answer."""
        return headers(self.policy)

    def stream(self, sink: str = "markdown") -> Stream:
        """Return a stream for one message.

        Raises:
            ConfigError: the sink has no stream, since its output is one structure.

        """
        if sink not in STREAMS:
            raise ConfigError(f"{sink!r} cannot be streamed", next_step="use one of " + ", ".join(STREAMS))
        budget = Budget(run_urls=self._run_urls)
        tail = ""

        def watch(text: str) -> bool:
            nonlocal tail
            tail = (tail + text)[-(_WINDOW + len(text)) :]
            return self._needles.hit(tail)

        def piece(text: str, as_plain: bool) -> Rendered:
            if stream.withheld:
                return Rendered("", (Denial("canary", sink, "text", severity="critical"),))
            if sink in {"text", "terminal", "log", "latex"}:
                method = {"text": plain.text, "terminal": plain.terminal, "log": _log_line, "latex": _latex}[sink]
                made, removed = method(text)
                return Rendered(made, self._invisible(removed, sink))
            return self._emit(text, sink, "markdown", budget, as_plain=as_plain)

        stream = Stream(piece, blocks=sink in {"markdown", "html", "github", "email"}, watch=watch)
        return stream

    # ---- how ---------------------------------------------------------------------------------------------------------
    def _bounded(self, text: str | bytes) -> tuple[str, int]:
        raw = text if isinstance(text, bytes) else only(text, str).encode("utf-8", "backslashreplace")
        over = len(raw) - self.policy.max_bytes
        kept = raw if over <= 0 else raw[: self.policy.max_bytes]
        return kept.decode("utf-8", "backslashreplace" if over <= 0 else "ignore"), max(0, over)

    def _document(self, raw: str | bytes, sink: Sink, source: Source) -> Rendered:
        if source not in {"markdown", "html"}:
            raise ConfigError(f"there is no source {source!r}", next_step="use markdown or html")
        text, dropped = self._bounded(raw)
        if self._needles.hit(text):
            return self._withhold(sink)
        made = self._emit(text, sink, source, Budget(run_urls=self._run_urls), as_plain=dropped > 0, dropped=dropped)
        if self._needles and self._needles.hit(made.text):
            return self._withhold(sink)
        return made

    def _withhold(self, sink: str) -> Rendered:
        return Rendered(_WITHHELD, (Denial("canary", sink, "text", severity="critical"),))

    def _judge(self, sink: str, budget: Budget) -> Judge:
        images = sink in {"markdown", "html"}
        return Judge(self.policy, self.provenance, sink, budget, latched=self.latched, images=images)

    def _emit(
        self, text: str, sink: str, source: Source, budget: Budget, *, as_plain: bool = False, dropped: int = 0
    ) -> Rendered:
        judge = self._judge(sink, budget)
        if sink == "teams":
            card = _card(text)
            if card is not None:
                try:
                    return Rendered(_dump(chat.rebuild_card(card, judge)), tuple(judge.denials))
                except TooComplex:
                    as_plain = True
        try:
            blocks = _words_only(text, dropped) if as_plain else self._parse(text, source, judge)
            judge.blocks(blocks)
        except (TooComplex, RecursionError):
            as_plain = True
            blocks = _words_only(text, dropped)
            judge.blocks(blocks)
        except HostFault:  # a missing extra is the host's fault, and says what to install
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and not panicked(error):
                raise
            judge.denials.append(Denial("parser_failed", sink, "markup", severity="critical"))
            as_plain = True
            blocks = _words_only(text, dropped)
            judge.blocks(blocks)
        out = _EMIT[sink](blocks)
        found = None if as_plain else self._second_opinion(out, sink, judge.approved)
        if found is not None:
            judge.denials.append(Denial("self_check", sink, "markup", severity="critical"))
            out, as_plain = _EMIT[sink](_words_only(text, dropped)), True
        return Rendered(out, tuple(judge.denials), dropped, as_plain)

    def _parse(self, text: str, source: Source, judge: Judge) -> list[Block]:
        found = Found()
        blocks = parse_html(text, found) if source == "html" else parse_markdown(text, found)
        for what, value in found.markup:
            judge.deny(f"markup_removed:{what}", "markup", destination(value))
        return blocks

    def _second_opinion(self, out: str, sink: str, approved: set[str]) -> str | None:
        every = self.policy.check_every
        self._count += 1
        if every == 0 or self._count % every:
            return None
        if sink in {"markdown", "github"}:
            return selfcheck.check_markdown(out, approved)
        return selfcheck.check_html(out, approved) if sink in {"html", "email"} else None

    def _words(
        self,
        raw: str | bytes,
        sink: Sink,
        method: Callable[[str], tuple[str, int]],
        *,
        whole: bool = False,
        most: int | None = None,
        wrap: Callable[[str], str] = str,
    ) -> Rendered:
        """Make plain words, at most `most` characters of them, in the structure that `wrap` gives them."""
        text, dropped = self._bounded(raw)
        if dropped and whole:  # rows are cut nowhere
            return Rendered("", (Denial("file_too_large", sink, "file"),), dropped, fell_back=True)
        if self._needles.hit(text):
            return self._withhold(sink)
        made, removed = method(text)
        if dropped and sink not in {"csv", "discord", "header"}:
            made += " " + _MARKER.format(dropped)
        if most is not None and len(made) > most:
            dropped += len(made[most:].encode("utf-8", "replace"))
            made = made[:most]
        made = wrap(made)
        return Rendered(made, (*noticed(text, sink, made), *self._invisible(removed, sink)), dropped)

    def _invisible(self, removed: int, sink: str) -> tuple[Denial, ...]:
        return (Denial("invisible_text", sink, "text"),) if removed > 8 else ()

    def _file(self, raw: str | bytes, sink: Sink, method: Callable[[str, files.Report], str]) -> Rendered:
        text, dropped = self._bounded(raw)
        if self._needles.hit(text):
            return self._withhold(sink)
        denials: list[Denial] = []

        def report(what: str, value: str) -> None:
            denials.append(Denial(f"markup_removed:{what[:60]}", sink, "file", destination(value)))

        if dropped:
            return Rendered("", (Denial("file_too_large", sink, "file"),), dropped, fell_back=True)
        try:
            return Rendered(method(text, report), tuple(denials))
        except (ValueError, TypeError, AttributeError, LookupError, TooComplex, RecursionError):
            denials.append(Denial("file_refused", sink, "file"))  # it has not the shape of its kind
            return Rendered("", tuple(denials), fell_back=True)

    def _cell_markdown(self, text: str) -> str:
        return self._emit(text, "github", "markdown", Budget(run_urls=self._run_urls)).text


def _words_only(text: str, dropped: int = 0) -> list[Block]:
    """A tree of the words as they stand: a paragraph a block of lines, nothing is markup."""
    blocks: list[Block] = [Para([Text(part)]) for part in re.split(r"\n[ \t]*\n", defang(text)) if part.strip()]
    if dropped:
        blocks.append(Para([Text(_MARKER.format(dropped))]))
    return blocks


def _github(blocks: list[Block]) -> str:
    return emit_markdown.emit(blocks, mentions=False)


_EMIT: Final[dict[str, Callable[[list[Block]], str]]] = {
    "markdown": emit_markdown.emit,
    "github": _github,
    "html": emit_html.emit,
    "email": lambda blocks: emit_html.emit(blocks, defang),
    "slack": lambda blocks: _dump(chat.slack(blocks)),
    "teams": lambda blocks: _dump(chat.adaptive_card(blocks)),
    "jira": lambda blocks: _dump(tickets.document(blocks)),
}


def _log_line(text: str) -> tuple[str, int]:
    made, removed = plain.log_line(text.removesuffix("\n"))
    return made + "\n" * text.endswith("\n"), removed


def _latex(text: str) -> tuple[str, int]:
    return plain.latex(text), 0


def _dump(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False)


def _card(text: str) -> Any:
    """A card, or a message of a bot that holds one, or None when it is only text."""
    if text.lstrip()[:1] not in {"{", "["} or _CARD.search(text) is None:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


__all__ = ["Guard", "Source"]
