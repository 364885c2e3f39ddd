"""What may be returned: a model that drops what it does not declare, with nothing open and no credential (C1).

Rule 1: no field can carry anything: a dict from a backend, `Any`, raw JSON. Undeclared data stays in the broker.
Rule 2: no field is called like a credential.
"""

from __future__ import annotations

import typing
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import msgspec

from lockgate.policy.checks import CREDENTIAL, hints, refuse, show


def check(operation: str, kind: Any) -> None:
    """Check the result type of an operation.

    Raises:
        RegistrationError: it has no model, or a field could carry anything.

    """
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        refuse(operation, "", f"its result {show(kind)} has no model", "return a subclass of lg.Result")
    _result(operation, kind, "result", set())


def _result(operation: str, kind: Any, path: str, seen: set[Any]) -> None:
    origin = get_origin(kind)
    if origin is Literal:
        return
    if origin is not None:
        for arm in get_args(kind)[: 1 if origin is Annotated else None]:
            if arm is not Ellipsis:
                _result(operation, arm, path, seen)
        return
    if kind in _OPEN:
        refuse(operation, path, f"{show(kind)} would let undeclared data out", "declare the fields that may leave")
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in seen:
        seen.add(kind)
        found = hints(operation, kind)
        for name in kind.__struct_fields__:
            if set(name.lower().split("_")) & CREDENTIAL:
                refuse(operation, f"{path}.{name}", "no call returns a credential (C1)", "leave the field out")
            _result(operation, found[name], f"{path}.{name}", seen)


_OPEN: Final = frozenset({Any, object, msgspec.Raw, dict, list, tuple, set, frozenset, typing.Dict, typing.List})  # noqa: UP006
