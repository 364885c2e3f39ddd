"""Run scope: what one run may ask for, as data (C3).

Rule 1: identity (user, agent, tenant) is a field of the scope; no argument can name it.
Rule 2: what is not in `allow` is denied; an empty `allow` denies everything; `deny` beats `allow`.
Rule 3: the only way to a child is `narrow`, and a child holds its parent: it can take away and add nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from lockgate.contract.errors import ScopeError
from lockgate.policy.constraints import Constraint

if TYPE_CHECKING:
    from lockgate.policy.compile import CompiledScope
    from lockgate.policy.registry import Operations

MAX_SECONDS: Final = 7 * 24 * 3600.0
MAX_NARROWING: Final = 8
_NAME_MAX: Final = 128


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How much of an operation a run may use: number of calls, and sums over whole-number arguments."""

    calls: int | None = None
    total: dict[str, int] = {}


class Where(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The rule of one allowed operation.

    Attributes:
        args: constraints by argument; an argument without one is bound by its type alone.
        budget: None = no limit beyond the run's number of calls.
        approve: True = every call needs a person; constraints by argument = a call that meets them all does.

    """

    args: dict[str, Constraint] = {}
    budget: Budget | None = None
    approve: bool | dict[str, Constraint] = False


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """What one run may do, for whom, and for how long.

    Args:
        user: on whose behalf.
        agent: which agent acts.
        tenant: whose data; operations take it from here.
        expires: seconds from the opening of the run; `minutes(10)`.
        allow: operations by name; `{}` or `where(...)` each.
        deny: operations that are denied whatever `allow` says.
        parent: the scope this one narrows.

    """

    user: str
    agent: str
    tenant: str
    expires: float
    allow: Mapping[str, Where | Mapping[str, Any]]
    deny: tuple[str, ...] = ()
    parent: Scope | None = None

    def __post_init__(self) -> None:
        for name in ("user", "agent", "tenant"):
            value = getattr(self, name)
            if not (isinstance(value, str) and 0 < len(value) <= _NAME_MAX and value.isprintable()):
                raise ScopeError(
                    f"{name} is empty, too long or not printable", next_step=f"give {name} 1 to {_NAME_MAX} characters"
                )
        if not isinstance(self.expires, (int, float)) or not 0 < self.expires <= MAX_SECONDS:
            raise ScopeError(
                f"the scope has expired or never would: expires={self.expires!r} seconds",
                next_step=f"give seconds above 0 and at most {MAX_SECONDS:g}, such as lg.minutes(10)",
            )

    def narrow(
        self,
        *,
        allow: Mapping[str, Where | Mapping[str, Any]] | None = None,
        deny: tuple[str, ...] = (),
        expires: float | None = None,
    ) -> Scope:
        """Return a child scope: what both allow, for no longer, on the parent's budgets and its own.

        Args:
            allow: operations of the parent with further constraints; None keeps the parent's as they are.
            deny: operations to take away.
            expires: seconds; never beyond the parent's end.

        Raises:
            ScopeError: an operation is not the parent's, or the chain is too deep.

        """
        kept = dict.fromkeys(self.allow, Where()) if allow is None else allow
        for name in kept:
            if name not in self.allow:
                raise ScopeError(f"{name} is not in the parent's scope", next_step="a child can only narrow")
        seconds = self.expires if expires is None else min(expires, self.expires)
        return Scope(
            user=self.user, agent=self.agent, tenant=self.tenant, expires=seconds, allow=kept, deny=deny, parent=self
        )

    def compile(self, ops: Operations, now: float) -> CompiledScope:
        """Compile against a sealed registry; `now` is monotonic seconds.

        Raises:
            ScopeError: an unknown operation or argument (with the nearest name), or a bound of the wrong type.

        """
        from lockgate.policy.compile import compile_scope  # noqa: PLC0415 - compile.py needs this class

        return compile_scope(self, ops, now)

    def to_data(self) -> dict[str, Any]:
        """Return the scope as plain data: JSON and TOML can hold it."""
        data: dict[str, Any] = {
            "user": self.user,
            "agent": self.agent,
            "tenant": self.tenant,
            "expires": self.expires,
            "allow": {name: rule_data(rule) for name, rule in self.allow.items()},
        }
        if self.deny:
            data["deny"] = list(self.deny)
        if self.parent is not None:
            data["parent"] = self.parent.to_data()
        return data

    @classmethod
    def from_data(cls, data: object, *, _depth: int = 0) -> Scope:
        """Read plain data.

        Raises:
            ScopeError: a key is unknown, a value has the wrong type, or the chain is too deep.

        """
        if not isinstance(data, Mapping):
            raise ScopeError("a scope is not an object", next_step="give user, agent, tenant, expires and allow")
        if _depth > MAX_NARROWING:
            raise ScopeError(f"narrowed more than {MAX_NARROWING} times", next_step="start from a scope, not a child")
        held: Mapping[str, Any] = data
        for key in held:
            if key not in cls.__struct_fields__:
                raise ScopeError(f"unknown key {key!r}", next_step="use: " + ", ".join(cls.__struct_fields__))
        missing = [key for key in ("user", "agent", "tenant", "expires", "allow") if key not in held]
        if missing:
            raise ScopeError("missing: " + ", ".join(missing), next_step="a scope names user, agent, tenant and expiry")
        allow, deny, parent = held["allow"], held.get("deny", ()), held.get("parent")
        if not isinstance(allow, Mapping) or not isinstance(deny, (list, tuple)):
            raise ScopeError("allow is not an object or deny not a list", next_step='write allow={"name": {}}')
        return cls(
            user=held["user"],
            agent=held["agent"],
            tenant=held["tenant"],
            expires=held["expires"],
            allow={str(name): as_where(str(name), rule) for name, rule in allow.items()},
            deny=tuple(str(name) for name in deny),
            parent=None if parent is None else cls.from_data(parent, _depth=_depth + 1),
        )

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical form, as in each audit row."""
        return hashlib.sha256(msgspec.json.encode(self.to_data(), order="deterministic")).hexdigest()


def as_where(name: str, rule: Where | Mapping[str, Any]) -> Where:
    """Read the rule of one operation: constraints beside the words `budget` and `approve`.

    Raises:
        ScopeError: it is malformed.

    """
    if isinstance(rule, Where):
        return rule
    try:
        held = dict(rule)
        budget_data, approve = held.pop("budget", None), held.pop("approve", False)
        return Where(
            args=msgspec.convert(held, dict[str, Constraint], from_attributes=False),
            budget=budget_data if isinstance(budget_data, Budget) else msgspec.convert(budget_data, Budget | None),
            approve=msgspec.convert(approve, bool | dict[str, Constraint]),
        )
    except (msgspec.ValidationError, TypeError, ValueError):
        raise ScopeError(
            f"the rule of {name} is malformed",
            next_step="write {argument: {bound: value}}, and budget or approve beside",
        ) from None


def rule_data(rule: Where | Mapping[str, Any]) -> dict[str, Any]:
    """Return a rule as plain data: the inverse of `as_where`."""
    where = as_where("a rule", rule)
    data: dict[str, Any] = msgspec.to_builtins(where.args)
    if where.budget is not None:
        data["budget"] = msgspec.to_builtins(where.budget)
    if where.approve:
        data["approve"] = msgspec.to_builtins(where.approve)
    return data


# ---- how a person writes them -------------------------------------------------------------------------------------
def where(*, budget: Budget | None = None, approve: bool | dict[str, Constraint] = False, **args: Constraint) -> Where:
    """The rule of one operation: `where(amount=at_most(5000), budget=budget(calls=3))`."""
    return Where(args=args, budget=budget, approve=approve)


def when(**args: Constraint) -> dict[str, Constraint]:
    """The condition under which a call needs a person's approval: all of these hold."""
    return args


def budget(*, calls: int | None = None, total: dict[str, int] | None = None) -> Budget:
    """How many calls, and the greatest sum of whole-number arguments by name."""
    return Budget(calls, total or {})


def minutes(count: float) -> float:
    """`count` minutes, in seconds."""
    return count * 60.0
