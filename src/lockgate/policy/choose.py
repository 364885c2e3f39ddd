"""Which rung a threat model asks for, why, and why not the others.

Rule 1: pure. What a host really has is passed in; nothing is probed here.
Rule 2: more hostile never means weaker. Hostile code, a larger reach, a longer life and a longer list of needs can only
        raise the level that is asked for or leave fewer rungs; a property test holds it.
Rule 3: a need that no rung of the level can give is an error, and never a rung below the level.
Rule 4: the tables below are the whole policy; the docs print them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal, get_args

import msgspec

from lockgate.contract.errors import CannotIsolate, ConfigError
from lockgate.contract.run import Rung
from lockgate.contract.rungs import Reaches

Code = Literal["own", "model", "third_party", "hostile"]
Lives = Literal["expression", "seconds", "session"]
Need = Literal["packages", "subprocess", "threads", "gpu"]

CODE: Final[tuple[Code, ...]] = get_args(Code)
REACHES: Final[tuple[Reaches, ...]] = get_args(Reaches)
LIVES: Final[tuple[Lives, ...]] = get_args(Lives)
NEEDS: Final[tuple[Need, ...]] = get_args(Need)

# Level 1: a wall that shares the host's kernel. 2: the host's kernel is not what code talks to. 3: hardware.
LEVELS: Final[Mapping[Code, Mapping[Reaches, int]]] = {
    "own": {"nothing": 1, "user": 1, "tenants": 2, "control_plane": 2},
    "model": {"nothing": 1, "user": 2, "tenants": 2, "control_plane": 3},
    "third_party": {"nothing": 2, "user": 2, "tenants": 3, "control_plane": 3},
    "hostile": {"nothing": 2, "user": 3, "tenants": 3, "control_plane": 3},
}
STRENGTH: Final[Mapping[Rung, int]] = {"container": 1, "wasm": 2, "gvisor": 2, "microvm": 3}
# Of rungs that are strong enough, the first in this order. Never a stronger one before a weaker one: a longer life, or
# one more need, could then mean less wall. Among equals the one that suits how long the code lives.
ORDER: Final[Mapping[Lives, tuple[Rung, ...]]] = {
    "expression": ("container", "wasm", "gvisor", "microvm"),
    "seconds": ("container", "wasm", "gvisor", "microvm"),
    "session": ("container", "gvisor", "wasm", "microvm"),
}
LINKED: Final = frozenset({"numpy", "pandas", "scipy", "scikit-learn", "matplotlib", "lxml"})
"""Packages with native code that the wasm guest carries."""
PURE: Final = frozenset({"python-dateutil", "pytz", "tzdata", "six"})
"""Pure packages that come with them."""
_LEVEL_WORDS: Final = {
    1: "a wall on the host's own kernel is enough",
    2: "the code must not talk to the host's kernel",
    3: "only hardware virtualisation is enough",
}
CANNOT: Final[Mapping[Rung, Mapping[Need, str]]] = {
    "container": {"subprocess": "its filter refuses execve"},
    "gvisor": {"subprocess": "its filter inside the box refuses execve"},
    "microvm": {"subprocess": "its filter inside the guest refuses execve"},
    "wasm": {"subprocess": "a WebAssembly guest has no processes", "threads": "its guest has no threads"},
}
_NO_GPU: Final = (
    "no rung passes a GPU through: gVisor's nvproxy forwards a driver's calls to the host's driver, which gives the "
    "wall away, and a microVM would need a device of its own"
)
_GPU_STEP: Final = (
    "keep the GPU outside: register an operation that does the work, or run the whole service in a machine of its own"
)


class ThreatModel(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the code that will run.

    Attributes:
        code: whose it is: our own; a model's, which hostile text may have steered; a third party's; a hostile tenant's.
        reaches: what an escape would reach, beside the run itself.
        lives: how long one sandbox runs: one expression, seconds, a session.
        needs: what it cannot do without.
        packages: names of packages that it imports; giving any is a need for "packages".

    """

    code: Code = "model"
    reaches: Reaches = "user"
    lives: Lives = "seconds"
    needs: frozenset[Need] = frozenset()
    packages: frozenset[str] = frozenset()


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A rung, and the grounds.

    Attributes:
        rung: the rung to use. level: the level that the threat model asks for, 1 to 3.
        reasons: why this one. refused: for each other rung, why not.

    """

    rung: Rung
    level: int
    reasons: tuple[str, ...]
    refused: dict[Rung, str]


def threat_model(
    *,
    code: str = "model",
    reaches: str = "user",
    lives: str = "seconds",
    needs: Iterable[str] = (),
    packages: Iterable[str] = (),
) -> ThreatModel:
    """Return the threat model of some words, as a person writes them.

    Raises:
        ConfigError: a word is none of its list; the error names the list.

    """
    needs = tuple(needs)
    asked = {"code": (code, CODE), "reaches": (reaches, REACHES), "lives": (lives, LIVES)}
    for name, (word, valid) in asked.items():
        if word not in valid:
            raise ConfigError(f"{name} cannot be {word[:40]!r}", next_step=f"use one of: {', '.join(valid)}")
    for need in needs:
        if need not in NEEDS:
            raise ConfigError(f"there is no need {need[:40]!r}", next_step=f"use any of: {', '.join(NEEDS)}")
    return msgspec.convert(
        {"code": code, "reaches": reaches, "lives": lives, "needs": needs, "packages": tuple(packages)}, ThreatModel
    )


def level(model: ThreatModel) -> int:
    """Return the level that a threat model asks for: its cell of the table, one more for a session of foreign code."""
    cell = LEVELS[model.code][model.reaches]
    longer = model.lives == "session" and model.code in {"third_party", "hostile"}
    return min(3, cell + longer)


def candidates(model: ThreatModel) -> tuple[Rung, ...]:
    """Return the rungs that are strong enough and can do what is needed, the one to try first in front."""
    least = level(model)
    return tuple(rung for rung in ORDER[model.lives] if STRENGTH[rung] >= least and _unable(rung, model) is None)


def choose(model: ThreatModel, missing: Mapping[Rung, str | None] | None = None) -> Choice:
    """Return the rung to run `model`'s code on.

    Args:
        model: what is known of the code.
        missing: of this host: for each rung None where it was seen to run, else what it lacks and how to get it; a rung
            that is not named does not run here. None = ask about no host.

    Raises:
        CannotIsolate: no rung is strong enough, can do what is needed, and runs here; it says what would.

    """
    least = level(model)
    refused: dict[Rung, str] = {}
    fit = candidates(model)
    chosen: Rung | None = None
    for rung in sorted(ORDER[model.lives], key=lambda one: one not in fit):  # a stable sort: what fits, in its order
        why = _why_not(rung, model, least, missing)
        if why is None and chosen is None:
            chosen = rung
        else:
            refused[rung] = why or f"strong enough too, but {chosen} is quicker to have"
    if chosen is None:
        raise _none(model, refused, fit, missing)
    reasons = (
        f"code: {model.code}, an escape reaches: {model.reaches}, lives: {model.lives}; {_LEVEL_WORDS[least]}",
        *((f"it can do what is needed: {', '.join(_wanted(model))}",) if _wanted(model) else ()),
        *(("it was seen to run on this host",) if missing is not None else ()),
    )
    return Choice(rung=chosen, level=least, reasons=reasons, refused=refused)


def _why_not(rung: Rung, model: ThreatModel, least: int, missing: Mapping[Rung, str | None] | None) -> str | None:
    if STRENGTH[rung] < least:
        return f"too weak: {_LEVEL_WORDS[least]}"
    unable = _unable(rung, model)
    if unable is not None:
        return unable
    if missing is not None:
        return missing.get(rung, "it does not run on this host; see: lockgate doctor")
    return None


def _wanted(model: ThreatModel) -> list[str]:
    return sorted({*model.needs, *model.packages})


def _unable(rung: Rung, model: ThreatModel) -> str | None:
    """Return what of the needs a rung cannot give, in words."""
    if "gpu" in model.needs:
        return _NO_GPU
    for need in sorted(model.needs):
        if need in CANNOT[rung]:
            return f"no {need}: {CANNOT[rung][need]}"
    outside = sorted(name for name in model.packages if normal(name) not in LINKED | PURE)
    if rung == "wasm" and outside:
        return f"no {', '.join(outside)}: its guest imports only what is linked into it ({', '.join(sorted(LINKED))})"
    return None


def normal(name: str) -> str:
    """Return a package's name as PEP 503 compares it."""
    return "-".join(part for part in name.lower().replace("_", "-").replace(".", "-").split("-") if part)


def _none(
    model: ThreatModel, refused: Mapping[Rung, str], fit: tuple[Rung, ...], missing: Mapping[Rung, str | None] | None
) -> CannotIsolate:
    if "gpu" in model.needs:
        return CannotIsolate(_NO_GPU, next_step=_GPU_STEP)
    if not fit:
        asked = ", ".join(_wanted(model))
        return CannotIsolate(
            f"no rung that is strong enough can give: {asked}",
            next_step="keep that work outside the sandbox, in an operation of the broker",
        )
    lacks = "; ".join(f"{rung}: {refused[rung]}" for rung in fit)
    first = next(((missing or {}).get(rung) for rung in fit), None)
    return CannotIsolate(
        f"nothing on this host is strong enough for {model.code} code whose escape reaches {model.reaches} ({lacks})",
        next_step=first.rpartition("fix: ")[2] if first else "see: lockgate doctor",
    )
