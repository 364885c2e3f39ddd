"""From a scope as data to closures that decide in microseconds.

Rule 1: everything that can be wrong with a scope is wrong here, before a run opens.
Rule 2: a child's rule is its parent's tests and its own, joined: for every call, child allows => parent allows.
Rule 3: no clock is read; `now` and `call.at` come in, in monotonic seconds.
"""

from __future__ import annotations

import difflib
import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from lockgate.contract.errors import ScopeError
from lockgate.policy.constraints import Constraint, Test, compile_constraint
from lockgate.policy.registry import Operation, Operations
from lockgate.policy.scope import Budget, Scope, Where, as_where
from lockgate.policy.types import INT_LIMIT

_levels: Final = itertools.count(1)


class Predicate(NamedTuple):
    """One bound on one argument: the rule's name, the pointer to the argument, how to get and test it."""

    rule: str
    path: str
    get: Callable[[Any], Any]
    test: Test
    shown: str


class Sum(NamedTuple):
    """A budget: its key, its limit and how to get what one call takes (None = one call)."""

    key: tuple[str, str, str]
    limit: int
    get: Callable[[Any], int] | None


class Rule(NamedTuple):
    """All that is asked of a call of one operation. `approvals` is a list of conditions; one that holds suffices."""

    predicates: tuple[Predicate, ...]
    sums: tuple[Sum, ...]
    approvals: tuple[tuple[Predicate, ...], ...]


class CompiledScope:
    """A scope that can decide. Build it with `Scope.compile` or `narrow`.

    Attributes:
        operations: names that may be called, with their rules.
        expires_at: monotonic seconds.
        hash: SHA-256 of the scope's canonical form.
        scope: the data it was compiled from.

    """

    __slots__ = ("_ops", "denied", "expires_at", "hash", "operations", "scope")

    def __init__(
        self, scope: Scope, ops: Operations, operations: dict[str, Rule], denied: frozenset[str], expires_at: float
    ) -> None:
        self.scope = scope
        self.operations = operations
        self.denied = denied
        self.expires_at = expires_at
        self.hash = scope.hash
        self._ops = ops

    def narrow(self, child: Scope, now: float) -> CompiledScope:
        """Compile `child` beneath this scope: both sets of tests, both budgets, the earlier end.

        `child` may be a bare scope or one that already names this one's data as its parent.

        Raises:
            ScopeError: it speaks for somebody else, or names what this scope does not allow.

        """
        mine = self.scope
        if (child.user, child.agent, child.tenant) != (mine.user, mine.agent, mine.tenant):
            raise ScopeError("a child scope names another user, agent or tenant", next_step="use Scope.narrow")
        bare = Scope(
            user=child.user, agent=child.agent, tenant=child.tenant, expires=child.expires, allow=child.allow,
            deny=child.deny, parent=mine,
        )  # fmt: skip
        return _level(bare, self._ops, now, self)


def compile_scope(scope: Scope, ops: Operations, now: float) -> CompiledScope:
    """Compile a scope and the chain it narrows; see `Scope.compile`."""
    if scope.parent is None:
        return _level(scope, ops, now, None)
    return compile_scope(scope.parent, ops, now).narrow(scope, now)


def _level(scope: Scope, ops: Operations, now: float, above: CompiledScope | None) -> CompiledScope:
    level = str(next(_levels))  # budgets of one narrowing are its own, also beside a twin
    rules: dict[str, Rule] = {}
    known = ops.names()
    for name in (*scope.allow, *scope.deny):
        if ops.get(name) is None:
            raise ScopeError(f"there is no operation {name!r}", next_step=_nearest(name, known))
        if above is not None and name in scope.allow and name not in above.operations:
            raise ScopeError(f"{name} is not in the parent's scope", next_step="a child can only narrow")
    for name, given in scope.allow.items():
        found = ops.get(name)
        if found is None or name in scope.deny:
            continue
        rule = _rule(found, as_where(name, given), level)
        if above is not None:
            parent = above.operations[name]
            rule = Rule(parent.predicates + rule.predicates, parent.sums + rule.sums, parent.approvals + rule.approvals)
        rules[name] = rule
    denied = frozenset(scope.deny)
    expires_at = now + scope.expires
    if above is not None:
        denied |= above.denied
        expires_at = min(expires_at, above.expires_at)
    return CompiledScope(scope, ops, rules, denied, expires_at)


def _rule(op: Operation, where: Where, level: str) -> Rule:
    predicates = tuple(_predicates(op, where.args, ""))
    approvals: tuple[tuple[Predicate, ...], ...] = ()
    if where.approve is True:
        approvals = ((),)
    elif where.approve:
        approvals = (tuple(_predicates(op, where.approve, "approve.")),)
    return Rule(predicates, tuple(_sums(op, where.budget, level)), approvals)


def _predicates(op: Operation, args: dict[str, Constraint], prefix: str) -> Iterable[Predicate]:
    for name, constraint in args.items():
        field = op.fields.get(name)
        if field is None:
            raise ScopeError(f"{op.name} has no argument {name!r}", next_step=_nearest(name, list(op.fields)))
        get = operator.attrgetter(name)
        for one in compile_constraint(f"{op.name}.{name}", field, constraint):
            yield Predicate(f"{op.name}.{prefix}{name}.{one.name}", f"/{name}", get, one.test, one.shown)


def _sums(op: Operation, given: Budget | None, level: str) -> Iterable[Sum]:
    if given is None:
        return
    if given.calls is None and not given.total:
        raise ScopeError(f"the budget of {op.name} bounds nothing", next_step="give calls=, total= or both")
    if given.calls is not None:
        yield Sum((level, op.name, "calls"), _limit(op, given.calls), None)
    for name, limit in given.total.items():
        field = op.fields.get(name)
        if field is None or field.base is not int:
            raise ScopeError(
                f"the budget of {op.name} sums {name!r}, which is no whole-number argument",
                next_step=_nearest(name, [key for key, one in op.fields.items() if one.base is int]),
            )
        yield Sum((level, op.name, name), _limit(op, limit), operator.attrgetter(name))


def _limit(op: Operation, value: int) -> int:
    if not 0 <= value <= INT_LIMIT:
        raise ScopeError(f"a budget of {op.name} is negative or beyond 2**53", next_step="give a number from 0 on")
    return value


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    if close:
        return f"did you mean {close[0]!r}?"
    return "use one of: " + (", ".join(known) or "(there is none)")
