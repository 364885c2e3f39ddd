"""The words of a scope: constraints, budgets and conditions, as plain data.

Rule 1: a constraint compares typed values, never text with numbers; what it cannot compare is a load error, and what
        raises while comparing denies.
Rule 2: several constraints on one argument all hold (conjunction). There is no "or": that is what one_of is for.
Rule 3: on a list, `length` speaks of the list and every other constraint of each element.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NoReturn, cast, get_args

import msgspec

from lockgate.contract.errors import ScopeError
from lockgate.policy import patterns

Kind = Literal["one_of", "at_most", "at_least", "more_than", "less_than", "matches", "length"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
Scalar = str | int | bool | None
Value = tuple[Scalar, ...] | int | str
MAX_VALUES: Final = 10_000
MAX_NUMBER: Final = 2**53


def refuse(where: str, what: str, instead: str) -> NoReturn:
    """Raise the typed refusal of a scope."""
    raise ScopeError(f"scope {where}: {what}" if where else f"scope: {what}", next_step=instead)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the next step for a name that is not known."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, 1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"use one of: {', '.join(known)}" if known else "there is none to name here"


class Constraint(msgspec.Struct, frozen=True):
    """One comparison. `value`: the set of `one_of`, (least, most) of `length`, else the number or pattern."""

    kind: Kind
    value: Value

    def to_data(self) -> Any:
        """Return the value as JSON has it."""
        return list(self.value) if isinstance(self.value, tuple) else self.value


Conditions = dict[str, tuple[Constraint, ...]]


class Budget(msgspec.Struct, frozen=True):
    """How much of an operation a run may use. `calls`: number of calls; `total`: greatest sum per argument."""

    calls: int | None = None
    total: dict[str, int] = {}

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        data: dict[str, Any] = {} if self.calls is None else {"calls": self.calls}
        return data | ({"total": dict(sorted(self.total.items()))} if self.total else {})

    def narrow(self, other: Budget | None) -> Budget:
        """Return the budget that is as small as the smaller of both, item by item."""
        if other is None:
            return self
        calls = [one.calls for one in (self, other) if one.calls is not None]
        total = dict(self.total)
        for name, limit in other.total.items():
            total[name] = min(limit, total.get(name, limit))
        return Budget(min(calls, default=None), total)


class When(msgspec.Struct, frozen=True):
    """A condition on a call: all constraints hold. Without any it always holds."""

    arguments: Conditions = {}

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return conditions_to_data(self.arguments)


class Where(msgspec.Struct, frozen=True):
    """How one operation is allowed."""

    arguments: Conditions = {}
    budget: Budget | None = None
    approve: tuple[When, ...] = ()

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        data = conditions_to_data(self.arguments)
        if self.budget is not None:
            data["budget"] = self.budget.to_data()
        if self.approve:
            data["approve"] = [one.to_data() for one in self.approve]
        return data

    def narrow(self, other: Where) -> Where:
        """Return what both allow: all constraints, the smaller budgets, and approval where either asks."""
        merged = dict(self.arguments)
        for name, more in other.arguments.items():
            merged[name] = tuple(dict.fromkeys((*merged.get(name, ()), *more)))
        budget = other.budget if self.budget is None else self.budget.narrow(other.budget)
        approve = self.approve + tuple(one for one in other.approve if one not in self.approve)
        return Where(merged, budget, approve)


# ---- what a person writes ------------------------------------------------------------------------------------
def one_of(*values: Scalar) -> Constraint:
    """Allow exactly these values.

    Raises:
        ScopeError: there is none, or one is not text, a whole number, a truth value or None.

    """
    if not values:
        refuse("one_of()", "an empty set allows nothing", "name the values, or leave the operation out of allow")
    if len(values) > MAX_VALUES or not all(value is None or type(value) in (str, int, bool) for value in values):
        refuse("one_of()", "a value is no text, whole number or truth value", "write plain values, each for itself")
    for value in values:
        if type(value) is int:
            _number("one_of()", value)
    unique = {(type(value).__name__, value): value for value in values}
    return Constraint("one_of", tuple(unique[key] for key in sorted(unique, key=repr)))


def at_most(number: int) -> Constraint:
    """Allow numbers up to and including this one."""
    return Constraint("at_most", _number("at_most", number))


def at_least(number: int) -> Constraint:
    """Allow numbers from this one on."""
    return Constraint("at_least", _number("at_least", number))


def more_than(number: int) -> Constraint:
    """Allow numbers above this one."""
    return Constraint("more_than", _number("more_than", number))


def less_than(number: int) -> Constraint:
    """Allow numbers below this one."""
    return Constraint("less_than", _number("less_than", number))


def matches(pattern: str) -> Constraint:
    r"""Allow text that the pattern (Python's `re`) matches as a whole.

    Raises:
        ScopeError: the pattern uses `$`, `\d` and their like, or could take exponential time.

    """
    trouble = patterns.problem(pattern) if type(pattern) is str else "is no text"
    if trouble is not None:
        refuse(
            "matches()", f"the pattern {trouble}", "write explicit ranges such as [0-9]{1,12}, without nested repeats"
        )
    return Constraint("matches", pattern)


def length(most: int, least: int = 0) -> Constraint:
    """Allow text or lists of `least` to `most` characters or elements."""
    if not 0 <= _number("length", least) <= _number("length", most):
        refuse("length()", f"{least} to {most} is no range", "write length(most, least)")
    return Constraint("length", (least, most))


def budget(*, calls: int | None = None, total: Mapping[str, int] | None = None) -> Budget:
    """Limit the number of calls and the sum of arguments over all calls of the run."""
    if total is not None and not isinstance(total, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse("budget()", "total is no table", 'write total={"amount": 5000}')
    total = dict(total or {})
    if calls is None and not total:
        refuse("budget()", "it limits nothing", "give calls=, total= or both")
    for name, limit in (*total.items(), ("calls", 0 if calls is None else calls)):
        if _number(f"budget {name}", limit) < 0:
            refuse(f"budget {name}", "a budget below zero", "give zero or more")
    return Budget(calls, total)


def when(**arguments: Constraint | Sequence[Constraint]) -> When:
    """Describe calls for which all constraints hold; without any: all calls."""
    return When(_conditions("when()", arguments))


def where(
    *,
    budget: Budget | None = None,
    approve: When | Sequence[When] | None = None,
    **arguments: Constraint | Sequence[Constraint],
) -> Where:
    """Allow an operation for calls whose arguments satisfy every constraint.

    Args:
        budget: what all calls of the run may use together.
        approve: calls for which a person must agree first; several conditions: any of them.
        arguments: constraints by argument name; a list of them all hold.

    """
    asked = [one for one in layers(() if approve is None else approve) if isinstance(one, When)]
    if len(asked) != len(layers(() if approve is None else approve)) or type(budget) not in (Budget, type(None)):
        refuse("where()", "approve and budget have their own words", "write approve=when(...), budget=budget(...)")
    return Where(_conditions("where()", arguments), budget, tuple(asked))


def minutes(number: float) -> float:
    """Return seconds."""
    if type(number) not in (int, float):
        refuse("minutes()", "is given no number", "write minutes(10)")
    return number * 60.0


# ---- data ----------------------------------------------------------------------------------------------------
def conditions_to_data(conditions: Conditions) -> dict[str, Any]:
    """Return conditions as JSON has them: a mapping of kinds, or a list where a kind stands twice."""
    data: dict[str, Any] = {}
    for name, held in sorted(conditions.items()):
        one_each = {c.kind: c.to_data() for c in held}
        data[name] = (
            dict(sorted(one_each.items())) if len(one_each) == len(held) else [{c.kind: c.to_data()} for c in held]
        )
    return data


def layers(data: object) -> list[object]:
    """Return several layers, or one as a list of itself."""
    return list(cast("Sequence[object]", data)) if isinstance(data, list | tuple) else [data]


def _conditions(where: str, arguments: Mapping[str, Constraint | Sequence[Constraint]]) -> Conditions:
    found: Conditions = {}
    for name, given in arguments.items():
        held = [one for one in layers(given) if isinstance(one, Constraint)]
        if not held or len(held) != len(layers(given)):
            refuse(where, f"{name} is not given a constraint", f'write {name}=one_of("value")')
        found[name] = tuple(dict.fromkeys(held))
    return found


def _number(where: str, number: object) -> int:
    if type(number) is not int or abs(number) > MAX_NUMBER:
        refuse(where, f"{_shown(number)} is no whole number within 2**53", "money is in cents, without fractions")
    return number


def _shown(value: object) -> str:
    # Python does not write out an int of more than 4,300 digits (sys.set_int_max_str_digits).
    return "a very large one" if type(value) is int and value.bit_length() > 256 else str(value)[:40]
