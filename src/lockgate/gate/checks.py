"""What can be refused before anything is sent. Pure; the code is never compiled here, only measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from lockgate.config import nearest
from lockgate.contract.bounds import FRACTIONS, Bounds
from lockgate.contract.errors import BadScript, CannotIsolate, ConfigError, UnknownRung
from lockgate.contract.run import Rung
from lockgate.contract.rungs import BOUNDARIES, BUILT, RUNGS, WEAKNESSES, Weakness

_DEFAULTS = Bounds()
# Bounds that the broker enforces: a run that narrows one of them needs a ticket that says so.
BROKER_BOUNDS = ("calls", "calls_in_flight", "export", "exports")


def script(source: str | bytes, cap: int) -> str:
    """Return the source as text.

    Raises:
        BadScript: it is not UTF-8, holds a NUL, or is over `cap` bytes.

    """
    text = ""
    size = len(source)  # for text a lower bound, and enough to refuse 50 MB before encoding them
    if size <= cap:
        try:
            raw = source.encode() if isinstance(source, str) else bytes(source)
            text = raw.decode()
        except UnicodeError as error:
            start = error.start if isinstance(error, UnicodeEncodeError | UnicodeDecodeError) else 0
            where = f"character {start}" if isinstance(source, str) else f"byte {start}"
            raise BadScript(f"the code is not UTF-8 at {where}", next_step="save it as UTF-8 and try again") from None
        size = len(raw)
    if size > cap:
        raise BadScript(
            f"the code is over the cap of {cap} bytes",
            next_step="hand large data over through an operation, not through the code",
        )
    if (nul := text.find("\0")) >= 0:
        raise BadScript(f"the code holds a NUL at character {nul}", next_step="remove it: Python source has none")
    return text.removeprefix("\ufeff")  # a byte order mark is no code


def rung(asked: str, *, accept_shared_kernel: bool) -> Rung:
    """Return the rung.

    Raises:
        UnknownRung: there is no such rung.
        CannotIsolate: this build cannot provide it, or it shares the host's kernel and nobody accepted that (X3).

    """
    found = next((known for known in RUNGS if known == asked), None)
    if found is None:
        raise UnknownRung(f"there is no rung {asked[:80]!r}", next_step=nearest(asked, RUNGS))
    if found not in BUILT:
        raise CannotIsolate(
            f"this version does not drive the {found} rung", next_step="use one of: " + ", ".join(BUILT)
        )
    if BOUNDARIES[found] == "shared kernel" and not accept_shared_kernel:
        raise CannotIsolate(
            "the container rung shares the host's kernel, which is a packaging boundary and not one for hostile code, "
            "and nobody accepted that",
            next_step="pass accept_shared_kernel=True (--accept-shared-kernel on the command line), "
            "or set it under [execution] in lockgate.toml",
        )
    return found


def weaknesses(asked: Iterable[str]) -> tuple[Weakness, ...]:
    """Return what may be missing of a rung's wall.

    Raises:
        ConfigError: there is no weakness of that name.

    """
    names: dict[str, Weakness] = {name: name for name in WEAKNESSES}
    found: list[Weakness] = []
    for one in asked:
        known = names.get(one)
        if known is None:
            raise ConfigError(f"there is no weakness {one[:80]!r}", next_step=nearest(one, tuple(WEAKNESSES)))
        found.append(known)
    return tuple(found)


def bounds(limits: Bounds, asked: Bounds | Mapping[str, float] | None, timeout: float | None) -> Bounds:
    """Return `limits` narrowed by what the call asked for. Of a `Bounds` only what differs from the defaults counts.

    Raises:
        ConfigError: a bound is unknown, not a number, or wider than the present one.

    """
    if asked is None and timeout is None:
        return limits
    changes: dict[str, float]
    if isinstance(asked, Bounds):
        fields = asked.__struct_fields__
        changes = {key: getattr(asked, key) for key in fields if getattr(asked, key) != getattr(_DEFAULTS, key)}
    else:
        changes = dict(asked or {})
    if timeout is not None:
        for value in (timeout, changes.get("wall", timeout)):
            if isinstance(value, bool) or not isinstance(value, int | float):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError("the timeout is not a number", next_step="give seconds")
        changes["wall"] = min(timeout, changes.get("wall", timeout))
    narrowed = limits.narrow(**changes)  # refuses what is no number before anything converts it
    whole = {name: float(value) if name in FRACTIONS else int(value) for name, value in changes.items()}
    return msgspec.structs.replace(narrowed, **whole)


def broker_bounds(limits: Bounds, narrowed: Bounds) -> Bounds | None:
    """Return `narrowed` when it changes a bound that the broker enforces, else None."""
    if limits is narrowed or all(getattr(limits, name) == getattr(narrowed, name) for name in BROKER_BOUNDS):
        return None
    return narrowed
