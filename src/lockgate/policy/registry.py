"""The operations of a deployment: registered, typed, enumerable, sealed (C1).

Rule 1: what was not registered before `seal` does not exist; after it, nothing can be added.
Rule 2: a function is stored here and entered by the broker's edge alone; `Operation` has no method that calls it.
Rule 3: arguments are decoded once, into the very object that is authorized and handed over.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import msgspec

from lockgate.contract.errors import RegistrationError
from lockgate.policy import checks
from lockgate.policy.types import Args, BadArguments

if TYPE_CHECKING:
    from lockgate.policy.compile import CompiledScope

Function = TypeVar("Function", bound=Callable[..., Any])
Effect = Literal["read", "write"]
MAX_RESULT: Final = 1024 * 1024
MAX_TIMEOUT: Final = 300.0
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,47}")
_AT: Final = re.compile(r" - at `\$([^`]*)`")


class Operation:
    """One registered operation; read-only.

    Attributes:
        name: what code and scopes call it.
        fn: the function; only the broker's edge calls it.
        effect: "write" needs a durable intent row first.
        idempotency: the fields that make two requests the same, or None (then `why` says why not).
        timeout: seconds the function may take.
        max_result: bytes of the encoded result.
        is_async: whether `fn` is a coroutine function.
        fields: arguments by name, for scopes.

    """

    __slots__ = (
        "_checks", "_decode", "_encode", "args_type", "authorize_checks", "doc", "effect", "fields", "fn",
        "idempotency", "is_async", "max_result", "name", "result_type", "timeout", "why",
    )  # fmt: skip

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        effect: Effect,
        idempotency: tuple[str, ...] | None,
        why: str | None,
        timeout: float,
        max_result: int,
    ) -> None:
        self.fn = fn
        self.name = getattr(fn, "__name__", "")
        self.effect = effect
        self.idempotency = idempotency
        self.why = why
        self.timeout = timeout
        self.max_result = max_result
        self.is_async = inspect.iscoroutinefunction(fn)
        self.doc = (inspect.getdoc(fn) or "").partition("\n")[0]
        self.args_type, self.result_type = _signature(self.name, fn)
        self.fields, self._checks = checks.arguments(self.name, self.args_type)
        checks.result(self.name, self.result_type)
        self.authorize_checks = tuple(one for one in self._checks if one.check.stage == "authorize")
        self._checks = [one for one in self._checks if one.check.stage == "decode"]
        self._decode = msgspec.json.Decoder(self.args_type).decode
        self._encode = msgspec.json.Encoder().encode

    def decode_args(self, raw: bytes) -> Args:
        """Return the typed arguments.

        Raises:
            BadArguments: not of the declared types; names the field, holds no value.

        """
        try:
            args = self._decode(raw)
        except msgspec.ValidationError as error:
            at = _AT.search(str(error))
            # The library's text may quote a key or a value of the caller; only the place, a declared name, is kept.
            place = at.group(1).replace(".", "/") if at else ""
            raise BadArguments(place if place.isprintable() else "", "is not of the declared type") from None
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            raise BadArguments("", "is not well-formed JSON") from None
        if self._checks:
            found = checks.run_checks(args, self._checks, "decode")
            if found is not None:
                raise checks.bad(found)
        return args

    def encode_result(self, result: object) -> bytes:
        """Return the JSON of a result of the declared type.

        Raises:
            TypeError: it is not of that type.

        """
        if type(result) is not self.result_type:
            raise TypeError("not of the declared type")
        return self._encode(result)

    def describe(self) -> dict[str, Any]:
        """Return name, effect, first line of the docstring and JSON Schemas of arguments and result."""
        return {
            "name": self.name,
            "effect": self.effect,
            "doc": self.doc,
            "args": msgspec.json.schema(self.args_type),
            "result": msgspec.json.schema(self.result_type),
        }

    def __repr__(self) -> str:
        return f"<operation {self.name} ({self.effect})>"


class Operations:
    """A registry. `seal` it before use; the broker does."""

    def __init__(self) -> None:
        self._all: dict[str, Operation] = {}
        self._sealed = False

    def operation(
        self,
        *,
        effect: Effect,
        idempotency: tuple[str, ...] | Literal["unset"] | None = "unset",
        why: str | None = None,
        timeout: float = 5.0,
        max_result: int | None = None,
    ) -> Callable[[Function], Function]:
        """Register the decorated function under its own name.

        Args:
            effect: "read" or "write".
            idempotency: names of the arguments that make two requests the same; a write must say so, or give
                `idempotency=None` and `why`.
            why: the reason a write has no idempotency.
            timeout: seconds, at most 300.
            max_result: bytes of the encoded result, at most 1 MiB; must be given.

        Raises:
            RegistrationError: the declaration could not be held to its promise.

        """

        def register(fn: Function) -> Function:
            name = getattr(fn, "__name__", "")
            if self._sealed:
                checks.refuse(name, "", "the registry is sealed", "register every operation before the broker starts")
            if not _NAME.fullmatch(name) or name in self._all:
                checks.refuse(name, "", "its name is taken or not lower-case words", "rename the function")
            if effect not in ("read", "write"):
                checks.refuse(name, "", f"effect {effect!r}", 'say effect="read" or effect="write"')
            if max_result is None or not 0 < max_result <= MAX_RESULT:
                checks.refuse(name, "", "its result has no size cap", f"give max_result in bytes, at most {MAX_RESULT}")
            if not 0 < timeout <= MAX_TIMEOUT:
                checks.refuse(name, "", f"timeout {timeout!r}", f"give seconds between 0 and {MAX_TIMEOUT:g}")
            key = None if idempotency == "unset" else idempotency
            if effect == "write" and (idempotency == "unset" or (key is None and not why)):
                checks.refuse(name, "", "a write that does not say when two requests are the same",
                              'name the fields in idempotency=(...), or say idempotency=None, why="..."')  # fmt: skip
            made = Operation(fn, effect=effect, idempotency=key, why=why, timeout=timeout, max_result=max_result)
            for field in key or ():
                if field not in made.fields:
                    checks.refuse(name, field, "idempotency names no argument", "use names of the arguments")
            self._all[name] = made
            return fn

        return register

    def seal(self) -> Operations:
        """Close the registry; idempotent. Returns it."""
        self._sealed = True
        return self

    @property
    def sealed(self) -> bool:
        """Whether nothing can be added any more."""
        return self._sealed

    def get(self, name: str) -> Operation | None:
        """Return the operation of that name, or None."""
        return self._all.get(name)

    def names(self) -> list[str]:
        """Return all names, sorted."""
        return sorted(self._all)

    def describe(self, scope: CompiledScope | None = None) -> list[dict[str, Any]]:
        """Describe all operations, or those that a scope allows."""
        allowed = self._all if scope is None else scope.operations
        return [self._all[name].describe() for name in self.names() if name in allowed]

    @property
    def digest(self) -> str:
        """SHA-256 over the description of every operation: two brokers with one digest offer the same."""
        return hashlib.sha256(msgspec.json.encode(self.describe(), order="deterministic")).hexdigest()


def _signature(name: str, fn: Callable[..., Any]) -> tuple[type[Args], type[msgspec.Struct]]:
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(fn).parameters
    try:
        hints = typing.get_type_hints(fn, include_extras=True)
    except NameError as error:
        raise RegistrationError(
            f"operation {name}: an annotation cannot be resolved ({error.name})",
            next_step="import the name at run time, not under TYPE_CHECKING",
        ) from None
    names = list(parameters)
    if len(names) != 2:
        checks.refuse(
            name, "", "it does not take (call, args)", "write `def f(call: lg.Call, args: MyArgs) -> MyResult`"
        )
    kind = hints.get(names[1])
    if not (isinstance(kind, type) and issubclass(kind, Args)) or kind is Args:
        checks.refuse(name, names[1], "is no subclass of lg.Args", "declare the arguments as a subclass of lg.Args")
    if "return" not in hints:
        checks.refuse(name, "", "it has no result type", "annotate the return with a subclass of lg.Result")
    return kind, hints["return"]
