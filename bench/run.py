"""Run every suite of this folder, print one table, write bench/results.json.

A suite is any other script here that prints JSON lines, one row each: id, median, p99, unit, reference, ratio, bar,
holds. Suites run one after another, since they would disturb each other's figures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
NOT_SUITES = {"run", "common"}
DEADLINE = 900  # seconds a suite may take before it counts as failed


def show(value: float | None, unit: str) -> str:
    """A figure for people."""
    if value is None:
        return "-"
    if unit == "s":
        return f"{value * 1e6:,.0f} us" if value < 0.01 else f"{value * 1e3:,.1f} ms"
    return f"{value:,.2f} {unit}"


def main() -> int:
    """Return 0; with --strict 1 when a bar is missed; 2 when a suite failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", help="names of suites; all when none is given")
    parser.add_argument("--strict", action="store_true", help="exit 1 when a bar is missed")
    options = parser.parse_args()
    console = Console()
    names = options.suites or sorted(p.stem for p in HERE.glob("*.py") if p.stem not in NOT_SUITES)
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for name in names:
        with console.status(f"measuring {name}"):
            done = subprocess.run(
                [sys.executable, str(HERE / f"{name}.py")],
                capture_output=True,
                text=True,
                timeout=DEADLINE,
                check=False,
            )
        rows += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode:
            failed.append(name)
            console.print(f"[red]{name} failed[/red]\n{done.stderr[-2000:]}", highlight=False)
    table = Table("figure", "median", "p99", "reference", "ratio", "bar", "holds", title="lockgate bench")
    for one in rows:
        bar = f"{one['bar']:g}" + ("" if one["ratio"] is not None else f" {one['unit']}")
        ratio = "-" if one["ratio"] is None else f"{one['ratio']:.3f}"
        holds = "[green]yes[/green]" if one["holds"] else "[red]no[/red]"
        unit = one["unit"]
        table.add_row(
            one["id"], show(one["median"], unit), show(one["p99"], unit), one["reference"] or "-", ratio, bar, holds
        )
    console.print(table)
    (HERE / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
    if failed:
        return 2
    return 1 if options.strict and not all(one["holds"] for one in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
