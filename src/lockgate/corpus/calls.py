"""Cases about operations whose words leave, called by a run that has read something.

Rule 1: they are judged where they are judged in a run: a registered operation, a compiled scope, `authorize()`.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Final, cast

import msgspec

from lockgate.corpus.arguments import WHO, Done
from lockgate.corpus.case import Got, listed, texts_of
from lockgate.policy import Args, Call, Operations, Scope, Text, authorize, request

_CALL: Final = re.compile(r"\A\s*([A-Za-z_]\w*)\((.*)\)\s*\Z", re.DOTALL)
_PUBLIC: Final = re.compile(
    r"(?i)search|(?<!http[_ -])post(?![_ -]?webhook)|tweet|comment|publish|issue|gist|paste|lookup|browse|fetch"
)
LABELS: Final = ("labels", "seen", "run_labels", "run_reads", "reads", "taints", "taint", "context")
_NAMES: Final = ("tool", "op", "operation", "action")
CALLS: Final = ("query", "call", "args", "sink", *_NAMES)
_ABOUT: Final = frozenset((*LABELS, *_NAMES, "sink", "note"))
# Words of a placeholder such as <secret memo>, which stands for what a run has read.
_TOLD: Final = {
    "private": re.compile(r"(?i)<[^<>]*\b(?:private|confidential|secret|internal|customer|personal|sensitive|inbox)\b"),
    "untrusted": re.compile(r"(?i)<[^<>]*\b(?:untrusted|hostile|attacker\S*|injected|stranger\S*)\b"),
}


class Said(Args):
    """The words that an operation sends."""

    text: Annotated[str, Text(100_000, lines=True)]


def _seen(given: dict[str, Any], text: str) -> frozenset[str]:
    """Return what a run has read: as the case lists it, else as its words tell."""
    told: list[Any] = [given[one] for one in LABELS if one in given]
    if told:
        words = " ".join(_word(one) for part in told for one in _pairs(part))
        return frozenset(label for label in ("private", "untrusted") if re.search(rf"(?i)\b{label}", words))
    found = {label for label in ("private", "untrusted") if label in text.lower()}
    return frozenset(found | {label for label, words in _TOLD.items() if words.search(text)})


def _pairs(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return list(cast("dict[str, Any]", value).items())
    return [("", one) for one in listed(value)]


def _word(pair: tuple[str, Any]) -> str:
    """Return what one label says: `{"private": true}` does, `{"private": false}` does not."""
    name, value = pair
    return name if value is True else "" if value is False else str(value)


def _sink(said: Any, name: str) -> str:
    """Return where the words of an operation go: nowhere, outside, or to strangers."""
    if said is None:
        return "public_sink" if _PUBLIC.search(name) else "sink"
    text = str(said).lower()
    if said is False or re.search(r"\A(?:none|no|model|broker|read|internal|inside)\b", text):
        return "none"
    return "public_sink" if "public" in text or _PUBLIC.search(text) else "sink"


def call(given: dict[str, Any]) -> Got:
    """A call of an operation whose words leave, by a run that has read something."""
    text = next((str(given[one]) for one in CALLS if one in given), "")
    found = _CALL.match(text)
    name = next((str(given[one]) for one in _NAMES if one in given), found[1] if found else "send")
    text = " ".join(texts_of({name: one for name, one in given.items() if name not in _ABOUT}))
    sink = _sink(given.get("sink"), name)
    seen = _seen(given, text)
    operations = Operations()

    def send(call: Call, args: Said) -> Done:
        return Done(ok=bool(call and args))

    operations.operation(effect="read", max_result=100, labels=() if sink == "none" else (sink,))(send)
    scope = Scope(user="u", agent="a", tenant="t", expires=60.0, allow={"send": {}}).compile(operations.seal(), 0.0)
    asked = request(scope, "send", json.dumps({"text": text}).encode(), 1.0)
    verdict = authorize(WHO, msgspec.structs.replace(asked, seen=seen), scope)
    if verdict.effect == "allow":
        return Got("allow", "ok")
    return Got("deny", verdict.reason.partition(":")[0])
