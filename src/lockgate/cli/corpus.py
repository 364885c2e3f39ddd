"""`lockgate corpus`: files of cases against the real policy, the real gateway code and the real render guard."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from lockgate.cli.output import Json, err, print_json
from lockgate.contract.errors import ConfigError

_INPUT_BYTES: Final = 64 * 1024 * 1024


def corpus(
    file: Annotated[Path, typer.Argument(help="Cases, one JSON object a line; - for standard input.")],
    as_json: Json = False,
) -> int:
    """Run a file of cases; exits 1 when one does not hold. Nothing in it can make a connection."""
    from lockgate.corpus import run_lines  # noqa: PLC0415 - it loads the gateway and the render guard

    report = run_lines(_read(file).decode("utf-8", "replace").splitlines())
    if as_json:
        print_json(report)
    else:
        for failure in report.failures:
            wanted = f"expected {failure.expected}, got {failure.got}" if failure.expected else failure.got
            err().print(f"{failure.id}: {wanted}: {failure.reason}", markup=False)
        sys.stdout.write(f"{report.passed} of {report.total} cases hold\n")
    return 1 if report.failures else 0


def _read(file: Path) -> bytes:
    try:
        if str(file) == "-":
            data = sys.stdin.buffer.read(_INPUT_BYTES + 1)
        else:
            with file.open("rb") as opened:
                data = opened.read(_INPUT_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{str(file)!r} cannot be read: {error.strerror}", next_step="name a file that exists, or -"
        ) from None
    if len(data) > _INPUT_BYTES:
        raise ConfigError(f"{str(file)!r} is over 64 MiB", next_step="split the file")
    return data
