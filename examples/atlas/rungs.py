"""Which rung the demo runs on: the strongest that stands on this host, found by running something on it.

Rule 1: a rung counts when a run on it came back, whole or on an older runtime, which the demo accepts in the open. An
        emulated machine does not count: it is no boundary.
Rule 2: what is stronger than the one that is used is named, with the command that brings it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import lockgate as lg

ORDER: Final = ("microvm", "gvisor", "wasm")
ACCEPTED: Final = ("old runtime",)
SECONDS: Final = 20.0


def strongest(folder: Path, say: Callable[[str], object]) -> tuple[str, list[tuple[str, str]]]:
    """Return the rung to use, and for each stronger one what would bring it.

    Args:
        folder: an empty directory for the audit log of the tries.
        say: told what is being tried.

    """
    lacking: list[tuple[str, str]] = []
    config = {"audit": {"path": str(folder / "tries.db")}, "execution": {"pool": 0, "bounds": {"wall": SECONDS}}}
    scope = lg.Scope(user="demo", agent="demo", tenant="demo", expires=lg.minutes(10), allow={})
    with lg.sync.Gate(config) as gate, gate.run_scope(scope) as run:
        for rung in ORDER:
            say(f"looking for the strongest rung that runs here: {rung}")
            try:
                if run.code("6 * 7", rung=rung, accept_weaker=ACCEPTED).value == 42:
                    return rung, lacking
            except lg.LockgateError as error:
                lacking.append((rung, error.next_step))
            else:
                lacking.append((rung, "see: lockgate doctor"))
    return "container", lacking
