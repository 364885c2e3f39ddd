"""Reads the rules of a scope from plain data (JSON, TOML, or what crossed a process boundary).

Rule 1: an unknown word is an error with the nearest known one; a value of another form names its place.
Rule 2: data goes through the same constructors as Python code, so there is one set of checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from lockgate.contract.errors import ScopeError
from lockgate.policy.constraints import (
    KINDS,
    Budget,
    Conditions,
    Constraint,
    When,
    Where,
    at_least,
    at_most,
    budget,
    layers,
    length,
    less_than,
    matches,
    more_than,
    nearest,
    one_of,
    refuse,
)


def where_from_data(where: str, data: object) -> Where:
    """Read the rule of one operation."""
    if isinstance(data, Where):
        return data
    table = _table(where, data)
    limit = table.pop("budget", None)
    asked = table.pop("approve", [])
    approve = tuple(when_from_data(f"{where}.approve", one) for one in layers(asked))
    return Where(_conditions_from_data(where, table), _budget(f"{where}.budget", limit), approve)


def when_from_data(where: str, data: object) -> When:
    """Read one condition."""
    if isinstance(data, When):
        return data
    return When(_conditions_from_data(where, _table(where, data)))


def _conditions_from_data(where: str, table: dict[str, Any]) -> Conditions:
    found: Conditions = {}
    for name, data in table.items():
        held: list[Constraint] = []
        for layer in layers(data):
            if isinstance(layer, Constraint):
                held.append(layer)
            else:
                kinds = _table(f"{where}.{name}", layer)
                held += [_constraint(f"{where}.{name}", kind, value) for kind, value in kinds.items()]
        if not held:
            refuse(f"{where}.{name}", "holds no constraint", "leave the argument out, or constrain it")
        found[name] = tuple(dict.fromkeys(held))
    return found


def _constraint(where: str, kind: str, value: Any) -> Constraint:
    if kind not in KINDS:
        refuse(where, f"there is no constraint {kind[:40]!r}", nearest(kind, KINDS))
    try:
        if kind == "one_of":
            return one_of(*_list(where, value))
        if kind == "length":
            least, most = _list(where, value)
            return length(most, least)
        if kind == "matches":
            return matches(value)
        return _NUMERIC[kind](value)
    except ScopeError as error:
        raise ScopeError(f"scope {where}: {error.message}", next_step=error.next_step) from None
    except (TypeError, ValueError):
        refuse(
            where, f"{kind} has a value of the wrong form", "length is [least, most], one_of a list, others one value"
        )


_NUMERIC: Final = {"at_most": at_most, "at_least": at_least, "more_than": more_than, "less_than": less_than}


def _budget(where: str, data: object) -> Budget | None:
    if data is None or isinstance(data, Budget):
        return data
    table = _table(where, data)
    for name in table:
        if name not in {"calls", "total"}:
            refuse(where, f"there is no {name[:40]!r}", nearest(name, ("calls", "total")))
    return budget(calls=table.get("calls"), total=_table(f"{where}.total", table.get("total", {})))


def _table(where: str, data: object) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        refuse(where, "is no table", "write names and values")
    table = cast("Mapping[object, Any]", data)
    if not all(isinstance(key, str) for key in table):
        refuse(where, "has a key that is no text", "write names and values")
    return dict(cast("Mapping[str, Any]", table))


def _list(where: str, data: object) -> list[Any]:
    if not isinstance(data, list | tuple):
        refuse(where, "is no list", "write [a, b]")
    return list(cast("Sequence[Any]", data))
