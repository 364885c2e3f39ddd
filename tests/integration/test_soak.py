"""The short soak: mixed runs at full rate, broker and supervisor killed at random moments (X10, C5)."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

import soak


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_nothing_is_left_and_every_run_has_an_end() -> None:
    report = asyncio.run(soak.soak(runs=3000, seconds=40, kills=4, seed=7))
    ends = Counter(report["ends"])
    killed = sum(count for end, count in ends.items() if end.startswith("killed"))
    assert report["left"] == {}
    assert report["audit"]["ok"]
    assert killed >= 2, "the soak proves nothing if nothing was killed"
    assert sum(ends.values()) - killed == report["runs"]
    assert set(ends) <= {
        "ok", "error", "wall", "cpu", "memory", "disk", "processes", "output", "protocol",
        "ProcessDied", "HostFault", "killed the broker", "killed the supervisor",
    }  # fmt: skip
