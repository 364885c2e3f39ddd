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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, final

import msgspec

from lockgate.contract.bounds import FRAME_BYTES
from lockgate.policy import checks, results
from lockgate.policy.describe import describe
from lockgate.policy.latch import taints
from lockgate.policy.types import Args, BadArguments

if TYPE_CHECKING:
    from lockgate.policy.compile import CompiledScope

Function = TypeVar("Function", bound=Callable[..., Any])
Effect = Literal["read", "write"]
MAX_RESULT: Final = FRAME_BYTES - 1024  # a reply is one frame, with its envelope
MAX_TIMEOUT: Final = 300.0
LABELS: Final = ("private", "untrusted", "public", "sink", "public_sink")
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,47}")
_AT: Final = re.compile(r" - at `\$((?:\.[A-Za-z_][A-Za-z0-9_]*|\[[0-9]*\]|\[\.\.\.\])*)`\Z")
_STEP: Final = re.compile(r"\.([A-Za-z_][A-Za-z0-9_]*)|\[([0-9]*|\.\.\.)\]")


@final
class Operation:
    """One registered operation; read-only.

    Attributes:
        name: what code and scopes call it.
        fn: the function; only the broker's edge calls it.
        effect: "write" needs a durable intent row first.
        idempotency: the fields that make two requests the same, or None (then `why` says why not).
        timeout: seconds the function may take.
        max_result: bytes of the encoded result.
        labels: what its result carries ("private", "untrusted", "public") and whether its arguments leave to strangers
            ("sink", "public_sink").
        reconcile: asks the backend what became of a call whose outcome is unknown, or None.
        is_async: whether `fn` is a coroutine function.
        decode_args: returns the typed arguments of some JSON, or raises `BadArguments`, which names the place and
            holds no value.
        fields: arguments by name, for scopes.
        authorize_checks: rules of the arguments' own types that are part of the decision (URL destinations).
        vouches: whether a field of its result is declared `lg.SafeUrl`.
        decoys: fields of its result that are declared `lg.Decoy`.
        taints: what its result adds to what a run has read ("private", "untrusted").

    """

    __slots__ = (
        "_encode", "args_type", "authorize_checks", "decode_args", "decoys", "doc", "effect", "fields", "fn",
        "idempotency", "is_async", "labels", "max_result", "name", "reconcile", "result_type", "taints", "timeout",
        "vouches",
        "why",
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
        labels: tuple[str, ...],
        reconcile: Callable[..., Any] | None,
    ) -> None:
        self.fn = fn
        self.name: str = getattr(fn, "__name__", "")
        self.effect: Effect = effect
        self.idempotency = idempotency
        self.why = why
        self.timeout = timeout
        self.max_result = max_result
        self.labels = labels
        self.reconcile = reconcile
        self.is_async = inspect.iscoroutinefunction(fn)
        self.doc = (inspect.getdoc(fn) or "").partition("\n")[0]
        self.args_type, self.result_type = _signature(self.name, fn)
        self.fields, found = checks.arguments(self.name, self.args_type)
        results.check(self.name, self.result_type)
        self.vouches = results.marks(self.name, self.result_type)
        self.decoys = results.decoys(self.name, self.result_type)
        self.taints = taints(labels)
        self.authorize_checks = tuple(one for one in found if one.check.stage == "authorize")
        self.decode_args = _decode_args(self, found)
        self._encode = msgspec.json.Encoder().encode

    def encode_result(self, result: object) -> bytes:
        """Return the JSON of a result of the declared type.

        Raises:
            TypeError: it is not of that type.

        """
        if type(result) is not self.result_type:
            raise TypeError("not of the declared type")
        return self._encode(result)

    def safe_urls(self, encoded: bytes) -> tuple[str, ...]:
        """Return the values of an encoded result that stand in fields declared `lg.SafeUrl`.

        Nothing when no field is, or when these are not the bytes of such a result (one that an older version stored).
        """
        if not self.vouches:
            return ()
        try:
            result = msgspec.json.decode(encoded, type=self.result_type)
        except msgspec.DecodeError:
            return ()
        return results.safe_urls(self.result_type, result)

    def describe(self) -> dict[str, Any]:
        """Return it as data; see `policy.describe`."""
        return describe(self)

    def __repr__(self) -> str:
        return f"<operation {self.name} ({self.effect})>"


def _decoder(name: str, kind: type[Args]) -> Callable[[bytes], Args]:
    try:
        return msgspec.json.Decoder(kind).decode
    except TypeError:  # such as a bound for numbers on a text
        checks.refuse(name, "", f"the decoder cannot read {kind.__name__}", "give each type the bounds of its kind")


def _decode_args(operation: Operation, found: list[checks.FieldCheck]) -> Callable[[bytes], Args]:
    """Return what `Operation.decode_args` does, with all that it needs at hand."""
    decode = _decoder(operation.name, operation.args_type)
    ready = tuple(checks.ready(one) for one in found if one.check.stage == "decode")
    fields = operation.fields

    def decode_args(raw: bytes) -> Args:
        failed = None
        try:
            args = decode(raw)
            for get, test, one in ready:
                if not test(get(args)):
                    failed = one
                    break
            else:
                return args
        except msgspec.ValidationError as error:
            raise BadArguments(_place(str(error), fields), "is not of the declared type") from None
        except Exception:  # noqa: BLE001 - malformed JSON, or a check that raised: refused, and nothing of it is told
            raise BadArguments("", "could not be read") from None
        raise BadArguments(failed.path, f"is no valid {failed.check.kind}")

    return decode_args


def _place(text: str, fields: dict[str, checks.Field]) -> str:
    """Return the JSON pointer in a decoder's message; of its text, which may quote the caller, nothing else."""
    at = _AT.search(text)
    steps = ["-" if step[2] in {"", "..."} else step[2] or step[1] for step in _STEP.finditer(at[1])] if at else []
    return "/" + "/".join(steps) if steps and steps[0] in fields else ""


@final
class Operations:
    """A registry. `seal` it before use; the broker does."""

    def __init__(self) -> None:
        self._all: dict[str, Operation] = {}
        self._sealed = False
        self._described: dict[str, dict[str, Any]] = {}

    def operation(
        self,
        *,
        effect: Effect,
        idempotency: tuple[str, ...] | Literal["unset"] | None = "unset",
        why: str | None = None,
        timeout: float = 5.0,
        max_result: int | None = None,
        labels: tuple[str, ...] = (),
        reconcile: Callable[..., Any] | None = None,
    ) -> Callable[[Function], Function]:
        """Register the decorated function under its own name.

        Args:
            effect: "read" or "write".
            idempotency: names of the arguments that make two requests the same; a write must say so, or give
                `idempotency=None` and `why`.
            why: the reason a write has no idempotency.
            timeout: seconds, at most 300.
            max_result: bytes of the encoded result, below 1 MiB; must be given.
            labels: of "private", "untrusted", "public" (the result), "sink", "public_sink" (the arguments).
            reconcile: `(call, args) -> result | None` that asks the backend what became of an unknown call.

        Raises:
            RegistrationError: the declaration could not be held to its promise.

        """

        def register(fn: Function) -> Function:
            made = Operation(
                fn,
                effect=effect,
                idempotency=_declared(fn, effect, idempotency, why),
                why=why,
                timeout=_timeout(fn, timeout),
                max_result=_max_result(fn, max_result),
                labels=_labels(fn, labels),
                reconcile=reconcile,
            )
            name = made.name
            if self._sealed:
                checks.refuse(name, "", "the registry is sealed", "register every operation before the broker starts")
            if name in self._all:
                checks.refuse(name, "", "there is an operation of that name", "rename the function")
            for field in made.idempotency or ():
                if field not in made.fields:
                    checks.refuse(name, field, "idempotency names no argument", "use names of the arguments")
            if reconcile is not None and (
                effect == "read" or not callable(reconcile) or len(inspect.signature(reconcile).parameters) != 2
            ):
                checks.refuse(
                    name, "", "reconcile is for writes and takes (call, args)", "write reconcile=f for a write"
                )
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
        names = sorted(self._all if scope is None else scope.operations)
        for name in names:
            if name not in self._described:
                self._described[name] = self._all[name].describe()
        return [self._described[name] for name in names]

    @property
    def digest(self) -> str:
        """SHA-256 over the description of every operation: two brokers with one digest offer the same."""
        return hashlib.sha256(msgspec.json.encode(self.describe(), order="deterministic")).hexdigest()


def _declared(
    fn: Callable[..., Any], effect: str, given: tuple[str, ...] | Literal["unset"] | None, why: str | None
) -> tuple[str, ...] | None:
    name = getattr(fn, "__name__", "")
    if not _NAME.fullmatch(name):
        checks.refuse(name or "?", "", "its name is not lower-case words", "rename the function, such as get_order")
    if effect not in ("read", "write"):
        checks.refuse(name, "", f"effect {effect!r} is none", 'say effect="read" or effect="write"')
    if isinstance(given, str) and given != "unset":
        checks.refuse(name, given, "idempotency is one text", f'write idempotency=("{given}",)')
    if given is not None and not isinstance(given, str | tuple | list):  # pyright: ignore[reportUnnecessaryIsInstance]
        checks.refuse(name, "", "idempotency names no arguments", 'write idempotency=("order_id",)')
    key = None if given == "unset" or given is None else tuple(given)
    if key is not None and len(set(map(repr, key))) != len(key):
        checks.refuse(name, "", "idempotency names an argument twice", "name each once")
    if key == () or (effect == "write" and key is None and (given == "unset" or not (why or "").strip())):
        checks.refuse(
            name, "", "a write that does not say when two requests are the same",
            'name the fields in idempotency=(...), or say idempotency=None, why="..."',
        )  # fmt: skip
    if effect == "read" and key is not None:
        checks.refuse(name, "", "a read has no idempotency", "leave idempotency out")
    return key


def _timeout(fn: Callable[..., Any], timeout: float) -> float:
    if type(timeout) not in (int, float) or not 0 < timeout <= MAX_TIMEOUT:
        checks.refuse(fn.__name__, "", f"timeout {timeout!r}", f"give seconds above 0, at most {MAX_TIMEOUT:g}")
    return float(timeout)


def _max_result(fn: Callable[..., Any], size: int | None) -> int:
    if type(size) is not int or not 0 < size <= MAX_RESULT:
        checks.refuse(fn.__name__, "", "its result has no size cap", f"give max_result in bytes, at most {MAX_RESULT}")
    return size


def _labels(fn: Callable[..., Any], labels: tuple[str, ...]) -> tuple[str, ...]:
    if not isinstance(labels, tuple | list):  # pyright: ignore[reportUnnecessaryIsInstance]
        checks.refuse(fn.__name__, "", "labels is no list of words", 'write labels=("private",)')
    for label in labels:
        if label not in LABELS:
            checks.refuse(fn.__name__, "", f"there is no label {label!r}", "use " + ", ".join(LABELS))
    return tuple(sorted(set(labels)))


def _signature(name: str, fn: Callable[..., Any]) -> tuple[type[Args], type[msgspec.Struct]]:
    parameters = list(inspect.signature(fn).parameters.values())
    plain = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    if len(parameters) != 2 or any(one.kind not in plain for one in parameters):
        checks.refuse(name, "", "it does not take (call, args)", "write `def f(call: lg.Call, args: A) -> R`")
    hints = checks.hints(name, fn)
    kind = hints.get(parameters[1].name)
    if not (isinstance(kind, type) and issubclass(kind, Args)) or kind is Args:
        checks.refuse(name, parameters[1].name, "is no subclass of lg.Args", "declare a subclass of lg.Args")
    if "return" not in hints:
        checks.refuse(name, "", "it has no result type", "annotate the return with a subclass of lg.Result")
    return kind, typing.cast("type[msgspec.Struct]", hints["return"])
