"""The agent's side: links to the processes that hold what the agent must not. Blocking twin: `lockgate.gate.sync`.

Names load at first use: neither the blocking twin nor the command line pays for asyncio.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from lockgate.gate._async.gate import Gate as Gate
    from lockgate.gate._async.run import Run as Run
    from lockgate.gate._async.run import RunScope as RunScope
    from lockgate.gate.values import Approval as Approval
    from lockgate.gate.values import CallOutcome as CallOutcome
    from lockgate.gate.values import Decision as Decision

_HOME: Final[dict[str, str]] = {
    "Approval": "lockgate.gate.values",
    "CallOutcome": "lockgate.gate.values",
    "Decision": "lockgate.gate.values",
    "Gate": "lockgate.gate._async.gate",
    "Run": "lockgate.gate._async.run",
    "RunScope": "lockgate.gate._async.run",
}

if not TYPE_CHECKING:  # a checker would take any name for a public one

    def __getattr__(name: str) -> Any:
        module = _HOME.get(name)
        if module is None:
            raise AttributeError(f"module 'lockgate.gate' has no attribute {name!r}")
        return getattr(importlib.import_module(module), name)
