"""What may be returned: a model that drops what it does not declare, with nothing open and no credential (C1).

Rule 1: no field can carry anything: a dict from a backend, `Any`, raw JSON. Undeclared data stays in the broker.
Rule 2: no field is called like a credential, in Python or in JSON.
Rule 3: a URL counts as known to the render guard only where its field says `lg.SafeUrl`; what is not found is not live.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime as dt
import decimal
import enum
import functools
import types
import typing
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NoReturn, get_args, get_origin

import msgspec

from lockgate.policy import names
from lockgate.policy.checks import hints, refuse, show
from lockgate.policy.types import DECOY_KEY, URL_SAFE_KEY, SafeUrl

MAX_URLS: Final = 64
"""URL-safe values that one result makes known; a result with more makes only the first ones live."""
MAX_URL_CHARS: Final = 2048


def check(operation: str, kind: Any) -> None:
    """Check the result type of an operation.

    Raises:
        RegistrationError: it has no model, or a field could carry anything.

    """
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        refuse(operation, "", f"its result {show(kind)} has no model", "return a subclass of lg.Result")
    _result(operation, kind, "result", set())
    try:
        msgspec.json.Decoder(kind)
    except TypeError:  # such as a union that JSON cannot tell apart
        refuse(operation, "result", f"the decoder cannot read {show(kind)}", "declare types that JSON tells apart")


def _result(operation: str, kind: Any, path: str, seen: set[Any]) -> None:
    """Walk one type; what is not known to be closed is refused."""
    if isinstance(kind, typing.NewType):
        _result(operation, kind.__supertype__, path, seen)
        return
    origin, arms = get_origin(kind), get_args(kind)
    if origin is Literal:
        return
    if origin is Annotated:
        _result(operation, arms[0], path, seen)
    elif origin is None:
        _class(operation, kind, path, seen)
    elif arms and (origin in _UNIONS or origin in _MAPPINGS or origin in _SERIES or _is_struct(origin)):
        if _is_struct(origin):  # a generic model: its own fields, then what it was made for
            _class(operation, origin, path, seen)
        for arm in arms:
            if arm is not Ellipsis:
                _result(operation, arm, path, seen)
    else:
        _open(operation, kind, path)


def _class(operation: str, kind: Any, path: str, seen: set[Any]) -> None:
    if kind in seen or kind in _CLOSED:
        return
    if not isinstance(kind, type):
        if not (isinstance(kind, typing.TypeVar) and any(kind in getattr(one, "__parameters__", ()) for one in seen)):
            _open(operation, kind, path)
        return  # the variable of a generic model: what stands for it is looked at where the model is used
    if issubclass(kind, enum.Enum):
        return
    fields = _fields_of(kind)
    if fields is None:
        _open(operation, kind, path)
    seen.add(kind)
    found = hints(operation, kind)
    for name, spelled in fields.items():
        if path == "result" and _is_decoy(found.get(name)):
            continue  # it may look like a credential: that is what it is for
        for said in (name, spelled):
            if not said.isascii():
                refuse(operation, f"{path}.{name}", "a name outside ASCII can look like another one",
                       "call it in plain letters")  # fmt: skip
            if names.says_credential(said):
                refuse(operation, f"{path}.{name}", "no call returns a credential (C1)", "leave the field out")
        if name in found:
            _result(operation, found[name], f"{path}.{name}", seen)


def _fields_of(kind: Any) -> dict[str, str] | None:
    """Return the fields of a model and what JSON calls them; None when it is no model of a kind that drops the rest."""
    if _is_struct(kind):
        found = dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
        tag = kind.__struct_config__.tag_field
        return found if tag is None else found | {tag: tag}
    if dataclasses.is_dataclass(kind):
        return {field.name: field.name for field in dataclasses.fields(kind)}
    if typing.is_typeddict(kind):
        return {name: name for name in kind.__annotations__}
    if _is_named(kind):
        return {name: name for name in kind._fields} if set(kind._fields) <= set(kind.__annotations__) else None
    return None


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _is_named(kind: type) -> bool:
    return tuple in kind.__mro__ and "_fields" in vars(kind)


def _open(operation: str, kind: Any, path: str) -> NoReturn:
    refuse(operation, path, f"{show(kind)} would let undeclared data out", "declare the fields that may leave")


def marks(operation: str, kind: Any) -> bool:
    """Whether a value of the type `kind` may hold a field that is declared `lg.SafeUrl`."""
    return _marks(operation, kind, set())


def _marks(operation: str, kind: Any, seen: set[Any]) -> bool:
    origin = get_origin(kind)
    if origin is Annotated:
        return _marked(kind) or _marks(operation, get_args(kind)[0], seen)
    if origin is Literal:
        return False
    if origin is not None:
        return any(_marks(operation, arm, seen) for arm in get_args(kind))
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)) or kind in seen:
        return False
    seen.add(kind)
    found = hints(operation, kind)
    return any(_marks(operation, found[name], seen) for name in kind.__struct_fields__)


def _marked(kind: Any) -> bool:
    """Whether an `Annotated[...]` is `lg.SafeUrl`, or was given it beside other metadata."""
    return any(
        one is SafeUrl or (isinstance(one, msgspec.Meta) and URL_SAFE_KEY in (one.extra or {}))
        for one in kind.__metadata__
    )


def decoys(operation: str, kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the fields of a result that are declared `lg.Decoy`.

    Raises:
        RegistrationError: one has no default, so an operation would have to make it up.

    """
    found = hints(operation, kind)
    names = tuple(name for name in kind.__struct_fields__ if _is_decoy(found[name]))
    for field in msgspec.structs.fields(kind):
        if field.name in names and field.required:
            refuse(
                operation,
                f"result.{field.name}",
                "a decoy is filled in by the broker",
                f'write {field.name}: lg.Decoy = ""',
            )
    return names


def _is_decoy(kind: Any) -> bool:
    return get_origin(kind) is Annotated and any(
        isinstance(one, msgspec.Meta) and DECOY_KEY in (one.extra or {}) for one in kind.__metadata__
    )


def safe_urls(kind: Any, value: object) -> tuple[str, ...]:
    """Return the values in `value`, a checked object of the type `kind`, that stand in fields declared `lg.SafeUrl`.

    At most `MAX_URLS` different ones of at most `MAX_URL_CHARS` characters, in the order of the fields.
    """
    found: dict[str, None] = {}
    _collect(kind, value, found)
    return tuple(found)[:MAX_URLS]


def _collect(kind: Any, value: object, found: dict[str, None]) -> None:
    origin = get_origin(kind)
    inside: Any = value
    arms = get_args(kind)
    if origin is Annotated:
        if not _marked(kind):
            _collect(arms[0], value, found)
        elif isinstance(value, str) and len(value) <= MAX_URL_CHARS and len(found) < MAX_URLS:
            found[value] = None
    elif origin is Literal:
        return
    elif isinstance(value, msgspec.Struct):
        if origin is None and type(value) is kind:
            for name, hint in _fields(type(value)).items():
                _collect(hint, getattr(value, name), found)
        for arm in arms if origin is not None else ():
            _collect(arm, value, found)
    elif isinstance(value, Mapping) and origin in _MAPPINGS:
        for key, one in inside.items():
            _collect(arms[0], key, found)
            _collect(arms[1], one, found)
    elif isinstance(value, tuple) and origin is tuple and Ellipsis not in arms:
        for arm, one in zip(arms, inside, strict=False):
            _collect(arm, one, found)
    elif isinstance(value, list | tuple | set | frozenset) and origin in _SERIES:
        for one in inside:
            _collect(arms[0], one, found)
    elif origin in _UNIONS:
        for arm in arms:
            _collect(arm, inside, found)


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, Any]:
    found = typing.get_type_hints(kind, include_extras=True)
    return {name: found[name] for name in kind.__struct_fields__}


_UNIONS: Final = frozenset({typing.Union, types.UnionType})
_MAPPINGS: Final = frozenset({dict, collections.abc.Mapping, collections.abc.MutableMapping})
_SERIES: Final = frozenset(
    {list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Set, collections.abc.Collection}
)
_CLOSED: Final = frozenset(
    {
        str, int, float, bool, type(None), bytes, bytearray, memoryview, dt.datetime, dt.date,
        dt.time, dt.timedelta, decimal.Decimal, uuid.UUID, msgspec.UnsetType,
    }
)  # fmt: skip
