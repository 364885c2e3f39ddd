"""The rungs: what kind of boundary each is, which of them this version drives, and what may be missing of one.

Rule 1: a rung that shares the host's kernel, or stands here without a part of its wall (`Weakness`), takes code only
        after somebody accepted exactly that (X3).
Rule 2: this file is data. Whether a rung works on this host is found out by its `Runtime`, never here.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import msgspec

from lockgate.contract.run import Rung

Boundary = Literal["shared kernel", "user-space kernel", "hardware", "emulated", "wasm"]

# What of a rung's own wall may be missing on a host.
Weakness = Literal["emulated", "no outer wall", "old runtime"]


class GvisorChoices(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[execution.gvisor]`: what an operator decides about the gvisor rung.

    Attributes:
        runsc: path of the runsc to use; None = look on the usual paths, then for the fetched copy.
        store: directory of images, verdicts and the fetched runsc; None = the store of this user.
        allow_old: accept a runsc that is older than the release this rung relies on ("old runtime").

    """

    runsc: str | None = None
    store: str | None = None
    allow_old: bool = False


class MicrovmChoices(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[execution.microvm]`: what an operator decides about the microvm rung.

    Attributes:
        store: directory of kernels, images and snapshots (`lockgate microvm build`); None = the store of this user.
        allow_emulated: accept machines that are emulated ("emulated"): for development and CI, no boundary.

    """

    store: str | None = None
    allow_emulated: bool = False


class WasmChoices(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[execution.wasm]`: what an operator decides about the wasm rung.

    Attributes:
        store: directory of the compiled guest and its images (`lockgate wasm build`); None = the store of this user.

    """

    store: str | None = None


# What an escape from a rung would reach, beside the run itself; `policy.choose` has the table.
Reaches = Literal["nothing", "user", "tenants", "control_plane"]
# What may be asked for: a rung, or "auto" for the one that the chooser finds strong enough among those that run here.
RungChoice = Literal["container", "gvisor", "microvm", "wasm", "auto"]
AUTO: Final = "auto"

RUNGS: Final[tuple[Rung, ...]] = get_args(Rung)
BUILT: Final[tuple[Rung, ...]] = ("container", "gvisor", "microvm", "wasm")
"""The rungs that this version drives: those of `supervisor.engine.runtimes`, which a test holds to this list."""

BOUNDARIES: Final[dict[Rung, Boundary]] = {
    "container": "shared kernel",
    "gvisor": "user-space kernel",
    "microvm": "hardware",
    "wasm": "wasm",
}
WEAKNESSES: Final[dict[Weakness, str]] = {
    "emulated": "the machine is emulated: slower, and its boundary is the emulator's code, not the processor's",
    "no outer wall": "a part of what confines the engine's own process is missing: its defect may be an escape",
    "old runtime": "the runtime is older than the release whose fixes this rung relies on",
}
