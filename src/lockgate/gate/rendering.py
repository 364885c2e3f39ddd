"""What both twins of the Gate do with the render guard that needs no waiting.

Rule 1: `lockgate.render` is imported at the first use: a Gate that shows nothing does not pay for it.
Rule 2: what is known of one run is known of no other.
Rule 3: rows are bounded: equal denials are one row with a count, and what is beyond the bound is counted in one more.
        The most severe come first, so a flood of harmless ones hides none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import msgspec

from lockgate.config import Render
from lockgate.contract import wire

if TYPE_CHECKING:
    from lockgate.render import Denial, Guard, Provenance

MAX_KNOWN: Final = 4096
"""URLs that one run may hold as known; what comes later is not live."""
_ORDER: Final = {"critical": 0, "high": 1, "medium": 2}


class Known:
    """The guard of one run and what it knows; made at its first use."""

    def __init__(self, table: Render, canary: str = "") -> None:
        self._table = table
        self._canary = canary
        self._latched = False
        self._guard: Guard | None = None

    @property
    def guard(self) -> Guard:
        """The run's guard."""
        if self._guard is None:
            from lockgate.render import Guard, RenderPolicy  # noqa: PLC0415

            rules = msgspec.structs.asdict(self._table)
            if self._canary:
                rules["canaries"] = (*self._table.canaries, self._canary)
            self._guard = Guard(RenderPolicy.of(**rules))
            self._guard.latched = self._latched
        return self._guard

    def latch(self) -> None:
        """Let no prefix rule make a URL live any more."""
        self._latched = True
        if self._guard is not None:
            self._guard.latched = True

    @property
    def _provenance(self) -> Provenance | None:
        provenance = self.guard.provenance
        return provenance if len(provenance) < MAX_KNOWN else None

    def message(self, text: str) -> None:
        """Know the URLs in a message of the user."""
        if (provenance := self._provenance) is not None:
            provenance.add_message(text)

    def fields(self, urls: Iterable[str]) -> None:
        """Know URLs of result fields that their operation vouches for."""
        for url in urls:
            if (provenance := self._provenance) is not None:
                provenance.add(url, "field")


class Tally:
    """Which denials of one message have their rows already. `sink`: where the message is shown."""

    def __init__(self) -> None:
        self.sink = ""
        self._seen: set[Denial] = set()
        self._rows = 0
        self._left_out = 0

    def batch(self, denials: Iterable[Denial], *, last: bool) -> tuple[tuple[wire.RenderDenial, ...], int]:
        """Return the rows that `denials` need, and with the `last` of them how many got none."""
        counts: dict[Denial, int] = {}
        for one in denials:
            self.sink = one.sink
            counts[one] = counts.get(one, 0) + 1
        fresh = sorted((one for one in counts if one not in self._seen), key=lambda one: _ORDER[one.severity])
        room = wire.MAX_RENDER_ROWS - self._rows
        # A critical one has its row whatever came before it; there are at most two kinds of them.
        taken = [one for number, one in enumerate(fresh) if number < room or one.severity == "critical"]
        taken = taken[: wire.MAX_RENDER_ROWS]
        self._seen.update(taken)
        self._rows += len(taken)
        self._left_out += len(fresh) - len(taken)
        left_out = self._left_out if last else 0
        if last:
            self._left_out = 0
        return tuple(_row(one, counts[one]) for one in taken), left_out


def _row(one: Denial, count: int) -> wire.RenderDenial:
    return wire.RenderDenial(
        reason=one.reason[:96],
        kind=one.kind,
        destination=None if one.host is None else one.host[:300],
        severity=one.severity,
        count=count,
    )
