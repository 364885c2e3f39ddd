"""The latch: what a run has read decides where it may still send (E7).

Rule 1: a run keeps the union of the labels of all results it was given; nothing takes a label away.
Rule 2: private and untrusted together close every external sink, until the run ends or a person approves those exact
        arguments. Reading, and asking the model, stay.
Rule 3: private alone closes the public sinks: operations whose arguments strangers can read. No approval opens them; a
        child run that never sees private data does what they are for.
Rule 4: a child begins with what its parent had read when it was opened. What a child reads, its parents have read too,
        and whatever comes from a child is untrusted to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

import msgspec

Sink = Literal["", "sink", "public_sink"]

CLEAN: Final[frozenset[str]] = frozenset()
TAINTS: Final = frozenset(("private", "untrusted"))


class Latched(msgspec.Struct, frozen=True):
    """Why a sink is closed. `approvable`: whether a person may open it for one exact call."""

    reason: Literal["trifecta", "tainted_arg"]
    why: str
    approvable: bool


_TRIFECTA: Final = Latched("trifecta", "the run has read private and untrusted data", approvable=True)
_TAINTED: Final = Latched("tainted_arg", "the run has read private data and strangers can read this", approvable=False)


def sink_of(labels: Iterable[str]) -> Sink:
    """Return where the arguments of an operation with these labels go: nowhere, outside, or to strangers."""
    found = frozenset(labels)
    return "public_sink" if "public_sink" in found else "sink" if "sink" in found else ""


def latched(sink: Sink, seen: frozenset[str]) -> Latched | None:
    """Return why `sink` is closed to a run that has read `seen`, or None."""
    if sink == "public_sink" and "private" in seen:
        return _TAINTED
    if sink and seen >= TAINTS:
        return _TRIFECTA
    return None


def taints(labels: Iterable[str]) -> frozenset[str]:
    """Return what a result with these labels adds to what a run has read."""
    return TAINTS.intersection(labels)
