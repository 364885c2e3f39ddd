"""`lockgate env`: package sets, built before any run."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from lockgate.cli.common import ConfigPath, load_config
from lockgate.cli.output import Json, fields, print_json, steps, table
from lockgate.supervisor import envs

app = typer.Typer(help="Package sets: resolved, pinned by hash and read-only.", no_args_is_help=True)
Store = Annotated[Path | None, typer.Option(help="Directory of package sets; default: the configured one, or yours.")]


def _store(store: Path | None, config: Path | None) -> Path | None:
    if store is not None:
        return store.absolute()
    configured = load_config(config).execution.env_store
    return Path(configured) if configured is not None else None


@app.command("build")
def build(
    name: Annotated[str, typer.Argument(help="What runs will ask for.")],
    *,
    requirements: Annotated[Path, typer.Option("--requirements", "-r", help="A pip requirements file.")],
    preload: Annotated[list[str] | None, typer.Option(help="Module to import before any run; repeatable.")] = None,
    store: Store = None,
    config: ConfigPath = None,
    as_json: Json = False,
) -> None:
    """Resolve, pin and install a package set. Wheels only."""
    where = _store(store, config)
    loaded = tuple(preload) if preload else None
    with steps(quiet=as_json) as step:
        info = envs.build(name, requirements, store=where, progress=step, preload=loaded)
    if as_json:
        print_json(msgspec.to_builtins(info))
        return
    fields(
        [
            ("name", info.name),
            ("digest", info.digest),
            ("python", info.python),
            ("packages", ", ".join(f"{package} {version}" for package, version in info.packages)),
            ("preloaded", ", ".join(info.preload)),
            ("size", f"{info.size / 2**20:.1f} MiB in {info.files} files"),
        ]
    )


@app.command("list")
def list_(store: Store = None, config: ConfigPath = None, as_json: Json = False) -> None:
    """List the package sets of this host."""
    found = envs.list_envs(_store(store, config))
    if as_json:
        print_json(msgspec.to_builtins(found))
        return
    table(
        "package sets",
        ("name", "python", "packages", "MiB", "built", "digest"),
        [
            (
                one.name,
                one.python,
                len(one.packages),
                f"{one.size / 2**20:.1f}",
                datetime.fromtimestamp(one.created, UTC).strftime("%Y-%m-%d %H:%M UTC"),
                one.digest[:16],
            )
            for one in found
        ],
    )
