"""Showing things: JSON for programs, tables and notes for people.

Rule 1: colour and width are rich's affair, which honours NO_COLOR and FORCE_COLOR; nothing here reads the environment.
Rule 2: no text is markup: what comes in is escaped and printed as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockgate.contract.errors import LockgateError
from lockgate.gate.escape import escape

_PIPED_WIDTH: Final = 240
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def out() -> Console:
    """Return the console of results."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def err() -> Console:
    """Return the console of progress, notes and errors."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_json(value: Any, *, lines: bool = False) -> None:
    """Write one JSON document; with `lines` one without white space."""
    body = msgspec.json.encode(value)
    sys.stdout.write((body if lines else msgspec.json.format(body, indent=2)).decode() + "\n")
    sys.stdout.flush()


def plain(value: Any) -> str:
    """Return a value as one line that cannot act on a terminal."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return escape(value if isinstance(value, str) else msgspec.json.encode(value).decode())


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table; cells are escaped."""
    shown = Table(title=Text(title), title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2))
    for column in columns:
        shown.add_column(column, header_style="dim", overflow="fold")
    for row in rows:
        shown.add_row(*(cell if isinstance(cell, Text) else Text(plain(cell)) for cell in row))
    console = out()
    console.soft_wrap = False
    console.print(shown, width=None if console.is_terminal else _PIPED_WIDTH)


def lines(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print aligned lines that are never folded, for rows of which one looks for one."""
    cells = [[plain(cell) for cell in row] for row in rows]
    widths = [max(len(row[at]) for row in [list(columns), *cells]) for at in range(len(columns))]
    console = out()
    for style, row in [("dim", list(columns)), *(("", row) for row in cells)]:
        text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        console.print(Text(text, style=style))


def fields(pairs: Iterable[tuple[str, Any]]) -> None:
    """Print names and values, dim name, two spaces, value."""
    rows = [(name, plain(value)) for name, value in pairs if value not in (None, "")]
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        out().print(Text.assemble((name.ljust(width), "dim"), "  ", value))


def yes(value: bool, good: str = "yes", bad: str = "no") -> Text:
    """Return a coloured yes or no."""
    return Text(good, style="green") if value else Text(bad, style="yellow")


def note(text: str, style: str = "dim") -> None:
    """Say something beside the result, on stderr."""
    err().print(Text(escape(text), style=style))


@contextmanager
def progress(text: str, *, quiet: bool = False) -> Generator[None]:
    """Show that something goes on, on a terminal only."""
    console = err()
    if quiet or not console.is_terminal:
        yield
        return
    with console.status(Text(text)):
        yield


@contextmanager
def steps(*, quiet: bool) -> Generator[Callable[[str], None]]:
    """Show each step: in place on a terminal, a line for each new one elsewhere, where " (" begins a detail."""
    console = err()
    if quiet:
        yield lambda _text: None
    elif console.is_terminal:
        with console.status("starting") as status:
            yield lambda text: status.update(escape(text))
    else:
        seen: set[str] = set()

        def once(text: str) -> None:
            step = text.partition(" (")[0]
            if step not in seen:
                seen.add(step)
                note(text)

        yield once


def show_error(error: LockgateError, *, as_json: bool) -> int:
    """Show an error; returns the exit code."""
    if as_json:
        print_json(
            {
                "error": {
                    "code": error.code,
                    "fault": error.fault,
                    "message": error.message,
                    "next_step": error.next_step,
                }
            }
        )
    else:
        console = err()
        console.print(Text.assemble(("error: ", "bold red"), escape(error.message)))
        console.print(Text.assemble(("next step: ", "bold"), escape(error.next_step)))
    return error.exit_code
