"""`lockgate attack`: what can be reached from inside a rung, beside what the same list reaches without one."""

from __future__ import annotations

from typing import Annotated, get_args

import msgspec
import typer

from lockgate.cli.common import ConfigPath, empty_scope, gate_of, load_config
from lockgate.cli.output import Json, note, print_json, progress, table
from lockgate.contract.errors import HostFault
from lockgate.contract.rungs import Weakness
from lockgate.gate import checks
from lockgate.gate.sync import Run
from lockgate.runtimes import attack as suite


def attack(
    rung: Annotated[str, typer.Option("--rung", help="The rung to attack.")] = "container",
    controls: Annotated[
        bool,
        typer.Option("--controls/--no-controls", help="Run it also where less or nothing stands in its way."),
    ] = True,
    config: ConfigPath = None,
    as_json: Json = False,
) -> None:
    """Ask from inside a sandbox which primitives answer. Exploits nothing. Exits 1 when one does or a probe is dead."""
    settings = load_config(config)
    known = checks.rung(rung, accept_shared_kernel=True)
    settings = msgspec.structs.replace(
        settings, execution=msgspec.structs.replace(settings.execution, rung=known, env=None)
    )
    with (
        gate_of(settings, pool=1, accept=True, quiet=as_json) as gate,
        progress(f"attacking {rung}", quiet=as_json),
        gate.run_scope(empty_scope(600)) as run,
    ):
        found = _ask(run, rung)
    seen = suite.Controls(rows={}, missing={})
    if controls:
        with progress("running the controls", quiet=as_json):
            seen = suite.run_controls()
    report = suite.judge(rung, found, seen)
    if as_json:
        print_json(report.data())
    else:
        _show(report, found, seen.rows)
    _notes(report, seen.missing)
    if not report.passed:
        raise typer.Exit(1)


def _ask(run: Run, rung: str) -> list[suite.Row]:
    """Run the list in the rung."""
    result = run.code(suite.program(), rung=rung, accept_weaker=get_args(Weakness))
    if result.killed_by is not None or result.error is not None:
        raise HostFault(
            f"the attack program did not end by itself (killed_by={result.killed_by})",
            next_step="raise [execution.bounds] wall in the configuration, and look at the audit rows of the run",
        )
    found = suite.rows(result.value)
    for ident in suite.FATAL.keys() - {row.id for row in found}:
        alone = run.code(suite.program([ident]), rung=rung, accept_weaker=get_args(Weakness))
        if alone.ok:
            found += suite.rows(alone.value)
        else:
            found.append(suite.Row(ident, suite.FATAL[ident], reached=False, detail="ended the run"))
    return found


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


def _notes(report: suite.Report, missing: dict[str, str]) -> None:
    """Say on stderr what the figures stand on."""
    for name, why in missing.items():
        note(f"control {name} is missing: {why}")
    if report.absent:
        note(f"{len(report.absent)} primitives do not exist on this host: {', '.join(report.absent)}")
    if report.unproven:
        note(f"{len(report.unproven)} probes would be proven by the control root: {', '.join(report.unproven)}")
    if report.dead:
        note(f"{len(report.dead)} probes are dead, no control saw them reach: {', '.join(report.dead)}", "bold red")
    if report.reached:
        note("primitives were reached: do not run hostile code here", "bold red")
    elif report.controls:
        live = report.total - len(report.dead) - len(report.absent) - len(report.unproven)
        note(f"no primitive was reached; {live} of {report.total} probes were seen to reach theirs in a control")
    else:
        note("no primitive was reached; without controls this says little")


def _count(rows: list[suite.Row], goal: str) -> int:
    return sum(row.reached and goal in (row.goal, "all") for row in rows)
