"""What every bench shares: interleaved samples, medians, and the row that is printed.

Rule 1: a figure is a ratio to a named reference sampled in the same run, turn by turn, so that a slow minute of the
        machine hits both.
Rule 2: nothing is dropped and nothing is smoothed: median and p99 of all counted samples.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

BARE_PYTHON = "python -I -S -c pass"


def base_python() -> str:
    """The interpreter without its virtual environment: the one that sandboxes use too."""
    return getattr(sys, "_base_executable", sys.executable)


def bare_python() -> float:
    """Seconds of one unsandboxed `python -I -S -c pass`, start to reaped."""
    began = time.perf_counter()
    subprocess.run([base_python(), "-I", "-S", "-c", "pass"], check=True, env={}, close_fds=True)
    return time.perf_counter() - began


def interleave(count: int, *sources: Callable[[], float], warmup: int = 5) -> list[list[float]]:
    """Sample each source in turn, `count` times after `warmup` uncounted turns."""
    samples: list[list[float]] = [[] for _ in sources]
    for turn in range(warmup + count):
        for source, kept in zip(sources, samples, strict=True):
            value = source()
            if turn >= warmup:
                kept.append(value)
    return samples


def p99(samples: list[float]) -> float:
    """The 99th percentile (nearest rank)."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


def row(
    figure: str,
    samples: list[float],
    *,
    unit: str,
    bar: float,
    reference: str | None = None,
    against: list[float] | None = None,
    at_most: bool = True,
) -> dict[str, Any]:
    """One line of the table. With `against` the bar is on the ratio of medians, else on the median itself."""
    median = statistics.median(samples)
    ratio = median / statistics.median(against) if against else None
    judged = median if ratio is None else ratio
    return {
        "id": figure,
        "median": median,
        "p99": p99(samples),
        "unit": unit,
        "reference": reference,
        "ratio": ratio,
        "bar": bar,
        "holds": judged <= bar if at_most else judged >= bar,
    }


def emit(*rows: dict[str, Any]) -> None:
    """Print rows as JSON lines, which `bench/run.py` collects."""
    for one in rows:
        print(json.dumps(one), flush=True)
