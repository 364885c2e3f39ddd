"""`lockgate choose`: which rung a threat model asks for, and what of it this host has."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from lockgate.cli.common import ConfigPath, gate_of, load_config
from lockgate.cli.output import Json, fields, note, print_json, progress, table
from lockgate.contract.run import Rung
from lockgate.contract.rungs import BOUNDARIES
from lockgate.policy.choose import CODE, LIVES, NEEDS, REACHES, choose, threat_model


def choose_rung(
    *,
    config: ConfigPath = None,
    code: Annotated[str, typer.Option(help=f"Whose code: {', '.join(CODE)}.")] = "model",
    reaches: Annotated[str, typer.Option(help=f"What an escape would reach: {', '.join(REACHES)}.")] = "user",
    lives: Annotated[str, typer.Option(help=f"How long one sandbox runs: {', '.join(LIVES)}.")] = "seconds",
    needs: Annotated[list[str] | None, typer.Option(help=f"Any of {', '.join(NEEDS)}; repeatable.")] = None,
    package: Annotated[list[str] | None, typer.Option(help="A package that it imports; repeatable.")] = None,
    host: Annotated[bool, typer.Option("--host", help="Boot each rung here, and choose among those that run.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Say why each other rung was refused.")] = False,
    as_json: Json = False,
) -> None:
    """Choose the rung for some code, by whose it is and what an escape from it would reach.

    Exits 3 when no rung is strong enough and can do what is needed; with --host, when none of these runs here.
    """
    model = threat_model(code=code, reaches=reaches, lives=lives, needs=needs or (), packages=package or ())
    missing: dict[Rung, str | None] | None = None
    if host:
        with (
            gate_of(load_config(config), pool=1, accept=True, quiet=as_json) as gate,
            progress("booting each rung", quiet=as_json),
        ):
            missing = {one["rung"]: _missing(one) for one in gate.doctor().get("rungs", [])}
    choice = choose(model, missing)
    if as_json:
        print_json(msgspec.to_builtins(choice))
        return
    boundary = BOUNDARIES[choice.rung]
    fields([("rung", f"{choice.rung} ({boundary})"), *(("because", reason) for reason in choice.reasons)])
    if explain:
        table("refused", ("rung", "why not"), list(choice.refused.items()))
    elif choice.refused:
        note("why not the others: --explain")
    if not host:
        note("no host was asked: --host boots each rung here; lockgate doctor shows what is missing")


def _missing(row: dict[str, Any]) -> str | None:
    """Return what a rung lacks by the doctor's row of it."""
    if row.get("weakness"):
        return f"it stands here without its whole wall ({row['weakness']}); fix: {row.get('fix') or 'lockgate doctor'}"
    if row.get("available"):
        return None
    return f"{row.get('missing') or 'it does not run here'}; fix: {row.get('fix') or 'lockgate doctor'}"
