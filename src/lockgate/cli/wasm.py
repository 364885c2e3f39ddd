"""`lockgate wasm`: the guest of the wasm rung, built before any run."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from lockgate.cli.common import ConfigPath, load_config
from lockgate.cli.output import Json, fields, print_json, steps, table
from lockgate.runtimes.wasm import artifacts, build, image_recipe

app = typer.Typer(
    help="The guest of the wasm rung: fetched by hash, compiled once, made into memory images.", no_args_is_help=True
)
Store = Annotated[Path | None, typer.Option(help="Directory of built guests; default: the configured one, or yours.")]


def _store(store: Path | None, config: Path | None) -> Path:
    if store is not None:
        return store.absolute()
    configured = load_config(config).execution.wasm.store
    return Path(configured) if configured is not None else artifacts.default_store()


@app.command("build")
def build_(
    *,
    image: Annotated[list[str] | None, typer.Option(help="Image set to make; repeatable; default: all.")] = None,
    wheel: Annotated[Path | None, typer.Option(help="The guest's package, where no index can be reached.")] = None,
    store: Store = None,
    config: ConfigPath = None,
    as_json: Json = False,
) -> None:
    """Build what is missing: a minute or two and 3 GB of memory the first time, seconds after."""
    sets = tuple(dict.fromkeys(image)) if image else tuple(image_recipe.SETS)
    where = _store(store, config)
    with steps(quiet=as_json) as step:
        built = build.build(sets, store=where, wheel=wheel, progress=step)
    if as_json:
        print_json(msgspec.to_builtins(built))
        return
    rows: list[tuple[str, object]] = [("store", built.store), ("engine", f"wasmtime {built.engine}")]
    rows += [(f"image {one.name}", f"sha256 {one.image_sha256}") for one in built.sets]
    rows.append(("made now", ", ".join(built.made) or "nothing: all of it was there"))
    rows.append(("took", f"{built.seconds:.0f} s"))
    fields(rows)


@app.command("list")
def list_(store: Store = None, config: ConfigPath = None, as_json: Json = False) -> None:
    """List what was built, and say whether this engine may use it."""
    root = _store(store, config)
    version = artifacts.engine_version()
    bad = artifacts.check_engine(version)
    found = build.inventory(root)
    if as_json:
        print_json({"store": str(root), "engine": version, "refused": bad, "built": found})
        return
    fields([("store", str(root)), ("engine", f"wasmtime {version}" if version else "none")])
    if bad is not None:
        fields([("missing", bad.missing), ("fix", bad.fix)])
    table(
        "built",
        ("directory", "kind", "for this engine", "size", "made"),
        [
            (
                one.name,
                one.kind,
                "yes" if one.current else "no",
                f"{one.size / 2**20:.0f} MiB",
                datetime.fromtimestamp(one.created, UTC).strftime("%Y-%m-%d %H:%M"),
            )
            for one in found
        ],
    )


@app.command("prune")
def prune(store: Store = None, config: ConfigPath = None, as_json: Json = False) -> None:
    """Remove what was built for other engines, other guests and older recipes."""
    root = _store(store, config)
    gone = build.prune(root)
    if as_json:
        print_json({"store": str(root), "removed": gone})
        return
    fields([("removed", ", ".join(gone) or "nothing")])


@app.command("packages")
def packages(store: Store = None, config: ConfigPath = None, as_json: Json = False) -> None:
    """List the packages that are linked into the guest; there are no others on this rung."""
    found = artifacts.find("stdlib", _store(store, config))
    if as_json:
        print_json([{"name": name, "version": version} for name, version in found.packages])
        return
    table("linked in", ("package", "version"), found.packages)
