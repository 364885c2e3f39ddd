"""The agent's side: links to the processes that hold what the agent must not. Blocking twin: `lockgate.gate.sync`."""

from __future__ import annotations

from lockgate.gate._async.gate import Gate
from lockgate.gate._async.run import Run, RunScope
from lockgate.gate.values import Approval, CallOutcome, Decision

__all__ = ["Approval", "CallOutcome", "Decision", "Gate", "Run", "RunScope"]
