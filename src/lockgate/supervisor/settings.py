"""What the supervisor is told at start: one JSON object in argv. No secret ever has a place in it."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import ConfigError
from lockgate.contract.run import Rung
from lockgate.contract.rungs import GvisorChoices, MicrovmChoices, WasmChoices, Weakness


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The operator's choices for execution.

    Attributes:
        rung: the rung that is kept warm.
        env: the package set that is kept warm; None = the standard library alone.
        pool: warm machines kept for (rung, env) under the default bounds.
        bounds: what a run may ask for at most; the operator's configuration already narrowed it.
        memory: "rlimit" accepts a per-process address-space limit where no memory cgroup can be had (X3, X6).
        accept_shared_kernel: the operator accepts the container rung for every run of this supervisor.
        accept_weaker: weaknesses of other rungs that the operator accepts for every run of this supervisor.
        env_store: directory of the package sets; None = the store of this user (`envs.default_store`).
        cgroup: a delegated cgroup v2 directory to work in; None = look for one.
        max_runs: runs alive at once; later ones wait for a machine.
        recycle: runs after which a template is replaced by a fresh one.
        acquire: seconds a run may wait for a machine before it is refused.
        gvisor, microvm, wasm: what only the rung of that name has.

    """

    rung: Rung = "container"
    env: str | None = None
    pool: int = 4
    bounds: Bounds = Bounds()
    memory: Literal["cgroup", "rlimit"] = "cgroup"
    accept_shared_kernel: bool = False
    accept_weaker: tuple[Weakness, ...] = ()
    env_store: str | None = None
    cgroup: str | None = None
    max_runs: int = 64
    recycle: int = 2000
    acquire: float = 30.0
    gvisor: GvisorChoices = GvisorChoices()
    microvm: MicrovmChoices = MicrovmChoices()
    wasm: WasmChoices = WasmChoices()

    @property
    def accepted(self) -> tuple[Weakness, ...]:
        """What may be missing of a rung's wall in every run, by whatever name it was accepted."""
        old: tuple[Weakness, ...] = ("old runtime",) if self.gvisor.allow_old else ()
        emulated: tuple[Weakness, ...] = ("emulated",) if self.microvm.allow_emulated else ()
        return (*self.accept_weaker, *old, *emulated)

    def __post_init__(self) -> None:
        for name, least, most in (("pool", 0, 1000), ("max_runs", 1, 1000), ("recycle", 1, 10**9), ("acquire", 0, 600)):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(f"{name} is {value!r}", next_step=f"give {name} a value from {least} to {most}")


_DECODER: Final = msgspec.json.Decoder(Settings)


def decode(raw: str) -> Settings:
    """Return the settings in a JSON text.

    Raises:
        ConfigError: the text is not JSON, names what is not a setting, or a value is of the wrong type.

    """
    try:
        return _DECODER.decode(raw.encode())
    except (msgspec.DecodeError, UnicodeEncodeError) as err:
        raise ConfigError(
            f"the supervisor's settings cannot be read: {err}",
            next_step="use the fields of lockgate.supervisor.settings.Settings",
        ) from None
