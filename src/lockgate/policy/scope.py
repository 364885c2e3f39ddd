"""The scope of a run: who, until when, and which operations with which arguments. Data, nothing else (C3).

Rule 1: tenant, user and agent stand here and in no argument.
Rule 2: an empty `allow` allows nothing. What is not named is denied.
Rule 3: a scope is compiled against the sealed registry before it is used; a name or a type that does not fit there is
        an error at load, never a rule that silently never matches.
Rule 4: a child comes from `narrow` alone: everything the parent asks, and more.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast, final

import msgspec

from lockgate.contract.run import Principal
from lockgate.policy import scopetext
from lockgate.policy.constraints import When, Where, layers, nearest, refuse
from lockgate.policy.scopedata import when_from_data, where_from_data
from lockgate.policy.types import clean

if TYPE_CHECKING:
    from lockgate.policy.compile import CompiledScope
    from lockgate.policy.registry import Operations

MAX_SECONDS: Final = 30 * 24 * 3600.0
MAX_OPERATIONS: Final = 1000
MAX_NAME: Final = 200
_IDENTITY: Final = ("user", "agent", "tenant")
_FIELDS: Final = (*_IDENTITY, "expires", "allow", "deny")
_canonical: Final = msgspec.json.Encoder(order="deterministic").encode

Allow = Mapping[str, Where | Mapping[str, Any]]
Deny = Sequence[str] | Mapping[str, When | Sequence[When] | Mapping[str, Any]]


@final
class Scope:
    """What one run may do.

    Args:
        user: on whose behalf. agent: which program asks. tenant: whose data. All from the caller's own session.
        expires: seconds from the opening of the run (`minutes(10)`).
        allow: rules by operation; `{}` allows it with any valid arguments, an empty `allow` denies all.
        deny: operations that are denied whatever `allow` says, or conditions under which they are.

    Raises:
        ScopeError: a part is malformed, or the scope has expired before it began.

    """

    __slots__ = ("agent", "allow", "deny", "expires", "tenant", "user")
    user: str
    agent: str
    tenant: str
    expires: float
    allow: dict[str, Where]
    deny: dict[str, tuple[When, ...]]

    def __init__(self, *, user: str, agent: str, tenant: str, expires: float, allow: Allow, deny: Deny = ()) -> None:
        put = object.__setattr__
        for name, value in (("user", user), ("agent", agent), ("tenant", tenant)):
            if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME or not clean(value):  # pyright: ignore[reportUnnecessaryIsInstance]
                refuse(name, "is empty, too long or holds control characters", f"name the {name} of this run")
            put(self, name, value)
        put(self, "expires", _seconds(expires))
        put(self, "allow", _allow(allow))
        put(self, "deny", _deny(deny))
        try:
            self.canonical()
        except UnicodeEncodeError:
            refuse("", "a text in it is no Unicode (a lone surrogate)", "write it anew")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a scope does not change; narrow() makes another")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scope) and self.to_data() == other.to_data()

    def __hash__(self) -> int:
        return hash(self.hash)

    def __repr__(self) -> str:
        return f"<scope of {self.agent} for {self.user}@{self.tenant}: {', '.join(self.allow) or 'nothing'}>"

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical form, hexadecimal: what audit rows name."""
        return hashlib.sha256(b"lockgate/scope/1\0" + self.canonical()).hexdigest()

    def canonical(self) -> bytes:
        """Return the JSON of `to_data` with sorted keys and no white space."""
        return _canonical(self.to_data())

    def principal(self, run: str) -> Principal:
        """Return on whose behalf the calls of `run` are made."""
        return Principal(self.user, self.agent, self.tenant, run)

    def compile(self, operations: Operations, now: float, *, parent: CompiledScope | None = None) -> CompiledScope:
        """Check against the registry and make ready for `authorize`.

        Args:
            operations: the sealed registry.
            now: seconds on the monotonic clock; expiry counts from here.
            parent: the compiled scope this one was narrowed from; whatever stands here, the result allows no more.

        Raises:
            ScopeError: an operation or argument is unknown, or a constraint does not fit the argument's type.

        """
        from lockgate.policy.compile import compile_scope  # noqa: PLC0415 - compile.py imports this file

        return compile_scope(self, operations, now, parent)

    def narrow(
        self, /, *, allow: Allow | None = None, deny: Deny = (), expires: float | None = None, **other: object
    ) -> Scope:
        """Return a child scope.

        Args:
            allow: the operations that remain, each with further constraints; None = all, as they are.
            deny: further denials.
            expires: seconds from the child's opening, at most the parent's.
            other: nothing else can be changed; named here so that the error can say so.

        Raises:
            ScopeError: it would be wider.

        """
        for name in other:
            if name in _IDENTITY:
                refuse(name, "belongs to the run and is inherited", "open another run for another principal")
            refuse(name[:40], "cannot be narrowed", nearest(name, ("allow", "deny", "expires")))
        if expires is not None and _seconds(expires) > self.expires:
            refuse("expires", f"{expires:g} s is later than the parent's {self.expires:g} s", "ask for less")
        rules = dict(self.allow)
        if allow is not None:
            more = _allow(allow)
            for name in more:
                if name not in rules:
                    refuse(f"allow.{name[:64]}", "the parent does not allow it", nearest(name, rules))
            rules = {name: rules[name].narrow(rule) for name, rule in more.items()}
        denied = dict(self.deny)
        for name, conditions in _deny(deny).items():
            denied[name] = _join(denied.get(name, ()), conditions)
        return Scope(
            user=self.user, agent=self.agent, tenant=self.tenant,
            expires=self.expires if expires is None else expires, allow=rules, deny=denied,
        )  # fmt: skip

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON has it; `from_data` reads it back."""
        plain = all(conditions == (When(),) for conditions in self.deny.values())
        return {
            "user": self.user,
            "agent": self.agent,
            "tenant": self.tenant,
            "expires": int(self.expires) if self.expires.is_integer() else self.expires,
            "allow": {name: rule.to_data() for name, rule in sorted(self.allow.items())},
            "deny": sorted(self.deny)
            if plain
            else {name: [one.to_data() for one in held] for name, held in sorted(self.deny.items())},
        }

    @classmethod
    def from_data(cls, data: object) -> Scope:
        """Read `to_data`'s form.

        Raises:
            ScopeError: a key is unknown or missing, or a value is malformed.

        """
        if not isinstance(data, Mapping):
            refuse("", "it is no table", "write user, agent, tenant, expires and allow")
        table = {str(name): value for name, value in cast("Mapping[object, Any]", data).items()}
        for name in table:
            if name not in _FIELDS:
                refuse("", f"there is no {name[:40]!r}", nearest(name, _FIELDS))
        for name in _FIELDS[:-1]:
            if name not in table:
                refuse("", f"{name} is missing", f"add {name}")
        return cls(**table)

    @classmethod
    def from_json(cls, text: str | bytes) -> Scope:
        """Read JSON; duplicate keys, NaN and more than 1 MiB are refused."""
        return cls.from_data(scopetext.from_json(text))

    @classmethod
    def from_toml(cls, text: str) -> Scope:
        """Read TOML."""
        return cls.from_data(scopetext.from_toml(text))

    def to_toml(self) -> str:
        """Return it as TOML.

        Raises:
            ScopeError: a constraint holds None, which TOML cannot write.

        """
        return scopetext.to_toml(self.to_data())


def _seconds(value: object) -> float:
    # An int is not asked whether it is finite: it may be larger than any float.
    if type(value) is not int and not (isinstance(value, float) and math.isfinite(value)):
        refuse("expires", "is no number of seconds", "write expires=minutes(10)")
    if value <= 0:
        refuse("expires", "it has expired before it began", "give seconds above zero")
    if value > MAX_SECONDS:
        refuse("expires", "is longer than 30 days", "open runs for as long as a task takes")
    return float(value)


def _allow(data: object) -> dict[str, Where]:
    if not isinstance(data, Mapping):
        refuse("allow", "is no table", 'write {"get_order": {}}')
    table = cast("Mapping[object, object]", data)
    if len(table) > MAX_OPERATIONS:
        refuse("allow", f"names more than {MAX_OPERATIONS} operations", "name the few that the task needs")
    return {
        (known := _name("allow", name)): rule if isinstance(rule, Where) else where_from_data(f"allow.{known}", rule)
        for name, rule in table.items()
    }


def _deny(data: object) -> dict[str, tuple[When, ...]]:
    if isinstance(data, list | tuple):
        return {_name("deny", name): (When(),) for name in cast("Sequence[object]", data)}
    if not isinstance(data, Mapping):
        refuse("deny", "is neither a list nor a table", 'write ["refund"] or {"refund": when(...)}')
    found: dict[str, tuple[When, ...]] = {}
    for key, given in cast("Mapping[object, object]", data).items():
        name = _name("deny", key)
        conditions = tuple(when_from_data(f"deny.{name}", one) for one in layers(given))
        if not conditions:
            refuse(f"deny.{name}", "holds no condition", "write {} to deny it always, or leave it out")
        found[name] = _join((), conditions)
    return found


def _join(first: tuple[When, ...], second: tuple[When, ...]) -> tuple[When, ...]:
    """Return both without repeats; "always" makes the others needless."""
    joined = [*first, *(one for one in second if one not in first)]
    return (When(),) if When() in joined else tuple(joined)


def _name(where: str, name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= 64:
        refuse(where, "an operation's name is no short text", "use names of registered operations")
    return name
