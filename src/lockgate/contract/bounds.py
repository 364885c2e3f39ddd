"""Bounds of one run: each is a value with a unit, an owner and what happens at the edge.

Rule 1: configuration and callers may narrow a bound, never widen it (`Bounds.narrow`).
Rule 2: a bound that this host cannot hold is a refusal or a named, accepted degradation, never silence (X3).
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from lockgate.contract.errors import ConfigError

KiB: Final = 1024
MiB: Final = 1024 * KiB

AtLimit = Literal["kill", "throttle", "refuse", "truncate+marker", "errno"]


class Bound(msgspec.Struct, frozen=True):
    """One row of the bounds table (docs/reference/bounds.md is generated from it)."""

    name: str
    ceiling: float
    unit: str
    owner: Literal["supervisor", "kernel", "broker", "guest runner"]
    at_limit: AtLimit
    promise: str


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The bounds of one run. The defaults are the ceilings; every value is narrow-only.

    Attributes:
        wall: seconds from "code sent" to kill. Owner: supervisor, armed before code is sent (X5).
        cpu: CPU-seconds of the whole run (X5).
        cpu_share: cores the run may use at once, as a quota (X5).
        memory: bytes of the whole run, working directory included; the run dies as a whole (X6).
        disk: bytes of the ephemeral working directory (X7).
        inodes: files in the working directory (X7).
        processes: processes and threads of the run.
        output: bytes kept of each of stdout and stderr; the rest is counted and named in a marker (X9).
        output_kill: bytes written to one stream after which the run is killed (X9).
        value: bytes of the JSON of the run's value, and of its text (X9).
        export: bytes of all exported files together (X7).
        exports: number of exported files (X7).
        code: bytes of source (UTF-8).
        calls: broker calls of one run.
        calls_in_flight: broker calls waiting for their answer at once.

    """

    wall: float = 30.0
    cpu: float = 20.0
    cpu_share: float = 1.0
    memory: int = 256 * MiB
    disk: int = 64 * MiB
    inodes: int = 4096
    processes: int = 64
    output: int = 64 * KiB
    output_kill: int = 4096 * MiB
    value: int = 256 * KiB
    export: int = 32 * MiB
    exports: int = 32
    code: int = 1 * MiB
    calls: int = 10_000
    calls_in_flight: int = 8

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = _checked(name, getattr(self, name))
            if not (value > 0):
                raise ConfigError(
                    f"bound {name} is {_shown(value)}, but must be above zero",
                    next_step=f"give {name} a positive value",
                )
            if value > CEILINGS.get(name, value):
                raise ConfigError(
                    f"bound {name} is {_shown(value)}, above its ceiling {CEILINGS[name]!r}",
                    next_step=f"give {name} at most {CEILINGS[name]!r}: configuration narrows, never widens",
                )

    def narrow(self, **changes: float) -> Bounds:
        """Return these bounds with some made tighter.

        Raises:
            ConfigError: a name is unknown or a value is wider than the present one.

        """
        for name, value in changes.items():
            if name not in self.__struct_fields__:
                raise ConfigError(
                    f"there is no bound {name!r}", next_step="use one of: " + ", ".join(self.__struct_fields__)
                )
            if _checked(name, value) > getattr(self, name):
                raise ConfigError(
                    f"bound {name}={_shown(value)} would widen the present {getattr(self, name)!r}",
                    next_step=f"give {name} at most {getattr(self, name)!r}",
                )
        return msgspec.structs.replace(self, **changes)


FRACTIONS: Final = frozenset({"wall", "cpu", "cpu_share"})


def _checked(name: str, value: object) -> int | float:
    """Return `value`, or raise ConfigError when it is no number that this bound can have."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"bound {name} is not a number", next_step=f"give {name} a positive number")
    if name not in FRACTIONS and isinstance(value, float) and not value.is_integer():
        raise ConfigError(f"bound {name} is not a whole number", next_step=f"give {name} a whole number")
    return value


def _shown(value: float) -> str:
    # Python does not write out an int of more than 4,300 digits (sys.set_int_max_str_digits).
    return "a very large number" if isinstance(value, int) and value.bit_length() > 256 else repr(value)


# Absolute ceilings: what a configuration file may ask for at most. A default may be below its ceiling.
CEILINGS: Final[dict[str, float]] = {
    "wall": 3600.0,
    "cpu": 3600.0,
    "cpu_share": 64.0,
    "memory": 8192 * MiB,
    "disk": 2048 * MiB,
    "inodes": 65_536,
    "processes": 256,
    "output": 16 * MiB,
    "output_kill": 65_536 * MiB,
    "value": 16 * MiB,
    "export": 512 * MiB,
    "exports": 1024,
    "code": 16 * MiB,
    "calls": 1_000_000,
    "calls_in_flight": 64,
}

TABLE: Final[tuple[Bound, ...]] = (
    Bound("wall", 3600, "seconds", "supervisor", "kill", "X5"),
    Bound("cpu", 3600, "CPU-seconds", "supervisor", "kill", "X5"),
    Bound("cpu_share", 64, "cores", "kernel", "throttle", "X5"),
    Bound("memory", 8192 * MiB, "bytes", "kernel", "kill", "X6"),
    Bound("disk", 2048 * MiB, "bytes", "kernel", "errno", "X7"),
    Bound("inodes", 65_536, "files", "kernel", "errno", "X7"),
    Bound("processes", 256, "tasks", "kernel", "errno", "X5"),
    Bound("output", 16 * MiB, "bytes a stream", "supervisor", "truncate+marker", "X9"),
    Bound("output_kill", 65_536 * MiB, "bytes a stream", "supervisor", "kill", "X9"),
    Bound("value", 16 * MiB, "bytes", "supervisor", "truncate+marker", "X9"),
    Bound("export", 512 * MiB, "bytes", "broker", "refuse", "X7"),
    Bound("exports", 1024, "files", "broker", "refuse", "X7"),
    Bound("code", 16 * MiB, "bytes", "supervisor", "refuse", "X9"),
    Bound("calls", 1_000_000, "calls", "broker", "refuse", "C3"),
    Bound("calls_in_flight", 64, "calls", "broker", "refuse", "C3"),
)

# Frames on the sandbox channel (SPEC: broker.md section 7).
FRAME_BYTES: Final = 1 * MiB
FRAME_SECONDS: Final = 5.0
