"""`lockgate audit`: read rows, check the chain."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from lockgate.audit import reader
from lockgate.audit.chain import Head
from lockgate.audit.rows import StoredRow
from lockgate.cli.common import ConfigPath, audit_path
from lockgate.cli.output import Json, fields, lines, note, out, plain, print_json, progress, table
from lockgate.contract.errors import ConfigError

app = typer.Typer(help="The audit log: who asked for what, what was decided and what came of it.", no_args_is_help=True)
File = Annotated[Path | None, typer.Argument(help="Audit file; default: the configured one.", metavar="[FILE]")]
_COLUMNS = ("seq", "time", "phase", "user", "agent", "run", "via", "operation", "verdict", "rule", "status")


@app.command("tail")
def tail(
    file: File = None,
    *,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="How many rows.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new rows.")] = False,
    run: Annotated[str | None, typer.Option(help="Only rows of this run.")] = None,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="One JSON document a line, as rows come.")] = False,
    config: ConfigPath = None,
    as_json: Json = False,
) -> None:
    """Show the last rows, oldest first."""
    if follow and as_json and not jsonl:
        raise ConfigError("--follow has no end, so it is no one document", next_step="use --jsonl")
    rows = reader.tail(audit_path(file, config), count, follow=follow, run=run)
    if jsonl:
        for row in rows:
            print_json(_data(row), lines=True)
    elif as_json:
        print_json([_data(row) for row in rows])
    elif follow:
        console = out()
        for row in rows:
            console.print("  ".join(part for part in (plain(cell) for cell in _cells(row)) if part))
    else:
        lines(_COLUMNS, (_cells(row) for row in rows))


@app.command("verify")
def verify(
    file: File = None,
    expect: Annotated[
        str | None,
        typer.Option(metavar="SEQ:HASH", help="A head that was kept elsewhere; the chain must go through it."),
    ] = None,
    config: ConfigPath = None,
    as_json: Json = False,
) -> None:
    """Check every row and every link. Exits 1 when a row was altered, dropped or reordered."""
    head = _head(expect) if expect is not None else None
    path = audit_path(file, config)
    with progress("checking the chain", quiet=as_json):
        report = reader.verify(path, head)
    if as_json:
        print_json({**_plain(report), "ok": not report.findings})
    else:
        if report.findings:
            table(
                "findings",
                ("seq", "kind", "id", "detail"),
                [(one.seq, one.kind, one.id, one.detail) for one in report.findings],
            )
        fields(
            [
                ("rows", report.rows),
                ("head", str(report.head)),
                ("findings", len(report.findings)),
                ("unknown outcomes", report.unknown),
                ("open intents", report.open),
                ("stated gaps", "; ".join(report.gaps)),
            ]
        )
        if not report.findings:
            note("the chain holds. Whoever owns this machine could write a new one: keep heads elsewhere (--expect)")
    if report.findings:
        raise typer.Exit(1)


def _cells(row: StoredRow) -> tuple[Any, ...]:
    at = datetime.fromtimestamp(row.at, UTC).strftime("%H:%M:%S.%f")[:-3]
    verdict = row.verdict or row.visible
    return (
        row.seq,
        at,
        row.phase,
        row.user,
        row.agent,
        row.run[:12],
        row.via,
        row.operation,
        verdict,
        row.rule,
        row.status,
    )


def _data(row: StoredRow) -> dict[str, Any]:
    return {"seq": row.seq, **_plain(row)}


def _plain(value: msgspec.Struct) -> dict[str, Any]:
    data = msgspec.to_builtins(value, enc_hook=lambda part: part.hex() if isinstance(part, bytes) else str(part))
    return data if isinstance(data, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def _head(text: str) -> Head:
    try:
        return Head.parse(text)
    except ValueError as error:
        raise ConfigError(str(error), next_step="take it from what `lockgate audit verify` printed") from None
