"""What runs have read, and what was planted in them (E7).

Rule 1: a label is the run's before its result leaves the edge, so no later call is decided without it.
Rule 2: the agent is told that a run is latched before it gets the result that latched it: both go over one link.
Rule 3: a planted value that turns up in an argument or an export ends the run, after its row is durable.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from lockgate.broker.runs import Run
from lockgate.policy import Operation

_WORTH_A_LOOK: Final = re.compile(rb'"[^"]{12,}')
_LONG: Final = 256


def _nobody(run: Run) -> None:
    del run


class Watcher:
    """Keeps labels and looks for planted values. Any thread may call."""

    def __init__(self) -> None:
        self._latched: Callable[[Run], None] = _nobody
        self._end: Callable[[Run], None] = _nobody

    def attach(self, *, latched: Callable[[Run], None], end: Callable[[Run], None]) -> None:
        """Say who is told that a run was latched, and who ends one."""
        self._latched, self._end = latched, end

    def read(self, run: Run, operation: Operation | None) -> None:
        """Take note of a result that `run` is about to be given."""
        if operation is None or (not operation.taints and run.parent is None):
            return
        for one in run.learn(operation.taints):
            self._latched(one)

    def planted(self, run: Run, data: bytes) -> bool:
        """Whether arguments that are about to leave hold a value that was planted in this run."""
        if not run.canary:
            return False
        # Shorter texts cannot hold half of one, in whatever spelling; the common call costs this one look.
        if len(data) < _LONG and not _WORTH_A_LOOK.search(data):
            return False
        return run.needles.hit(data)

    def end(self, run: Run) -> None:
        """End a run in which a planted value turned up."""
        self._end(run)
