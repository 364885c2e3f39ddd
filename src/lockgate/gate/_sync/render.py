# Generated from gate/_async/render.py by scripts/unasync.py. Edit that file, then run the script.
"""The render guard in front of what a person is shown: `safe = gate.render.markdown(reply, run=run)` (E5).

Rule 1: what was refused has its audit rows, durable, before the caller gets the text. No rows, no text.
Rule 2: what a run knows (its user's message, fields declared `lg.SafeUrl`) makes URLs live in that run alone.
Rule 3: a canary ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from lockgate.contract import wire
from lockgate.contract.errors import AuditUnavailable, ConfigError, HostFault
from lockgate.gate._sync.session import Session
from lockgate.gate.rendering import Known, Tally

if TYPE_CHECKING:
    from lockgate.gate._sync.run import Run
    from lockgate.render import Denial, Guard, Rendered, Stream
    from lockgate.render.guard import Source


class RunRender:
    """What one run makes known to the guard, and the guard itself.

    A URL in the user's own message is a link that may live; one in a result field declared `lg.SafeUrl` an image, too.
    """

    def __init__(self, session: Session, run: Run, *, canary: str = "") -> None:
        self._session = session
        self._run = run
        self._known = Known(session.config.render, canary)

    def add_message(self, text: str) -> None:
        """Say what the user wrote: its https URLs may be live links in this run's answers. Never a model's words."""
        self._known.message(text)

    def vouched(self, urls: Iterable[str]) -> None:
        """Know URLs that stood in fields declared `lg.SafeUrl`; the Gate calls it with each result of this run."""
        if urls:
            self._known.fields(urls)

    def latch(self) -> None:
        """From now on no prefix rule makes a URL live, only what is known; there is no way back (E7).

        The Gate calls it by itself once the run has been given private and untrusted results.
        """
        self._known.latch()

    def belongs_to(self, session: Session) -> bool:
        """Whether the run is one of this Gate."""
        return self._session is session

    def show(self, draw: Callable[[Guard], Rendered]) -> Rendered:
        """Draw with the run's guard, record what it refused, then return what may be shown.

        Raises:
            AuditUnavailable: it could not be recorded, so nothing is shown.
            HostFault: the run is closed, or the parsers of the extra `[render]` are not installed.

        """
        self._usable()
        rendered = draw(self._known.guard)
        self.record(rendered.denials)
        if rendered.withheld:
            self._run.close()
        return rendered

    def record(self, denials: Iterable[Denial], tally: Tally | None = None, *, last: bool = True) -> None:
        """Return when each of `denials` has its audit row; bounded in number.

        Args:
            denials: of one message, or of a part of it.
            tally: of the message, when it comes in parts.
            last: whether this is the last part.

        Raises:
            AuditUnavailable: they are not recorded.

        """
        tally = tally or Tally()
        rows, left_out = tally.batch(denials, last=last)
        if not rows and not left_out:
            return
        session = self._session
        id_ = session.core().next_id()
        message = wire.RenderDenied(id=id_, run=self._run.id, sink=tally.sink, denials=rows, left_out=left_out)
        try:
            session.ask_broker(message, id_, wire.Done)
        except AuditUnavailable:
            raise
        except HostFault as error:
            raise AuditUnavailable(
                f"what the render guard refused is not recorded, so nothing is shown: {error.message}",
                next_step=error.next_step,
            ) from error

    def end(self) -> None:
        """Close the run: a canary was in its words."""
        self._run.close()

    def stream(self, sink: str) -> Stream:
        """Return the guard's own stream, which records nothing; `Gate.render.stream` is the one that does."""
        self._usable()
        return self._known.guard.stream(sink)

    def _usable(self) -> None:
        self._session.core()
        if self._run.closed:
            raise HostFault("this run is closed", next_step="show answers while their run is open")


class GateRender:
    """One method per place where an answer is shown. Each takes the run whose words they are.

    Raises, every method: AuditUnavailable when a refusal cannot be recorded, HostFault when the run is closed or the
    extra `[render]` is missing, ConfigError when the run is another Gate's. In none of them is anything shown.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def _show(self, run: Run, draw: Callable[[Guard], Rendered]) -> Rendered:
        return self._of(run).show(draw)

    def _of(self, run: Run) -> RunRender:
        if not run.render.belongs_to(self._session):
            raise ConfigError("this run is another Gate's", next_step="show it with the Gate that opened it")
        return run.render

    # ---- documents -------------------------------------------------------------------------------------------
    def markdown(self, text: str | bytes, *, run: Run, source: Source = "markdown") -> Rendered:
        """Markdown for a chat client; `source` says what the text is written in."""
        return self._show(run, lambda guard: guard.markdown(text, source=source))

    def html(self, text: str | bytes, *, run: Run, source: Source = "markdown") -> Rendered:
        """HTML for a page; send `headers()` with that page."""
        return self._show(run, lambda guard: guard.html(text, source=source))

    def email_html(self, text: str | bytes, *, run: Run, source: Source = "markdown") -> Rendered:
        """The HTML part of a mail: no images, links broken in words."""
        return self._show(run, lambda guard: guard.email_html(text, source=source))

    def github(self, text: str | bytes, *, run: Run) -> Rendered:
        """A comment on a forge: Markdown without images and mentions."""
        return self._show(run, lambda guard: guard.github(text))

    def slack(self, text: str | bytes, *, run: Run) -> Rendered:
        """Arguments of Slack's chat.postMessage, as JSON."""
        return self._show(run, lambda guard: guard.slack(text))

    def slack_mrkdwn(self, text: str | bytes, *, run: Run) -> Rendered:
        """Words for one mrkdwn field."""
        return self._show(run, lambda guard: guard.slack_mrkdwn(text))

    def discord(self, text: str | bytes, *, run: Run) -> Rendered:
        """A Discord message body, as JSON."""
        return self._show(run, lambda guard: guard.discord(text))

    def adaptive_card(self, text: str | bytes, *, run: Run) -> Rendered:
        """An Adaptive Card, as JSON."""
        return self._show(run, lambda guard: guard.adaptive_card(text))

    def teams(self, text: str | bytes, *, run: Run) -> Rendered:
        """The same as `adaptive_card`."""
        return self._show(run, lambda guard: guard.teams(text))

    def jira(self, text: str | bytes, *, run: Run) -> Rendered:
        """A comment in Atlassian Document Format, as JSON."""
        return self._show(run, lambda guard: guard.jira(text))

    def jira_wiki(self, text: str | bytes, *, run: Run) -> Rendered:
        """Words for Jira wiki markup."""
        return self._show(run, lambda guard: guard.jira_wiki(text))

    def text(self, text: str | bytes, *, run: Run) -> Rendered:
        """Plain text for messages, titles, push, tickets."""
        return self._show(run, lambda guard: guard.text(text))

    def terminal(self, text: str | bytes, *, run: Run) -> Rendered:
        """Text for a terminal."""
        return self._show(run, lambda guard: guard.terminal(text))

    def log_line(self, text: str | bytes, *, run: Run) -> Rendered:
        """One log record on one line."""
        return self._show(run, lambda guard: guard.log_line(text))

    def latex(self, text: str | bytes, *, run: Run) -> Rendered:
        """Words for a TeX document."""
        return self._show(run, lambda guard: guard.latex(text))

    def header(self, text: str | bytes, *, run: Run) -> Rendered:
        """One header value, in ASCII."""
        return self._show(run, lambda guard: guard.header(text))

    def subject(self, text: str | bytes, *, run: Run) -> Rendered:
        """A mail's subject, or another of its fields that are words: encoded where it is not ASCII."""
        return self._show(run, lambda guard: guard.subject(text))

    def cell(self, text: str | bytes, *, run: Run) -> Rendered:
        """One spreadsheet cell, never a formula."""
        return self._show(run, lambda guard: guard.cell(text))

    def svg(self, text: str | bytes, *, run: Run) -> Rendered:
        """An SVG file, rebuilt."""
        return self._show(run, lambda guard: guard.svg(text))

    def xml(self, text: str | bytes, *, run: Run) -> Rendered:
        """An XML file that fetches nothing."""
        return self._show(run, lambda guard: guard.xml(text))

    def json(self, text: str | bytes, *, run: Run) -> Rendered:
        """A JSON file without schema and remote references."""
        return self._show(run, lambda guard: guard.json(text))

    def yaml(self, text: str | bytes, *, run: Run) -> Rendered:
        """A YAML file without schema, tags and remote references."""
        return self._show(run, lambda guard: guard.yaml(text))

    def ipynb(self, text: str | bytes, *, run: Run) -> Rendered:
        """A notebook with text and PNG outputs only."""
        return self._show(run, lambda guard: guard.ipynb(text))

    def csv(self, rows: list[list[str]] | str | bytes, *, run: Run) -> Rendered:
        """A CSV file from rows, or from CSV text, every cell quoted and inert."""
        return self._show(run, lambda guard: guard.csv(rows))

    def office(self, data: bytes, *, run: Run) -> tuple[Denial, ...]:
        """Inspect a docx, pptx, xlsx or ODF file; an empty answer lets it leave unchanged."""
        found: list[Denial] = []

        def draw(guard: Guard) -> Rendered:
            from lockgate.render import Rendered as Shown  # noqa: PLC0415 - loaded by the guard already

            found.extend(guard.office(data))
            return Shown("", tuple(found))

        self._show(run, draw)
        return tuple(found)

    # ---- more ------------------------------------------------------------------------------------------------
    def headers(self) -> dict[str, str]:
        """Headers for the page that shows an answer."""
        return Known(self._session.config.render).guard.headers()

    def stream(self, sink: str = "markdown", *, run: Run) -> RunStream:
        """Return a stream for one message of `run`.

        Raises:
            ConfigError: the sink has no stream, since its output is one structure.

        """
        render = self._of(run)
        return RunStream(render, render.stream(sink))


class RunStream:
    """Takes chunks of one message and returns what may be shown so far, after its refusals were recorded.

    Attributes:
        withheld: a canary was inside: the rest is not shown, and the run is closed.

    """

    def __init__(self, render: RunRender, stream: Stream) -> None:
        self._render = render
        self._stream = stream
        self._tally = Tally()
        self._recorded = 0
        self._broken = False
        self._ended = False

    @property
    def withheld(self) -> bool:
        """Whether the message held a canary."""
        return self._stream.withheld

    def feed(self, chunk: str | bytes) -> str:
        """Take a chunk; return what may be shown now, often nothing.

        Raises:
            AuditUnavailable: a refusal could not be recorded; nothing of this message is shown any more.

        """
        return self._recorded_first(self._stream.feed, chunk, last=False)

    def close(self) -> str:
        """End the message; return the rest. Raises as `feed`."""
        return self._recorded_first(lambda _: self._stream.close(), "", last=True)

    def _recorded_first(self, take: Callable[[str | bytes], str], chunk: str | bytes, *, last: bool) -> str:
        if self._broken:
            raise AuditUnavailable(
                "an earlier part of this message could not be recorded", next_step="show nothing more of it"
            )
        self._broken = True  # until it went well: an interrupt in the middle loses a part
        text = take(chunk)
        fresh = self._stream.denials[self._recorded :]
        self._render.record(fresh, self._tally, last=last)
        self._recorded += len(fresh)
        self._broken = False
        if self._stream.withheld and not self._ended:
            self._ended = True
            self._render.end()
        return text
