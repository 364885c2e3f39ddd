"""Audit rows of what the render guard refused in the agent's process.

Rule 1: who and which run come from the open run, never from the message.
Rule 2: a destination is defanged here again: no program that shows the log makes it live.
"""

from __future__ import annotations

from typing import Final

from lockgate.audit.rows import Row
from lockgate.broker.attachment import row
from lockgate.broker.runs import Origin, Run
from lockgate.contract import wire

_NOBODY: Final = Origin("tool")
LEFT_OUT: Final = "left_out"


def render_rows(run: Run, message: wire.RenderDenied) -> list[Row]:
    """Return one row for each denial, and one for those that were left out."""
    operation = f"render.{message.sink}"

    def made(reason: str, detail: dict[str, str | int]) -> Row:
        return row(
            run,
            _NOBODY,
            "render",
            operation,
            verdict="deny",
            rule=f"render.{reason}",
            reason=reason,
            status="denied",
            detail={"sink": message.sink, **detail},
        )

    rows = [
        made(
            one.reason,
            {
                "kind": one.kind,
                "severity": one.severity,
                "count": one.count,
                **({} if one.destination is None else {"destination": defanged(one.destination)}),
            },
        )
        for one in message.denials
    ]
    if message.left_out:
        rows.append(made(LEFT_OUT, {"count": message.left_out}))
    return rows


def defanged(host: str) -> str:
    """Return a host with every dot and colon broken; one that is broken already stays as it is."""
    for mark in ".:":
        host = host.replace(f"[{mark}]", mark).replace(mark, f"[{mark}]")
    return host
