"""Scopes as JSON and TOML text. Pure: text in, data out, and back.

Rule 1: a duplicate key is an error, not the last one's victory.
Rule 2: a scope is at most 1 MiB; depth is what the form of a scope needs and no more.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from typing import Any, Final, NoReturn, cast

from lockgate.contract.errors import ScopeError

MAX_BYTES: Final = 1024 * 1024


def from_json(text: str | bytes) -> Any:
    """Decode JSON.

    Raises:
        ScopeError: not UTF-8, not JSON, a duplicate key, NaN, too large or too deep.

    """
    decoded = _text(text)
    try:
        return json.loads(decoded, object_pairs_hook=_pairs, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        _refuse("it is no JSON" + (f" (line {line})" if line else ""), "write one JSON object")


def from_toml(text: str | bytes) -> Any:
    """Decode TOML.

    Raises:
        ScopeError: not UTF-8, not TOML (a duplicate key is none), too large or too deep.

    """
    decoded = _text(text)
    try:
        return tomllib.loads(decoded)
    except (ValueError, RecursionError):
        _refuse("it is no TOML", "write user, agent, tenant, expires and [allow.OPERATION] tables")


def to_toml(data: dict[str, Any]) -> str:
    """Encode the data of a scope.

    Raises:
        ScopeError: it holds None.

    """
    lines = [f"{name} = {_value(value)}" for name, value in data.items() if not isinstance(value, dict)]
    for name in ("allow", "deny"):
        if isinstance(data.get(name), dict):
            lines += ["", f"[{name}]"]
            lines += [f"{_quoted(key)} = {_value(value)}" for key, value in data[name].items()]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if value is None:
        _refuse("TOML has no word for None", "write this scope as JSON")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, dict):
        pairs = [f"{_quoted(key)} = {_value(item)}" for key, item in cast("dict[str, Any]", value).items()]
        return "{ " + ", ".join(pairs) + " }" if pairs else "{}"
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in cast("Iterable[Any]", value)) + "]"
    return repr(value)


def _quoted(text: str) -> str:
    # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _text(text: object) -> str:
    if not isinstance(text, str | bytes | bytearray):
        _refuse("it is no text", "read the file first")
    if len(text) > MAX_BYTES:
        _refuse(f"it is larger than {MAX_BYTES} bytes", "name the few operations that the task needs")
    if isinstance(text, str):
        return text
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        _refuse("it is not UTF-8", "save it as UTF-8")


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        _refuse("a key stands twice", "write each key once")
    return found


def _constant(name: str) -> NoReturn:
    _refuse(f"{name} is no number", "write whole numbers")


def _refuse(what: str, instead: str) -> NoReturn:
    raise ScopeError(f"scope: {what}", next_step=instead)
