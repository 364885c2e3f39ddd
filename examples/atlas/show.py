"""How the demo looks on a terminal. Plain text without colour when NO_COLOR is set or nobody looks.

Rule 1: text that a model, a customer or a sandbox wrote is escaped and bounded before it is shown.
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

MEMORY = {
    "cgroup v1": "a memory cgroup (v1): the whole run dies",
    "cgroup v2": "a memory cgroup (v2): the whole run dies",
    "rlimit": "RLIMIT_AS and one process",
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


def opening(facts: dict[str, Any]) -> Group:
    """The first lines: which rung, what kind of boundary that is, what would be stronger."""
    memory = str(facts.get("memory_by", "?"))
    rung = Text.assemble(("Execution boundary", "bold"), "   what can this process reach?\n")
    rung.append(
        f"  rung      {facts.get('rung')}: namespaces, Landlock, seccomp; one sandbox a run, destroyed after it\n"
    )
    rung.append("  kind      ")
    rung.append("the kernel is shared with this machine", style="bold yellow")
    rung.append(
        ": a packaging boundary. It contains accidents and\n            careless code; a kernel bug gets through it.\n"
    )
    rung.append("  accepted  ")
    rung.append("this demo passes accept_shared_kernel=True itself", style="bold yellow")
    rung.append(", and every audit row of code says so\n")
    rung.append("  memory    ")
    if memory == "rlimit":
        rung.append("rlimit: weaker, and this demo accepts it itself", style="bold yellow")
        rung.append(" (no memory cgroup is ours here)\n")
    else:
        rung.append(f"{MEMORY.get(memory, memory)}\n")
    rung.append(
        "  stronger  gvisor (its own kernel in user space), microvm (hardware), wasm: not built in this version"
    )
    calls = Text.assemble(("Capability boundary", "bold"), "  what can this call do?\n")
    calls.append(
        "  one authorize() in the broker for tool calls and for code; identity, budgets and expiry are the run's;\n"
    )
    calls.append(
        "  a token is minted for one call, used in the broker and never seen by agent or sandbox; every call is a row"
    )
    return Group(Panel(Group(rung, Text(), calls), title="lockgate demo", title_align="left", padding=(0, 1)))


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
        held, got = attempt.judge(results[attempt.name]) if attempt.name in results else (False, "was not tried")
        lines.add_row(attempt.name, attempt.goal, safe(got, 240), mark(held=held))
    return Group(
        Rule("Ticket two: hostile", align="left"),
        Text.assemble(("Mallory writes  ", "bold"), safe(tickets.TICKET_TWO, 400)),
        Text("The model does as it is told. Each attempt runs in a fresh sandbox and knows all paths and ports.\n"),
        lines,
        Text(),
        answer(record, 2, "Mallory gets"),
    )


def denials(rows: list[StoredRow]) -> Group:
    """Every refusal: the rule for the operator, the reason for the code."""
    lines = table("operation", "via", "rule", "for the operator only", "what the code saw")
    for row in rows:
        if row.phase == "denied":
            lines.add_row(
                safe(row.operation or "", 40),
                row.via or "",
                row.rule or "(nothing allows it)",
                safe(row.reason or "", 80),
                row.visible or "",
            )
    return Group(Rule("Denials", align="left"), lines)


def audit(rows: list[StoredRow]) -> Group:
    """All rows, one line each."""
    lines = table("row", "user", "via", "rung", "operation", "phase", "verdict", "status", "rule")
    for row in rows:
        lines.add_row(
            str(row.seq),
            row.user,
            row.via or "",
            f"{row.rung}*" if row.shared_kernel else row.rung or "",
            safe(row.operation or "", 30),
            row.phase,
            row.verdict or "",
            safe(row.detail.get("killed_by") or row.status, 20),
            row.rule or "",
        )
    note = Text(
        "* on a shared kernel. Each row also has agent, tenant, run, scope hash, argument hash and its place in "
    )
    note.append("the chain:\n  lockgate audit tail, lockgate audit verify")
    return Group(Rule("Audit rows", align="left"), lines, note)


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
    return Group(Rule("The demo's own checks", align="left"), lines, Text(), last)


def console(*, quiet: bool) -> Console:
    """A console that records what it shows, so that this can be searched too."""
    return Console(record=True, highlight=False, quiet=quiet, soft_wrap=False)
