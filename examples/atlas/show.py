"""How the demo looks on a terminal. Plain text without colour when NO_COLOR is set or nobody looks.

Rule 1: text that a model, a customer or a sandbox wrote is escaped and bounded before it is shown; none is markup.
Rule 2: colour repeats what words say; nothing is told by colour alone.
"""

from __future__ import annotations

import json
from typing import Any

import tickets
from judge import Check, Record
from rich.console import Console, Group
from rich.panel import Panel
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from lockgate.audit.rows import StoredRow
from lockgate.gate.escape import escape

RUNGS: dict[str, tuple[str, Any]] = {
    "container": ("namespaces, Landlock, seccomp", ""),
    "wasm": (
        "CPython in WebAssembly, in a process of its own behind namespaces, Landlock and seccomp",
        "code has no system calls at all; its numbers in numpy are 32 bits wide",
    ),
    "gvisor": ("a kernel of its own, in user space", "code never talks to the kernel of this machine"),
    "microvm": ("a virtual machine of its own", "the wall is the processor's"),
}
STRONGER = {
    "microvm": "hardware",
    "gvisor": "a kernel of its own in user space",
    "wasm": "no system calls at all",
}
MEMORY = {
    "store limit": "the size of the guest's memory",
    "cgroup v1": "a memory cgroup (v1); reaching it ends the whole run",
    "cgroup v2": "a memory cgroup (v2); reaching it ends the whole run",
}


def safe(text: object, limit: int = 160) -> str:
    """Return text from outside on one line, escaped and cut."""
    line = escape(str(text))
    return line if len(line) <= limit else line[: limit - 1] + "…"


def mark(*, held: bool) -> Text:
    """A word and a colour."""
    return Text("held", style="green") if held else Text("FAILED", style="bold red")


def table(*columns: str, **options: Any) -> Table:
    """A table that folds long cells instead of cutting them."""
    made = Table(show_edge=False, pad_edge=False, header_style="bold", **options)
    for name in columns:
        made.add_column(name, overflow="fold")
    return made


def grid(*lines: tuple[str, Any]) -> Table:
    """Labels and texts, wrapped beside each other."""
    made = Table.grid(padding=(0, 1))
    made.add_column(style="bold", no_wrap=True, width=8)
    made.add_column()
    for label, text in lines:
        made.add_row(label, text)
    return made


def opening(facts: dict[str, Any], stronger: list[tuple[str, str]] | None) -> Panel:
    """The first lines: which rung, what kind of boundary that is, what would be stronger."""
    rung = str(facts.get("rung"))
    why = "the strongest that ran something on this host" if stronger is not None else "it was asked for by name"
    memory = str(facts.get("memory_by", "?"))
    warn = "bold yellow"
    held = Text(MEMORY.get(memory, memory))
    if memory == "rlimit":
        held = Text("weaker: RLIMIT_AS and one process. This demo accepts that itself", style=warn)
        held.append(", since this user has no memory cgroup; root would get one", style="not bold default")
    lines = [("rung", f"{rung}: {RUNGS[rung][0]}; one sandbox a run, destroyed after it"), ("kind", RUNGS[rung][1])]
    if rung == "container":
        kind = Text("the kernel is shared with this machine", style=warn)
        kind.append(
            ": a packaging boundary. It holds code that goes astray; code with a kernel exploit gets through",
            style="not bold default",
        )
        accepted = Text("accept_shared_kernel=True, passed by this demo itself", style=warn)
        accepted.append("; the audit rows of code say so", style="not bold default")
        lines = [lines[0], ("kind", kind), ("accepted", accepted)]
    elif facts.get("weakness"):
        accepted = Text(f"weaker on this host: {facts['weakness']}", style=warn)
        accepted.append(", accepted by this demo itself; the audit rows of code say so", style="not bold default")
        lines.append(("accepted", accepted))
    lines.append(("memory", held))
    lines.append(("why", why))
    lines += [("stronger", f"{name}: {STRONGER[name]}. To have it: {safe(step, 200)}") for name, step in stronger or ()]
    execution = grid(*lines)
    calls = grid(
        ("decides", "one authorize() in the broker, for tool calls and for code; who, budget and expiry are the run's"),
        ("keys", "a token is minted for one call, used in the broker, never seen by the agent or the sandbox"),
        ("record", "each call is a row of a chained audit log; a write's intent is on the disk before the write"),
    )
    return Panel(
        Group(
            Text("Execution boundary: what can this process reach?", style="bold cyan"),
            execution,
            Text(),
            Text("Capability boundary: what can this call do?", style="bold cyan"),
            calls,
        ),
        title="lockgate demo",
        title_align="left",
    )


def ticket_one(record: Record) -> Group:
    """What the customer wrote, what the model did, what the customer got."""
    steps = table("step", "what", "came to")
    shown: Any = Text()
    for event in record.events:
        if event.get("ticket") != 1:
            continue
        if event["event"] == "tool":
            outcome = event["outcome"]
            asked = f"{event['name']}({', '.join(f'{k}={v}' for k, v in event['arguments'].items())})"
            steps.add_row("tool call", safe(asked), safe(outcome["reason"] or json.dumps(outcome["value"])))
        elif event["event"] == "code":
            calls = ", ".join(call["operation"] for call in event["result"]["calls"])
            steps.add_row("generated code", f"below; calls {safe(calls)}", safe(json.dumps(event["result"]["value"])))
            shown = Panel(
                Syntax(event["code"].rstrip(), "python", theme="ansi_dark", background_color="default", word_wrap=True),
                title="the code, as the model wrote it",
                title_align="left",
                border_style="dim",
            )
    return Group(
        Text(),
        Rule("Ticket one: a refund", align="left"),
        Text.assemble(("Dana writes  ", "bold"), safe(tickets.TICKET_ONE, 400)),
        Text(),
        steps,
        shown,
        answer(record, 1, "Dana gets"),
    )


def answer(record: Record, ticket: int, who: str) -> Text:
    """The reply that left."""
    texts = [one["text"] for one in record.of("answer", ticket)]
    return Text.assemble((f"{who}  ", "bold green"), safe(texts[-1] if texts else "nothing", 300))


def ticket_two(record: Record) -> Group:
    """What the hostile code got for each attempt."""
    results = record.results(2)
    lines = table("attempt", "wants to", "got", "")
    for attempt in tickets.ATTEMPTS:
        held, got = attempt.got(results)
        lines.add_row(attempt.name, attempt.goal, safe(got, 240), mark(held=held))
    return Group(
        Text(),
        Rule("Ticket two: hostile", align="left"),
        Text.assemble(("Mallory writes  ", "bold"), safe(tickets.TICKET_TWO, 400)),
        Text("The model does as it is told. Each attempt runs in a fresh sandbox and knows all paths and ports.\n"),
        lines,
        Text(),
        answer(record, 2, "Mallory gets"),
    )


def denials(rows: list[StoredRow]) -> Group:
    """Every refusal: the rule and the values for the operator, the reason for the code."""
    lines = table("operation", "rule that decided", "for the operator only", "what the code saw")
    for row in rows:
        if row.phase == "denied":
            rule = row.rule or "nothing allows it"
            lines.add_row(safe(row.operation, 40), rule, safe(row.reason or "", 80), row.visible or "")
    return Group(Text(), Rule("Denials", align="left"), lines)


def audit(rows: list[StoredRow]) -> Group:
    """All rows, one line each."""
    lines = table("row", "user", "via", "operation", "what", "rule")
    for row in rows:
        what = {"intent": "intent", "outcome": f"outcome {row.status}", "denied": "denied"}.get(row.phase, row.status)
        killed = row.detail.get("killed_by")
        lines.add_row(
            str(row.seq),
            row.user,
            f"{row.via or '-'}{'*' if row.shared_kernel else ''}",
            safe(row.operation or "-", 24),
            Text(safe(f"killed: {killed}" if killed else what, 20), style="yellow" if row.phase == "denied" else ""),
            row.rule or "",
        )
    note = "* on a kernel shared with this machine. " if any(row.shared_kernel for row in rows) else ""
    note += "Each row also has agent, tenant, run, rung, scope hash, argument hash and its place in the chain. "
    note += "See them again: lockgate audit tail, lockgate audit verify."
    return Group(Text(), Rule("Audit rows", align="left"), lines, Text(note, style="dim"))


def verdict(checks: list[Check], seconds: float) -> Group:
    """The demo's own checks and the last word."""
    lines = table("check", "found", "")
    for check in checks:
        lines.add_row(check.name, safe(check.detail, 300), mark(held=check.held))
    failed = [check.name for check in checks if not check.held]
    if failed:
        last = Text(f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}", style="bold red")
    else:
        last = Text(f"All {len(checks)} checks held, in {seconds:.1f} s.", style="bold green")
        last.append(
            "  What lockgate cannot do: a call that its scope allows runs, as Mallory's one refund shows.", style=""
        )
    return Group(Text(), Rule("The demo's own checks", align="left"), lines, Text(), last)


def console(*, quiet: bool) -> Console:
    """A console that records what it shows, so that this can be searched too."""
    return Console(record=True, highlight=False, markup=False, emoji=False, quiet=quiet, soft_wrap=False)
