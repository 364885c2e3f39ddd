"""Runs files of cases against the real policy, the real gateway code and the real render guard.

Rule 1: a case is data from somewhere else. Whatever is in it, running it opens no connection and asks no resolver.
Rule 2: a line that cannot be run is a failure with its reason, never a crash and never skipped.
"""

from __future__ import annotations

from lockgate.corpus.runner import Report, run_cases, run_lines
from lockgate.render.corpus import Outcome

__all__ = ["Outcome", "Report", "run_cases", "run_lines"]
