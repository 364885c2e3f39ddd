"""`lockgate doctor`: which rungs really run on this host, and which bounds hold by what."""

from __future__ import annotations

from typing import Any

import typer
from rich.text import Text

from lockgate.cli.common import ConfigPath, gate_of, load_config
from lockgate.cli.output import Json, fields, note, print_json, progress, table, yes


def doctor(config: ConfigPath = None, as_json: Json = False) -> None:
    """Boot each rung for real and attack its bounds. Exits 3 when no rung can run here."""
    settings = load_config(config)
    # The probes are ours, so nobody has to accept the shared kernel for them.
    with (
        gate_of(settings, pool=1, accept=True, quiet=as_json) as gate,
        progress("booting a sandbox and attacking its bounds", quiet=as_json),
    ):
        report = gate.doctor()
        report["broker"] = gate.facts.get("broker", {})
    if as_json:
        print_json(report)
    else:
        _show(report)
    if not any(rung.get("available") for rung in report.get("rungs", [])):
        raise typer.Exit(3)


def _show(report: dict[str, Any]) -> None:
    host: dict[str, Any] = report.get("host", {})
    fields(list(host.items()))
    rungs: list[dict[str, Any]] = report.get("rungs", [])
    table(
        "rungs",
        ("rung", "runs here", "boundary", "probes", "reached", "missing", "fix"),
        [
            (
                one["rung"],
                yes(bool(one["available"])),
                _boundary(one),
                one.get("probes") or "",
                len(one.get("reached", ())) if one.get("probes") else "",
                one.get("missing"),
                one.get("fix"),
            )
            for one in rungs
        ],
    )
    timings: dict[str, Any] = report.get("timings", {})
    fields(
        [
            ("from nothing", _ms(timings.get("template_ms"), "to a template")),
            ("cold", _ms(timings.get("cold_ms"), "from the request to the result of 1+1, sandbox made for it")),
            ("warm", _ms(timings.get("warm_ms"), "the same with a sandbox that was ready")),
        ]
    )
    bounds: list[dict[str, Any]] = report.get("bounds", [])
    table(
        "bounds",
        ("bound", "holds", "by", "seen", "fix"),
        [
            (one["name"], yes(bool(one["holds"])), one.get("by"), Text(str(one.get("saw", ""))), one.get("fix"))
            for one in bounds
        ],
    )
    note("each rung that runs here was booted and asked with every probe of `lockgate attack` first")
    if any(one.get("boundary") == "shared kernel" and one.get("available") for one in rungs):
        note("container shares the host's kernel: packaging for code you half trust, no wall against a kernel exploit")
    if any(one.get("rung") == "wasm" and one.get("available") for one in rungs):
        note("wasm computes and calls operations, at a half to a tenth of native speed and in 32 bits: no threads,")
        note("processes, sockets or packages beside those linked in (`lockgate wasm packages`)")


def _boundary(one: dict[str, Any]) -> str:
    """Return what stands between code and this host, and what of it is missing here."""
    boundary, weakness = str(one.get("boundary")), one.get("weakness")
    if boundary == "emulated":
        return "none: emulated"
    return f"{boundary}, {weakness}" if weakness else boundary


def _ms(value: float | None, what: str) -> str:
    return "" if value is None else f"{value:g} ms {what}"
