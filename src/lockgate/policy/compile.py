"""A scope made ready: constraints as closures over typed values.

Rule 1: nothing is looked up by text at call time but the operation's name; every comparison is prepared and typed.
Rule 2: a compiled child holds its parent's prepared rules beside its own, so it allows no more than its parent even if
        its data says otherwise; it never outlives it and charges the parent's budgets too.
Rule 3: what does not fit the registry (unknown name, wrong type) is an error here, not a rule that never matches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, final, get_args, get_origin

import msgspec

from lockgate.policy.checks import FieldCheck
from lockgate.policy.comparisons import Test, plain, prepare
from lockgate.policy.constraints import Budget, Conditions, Constraint, When, nearest, refuse
from lockgate.policy.latch import Sink, sink_of
from lockgate.policy.registry import Operation, Operations
from lockgate.policy.verdict import NONE, Charge, Obligations, Verdict

if TYPE_CHECKING:
    from lockgate.policy.scope import Scope

_SIGNS: Final = {"at_most": ">", "at_least": "<", "more_than": "<=", "less_than": ">="}


class Check(NamedTuple):
    """One prepared constraint: `test(getattr(args, name))` is true or the call is denied."""

    name: str
    test: Test
    constraint: Constraint
    rule: str
    path: str

    def explain(self, value: object) -> str:
        """Return the audit text of a failure; holds the value."""
        kind, limit = self.constraint.kind, self.constraint.value
        shown = repr(value)[:80]
        if kind in _SIGNS:
            return f"{self.name} {shown} {_SIGNS[kind]} {limit}"
        return f"{self.name} {shown} fails {kind}"


Ready = tuple[Callable[[Any], Any], Test, Check]


class Condition(NamedTuple):
    """A prepared `when`: it holds when every test does. `ready`: the checks as `authorize` walks them."""

    checks: tuple[Check, ...]
    rule: str
    ready: tuple[Ready, ...]

    @classmethod
    def of(cls, checks: tuple[Check, ...], rule: str) -> Condition:
        """Prepare one."""
        return cls(checks, rule, _ready(checks))


def _ready(checks: tuple[Check, ...]) -> tuple[Ready, ...]:
    return tuple((attrgetter(one.name), one.test, one) for one in checks)


class Cap(NamedTuple):
    """A prepared budget: `name` is the argument that is summed, None for a count of calls."""

    name: str | None
    key: tuple[str, str, str]
    limit: int


@final
class Rule:
    """How one operation is allowed, prepared."""

    __slots__ = (
        "allowed",
        "approve",
        "args_type",
        "caps",
        "checks",
        "counts",
        "denials",
        "further",
        "labels",
        "name",
        "operation",
        "ready",
        "sink",
        "sums",
        "typed",
    )

    def __init__(
        self,
        operation: Operation,
        checks: tuple[Check, ...],
        denials: tuple[Condition, ...],
        approve: tuple[Condition, ...],
        caps: tuple[Cap, ...],
    ) -> None:
        self.operation = operation
        self.name = operation.name
        self.labels = operation.labels
        self.sink: Sink = sink_of(operation.labels)
        self.args_type = operation.args_type
        self.checks = checks
        self.denials = denials
        self.approve = approve
        self.caps = caps
        self.ready = _ready(checks)
        self.counts = tuple(Charge(cap.key, 1, cap.limit) for cap in caps if cap.name is None)
        self.sums = tuple((attrgetter(cap.name), cap.key, cap.limit) for cap in caps if cap.name is not None)
        self.typed: tuple[FieldCheck, ...] = operation.authorize_checks
        self.further = bool(self.typed or approve or self.sink)  # whether anything is asked beside `checks`
        obligations = Obligations(labels=operation.labels) if operation.labels else NONE
        # A rule without budgets answers every allowed call with this one object.
        self.allowed = Verdict("allow", operation.name, obligations=obligations)


@final
class CompiledScope:
    """A scope that `authorize` decides by.

    Attributes:
        source: the data. hash: SHA-256 of its canonical form. expires_at: seconds on the monotonic clock.
        operations: what may be called at all, by name. Resolve names here and nowhere else: what is out of scope then
            looks exactly like what does not exist.
        user, agent, tenant: whose run.

    """

    __slots__ = (
        "_children", "agent", "denied", "expires_at", "hash", "level", "operations", "parent", "registry", "rules",
        "source", "tenant", "user",
    )  # fmt: skip

    def __init__(
        self,
        *,
        source: Scope,
        registry: Operations,
        expires_at: float,
        rules: dict[str, Rule],
        denied: Mapping[str, Verdict],
        parent: CompiledScope | None,
        level: str,
    ) -> None:
        self.source = source
        self.registry = registry
        self.hash = source.hash
        self.expires_at = expires_at
        self.rules = rules
        self.denied = denied
        self.operations: dict[str, Operation] = {name: rule.operation for name, rule in rules.items()}
        self.parent = parent
        self.level = level
        self.user, self.agent, self.tenant = source.user, source.agent, source.tenant
        self._children = itertools.count(1)

    def narrow(self, now: float, /, **changes: Any) -> CompiledScope:
        """Return a child: `changes` are those of `Scope.narrow`, `now` is its opening on the monotonic clock.

        Raises:
            ScopeError: it would be wider, or does not fit the registry.

        """
        return self.source.narrow(**changes).compile(self.registry, now, parent=self)

    def next_level(self) -> str:
        """Return a name for the budgets of one more child."""
        return f"{self.level}/{next(self._children)}"


def compile_scope(scope: Scope, operations: Operations, now: float, parent: CompiledScope | None) -> CompiledScope:
    """Do what `Scope.compile` promises."""
    if not operations.sealed:
        refuse("", "the registry is still open", "call seal() before scopes are compiled")
    expires_at = now + scope.expires
    if parent is not None:
        expires_at = min(expires_at, parent.expires_at)
        if (scope.user, scope.agent, scope.tenant) != (parent.user, parent.agent, parent.tenant):
            refuse("", "a child has its parent's user, agent and tenant", "use narrow()")
    level = "" if parent is None else parent.next_level()
    rules: dict[str, Rule] = {}
    denied: dict[str, Verdict] = {} if parent is None else dict(parent.denied)
    for name, conditions in scope.deny.items():
        operation = _operation(f"deny.{name}", name, operations)
        if When() in conditions:
            denied[name] = Verdict("deny", f"deny.{name}", None, "denied by the scope", "not_available")
        for one in conditions:
            _checks(f"deny.{name}", operation, one.arguments)
    for name, where in scope.allow.items():
        operation = _operation(f"allow.{name}", name, operations)
        place = f"allow.{name}"
        inherited = None if parent is None else parent.rules.get(name)
        if parent is not None and inherited is None and name not in parent.denied:
            refuse(place, "the parent does not allow it", nearest(name, parent.rules))
        checks = _checks(place, operation, where.arguments)
        denials = tuple(
            Condition.of(_checks(f"deny.{name}", operation, one.arguments, f"deny.{name}"), f"deny.{name}")
            for one in scope.deny.get(name, ())
        )
        approve = tuple(
            Condition.of(
                _checks(f"{place}.approve", operation, one.arguments, f"{name}.approve"), _approval_rule(name, one)
            )
            for one in where.approve
        )
        caps = _caps(place, operation, where.budget, level)
        if inherited is not None:
            checks = _unique(checks, inherited.checks)
            denials = _unique_conditions(denials, inherited.denials)
            approve = _unique_conditions(approve, inherited.approve)
            caps += inherited.caps
        if name not in denied:
            rules[name] = Rule(operation, checks, denials, approve, caps)
    return CompiledScope(
        source=scope, registry=operations, expires_at=expires_at, rules=rules, denied=denied, parent=parent, level=level
    )


def _operation(where: str, name: str, operations: Operations) -> Operation:
    found = operations.get(name)
    if found is None:
        refuse(where, "there is no such operation", nearest(name, operations.names()))
    return found


def _checks(where: str, operation: Operation, conditions: Conditions, prefix: str | None = None) -> tuple[Check, ...]:
    found: list[Check] = []
    for name, held in conditions.items():
        field = operation.fields.get(name)
        if field is None:
            refuse(f"{where}.{name[:64]}", "the operation has no such argument", nearest(name, operation.fields))
        found += [
            Check(
                name,
                prepare(f"{where}.{name}", one, field),
                one,
                f"{prefix or operation.name}.{name}.{one.kind}",
                f"/{name}",
            )
            for one in held
        ]
    return tuple(found)


def _caps(where: str, operation: Operation, budget: Budget | None, level: str) -> tuple[Cap, ...]:
    if budget is None:
        return ()
    found = [] if budget.calls is None else [Cap(None, (level, operation.name, "calls"), budget.calls)]
    for name, limit in sorted(budget.total.items()):
        field = operation.fields.get(name)
        place = f"{where}.budget.total.{name[:64]}"
        if field is None:
            refuse(place, "the operation has no such argument", nearest(name, operation.fields))
        if field.annotation is not plain(field.annotation) and _is_amount(field.annotation):
            found.append(Cap(name, (level, operation.name, f"total.{name}"), limit))
        else:
            refuse(place, "only a required whole number of at least zero can be summed", "sum an lg.Cents argument")
    return tuple(found)


def _is_amount(annotation: Any) -> bool:
    """Whether it is an int that is never None and never negative, so that nothing ever pays in."""
    if get_origin(annotation) is not Annotated or get_args(annotation)[0] is not int:
        return False
    metas = [meta for meta in get_args(annotation)[1:] if isinstance(meta, msgspec.Meta)]
    return any((meta.ge is not None and meta.ge >= 0) or (meta.gt is not None and meta.gt >= -1) for meta in metas)


def _approval_rule(name: str, condition: When) -> str:
    return ".".join((name, "approve", *next(((n, held[0].kind) for n, held in condition.arguments.items()), ())))


def _unique(own: tuple[Check, ...], inherited: tuple[Check, ...]) -> tuple[Check, ...]:
    have = {(check.name, check.constraint) for check in own}
    return own + tuple(check for check in inherited if (check.name, check.constraint) not in have)


def _unique_conditions(own: tuple[Condition, ...], inherited: tuple[Condition, ...]) -> tuple[Condition, ...]:
    def key(condition: Condition) -> frozenset[tuple[str, Constraint]]:
        return frozenset((check.name, check.constraint) for check in condition.checks)

    have = {key(one) for one in own}
    return own + tuple(one for one in inherited if key(one) not in have)
