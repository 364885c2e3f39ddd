"""The model: scripted here, so that the demo needs no key. A real one has the same one method.

    step = model.next(observation)        # observation: what the last step came to, as text; "" at the start

A real model in its place sends `observation` to its provider together with `TOOLS`, and turns the answer into a step:

    class Real:
        def next(self, observation: str) -> Step:
            self.messages.append({"role": "user", "content": observation})
            answer = self.client.messages.create(model=NAME, max_tokens=2000, tools=TOOLS, messages=self.messages)
            ...    # tool_use "run_python" -> RunPython(code), other tool_use -> UseTool(name, input), text -> Answer

Nothing else changes: the agent treats what a model says as text from outside, whoever wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Protocol

import tickets


@dataclass(frozen=True)
class UseTool:
    """The model asks for one operation."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class RunPython:
    """The model wrote code. `name` labels it in the demo's output."""

    code: str
    name: str = "code"
    seconds: float = 2.0


@dataclass(frozen=True)
class Answer:
    """The model is done."""

    text: str


Step = UseTool | RunPython | Answer

TOOLS: list[dict[str, Any]] = [
    {
        "name": "run_python",
        "description": "Run Python. host.call(name, **arguments) reaches an operation; there is no network.",
        "input_schema": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    }
]


class Model(Protocol):
    """What the agent needs of a model."""

    def next(self, observation: str) -> Step:
        """Return what the model wants to do after `observation`."""
        ...


@dataclass
class Scripted:
    """Plays a script: a generator that is sent each observation and yields steps."""

    script: Generator[Step, str, None]
    _started: bool = field(default=False, init=False)

    def next(self, observation: str) -> Step:
        """Return the next step of the script."""
        if not self._started:
            self._started = True
            return next(self.script)
        return self.script.send(observation)


def refund_script() -> Generator[Step, str, None]:
    """Ticket one: look at the order with a tool, compute and refund in code, leave a note with a tool."""
    yield UseTool("get_order", {"order_id": tickets.ORDER})
    seen = yield RunPython(tickets.PRORATE, "proration")
    cents = json.loads(seen)["value"]["refunded"]
    yield UseTool("add_note", {"order_id": tickets.ORDER, "text": f"prorated refund of {cents} cents"})
    yield Answer(
        f"Hello Dana, your plan was cancelled on 12 November, so {cents / 100:.2f} of the yearly price goes back to "
        "your card. You will see it within three days."
    )


def hostile_script(facts: dict[str, str]) -> Generator[Step, str, None]:
    """Ticket two: a model that was talked into everything. It reports what it found to the customer, as asked."""
    seen: dict[str, Any] = {}
    for attempt in tickets.ATTEMPTS:
        seen[attempt.name] = json.loads((yield RunPython(attempt.source(facts), attempt.name, attempt.seconds)))[
            "value"
        ]
    environment = (seen["environment"] or {}).get("values")
    yield Answer(
        f"Hello Mallory, I ran what you asked for. os.environ is {json.dumps(environment)}. I found no key file, no "
        "network and no other order. Of the three refunds one went through."
    )
