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
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, NamedTuple, NoReturn, cast, get_args, get_origin

import msgspec

from lockgate.contract.errors import RegistrationError
from lockgate.policy import names, patterns
from lockgate.policy.types import EXTRA_KEY, INT_LIMIT, ArgCheck, Args, IdCheck, PathCheck, TextCheck, UrlCheck, clean

RESERVED: Final = frozenset({"budget", "approve"})  # words of a scope's `where`
MAX_DEPTH: Final = 8

Get = Callable[[Any], Iterable[Any]]


class FieldCheck(NamedTuple):
    """A check bound to its place: `get` yields the values of that place.

    `attribute` names a plain top-level field, which needs no such detour; `optional` says whether it may be None.
    """

    path: str
    get: Get
    check: ArgCheck
    attribute: str | None
    optional: bool


class Field(NamedTuple):
    """An argument as a scope sees it."""

    name: str
    annotation: Any


def refuse(operation: str, where: str, what: str, instead: str) -> NoReturn:
    """Raise the typed refusal of a registration."""
    place = f"{operation}.{where}" if where else operation
    raise RegistrationError(f"operation {place}: {what}", next_step=instead)


def hints(operation: str, of: Any) -> dict[str, Any]:
    """Return the resolved annotations of a function or model.

    Raises:
        RegistrationError: one cannot be resolved at run time.

    """
    try:
        return typing.get_type_hints(of, include_extras=True)
    except NameError as error:
        refuse(operation, "", f"the name {error.name} in an annotation cannot be resolved",
               "import it at run time and not under TYPE_CHECKING")  # fmt: skip


def arguments(operation: str, kind: type[Args]) -> tuple[dict[str, Field], list[FieldCheck]]:
    """Check the arguments type of an operation; return its fields and the checks that run on each call.

    Raises:
        RegistrationError: a field could not be held to a bound.

    """
    walk = _Walk(operation)
    walk.model("", kind, lambda args: (args,), 0)
    fields = {
        name: Field(name, hint) for name, hint in hints(operation, kind).items() if name in kind.__struct_fields__
    }
    for name in fields:
        if name in RESERVED:
            refuse(operation, name, f"{name!r} is a word of the scope language", "give the argument another name")
    return fields, walk.checks


def run_checks(args: Any, checks: Iterable[FieldCheck]) -> tuple[FieldCheck, str] | None:
    """Return the first check that refuses, with its reason."""
    for one in checks:
        for value in one.get(args):
            if value is not None and (why := one.check.refuse(value)) is not None:
                return one, why
    return None


def ready(one: FieldCheck) -> tuple[Callable[[Any], Any], Callable[[Any], object], FieldCheck]:
    """Return (get, test, check) for the hot path: a plain field without a detour through iterators."""
    check = one.check
    test: Callable[[Any], object]
    if isinstance(check, IdCheck):
        test = check.match
    elif isinstance(check, TextCheck):
        test = _lines if check.lines else clean
    else:
        test = lambda value: check.refuse(value) is None  # noqa: E731
    if one.attribute is None:
        get, single = one.get, test
        return get, lambda values: all(value is None or single(value) for value in values), one
    given = test
    return attrgetter(one.attribute), (lambda value: value is None or given(value)) if one.optional else given, one


def _lines(value: str) -> bool:
    return clean(value, lines=True)


class _Walk:
    """Walks the annotations of one arguments type."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.checks: list[FieldCheck] = []

    def refuse(self, path: str, what: str, instead: str) -> NoReturn:
        refuse(self.operation, path, what, instead)

    def model(self, path: str, kind: type[Args], get: Get, depth: int) -> None:
        """Check a model: the arguments themselves or a nested part of them."""
        config = kind.__struct_config__
        if not config.frozen or not config.forbid_unknown_fields or config.array_like or config.tag is not None:
            self.refuse(path, f"{kind.__name__} turns off what lg.Args promises", "leave the class options as they are")
        if kind.__struct_fields__ != kind.__struct_encode_fields__:
            self.refuse(path, f"{kind.__name__} renames fields", "call the fields what callers write")
        if depth > MAX_DEPTH:
            self.refuse(path, "arguments nested too deep", "declare flat arguments")
        found = hints(self.operation, kind)
        for name in kind.__struct_fields__:
            inner = f"{path}.{name}" if path else name
            self.name(inner, name)
            self.field(inner, name, found[name], _step(get, name), (), depth, name if not path else None)

    def name(self, path: str, name: str) -> None:
        """Refuse names that say identity or credential, and names that cannot be read."""
        if not name.isascii():
            self.refuse(path, "a name outside ASCII can look like another one", "call it in plain letters")
        if names.says_identity(name):
            self.refuse(path, "an argument may not name whose call it is", "take it from call.principal")
        if names.says_credential(name):
            self.refuse(path, "an argument may not carry a credential", "take it from call.mint()")

    def field(  # noqa: PLR0917 - it calls itself with all it knows
        self, path: str, name: str, hint: Any, get: Get, metas: tuple[Any, ...], depth: int, attribute: str | None,
        optional: bool = False,
    ) -> None:  # fmt: skip
        """Check one annotation."""
        origin = get_origin(hint)
        if origin is Annotated:
            inner, *more = get_args(hint)
            return self.field(path, name, inner, get, (*metas, *more), depth, attribute, optional)
        if origin in (typing.Union, types.UnionType):
            arms = [arm for arm in get_args(hint) if arm is not type(None)]
            if len(arms) != 1:
                self.refuse(path, "a union of several types has no single bound", "declare one type, optional or not")
            return self.field(path, name, arms[0], get, metas, depth, attribute, True)
        found = [check for check in map(check_of, metas) if check is not None]
        pointer = "/" + path.replace(".", "/")
        self.checks += [FieldCheck(pointer, get, check, attribute, optional) for check in found]
        bounds = _Bounds.of(metas)
        if hint is not str and any(isinstance(check, _ON_TEXT) for check in found):
            self.refuse(path, f"a {found[0].kind} is text, and {show(hint)} is not", "write Annotated[str, ...]")
        if origin is Literal:
            values: tuple[object, ...] = get_args(hint)
            if not all(type(value) in (str, int) for value in values):
                self.refuse(path, "a Literal holds something other than text and whole numbers", "use text or int")
        elif origin is list:
            if bounds.max_length is None:
                self.refuse(path, "a list without a greatest length", f"write Annotated[{hint}, lg.ListOf(20)]")
            self.field(path, name, get_args(hint)[0], _each(get), (), depth, None)
        elif hint is str:
            self.text(path, name, bounds, {check.kind for check in found})
            if not found:
                self.checks.append(FieldCheck(pointer, get, TextCheck(lines=False), attribute, optional))
        elif hint is int:
            if bounds.low is None or bounds.high is None or max(abs(bounds.low), abs(bounds.high)) > INT_LIMIT:
                self.refuse(
                    path, "an int without bounds within 2**53", "use lg.Cents or Annotated[int, lg.Int(0, 100)]"
                )
        elif isinstance(hint, type) and issubclass(hint, Args):
            self.model(path, hint, get, depth + 1)
        elif hint is not bool and not (isinstance(hint, type) and issubclass(hint, enum.Enum)):
            self.refuse(
                path,
                f"{show(hint)} admits more than a bound can hold",
                "use lg.Id, lg.Text, lg.Int, lg.Cents, lg.ListOf, lg.Url, lg.PathBeneath, bool, Literal, an enum or a "
                "nested lg.Args",
            )
        return None

    def text(self, path: str, name: str, bounds: _Bounds, kinds: set[str]) -> None:
        """Check a str: its name, its pattern, its length."""
        if "url" not in kinds and names.says_url(name):
            self.refuse(path, "its name says URL, but its destinations are not declared (E6)",
                        'write Annotated[str, lg.Url("https://hooks.example/T1/*")]')  # fmt: skip
        if "path" not in kinds and names.says_path(name):
            self.refuse(path, "its name says path, but nothing keeps it beneath a root",
                        'write Annotated[str, lg.PathBeneath("uploads")]')  # fmt: skip
        if bounds.pattern is not None:
            trouble = patterns.problem(bounds.pattern)
            if trouble is None and not patterns.anchored(bounds.pattern):
                trouble = "is searched for anywhere in the text"
            if trouble is not None:
                self.refuse(
                    path, f"pattern {bounds.pattern!r} {trouble}", r"write \A[0-9]{1,12}\Z with explicit ranges"
                )
        if bounds.max_length is None and "url" not in kinds:
            self.refuse(path, "text without a greatest length", "write Annotated[str, lg.Text(200)]")


_ON_TEXT: Final = (IdCheck, PathCheck, TextCheck, UrlCheck)


def _step(get: Get, name: str) -> Get:
    return lambda args: (getattr(value, name) for value in get(args) if value is not None)


def _each(get: Get) -> Get:
    return lambda args: (value for values in get(args) for value in values or ())


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


def check_of(meta: Any) -> ArgCheck | None:
    """Return the check in one piece of `Annotated` metadata: itself, or inside a `msgspec.Meta`."""
    if isinstance(meta, msgspec.Meta):
        meta = (meta.extra or {}).get(EXTRA_KEY)
    is_check = all(hasattr(meta, name) for name in ("kind", "stage", "refuse")) and not isinstance(meta, type)
    return cast("ArgCheck", meta) if is_check else None


def show(kind: Any) -> str:
    """Return the name of a type for a message."""
    return str(getattr(kind, "__name__", None) or kind)
