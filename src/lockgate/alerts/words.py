"""The words of an alert. They are an output too: destinations, operations and paths in it were chosen by an attacker.

Rule 1: a destination is its host alone, with every dot and colon broken: no program that shows it makes it a link.
Rule 2: at most 80 characters on one line, visible ASCII, and nothing that a linkifier takes for a link.
Rule 3: what goes to a chat is built by the render guard's own emitter, with unfurling off.
"""

from __future__ import annotations

import re
from typing import Any, Final

from lockgate.alerts.dedupe import Alert
from lockgate.alerts.event import Event
from lockgate.render import chat
from lockgate.render.tree import Para, Text
from lockgate.render.visible import clean, defang, find_live, shown_host

CHARS: Final = 80
_BROKEN: Final = re.compile(r"\b(hxxps?)://")
_SHORT: Final = 40
_HOST: Final = 64
_WHY: Final = {
    "first": "denied",
    "critical": "CRITICAL denied",
    "count": "denied again",
    "escalation": "CRITICAL run",
    "each": "denied",
    "overflow": "CRITICAL alerts left out",
    "test": "TEST alert",
    "replay": "denied",
}


def line(alert: Alert) -> str:
    """Return one line of at most 80 characters."""
    event = alert.event
    count = f" x{alert.count}" if alert.count > 1 else ""
    parts = [f"lockgate {_WHY[alert.why]} {word(event.reason, 24)}{count}", where(event), f"by {word(event.agent, 16)}"]
    return _inert(" ".join(part for part in parts if part)[:CHARS])


def where(event: Event) -> str:
    """Return what was asked for: a broken host, or an operation."""
    if not event.host:
        return word(event.operation, _SHORT)
    host = shown_host(event.host)[:_HOST]
    if event.port in {0, 443}:
        return f"hxxps://{host}"
    return f"hxxp://{host}" if event.port == 80 else f"{host}[:]{event.port}"


def word(text: str, limit: int = _SHORT) -> str:
    """Return hostile text as visible ASCII, broken where it could be a link, at most `limit` characters."""
    shown = "".join(char if " " <= char <= "~" else "?" for char in clean(text[: limit * 4])[0])
    return _inert(defang(shown)[:limit])


def facts(alert: Alert) -> list[tuple[str, str]]:
    """Return what a person wants to know, by name, each value as inert as `line`."""
    event = alert.event
    found = [
        ("reason", word(event.reason)),
        ("rule", word(event.rule)),
        ("where", where(event)),
        ("path", word(event.path)),
        ("user", word(event.user)),
        ("agent", word(event.agent)),
        ("run", word(event.run)),
        ("tool", word(event.tool)),
        ("count", str(alert.count)),
        ("audit row", word(event.audit_id)),
    ]
    return [(name, value) for name, value in found if value]


def slack(alert: Alert) -> dict[str, Any]:
    """Return arguments of Slack's chat.postMessage: rich-text elements that no parser reads, unfurling off."""
    blocks = [Para([Text(line(alert))]), Para([Text("  ".join(f"{name}: {value}" for name, value in facts(alert)))])]
    return chat.slack([*blocks])


def inert(text: str) -> bool:
    """Whether no linkifier takes a part of `text` for a link. `hxxps://` is the usual word for a broken one."""
    return find_live(_BROKEN.sub(r"\1 ", text)) is None


def _inert(text: str) -> str:
    """Return `text` with whatever a linkifier would still take for a link broken apart."""
    return text if inert(text) else text.replace(".", " ").replace(":", " ").replace("@", " ")
