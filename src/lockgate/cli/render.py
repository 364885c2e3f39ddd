"""`lockgate render`: the render guard from a shell.

Rule 1: the safe text goes to stdout and nothing else; what was denied goes to stderr, or into the JSON document.
Rule 2: findings exit 1, so that a pipeline notices; the safe text is still written.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from lockgate.cli.output import Json, err, print_json
from lockgate.config.files import open_named
from lockgate.contract.errors import ConfigError
from lockgate.render import Guard, Provenance, Rendered, RenderPolicy

SINKS: Final = {
    "markdown": "markdown", "html": "html", "email": "email_html", "text": "text", "terminal": "terminal",
    "log": "log_line", "slack": "slack", "slack-mrkdwn": "slack_mrkdwn", "discord": "discord", "teams": "adaptive_card",
    "adaptive-card": "adaptive_card", "github": "github", "jira": "jira",
    "jira-wiki": "jira_wiki", "csv": "csv", "cell": "cell",
    "svg": "svg", "xml": "xml", "json": "json", "yaml": "yaml", "ipynb": "ipynb", "latex": "latex", "header": "header",
    "subject": "subject", "office": "office",
}  # fmt: skip
_WITH_SOURCE: Final = frozenset({"markdown", "html", "email"})
_INPUT_BYTES: Final = 64 * 1024 * 1024

Sink = Annotated[str, typer.Option("--sink", "-s", help="Where it will be shown: " + ", ".join(SINKS) + ".")]
Policy = Annotated[Path | None, typer.Option("--policy", help=r"TOML file with a \[render] table.")]
Links = Annotated[list[str] | None, typer.Option("--allow-link", help="A link rule, such as https://docs.example/*.")]
Images = Annotated[list[str] | None, typer.Option("--allow-image", help="An image rule.")]
Known = Annotated[list[str] | None, typer.Option("--known", help="A URL known before the model spoke, byte for byte.")]


def render(  # noqa: PLR0917 -- typer reads the options from the signature
    file: Annotated[str, typer.Argument(help="File to show, or - for standard input.")],
    sink: Sink = "markdown",
    source: Annotated[str, typer.Option("--source", help="What it is written in: markdown, html, or auto.")] = "auto",
    policy: Policy = None,
    allow_link: Links = None,
    allow_image: Images = None,
    known: Known = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say on stderr what was denied and why.")] = False,
    as_json: Json = False,
) -> int:
    """Rebuild a text for the place it will be shown at; nothing in it can fetch, link or execute."""
    method = SINKS.get(sink)
    if method is None:
        raise ConfigError(f"there is no sink {sink!r}", next_step="use one of: " + ", ".join(SINKS))
    if source not in {"auto", "markdown", "html"}:
        raise ConfigError(f"there is no source {source!r}", next_step="use markdown, html or auto")
    guard = Guard(_policy(policy, allow_link, allow_image), Provenance(known or ()))
    data = _read(file)
    if sink == "office":
        return _office(guard, data, as_json=as_json)
    written = source if source != "auto" else ("html" if file.lower().endswith((".html", ".htm")) else "markdown")
    extra: dict[str, Any] = {"source": written} if sink in _WITH_SOURCE else {}
    made: Rendered = getattr(guard, method)(data, **extra)
    if as_json:
        print_json(
            {
                "sink": sink,
                "text": made.text,
                "denials": made.denials,
                "truncated": made.truncated,
                "fell_back": made.fell_back,
            }
        )
    else:
        sys.stdout.write(made.text)
        sys.stdout.flush()
        if explain:
            _explain(made)
    return 1 if made.denials else 0


def _office(guard: Guard, data: bytes, *, as_json: bool) -> int:
    denials = guard.office(data)
    if as_json:
        print_json({"sink": "office", "denials": denials})
    else:
        for denial in denials:
            err().print(f"denied: {denial.reason}" + (f" ({denial.host})" if denial.host else ""))
    return 1 if denials else 0


def _explain(made: Rendered) -> None:
    console = err()
    for denial in made.denials:
        console.print(f"denied: {denial.kind} {denial.reason}" + (f", host {denial.host}" if denial.host else ""))
    if made.truncated:
        console.print(f"truncated: {made.truncated} bytes dropped")
    if made.fell_back and not made.text:
        console.print("refused: the file is not shown at all")
    elif made.fell_back:
        console.print("shown in plain form: too complex, or the self-check was surprised")
    if not made.denials:
        console.print("nothing was denied")


def _policy(path: Path | None, links: list[str] | None, images: list[str] | None) -> RenderPolicy:
    if path is None:
        return RenderPolicy.of(links=links or (), images=images or ())
    if links or images:
        raise ConfigError("--policy and --allow-… were both given", next_step="put the rules into the policy file")
    return RenderPolicy.load(_read(str(path)).decode("utf-8", "replace"))


def _read(file: str) -> bytes:
    try:
        if file == "-":
            return sys.stdin.buffer.read(_INPUT_BYTES)
        with open_named(Path(file), "the text") as opened:
            return opened.read(_INPUT_BYTES)
    except OSError as error:
        raise ConfigError(
            f"{file!r} cannot be read: {error.strerror}", next_step="name a file that exists, or -"
        ) from None
