"""How a person writes the arguments and the result of an operation.

Rule 1: an argument has a type with a bound. What has none is refused when the operation is registered (checks.py).
Rule 2: a kind of argument is data beside the plain type: `order_id: Annotated[str, lg.Id("ord")]`. Type checkers
        see `str`; the decoder gets the bounds from the same object.
Rule 3: text holds no control, format or bidirectional character unless its kind says so.
"""

from __future__ import annotations

import re
import types
import unicodedata
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any, Final, Generic, Literal, NamedTuple, ParamSpec, Protocol, dataclass_transform

import msgspec

from lockgate.contract.errors import RegistrationError
from lockgate.contract.run import Principal
from lockgate.policy.host import Refusal
from lockgate.policy.url import Url, UrlRule, first_refusal

INT_LIMIT: Final = 2**53  # beyond it a JSON reader that holds numbers as doubles changes the value
EXTRA_KEY: Final = "lockgate"
URL_SAFE_KEY: Final = "lockgate.url_safe"
DECOY_KEY: Final = "lockgate.decoy"
_PREFIX: Final = re.compile(r"[a-z][a-z0-9]{0,15}")
_ROOT: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")

Stage = Literal["decode", "authorize"]
P = ParamSpec("P")


# The decorator tells type checkers that a subclass is frozen and by keyword without its author saying so again.
@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Args(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """Base of the arguments of an operation: frozen, by keyword, unknown names refused."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the result of an operation: what it does not declare does not leave the broker."""


class BadArguments(Exception):
    """Arguments that are not of the declared types.

    Attributes:
        path: JSON pointer to the first bad one, "" for the whole.
        detail: for the audit row only, without any value.

    """

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(path, detail)
        self.path = path
        self.detail = detail


class ArgCheck(Protocol):
    """A rule on one argument beyond what the decoder checks, found in its `Annotated` metadata.

    It stands there itself, or as `msgspec.Meta(extra={"lockgate": check})`.

    Attributes:
        kind: short name, used in rule names ("notify.callback.url").
        stage: "decode" makes a failure `bad_request`; "authorize" makes it `argument_not_allowed`.

    """

    @property
    def kind(self) -> str:
        """Short name of the rule."""
        ...

    @property
    def stage(self) -> Stage:
        """When it is checked, and so what a failure is called."""
        ...

    def refuse(self, value: Any) -> str | None:
        """Return why `value` is refused (audit only), or None. Pure; raising refuses."""
        ...


class IdCheck(NamedTuple):
    """`ord_` and 1 to 12 decimal digits."""

    prefix: str
    match: Callable[[str], object]
    kind: str = "id"
    stage: Stage = "decode"

    def refuse(self, value: Any) -> str | None:
        """Return why `value` is no such identifier, or None."""
        return None if self.match(value) else f"is not {self.prefix}_ and 1 to 12 digits"


class TextCheck(NamedTuple):
    """Text without controls, format and bidirectional characters; `lines` admits newline and tab."""

    lines: bool
    kind: str = "text"
    stage: Stage = "decode"

    def refuse(self, value: Any) -> str | None:
        """Return why `value` holds a character that is refused, or None."""
        return None if clean(value, lines=self.lines) else "holds a control, format or private character"


class PathCheck(NamedTuple):
    """A relative path in lexical normal form beneath a root that the deployment names."""

    root: str
    kind: str = "path"
    stage: Stage = "decode"

    def refuse(self, value: Any) -> str | None:
        """Return why `value` is no plain relative path, or None."""
        if len(value.encode()) > 1024 or not clean(value) or "\\" in value:
            return "is too long, or holds a control character or a backslash"
        for part in value.split("/"):
            if part in {"", ".", ".."} or len(part.encode()) > 255:
                return "has an empty, dot or over-long segment"
        return None


class UrlCheck(NamedTuple):
    """An absolute URL that one of the declared rules takes (E6)."""

    rules: tuple[UrlRule, ...]
    kind: str = "url"
    stage: Stage = "authorize"

    def refuse(self, value: Any) -> str | None:
        """Return the reason class of the refusal, or None."""
        url = Url.parse(value.encode(), tuple({rule.scheme for rule in self.rules}))
        refusal = url if isinstance(url, Refusal) else first_refusal(url, self.rules)
        return None if refusal is None else f"{refusal.reason}: {refusal.detail}"


def clean(text: str, *, lines: bool = False) -> bool:
    """Whether `text` holds printable characters and spaces only (Unicode categories C*, Zl and Zp are refused)."""
    if text.isprintable():
        return True
    extra = "\n\t" if lines else ""
    return all(c.isprintable() or c in extra or unicodedata.category(c) == "Zs" for c in text)


class _Kind(Generic[P]):
    """A kind of argument: `Annotated[str, lg.Id("ord")]`, or `lg.Id["ord"]` where no type checker looks."""

    __slots__ = ("_base", "_make")

    def __init__(self, base: Any, make: Callable[P, msgspec.Meta]) -> None:
        self._base = base
        self._make = make

    def __call__(self, *parts: P.args, **options: P.kwargs) -> msgspec.Meta:
        """Return the bounds as data: `Annotated[str, lg.Text(200)]`."""
        return self._make(*parts, **options)

    def __getitem__(self, item: Any) -> Any:
        form: Any = Annotated
        make: Callable[..., msgspec.Meta] = self._make
        parts: Any = item if isinstance(item, tuple) else (item,)  # pyright: ignore[reportUnknownVariableType]
        if self._base is list:
            return form[types.GenericAlias(list, (parts[0],)), make(*parts[1:])]
        return form[self._base, make(*parts)]


def _id(prefix: str) -> msgspec.Meta:
    if not _PREFIX.fullmatch(prefix):
        raise RegistrationError(
            f"{prefix!r} is no prefix of an identifier", next_step='use lower-case letters, such as lg.Id("ord")'
        )
    pattern = rf"{prefix}_[0-9]{{1,12}}"
    # The pattern is checked by us (170 ns); the decoder's own pattern check is four times slower.
    return msgspec.Meta(
        max_length=len(prefix) + 13,
        description=f"{prefix}_ and 1 to 12 digits",
        extra_json_schema={"pattern": f"^{prefix}_[0-9]{{1,12}}$"},
        extra={EXTRA_KEY: IdCheck(prefix, re.compile(pattern).fullmatch)},
    )


def _text(most: int, least: int = 0, *, lines: bool = False) -> msgspec.Meta:
    _span("lg.Text", least, most, 0, INT_LIMIT)
    return msgspec.Meta(min_length=least, max_length=most, extra={EXTRA_KEY: TextCheck(lines)})


def _int(least: int, most: int) -> msgspec.Meta:
    _span("lg.Int", least, most, -INT_LIMIT, INT_LIMIT)
    return msgspec.Meta(ge=least, le=most)


def _list_of(most: int, least: int = 0) -> msgspec.Meta:
    _span("lg.ListOf", least, most, 0, 100_000)
    return msgspec.Meta(min_length=least, max_length=most)


def _path_beneath(root: str) -> msgspec.Meta:
    if not _ROOT.fullmatch(root):
        raise RegistrationError(
            f"{root!r} is no name of a root", next_step='name the root, such as lg.PathBeneath("uploads")'
        )
    return msgspec.Meta(
        min_length=1,
        max_length=1024,
        description=f"a relative path beneath {root}",
        extra={EXTRA_KEY: PathCheck(root)},
    )


def _url(*rules: str, query: tuple[str, ...] = ()) -> msgspec.Meta:
    if not rules:
        raise RegistrationError(
            "lg.Url() declares no destination", next_step='name them, such as lg.Url("https://hooks.example/T1/*")'
        )
    return msgspec.Meta(
        min_length=1,
        max_length=2048,
        description="an absolute URL of: " + ", ".join(rules),
        extra={EXTRA_KEY: UrlCheck(tuple(UrlRule.parse(rule, query=query) for rule in rules))},
    )


def _span(kind: str, least: int, most: int, floor: int, ceiling: int) -> None:
    if type(least) is not int or type(most) is not int or not floor <= least <= most <= ceiling:
        raise RegistrationError(
            f"{kind} from {least!r} to {most!r} is no range", next_step=f"use whole numbers within {floor}..{ceiling}"
        )


Id: Final = _Kind(str, _id)
Text: Final = _Kind(str, _text)
Int: Final = _Kind(int, _int)
ListOf: Final = _Kind(list, _list_of)
PathBeneath: Final = _Kind(str, _path_beneath)
UrlArg: Final = _Kind(str, _url)
Cents = Annotated[int, msgspec.Meta(gt=0, le=INT_LIMIT, description="an amount of money in cents, above zero")]
SafeUrl = Annotated[str, msgspec.Meta(description="a URL that may be shown as a live link", extra={URL_SAFE_KEY: True})]
"""A result field whose https URL the render guard lets live: the operation vouches that no stranger chose it (E5)."""


Decoy = Annotated[str, msgspec.Meta(description="a value of no use", extra={DECOY_KEY: True})]
"""A field at the top of a result that the broker fills with the run's planted value: `api_key: lg.Decoy = ""` (E7)."""


class Token(Protocol):
    """A credential that was minted for one call, one backend and one scope."""

    @property
    def id(self) -> str:
        """Public name of it, as in the audit row."""
        ...

    def use(self) -> AbstractContextManager[str]:
        """Read the credential inside one `with` block."""
        ...


class Call(Protocol):
    """What an operation function is told of the call it serves."""

    @property
    def id(self) -> str:
        """Name of this call, as in its audit rows."""
        ...

    @property
    def principal(self) -> Principal:
        """On whose behalf: take tenant and user from here, never from an argument."""
        ...

    @property
    def deadline(self) -> float:
        """Monotonic seconds at which the caller gives up."""
        ...

    @property
    def operation(self) -> str:
        """Registered name."""
        ...

    @property
    def idempotency_key(self) -> str | None:
        """Equal across every try of the same request; hand it to the backend."""
        ...

    def mint(self, backend: str, *, scope: Sequence[str]) -> Awaitable[Token]:
        """Mint a token for `backend` limited to `scope`, for this call only."""
        ...
