"""Why a run gave no result, for reasons that are not the code's: a typed error each, with the next step (X3).

Rule 1: each says what is known of the code: that nothing of it ran, or that it ran when the machine was lost.
"""

from __future__ import annotations

from lockgate.contract.errors import CannotIsolate, HostFault
from lockgate.contract.rungs import WEAKNESSES, Weakness


def not_accepted(rung: str, weakness: Weakness, lacks: str = "") -> CannotIsolate:
    """Return the refusal of a machine whose weakness nobody accepted: nothing was sent to it."""
    return CannotIsolate(
        f"the {rung} rung is weaker on this host than it should be ({weakness}): {WEAKNESSES[weakness]}"
        + (f"; missing: {lacks}" if lacks else ""),
        next_step=f'run `lockgate doctor` for what brings the whole wall, or accept it: accept_weaker = ["{weakness}"] '
        "under [execution]",
    )


def bound_not_set(reason: str) -> HostFault:
    """Return the refusal of a machine whose group did not take the run's bounds."""
    return HostFault(f"a bound could not be set on a sandbox ({reason})", next_step="run `lockgate doctor`")


def not_bound(seconds: float) -> HostFault:
    """Return the refusal of a run whose channel the broker did not bind in time."""
    return HostFault(
        f"the broker did not bind the run's channel within {seconds:g} s",
        next_step="look at the broker's audit disk; then run the code again",
    )


def unknown_ticket() -> HostFault:
    """Return the refusal of a run whose ticket is worth nothing to the broker."""
    return HostFault(
        "the broker does not know this run's ticket, or it was used before or has expired",
        next_step="start the run again from an open run scope",
    )


def taken_back() -> HostFault:
    """Return the refusal of a run whose channel the broker ended before the code was sent."""
    return HostFault("the broker took the run's channel back", next_step="start the run again")


def no_lease(detail: str) -> HostFault:
    """Return the refusal of a run whose warm machine could not be made its own."""
    return HostFault(
        f"a warm sandbox could not be made ready for this run ({detail})",
        next_step="run the code again, nothing of it ran; if it repeats: lockgate doctor",
    )


def lost_early() -> HostFault:
    """Return the refusal of a run whose machine ended before it had the code."""
    return HostFault("the sandbox was lost before the code was sent", next_step="run the code again; nothing ran")


def killed_outside() -> HostFault:
    """Return the refusal of a run whose machine was killed while the code ran, and not by this supervisor."""
    return HostFault(
        "the sandbox was killed by something on this host while the code ran",
        next_step="look in the kernel log for the out-of-memory killer; then run the code again",
    )
