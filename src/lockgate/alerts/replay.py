"""The alerts that an audit log stands for. Reads rows; holds no key and tells nobody."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from lockgate.alerts.dedupe import Alert, key_of
from lockgate.alerts.event import classify
from lockgate.alerts.follow import Follower


def replay(audit: Path, *, after: int, run: str | None) -> Iterator[Alert]:
    """Yield an alert for each denial behind row `after`, of one run or of all."""
    follower = Follower(audit)
    seq = after
    try:
        while found := follower.after(seq):
            for read in found:
                event = None if read.row is None else classify(read.row)
                if event is not None and run in {None, event.run}:
                    yield Alert(
                        uid=f"replay-{event.audit_id}",
                        key=key_of(event),
                        why="replay",
                        event=event,
                        count=event.count,
                        since=event.at,
                        at=time.time(),
                    )
            seq = found[-1].seq
    finally:
        follower.close()
