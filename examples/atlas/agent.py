"""Atlas, the agent: its own process, which reads tickets, asks a model and does what lockgate lets it do.

It runs the way such workers run: with keys in its environment that somebody put there. lockgate needs none of them.
It prints one JSON line for each thing that happened; `demo.py` reads them.

Rule 1: what a model says is text from outside. A tool call and generated code go through the same run scope.
Rule 2: this process imports neither the operations nor a secret: it knows names, not functions.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import tickets
from model import Answer, Model, RunPython, Scripted, UseTool, hostile_script, refund_script

import lockgate as lg
from lockgate.config import load

SCOPES = {
    1: lg.Scope(
        user="dana",
        agent="atlas",
        tenant="acme",
        expires=lg.minutes(10),
        allow={
            "get_order": lg.where(order_id=lg.one_of(tickets.ORDER)),
            "refund": lg.where(
                order_id=lg.one_of(tickets.ORDER),
                amount=lg.at_most(100_00),
                budget=lg.budget(calls=1, total={"amount": 100_00}),
            ),
            "add_note": lg.where(order_id=lg.one_of(tickets.ORDER), budget=lg.budget(calls=2)),
        },
    ),
    2: lg.Scope(
        user="mallory",
        agent="atlas",
        tenant="acme",
        expires=lg.minutes(10),
        allow={
            "get_order": {},
            "refund": lg.where(
                order_id=lg.one_of(tickets.HOSTILE_ORDER),
                amount=lg.at_most(tickets.HOSTILE_CAP),
                budget=lg.budget(calls=10, total={"amount": tickets.HOSTILE_TOTAL}),
            ),
        },
    ),
}


def say(event: str, **more: Any) -> None:
    """Print one event."""
    print(msgspec.json.encode({"event": event, **more}).decode(), flush=True)


def open_descriptors() -> int:
    """How many descriptors this process has."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def handle(run: lg.Run, number: int, model: Model) -> None:
    """Work on one ticket until the model answers."""
    observation = ""
    while True:
        step = model.next(observation)
        if isinstance(step, UseTool):
            outcome = await run.try_call(step.name, **step.arguments)
            say("tool", ticket=number, name=step.name, arguments=step.arguments, outcome=outcome)
            observation = json.dumps({"value": outcome.value, "refused": outcome.reason})
        elif isinstance(step, RunPython):
            result = await run.code(step.code, timeout=step.seconds)
            say("code", ticket=number, name=step.name, code=step.code, result=result)
            observation = json.dumps({"value": result.value, "stdout": result.stdout[-2000:]})
        elif isinstance(step, Answer):
            say("answer", ticket=number, text=step.text)
            return


async def work(state: Path, facts: dict[str, str]) -> None:
    """Handle both tickets."""
    config = load(state / "lockgate.toml")
    # The demo accepts two weaknesses of the host itself, and says so on its first lines: the shared kernel where no
    # stronger rung runs, and, where no memory cgroup can be had (most plain users), a limit on address space instead.
    shared = config.execution.rung == "container"
    execution = msgspec.structs.replace(config.execution, memory="rlimit", accept_shared_kernel=shared)
    async with lg.Gate(msgspec.structs.replace(config, execution=execution)) as gate:
        say("ready", facts=gate.facts["supervisor"])
        for number, script in ((1, refund_script()), (2, hostile_script(facts))):
            async with gate.run_scope(SCOPES[number]) as run:
                await handle(run, number, Scripted(script))


def main() -> int:
    """Arguments: the state directory, a JSON object of facts for the hostile code, and what to break, if anything."""
    facts = {**json.loads(sys.argv[2]), "pid": str(os.getpid())}
    before = open_descriptors()
    try:
        asyncio.run(work(Path(sys.argv[1]), facts))
    except lg.LockgateError as error:
        say("failed", code=error.code, fault=error.fault, message=str(error), exit_code=error.exit_code)
        return error.exit_code
    if sys.argv[3] == "process":  # what the demo's own check must find
        subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    say("closed", descriptors=[before, open_descriptors()], operations_imported="operations" in sys.modules)
    return 0


if __name__ == "__main__":
    sys.exit(main())
