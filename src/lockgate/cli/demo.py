"""`lockgate demo`: the worked example, from a checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import typer

from lockgate.contract.errors import ConfigError

_DEMO: Final = Path("examples", "atlas", "demo.py")


def demo(context: typer.Context) -> None:
    """Let Atlas, a support agent, handle two tickets, one of them hostile. Options go on to the demo."""
    program = subprocess.run([sys.executable, str(find()), *context.args], check=False)
    raise typer.Exit(program.returncode if program.returncode >= 0 else 128 - program.returncode)


def find() -> Path:
    """Return the example's program: beside the package in a checkout, else under the current directory.

    Raises:
        ConfigError: there is none.

    """
    beside = Path(__file__).resolve().parents[3] / _DEMO
    for place in (beside, Path.cwd() / _DEMO):
        if place.is_file():
            return place
    raise ConfigError(
        "the example is not part of an installed lockgate, and there is none here",
        next_step="clone the repository and run `make demo` in it",
    )
