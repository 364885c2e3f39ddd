"""`lockgate gvisor`: get a runsc, and find out whether one may be trusted here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lockgate.cli.common import ConfigPath, load_config
from lockgate.cli.output import Json, fields, note, print_json, progress
from lockgate.config import Config
from lockgate.runtimes.gvisor import GvisorRuntime, binary, fetching
from lockgate.runtimes.gvisor.runtime import unpacked_at

app = typer.Typer(help="The gvisor rung: which runsc, and whether it works here.", no_args_is_help=True)
Store = Annotated[Path | None, typer.Option(help="Directory of images, verdicts and the fetched runsc.")]


def _runtime(config: Config, store: Path | None) -> GvisorRuntime:
    choices = config.execution.gvisor
    if store is not None:
        choices = type(choices)(runsc=choices.runsc, store=str(store.absolute()), allow_old=choices.allow_old)
    return GvisorRuntime(choices)


@app.command("fetch")
def fetch(store: Store = None, config: ConfigPath = None, as_json: Json = False) -> None:
    """Unpack Debian's runsc beside lockgate's files. Installs nothing; refuses a package other than the tested one."""
    runtime = _runtime(load_config(config), store)
    with progress("fetching Debian's runsc", quiet=as_json):
        path = fetching.fetch(unpacked_at(runtime.store), progress=(lambda _text: None) if as_json else note)
        found = binary.inspect(path)
    _show(
        {"path": found.path, "version": found.version, "go": found.go, "sha256": found.sha256, "old": found.old},
        as_json,
    )
    if not as_json and found.old:
        note(f"older than {binary.MINIMUM}, for tests: runs need [execution.gvisor] allow_old = true")


@app.command("check")
def check(
    again: Annotated[bool, typer.Option("--again", help="Boot it anew, whatever was found before.")] = False,
    store: Store = None,
    config: ConfigPath = None,
    as_json: Json = False,
) -> None:
    """Boot the runsc that would be used twenty times. Exits 3 when it may not be used."""
    runtime = _runtime(load_config(config), store)
    with progress("booting runsc", quiet=as_json):
        verdict = runtime.check(again=again)
    _show(verdict, as_json)


def _show(data: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(data)
    else:
        fields([(name, str(value)) for name, value in data.items()])
