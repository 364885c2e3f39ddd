"""What may be registered: arguments and results whose promise can be held.

Rule 1: an argument has a bound. A type that admits anything (dict, Any, float, plain str, list or int) is refused.
Rule 2: identity is never an argument: tenant, user, agent and run come from the run, credentials from nowhere (C1, C3).
Rule 3: every refusal names the operation, the field and what to write instead.
"""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Final, Literal, NamedTuple, NoReturn, get_args, get_origin

import msgspec

from lockgate.contract.errors import RegistrationError
from lockgate.policy.types import EXTRA_KEY, INT_LIMIT, ArgCheck, Args, BadArguments, Result, Stage, TextCheck

IDENTITY: Final = frozenset({"tenant", "tenant_id", "user", "agent", "agent_id", "run", "run_id"})
CREDENTIAL: Final = frozenset({"token", "credential", "credentials", "secret", "password", "passwd", "apikey"})
RESERVED: Final = frozenset({"budget", "approve"})  # words of a scope's `where`
URLISH: Final = frozenset({"url", "uri", "callback", "webhook", "endpoint"})
PATHISH: Final = frozenset({"path", "file", "filename", "filepath", "dir", "directory", "folder"})


Getter = Callable[[Any], Iterable[Any]]


class FieldCheck(NamedTuple):
    """A check bound to the place of its value: `get` yields every value of that place in a typed arguments object."""

    path: str
    get: Callable[[Any], Iterable[Any]]
    check: ArgCheck


class Field(NamedTuple):
    """An argument as a scope sees it: its annotation and the plain type behind it."""

    name: str
    annotation: Any
    base: type


def refuse(operation: str, where: str, what: str, instead: str) -> NoReturn:
    """Raise the typed refusal of a registration."""
    place = f"{operation}.{where}" if where else operation
    raise RegistrationError(f"operation {place}: {what}", next_step=instead)


def arguments(operation: str, kind: type[Args]) -> tuple[dict[str, Field], list[FieldCheck]]:
    """Check the arguments type of an operation; return its fields and the checks that run on each call.

    Raises:
        RegistrationError: a field could not be held to a bound.

    """
    checks: list[FieldCheck] = []
    fields: dict[str, Field] = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        if name.startswith("__"):
            continue
        if name in RESERVED:
            refuse(operation, name, f"{name!r} is a word of the scope language", "give the argument another name")
        base = _walk(operation, name, name, hint, _step(_whole, name), checks)
        fields[name] = Field(name, hint, base)
    return fields, checks


def run_checks(args: Any, checks: Iterable[FieldCheck], stage: Stage) -> tuple[FieldCheck, str] | None:
    """Return the first check of `stage` that refuses, with its reason."""
    for one in checks:
        if one.check.stage == stage:
            for value in one.get(args):
                if value is not None and (why := one.check.refuse(value)) is not None:
                    return one, why
    return None


def bad(found: tuple[FieldCheck, str]) -> BadArguments:
    """Turn what `run_checks` found into the decoder's error."""
    return BadArguments(found[0].path, found[1])


def _walk(  # noqa: PLR0917 - one recursive step carries its place
    operation: str,
    name: str,
    path: str,
    hint: Any,
    get: Getter,
    checks: list[FieldCheck],
    metas: tuple[Any, ...] = (),
) -> type:
    """Check one annotation; return the plain type. `path` is the JSON pointer without its slash."""
    if get_origin(hint) is Annotated:
        inner, *more = get_args(hint)
        return _walk(operation, name, path, inner, get, checks, (*metas, *more))
    parts = set(name.lower().split("_"))
    if name.lower() in IDENTITY or parts & CREDENTIAL or {"api", "key"} <= parts:
        refuse(
            operation, path, "an argument may not name whose call it is or carry a credential",
            "take identity from call.principal and credentials from call.mint()",
        )  # fmt: skip
    found = [check for check in map(_check_of, metas) if check is not None]
    checks += [FieldCheck("/" + path.replace(".", "/"), get, check) for check in found]
    meta = _Bounds.of(metas)
    kinds = {check.kind for check in found}
    origin = get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        arms = [arm for arm in get_args(hint) if arm is not type(None)]
        if len(arms) != 1:
            refuse(operation, path, "a union of several types has no single bound", "declare one type, optional or not")
        return _walk(operation, name, path, arms[0], get, checks, metas)
    if origin is Literal:
        if not all(type(value) in (str, int) for value in get_args(hint)):
            refuse(operation, path, "a Literal holds something other than text and whole numbers", "use text or int")
        return type(get_args(hint)[0])
    if origin is list:
        if meta.max_length is None:
            refuse(
                operation, path, "a list without a greatest length", f"write Annotated[{_show(hint)}, lg.ListOf(20)]"
            )
        _walk(operation, name, path, get_args(hint)[0], lambda args: (v for vs in get(args) for v in vs or ()), checks)
        return list
    if hint is str:
        _text(operation, path, parts, meta, kinds)
        if not found:
            checks.append(FieldCheck("/" + path.replace(".", "/"), get, TextCheck(lines=False)))
        return str
    if hint is int:
        if meta.low is None or meta.high is None or abs(meta.low) > INT_LIMIT or abs(meta.high) > INT_LIMIT:
            refuse(
                operation, path, "an int without bounds within 2**53", "use lg.Cents or Annotated[int, lg.Int(0, 100)]"
            )
        return int
    if hint is bool:
        return bool
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint
    if isinstance(hint, type) and issubclass(hint, Args):
        for inner, annotation in typing.get_type_hints(hint, include_extras=True).items():
            if not inner.startswith("__"):
                step = _step(get, inner)
                _walk(operation, inner, f"{path}.{inner}", annotation, step, checks)
        return hint
    kinds_known = "lg.Id, lg.Text, lg.Int, lg.Cents, lg.ListOf, lg.Url, lg.PathBeneath, bool, Literal, an enum, lg.Args"
    return refuse(operation, path, f"{_show(hint)} admits more than a bound can hold", f"use one of: {kinds_known}")


def _whole(args: Any) -> Iterable[Any]:
    return (args,)


def _step(get: Getter, name: str) -> Getter:
    return lambda args: (getattr(value, name) for value in get(args) if value is not None)


def _text(operation: str, path: str, parts: set[str], meta: _Bounds, kinds: set[str]) -> None:
    if parts & URLISH and "url" not in kinds:
        refuse(operation, path, "its name says URL, but its destinations are not declared (E6)",
               'write Annotated[str, lg.Url("https://hooks.example/T1/*")]')  # fmt: skip
    if parts & PATHISH and "path" not in kinds:
        refuse(operation, path, "its name says path, but nothing keeps it beneath a root",
               'write Annotated[str, lg.PathBeneath("uploads")]')  # fmt: skip
    if meta.pattern is not None:
        pattern = meta.pattern
        if "$" in pattern or any(word in pattern for word in (r"\d", r"\w", r"\s", r"\b")):
            refuse(operation, path, f"pattern {pattern!r}: $ admits a trailing newline, \\d and \\w all of Unicode",
                   r"write \A[0-9]{1,12}\Z with explicit ranges")  # fmt: skip
        if not (pattern.startswith(r"\A") and pattern.endswith(r"\Z")):
            refuse(operation, path, f"pattern {pattern!r} is searched for anywhere", r"anchor it with \A and \Z")
    if meta.max_length is None:
        refuse(operation, path, "text without a greatest length", "write Annotated[str, lg.Text(200)]")


def result(operation: str, kind: Any) -> None:
    """Check the result type: a model that drops what it does not declare, with nothing open and no credential (C1).

    Raises:
        RegistrationError: it has no model, or a field could carry anything.

    """
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        refuse(operation, "", f"its result {_show(kind)} has no model", "return a subclass of lg.Result")
    _result(operation, kind, "result", set())


def _result(operation: str, kind: Any, path: str, seen: set[Any]) -> None:
    if get_origin(kind) is not None:
        for arm in get_args(kind):
            if isinstance(arm, type) or get_origin(arm) is not None or arm in (Any, object):
                _result(operation, arm, path, seen)
        return
    if kind in (Any, object, msgspec.Raw, dict, list, tuple, set):
        refuse(operation, path, f"{_show(kind)} would let undeclared data out", "declare the fields that may leave")
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in seen:
        seen.add(kind)
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            if set(name.lower().split("_")) & CREDENTIAL:
                refuse(operation, f"{path}.{name}", "no call returns a credential (C1)", "leave the field out")
            if not name.startswith("__") and get_origin(hint) is not typing.ClassVar:
                _result(operation, hint, f"{path}.{name}", seen)


class _Bounds(NamedTuple):
    """The bounds that several `Annotated` metas give together."""

    low: int | float | None = None
    high: int | float | None = None
    max_length: int | None = None
    pattern: str | None = None

    @classmethod
    def of(cls, metas: Iterable[Any]) -> _Bounds:
        bounds = cls()
        for meta in metas:
            if isinstance(meta, msgspec.Meta):
                low = meta.ge if meta.ge is not None else meta.gt
                high = meta.le if meta.le is not None else meta.lt
                bounds = cls(
                    bounds.low if low is None else low,
                    bounds.high if high is None else high,
                    bounds.max_length if meta.max_length is None else meta.max_length,
                    bounds.pattern if meta.pattern is None else meta.pattern,
                )
        return bounds


def _check_of(meta: Any) -> ArgCheck | None:
    if isinstance(meta, msgspec.Meta):
        return (meta.extra or {}).get(EXTRA_KEY)
    return meta if hasattr(meta, "refuse") and hasattr(meta, "stage") else None


def _show(kind: Any) -> str:
    return getattr(kind, "__name__", None) or str(kind)


__all__ = ["Field", "FieldCheck", "Result", "arguments", "bad", "refuse", "result", "run_checks"]
