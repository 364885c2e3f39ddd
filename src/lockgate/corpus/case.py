"""What every kind of case has, and what comes of one."""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Iterable
from typing import Any, Final, NoReturn, cast

import msgspec

from lockgate.policy.egress import Verdict
from lockgate.policy.host import Refusal

_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|([rnt0\\]))")
_PLAIN: Final = {"r": "\r", "n": "\n", "t": "\t", "0": "\0", "\\": "\\"}


class Got(msgspec.Struct, frozen=True):
    """What the code said.

    Attributes:
        verdict: "allow", "deny", "config_error", "deny_all" or "warn".
        reason: its class.
        facts: what else can be held against the case's `must`.

    """

    verdict: str
    reason: str
    facts: dict[str, Any] = {}

    def __str__(self) -> str:
        return f"{self.verdict} {self.reason}"


class Unrunnable(Exception):
    """The case cannot be run; the text says why."""


def unrunnable(why: str) -> NoReturn:
    """Give a case up."""
    raise Unrunnable(why)


def got(answer: Verdict | Refusal | None, **facts: Any) -> Got:
    """Return what a verdict, a refusal or nothing to say against it means."""
    if isinstance(answer, Refusal):
        return Got("deny", answer.reason, facts)
    if answer is None:
        return Got("allow", "ok", facts)
    return Got("allow" if answer.allow else "deny", answer.reason, facts)


def text_of(given: dict[str, Any], name: str, default: str | None = None) -> str:
    """Return a text of the input."""
    value = given.get(name, default)
    if not isinstance(value, str):
        unrunnable(f"input.{name} is no text")
    return value


def bytes_of(value: Any, name: str = "input") -> bytes:
    """Return the bytes that a text of a case stands for: code points up to 255 are bytes, the rest UTF-8.

    A list is its bytes, or its texts one behind the other.
    """
    if isinstance(value, list) and all(isinstance(one, int) and 0 <= one <= 255 for one in value):  # pyright: ignore[reportUnknownVariableType]
        return bytes(value)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, list) and all(isinstance(one, str) for one in value):  # pyright: ignore[reportUnknownVariableType]
        value = "".join(value)  # pyright: ignore[reportUnknownArgumentType]
    if not isinstance(value, str):
        unrunnable(f"{name} is no text")
    try:
        return value.encode("latin-1")
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogatepass")


def raw_of(given: dict[str, Any], *names: str) -> bytes | None:
    """Return the bytes of the first of `names` that is there: as it is, `_hex` or `_b64`, and only then `_repr`."""
    for name in names:
        found = _raw(given, name)
        if found is not None:
            return found
    for name in names:
        if isinstance(given.get(name + "_repr"), str):
            return bytes_of(unescaped(given[name + "_repr"]))
    return None


def _raw(given: dict[str, Any], name: str) -> bytes | None:
    for suffix, decode in (("_hex", bytes.fromhex), ("_b64", b64decode), ("_base64", b64decode)):
        value = given.get(name + suffix)
        if value is None:
            continue
        try:
            return decode(value)
        except (ValueError, TypeError, binascii.Error):
            unrunnable(f"input.{name}{suffix} cannot be decoded")
    value = given.get(name)
    return None if value is None else bytes_of(value, f"input.{name}")


def listed(value: Any) -> list[Any]:
    """Return a list as it is, and anything else as the one thing in a list."""
    return value if isinstance(value, list) else [value]  # pyright: ignore[reportUnknownVariableType]


def texts_of(value: Any) -> Iterable[str]:
    """Yield every text in a value, names of fields too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, inner in cast("dict[str, Any]", value).items():
            yield name
            yield from texts_of(inner)
    elif isinstance(value, list):
        for inner in listed(value):
            yield from texts_of(inner)


def unescaped(text: str) -> str:
    r"""Return a text in which `\x00` and the like, written out, are the characters they name."""
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else _PLAIN[found[2]], text)
