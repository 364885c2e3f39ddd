"""Constraints as closures over typed values.

Rule 1: the type decides at load what can be compared; at call time a value is only compared.
Rule 2: what a comparison cannot take (None for a missing argument) raises, and whoever calls it denies.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any, get_args, get_origin

import msgspec

from lockgate.policy.checks import Field, check_of
from lockgate.policy.constraints import Constraint, refuse

Test = Callable[[Any], object]


def prepare(where: str, constraint: Constraint, field: Field) -> Test:
    """Return the comparison of one constraint with values of one argument.

    Raises:
        ScopeError: it does not fit the argument's type.

    """
    kind: Any = plain(field.annotation)
    element = plain(get_args(kind)[0]) if get_origin(kind) is list else None
    if constraint.kind == "length":
        if kind is not str and element is None:
            refuse(where, "length speaks of text and lists", "use at_most for numbers")
        least, most = typing.cast("tuple[int, int]", constraint.value)
        return lambda value: least <= len(value) <= most
    test = _value_test(where, constraint, kind if element is None else element, field.annotation)
    return test if element is None else lambda values: all(test(value) for value in values)


def _value_test(where: str, constraint: Constraint, kind: Any, annotation: Any) -> Test:
    limit: Any = constraint.value
    match constraint.kind:
        case "one_of":
            return frozenset(_typed(where, limit, annotation)).__contains__
        case "matches":
            if kind is not str:
                refuse(where, "matches speaks of text", "use one_of, at_most or at_least")
            return re.compile(limit).fullmatch
        case _:
            if kind is not int:
                refuse(where, f"{constraint.kind} speaks of whole numbers", "use one_of or matches")
    match constraint.kind:
        case "at_most":
            return lambda value: value <= limit
        case "at_least":
            return lambda value: value >= limit
        case "more_than":
            return lambda value: value > limit
        case _:
            return lambda value: value < limit


def _typed(where: str, values: Iterable[Any], annotation: Any) -> list[Any]:
    """Return the values as the argument's own type has them; one that it could never have is an error."""
    kind: Any = plain(annotation)
    target = get_args(kind)[0] if get_origin(kind) is list else annotation
    rules = [one for one in map(check_of, metas(target)) if one is not None and one.stage == "decode"]
    try:
        typed = [msgspec.convert(value, target, strict=True) for value in values]
        fits = all(value is None or one.refuse(value) is None for value in typed for one in rules)
    except (msgspec.ValidationError, TypeError, AttributeError, UnicodeError):
        fits, typed = False, []
    if not fits:
        refuse(where, "a value of one_of is not of the argument's type", "write values as the argument takes them")
    return typed


def metas(annotation: Any) -> tuple[Any, ...]:
    """Return what stands beside an annotation's type, also where it may be None."""
    origin, arms = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return (*metas(arms[0]), *arms[1:])
    if origin in (typing.Union, types.UnionType):
        return tuple(meta for arm in arms for meta in metas(arm))
    return ()


def plain(annotation: Any) -> Any:
    """Return an annotation without bounds and without None."""
    while True:
        origin = get_origin(annotation)
        if origin is Annotated:
            annotation = get_args(annotation)[0]
        elif origin in (typing.Union, types.UnionType):
            annotation = next(arm for arm in get_args(annotation) if arm is not type(None))
        else:
            return annotation
