"""What a scope says of one argument: data, checked at load, compiled to one closure.

Rule 1: values are compared after typing, never as text.
Rule 2: several bounds on one argument are a conjunction; a bound that does not fit its argument's type is a load error.
Rule 3: a constraint that raises, denies (the caller of `test` sees to that).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from lockgate.contract.errors import ScopeError
from lockgate.policy.checks import Field
from lockgate.policy.types import INT_LIMIT

Test = Callable[[Any], bool]
MAX_PATTERN: Final = 256


class Constraint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Bounds on one argument. All that are set must hold.

    Attributes:
        one_of: the value is one of these.
        at_most, at_least, more_than, less_than: for whole numbers.
        matches: a regular expression that the whole text matches.
        length: greatest length of text (characters) or of a list.

    """

    one_of: tuple[str | int | bool, ...] | None = None
    at_most: int | None = None
    at_least: int | None = None
    more_than: int | None = None
    less_than: int | None = None
    matches: str | None = None
    length: int | None = None

    def __and__(self, other: Constraint) -> Constraint:
        """Return both together.

        Raises:
            ScopeError: both set the same bound.

        """
        merged = dict(_set_fields(self))
        for name, value in _set_fields(other):
            if name in merged:
                raise ScopeError(f"{name} is given twice for one argument", next_step="keep the tighter one")
            merged[name] = value
        return Constraint(**merged)


class Named(NamedTuple):
    """A compiled bound: its name for rules ("at_most") and its test."""

    name: str
    test: Test
    shown: str


def _set_fields(constraint: Constraint) -> list[tuple[str, Any]]:
    names = constraint.__struct_fields__
    return [(name, getattr(constraint, name)) for name in names if getattr(constraint, name) is not None]


def compile_constraint(where: str, field: Field, constraint: Constraint) -> list[Named]:
    """Return the tests of `constraint` for an argument; `where` names the place in messages ("refund.amount").

    Raises:
        ScopeError: a bound does not fit the argument's type, or nothing is bound.

    """
    found = _set_fields(constraint)
    if not found:
        raise ScopeError(f"{where} has an empty constraint", next_step="remove the argument, or bound it")
    return [Named(name, _MAKE[name](where, field, value), repr(value)) for name, value in found]


def _bad(where: str, why: str, step: str) -> ScopeError:
    return ScopeError(f"{where}: {why}", next_step=step)


def _one_of(where: str, field: Field, values: Any) -> Test:
    if not values:
        raise _bad(where, "one_of is empty and would deny every call", "name the values, or leave the operation out")
    typed: set[Any] = set()
    for value in values:
        try:
            typed.add(msgspec.convert(value, field.annotation, strict=True))
        except (msgspec.ValidationError, TypeError):
            raise _bad(where, "a value of one_of is not of the argument's type", f"use {field.base.__name__}") from None
    # True == 1 in Python: the type is compared too.
    pairs = frozenset((type(value), value) for value in typed)
    return lambda value: (type(value), value) in pairs


def _number(compare: Callable[[int], Test]) -> Callable[[str, Field, Any], Test]:
    def make(where: str, field: Field, bound: Any) -> Test:
        if field.base is not int:
            raise _bad(where, "a number bounds an argument that is no whole number", "use one_of, matches or length")
        if abs(bound) > INT_LIMIT:
            raise _bad(where, "the bound is beyond 2**53", "use a smaller number")
        return compare(bound)

    return make


def _at_most(bound: int) -> Test:
    return lambda value: value <= bound


def _at_least(bound: int) -> Test:
    return lambda value: value >= bound


def _more_than(bound: int) -> Test:
    return lambda value: value > bound


def _less_than(bound: int) -> Test:
    return lambda value: value < bound


def _matches(where: str, field: Field, pattern: Any) -> Test:
    if field.base is not str:
        raise _bad(where, "matches bounds an argument that is no text", "use one_of or a number")
    if len(pattern) > MAX_PATTERN or "$" in pattern or any(word in pattern for word in (r"\d", r"\w", r"\s")):
        raise _bad(where, "the pattern is over-long or has $, \\d, \\w or \\s", "write explicit ranges such as [0-9]")
    try:
        found = re.compile(pattern)
    except re.error:
        raise _bad(where, "the pattern is no regular expression", "see the re module of Python") from None
    return lambda value: found.fullmatch(value) is not None


def _length(where: str, field: Field, most: Any) -> Test:
    if field.base not in (str, list):
        raise _bad(where, "length bounds an argument that is neither text nor a list", "use one_of or a number")
    if most < 0:
        raise _bad(where, "a negative length", "use a number from 0 on")
    return lambda value: len(value) <= most


_MAKE: Final[dict[str, Callable[[str, Field, Any], Test]]] = {
    "one_of": _one_of,
    "at_most": _number(_at_most),
    "at_least": _number(_at_least),
    "more_than": _number(_more_than),
    "less_than": _number(_less_than),
    "matches": _matches,
    "length": _length,
}


# ---- how a person writes them -------------------------------------------------------------------------------------
def one_of(*values: str | int | bool) -> Constraint:
    """The value is one of these, compared with its type."""
    return Constraint(one_of=values)


def at_most(bound: int) -> Constraint:
    """A whole number of at most `bound`."""
    return Constraint(at_most=bound)


def at_least(bound: int) -> Constraint:
    """A whole number of at least `bound`."""
    return Constraint(at_least=bound)


def more_than(bound: int) -> Constraint:
    """A whole number above `bound`."""
    return Constraint(more_than=bound)


def less_than(bound: int) -> Constraint:
    """A whole number below `bound`."""
    return Constraint(less_than=bound)


def matches(pattern: str) -> Constraint:
    """Text that matches the whole of `pattern` (explicit ranges only)."""
    return Constraint(matches=pattern)


def length(most: int) -> Constraint:
    """Text or a list of at most this length."""
    return Constraint(length=most)
