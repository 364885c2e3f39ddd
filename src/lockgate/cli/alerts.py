"""`lockgate alerts`: try the sinks, read what was told, tell it again, follow a log without a Gate.

Rule 1: this process never holds a key of a sink: what needs one runs as the alerter, with an empty environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from lockgate.alerts import words
from lockgate.alerts.dedupe import Alert
from lockgate.alerts.metrics import rules as shipped_rules
from lockgate.alerts.state import SUFFIX, read
from lockgate.cli.common import ConfigPath, load_config
from lockgate.cli.output import Json, fields, note, print_json, table
from lockgate.config import Config
from lockgate.contract.errors import ConfigError, HostFault
from lockgate.gate.start import config_file

app = typer.Typer(help="Alerts: what the operator's sinks are told of denials.", no_args_is_help=True)
File = Annotated[Path | None, typer.Argument(help="Audit file; default: the configured one.", metavar="[FILE]")]
Sinks = Annotated[list[str] | None, typer.Option("--sink", help="Only this sink; may be given again.")]
_SECONDS: Final = 600.0


@app.command("test")
def try_sinks(sink: Sinks = None, config: ConfigPath = None, as_json: Json = False) -> None:
    """Tell every sink a test alert and say what it answered. Exits 1 when one did not take it."""
    loaded = load_config(config, required=True)
    if not loaded.alerts.sinks:
        raise ConfigError("no sink is configured", next_step="write a table [alerts.sinks.NAME]")
    code, told = _told(loaded, Path(loaded.audit.path), ["--send", "test"], sink)
    _show(told, as_json=as_json)
    if code:
        raise typer.Exit(1)


@app.command("tail")
def tail(
    file: File = None,
    *,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="How many alerts.")] = 20,
    config: ConfigPath = None,
    as_json: Json = False,
) -> None:
    """Show the last alerts that were told, and how each sink is doing."""
    audit = file if file is not None else Path(load_config(config).audit.path)
    told, tallies = read(audit.with_name(audit.name + SUFFIX), count)
    if as_json:
        print_json(
            {
                "told": [{"at": one.at, "sink": one.sink, "result": one.result, **_data(one.alert)} for one in told],
                "sinks": [one._asdict() for one in tallies],
            }
        )
        return
    if told:
        table(
            "told",
            ("time", "sink", "result", "why", "text"),
            [(_time(one.at), one.sink, one.result, one.alert.why, words.line(one.alert)) for one in told],
        )
    table("sinks", ("sink", "waiting", "delivered", "rejected", "dropped", "failed", "problem"), tallies)


@app.command("replay")
def replay(
    file: File = None,
    *,
    after: Annotated[int, typer.Option(min=0, help="Denials behind this row (seq).")] = 0,
    run: Annotated[str | None, typer.Option(help="Only denials of this run.")] = None,
    send: Annotated[bool, typer.Option("--send", help="Tell the sinks; without it they are only shown.")] = False,
    sink: Sinks = None,
    config: ConfigPath = None,
    as_json: Json = False,
) -> None:
    """Show the alerts that the rows of an audit log stand for, each denial once, or tell them to sinks again."""
    loaded = load_config(config)
    audit = file if file is not None else Path(loaded.audit.path)
    if not audit.is_file():
        raise ConfigError(f"there is no audit file at {audit}", next_step="give the path that [audit] path names")
    if send:
        options = ["--send", "replay", "--after", str(after), *(["--run", run] if run is not None else [])]
        code, told = _told(loaded, audit, options, sink)
        _show(told, as_json=as_json)
        if code:
            raise typer.Exit(1)
        return
    from lockgate.alerts.replay import replay as alerts_of  # noqa: PLC0415 - only this verb reads rows

    found = list(alerts_of(audit, after=after, run=run))
    if as_json:
        print_json([_data(one) for one in found])
        return
    table(
        "denials",
        ("seq", "time", "severity", "text", "run"),
        [
            (one.event.seq, _time(one.event.at), one.event.severity, words.line(one), words.word(one.event.run))
            for one in found
        ],
    )


@app.command("rules")
def rules(*, as_json: Json = False) -> None:
    """Print the alerting rules for Prometheus that fit the counters of the alerter."""
    if as_json:
        print_json({"rules": shipped_rules()})
    else:
        sys.stdout.write(shipped_rules())


@app.command("serve")
def serve(file: File = None, *, config: ConfigPath = None) -> None:
    """Follow an audit log in the foreground, as a Gate's alerter does; for logs whose Gate has no [alerts]."""
    loaded = load_config(config, required=True)
    if not loaded.alerts.wanted:
        raise ConfigError("no sink is configured", next_step="write a table [alerts.sinks.NAME]")
    audit = file if file is not None else Path(loaded.audit.path)
    fd = config_file(loaded)
    os.set_inheritable(fd, True)
    note(f"following {audit}; Ctrl-C ends it")
    os.execve(sys.executable, [sys.executable, "-I", *_argv(fd, audit.absolute())], {})  # noqa: S606 - a fixed argv


def _argv(fd: int, audit: Path) -> list[str]:
    return ["-m", "lockgate.alerts", "--config", f"/proc/self/fd/{fd}", "--audit", str(audit)]


def _told(config: Config, audit: Path, options: list[str], sinks: list[str] | None) -> tuple[int, list[dict[str, Any]]]:
    """Run the alerter's own sending; returns its exit code and what it said of each delivery."""
    fd = config_file(config)
    try:
        line = [sys.executable, "-I", *_argv(fd, audit.absolute()), *options]
        for name in sinks or []:
            line += ["--sink", name]
        ran = subprocess.run(
            line, env={}, pass_fds=[fd], capture_output=True, check=False, timeout=_SECONDS, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise HostFault(f"the sinks took more than {_SECONDS:g} s", next_step="try one with --sink") from None
    finally:
        os.close(fd)
    told: list[dict[str, Any]] = []
    for text in ran.stdout.splitlines():
        said = msgspec.json.decode(text, type=dict[str, Any])
        if "error" in said:
            raise ConfigError(said["error"], next_step=said["next_step"])
        told.append(said)
    if ran.returncode not in {0, 1}:
        raise HostFault("the alerter ended", next_step="report this")
    return ran.returncode, told


def _show(told: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print_json(told)
        return
    for one in told:
        fields([("sink", one["sink"]), ("result", one["result"]), ("problem", one["problem"])])


def _data(alert: Alert) -> dict[str, Any]:
    return {"text": words.line(alert), **msgspec.to_builtins(alert)}


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")
