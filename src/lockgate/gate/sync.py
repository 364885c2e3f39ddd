"""The blocking twin: the same names, the same deadlines, no event loop and no thread of its own."""

from __future__ import annotations

from lockgate.gate._sync.gate import Gate
from lockgate.gate._sync.run import Run, RunScope

__all__ = ["Gate", "Run", "RunScope"]
