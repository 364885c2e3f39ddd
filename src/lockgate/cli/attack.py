"""`lockgate attack`: what can be reached from inside a rung, beside what the same list reaches without one."""

from __future__ import annotations

from typing import Annotated

import typer

from lockgate.cli.common import ConfigPath, empty_scope, gate_of, load_config
from lockgate.cli.output import Json, note, print_json, progress, table
from lockgate.contract.errors import HostFault
from lockgate.runtimes import attack as suite


def attack(
    rung: Annotated[str, typer.Option("--rung", help="The rung to attack.")] = "container",
    controls: Annotated[
        bool, typer.Option("--controls/--no-controls", help="Run the list without a sandbox and under bubblewrap too.")
    ] = True,
    config: ConfigPath = None,
    as_json: Json = False,
) -> None:
    """Ask from inside a sandbox which primitives answer. Nothing is exploited. Exits 1 when one does."""
    settings = load_config(config)
    with (
        gate_of(settings, pool=1, accept=True, quiet=as_json) as gate,
        progress(f"attacking {rung}", quiet=as_json),
        gate.run_scope(empty_scope(600)) as run,
    ):
        result = run.code(suite.program(), rung=rung)
    if result.killed_by is not None or result.error is not None:
        raise HostFault(
            f"the attack program did not end by itself (killed_by={result.killed_by})",
            next_step="raise [execution.bounds] wall in the configuration, and look at the audit rows of the run",
        )
    found = suite.rows(result.value)
    seen: dict[str, list[suite.Row]] = {}
    if controls:
        with progress("running the controls", quiet=as_json):
            seen["none"] = suite.control_none()
            for name, as_root in (("bwrap", False), ("bwrap-root", True)):
                control = suite.control_bwrap(as_root=as_root)
                if control is not None:
                    seen[name] = control
    report = suite.judge(rung, found, seen)
    if as_json:
        print_json(report)
    else:
        _show(report, found, seen)
    if report.reached:
        raise typer.Exit(1)


def _show(report: suite.Report, found: list[suite.Row], seen: dict[str, list[suite.Row]]) -> None:
    goals = sorted({row.goal for row in found})
    columns = {report.rung: found} | seen
    table(
        f"{report.total} probes: how many primitives answered",
        ("goal", "probes", *columns),
        [
            (goal, sum(goal in (r.goal, "all") for r in found), *(_count(rows, goal) for rows in columns.values()))
            for goal in [*goals, "all"]
        ],
    )
    if report.reached:
        table(
            "reached, and should not be", ("probe", "goal", "saw"), [(r.id, r.goal, r.detail) for r in report.reached]
        )
    table(
        "allowed leaks of this rung",
        ("probe", "why", "see"),
        [(leak.id, leak.reason, leak.document) for leak in report.allowed_leaks],
    )
    if report.dead:
        note(f"{len(report.dead)} probes found nothing to reach outside either, so here they prove nothing")
    if "bwrap" not in seen and seen:
        note("bubblewrap is not installed: its column is missing (Debian: apt-get install bubblewrap)")
    note("no primitive was reached" if not report.reached else "primitives were reached: do not run hostile code here")


def _count(rows: list[suite.Row], goal: str) -> int:
    return sum(row.reached and goal in (row.goal, "all") for row in rows)
