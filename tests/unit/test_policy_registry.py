"""What may be registered, and that every refusal names the field and the fix (C1, C3, E6)."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import inspect
import typing
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, TypedDict, TypeVar

import msgspec
import pytest

import lockgate.policy as lg
from lockgate.contract.errors import LockgateError, RegistrationError
from lockgate.policy import patterns, registry
from lockgate.policy.registry import MAX_RESULT, Operations

Item = TypeVar("Item")


class Done(lg.Result):
    ok: bool = True


class Empty(lg.Args):
    pass


class Color(enum.Enum):
    RED = "red"


class Part(lg.Args):
    note: Annotated[str, lg.Text(10)]


class Loose(lg.Args, forbid_unknown_fields=False):
    n: lg.Cents


class Renamed(lg.Args, rename="camel"):
    order_id: Annotated[str, lg.Id("ord")]


class Open(lg.Result):
    data: dict[str, Any]


class Deep(lg.Result):
    parts: list[Open]


class Leaky(lg.Result):
    access_token: str


def args_of(**fields: Any) -> type[lg.Args]:
    return type(lg.Args)("Given", (lg.Args,), {"__annotations__": fields, "__module__": __name__})


def register(kind: Any = Empty, result: Any = Done, **options: Any) -> registry.Operation:
    def op(call: lg.Call, args: Any) -> Any:
        return call, args

    op.__annotations__ |= {"args": kind, "return": result}
    ops = Operations()
    ops.operation(**{"effect": "read", "max_result": 100} | options)(op)
    found = ops.get("op")
    assert found is not None
    return found


OUTSIDE = lg.Url("https://hooks.example/T1/*")

GOOD: list[dict[str, Any]] = [
    {"order_id": Annotated[str, lg.Id("ord")]},
    {"order_id": lg.Id["ord"]},
    {"amount": lg.Cents, "count": Annotated[int, lg.Int(0, 10)], "flag": bool},
    {"note": Annotated[str, lg.Text(200)] | None},
    {"note": Annotated[str, lg.Text(2000, lines=True)]},
    {"ids": Annotated[list[Annotated[str, lg.Id("ord")]], lg.ListOf(5)]},
    {"ids": lg.ListOf[lg.Id["ord"], 5]},
    {"kind": Literal["a", "b"], "color": Color, "number": Literal[1, 2]},
    {"part": Part, "parts": Annotated[list[Part], lg.ListOf(3)]},
    {"callback": Annotated[str, OUTSIDE]},
    {"upload_path": Annotated[str, lg.PathBeneath("uploads")]},
    {"code": Annotated[str, msgspec.Meta(pattern=r"\A[A-Z]{2}[0-9]{4}\Z", max_length=6)]},
    {"url_id": Annotated[str, lg.Id("url")], "callback_name": lg.Text[9], "endpoint_kind": Literal["a", "b"]},
    {"lieutenant": lg.Text[9], "runner": lg.Text[9], "users": lg.ListOf[lg.Id["usr"], 5], "key": lg.Text[9]},
    {"user_agent_text": Annotated[str, lg.Text(20)], "running": bool, "agenda": Annotated[str, lg.Text(9)]},
]


@pytest.mark.parametrize("fields", GOOD, ids=["-".join(fields) for fields in GOOD])
def test_arguments_with_a_bound_are_taken(fields: dict[str, Any]) -> None:
    assert sorted(register(args_of(**fields)).fields) == sorted(fields)


TEXT = Annotated[str, lg.Text(20)]
BAD: list[tuple[str, Any, str]] = [
    *(
        (name, TEXT, "whose call")
        for name in (
            *("tenant", "tenant_id", "user", "user_id", "agent", "agent_id", "run", "run_id", "TENANT", "tenants"),
            *("tenantId", "tenantid", "tenant2", "customerTenant", "userId", "userID", "userid", "username", "user2"),
            *("user_uuid", "agentId", "runId", "the_user", "current_user", "acting_user", "asUser", "on_behalf_of"),
            *("impersonate", "principal", "principalId", "impersonated_user", "__user__"),
        )
    ),
    *(
        (name, TEXT, "credential")
        for name in (
            *("token", "access_token", "credential", "credentials", "api_key", "password", "accessToken", "authToken"),
            *("accesstoken", "apiKey", "APIKey", "private_key", "privateKey", "clientSecret", "clientsecret", "jwt"),
            *("passphrase", "bearer", "signing_key", "access_key_id", "secretKey", "token2"),
        )
    ),
    ("budget", lg.Cents, "scope language"),
    ("approve", bool, "scope language"),
    ("anything", Any, "admits more"),
    ("table", dict[str, str], "admits more"),
    ("table", dict, "admits more"),
    ("ratio", float, "admits more"),
    ("raw", msgspec.Raw, "admits more"),
    ("pair", tuple[str, str], "admits more"),
    ("data", bytes, "admits more"),
    ("text", str, "greatest length"),
    ("text", str | None, "greatest length"),
    ("text", Annotated[str, msgspec.Meta(pattern=r"\A[a-z]+\Z")], "greatest length"),
    ("number", int, "without bounds"),
    ("number", Annotated[int, msgspec.Meta(ge=0)], "without bounds"),
    ("number", Annotated[int, msgspec.Meta(ge=0, le=2**60)], "without bounds"),
    ("items", list[bool], "greatest length"),
    ("items", list, "admits more"),
    ("items", Annotated[list[str], lg.ListOf(3)], "greatest length"),
    ("items", Annotated[list[Any], lg.ListOf(3)], "admits more"),
    ("either", bool | lg.Cents, "union"),
    ("flag", Literal[True, "a"], "Literal"),
    ("code", Annotated[str, msgspec.Meta(pattern=r"^[0-9]+$", max_length=9)], "trailing newline"),
    ("code", Annotated[str, msgspec.Meta(pattern=r"\A\d+\Z", max_length=9)], "Unicode"),
    ("code", Annotated[str, msgspec.Meta(pattern=r"\A\w+\Z", max_length=9)], "Unicode"),
    ("code", Annotated[str, msgspec.Meta(pattern=r"[0-9]+", max_length=9)], "anywhere"),
    ("code", Annotated[str, msgspec.Meta(pattern=r"\A[0-9]+\Z|x", max_length=9)], "anywhere"),
    ("code", Annotated[str, msgspec.Meta(pattern=r"\A([a-z]+)+\Z", max_length=99)], "repeats a group"),
    *(
        (name, TEXT, "says URL")
        for name in (
            *("url", "callback_url", "callback", "webhook", "target_uri", "endpoint", "urls", "imageUrl", "URL"),
            *("url_template", "urlToFetch", "web_hook", "webHook2", "callback_uri_text", "href", "call_back"),
        )
    ),
    *(
        (name, TEXT, "says path")
        for name in ("path", "file", "filename", "upload_dir", "files", "outputDir", "fileName", "file_name")
    ),
    ("order_id", Annotated[int, lg.Id("ord")], "is text"),
    ("order_ids", Annotated[list[bool], lg.Id("ord")], "is text"),
    ("part", Loose, "turns off"),
    ("part", Renamed, "renames"),
    ("part", args_of(token=TEXT), "credential"),
    ("part", args_of(url=TEXT), "says URL"),
    ("items", Annotated[list[args_of(text=str)], lg.ListOf(3)], "greatest length"),  # type: ignore[misc]
]


@pytest.mark.parametrize(("name", "kind", "why"), BAD, ids=[f"{name}-{why}" for name, _, why in BAD])
def test_an_argument_without_a_bound_is_refused_by_name(name: str, kind: Any, why: str) -> None:
    """Negative control beside it: the same registration with a bounded argument passes."""
    register(args_of(fine=lg.Cents))
    with pytest.raises(RegistrationError, match=why) as caught:
        register(args_of(fine=lg.Cents, **{name: kind}))
    assert f"op.{name}" in caught.value.message
    assert caught.value.next_step


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"max_result": None}, "no size cap"),
        ({"max_result": 0}, "no size cap"),
        ({"max_result": MAX_RESULT + 1}, "no size cap"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"timeout": 301}, "timeout"),
        ({"timeout": "5"}, "timeout"),
        ({"timeout": True}, "timeout"),
        ({"max_result": 1.5}, "no size cap"),
        ({"max_result": True}, "no size cap"),
        ({"max_result": "9"}, "no size cap"),
        ({"labels": None}, "no list"),
        ({"labels": "private"}, "no list"),
        ({"effect": "write", "idempotency": 5}, "no arguments"),
        ({"effect": "write", "idempotency": ("amount", "amount")}, "twice"),
        ({"effect": "write", "idempotency": None, "why": " "}, "two requests are the same"),
        ({"effect": "write", "idempotency": ("amount",), "reconcile": 5}, "reconcile"),
        ({"effect": "wrte"}, "effect"),
        ({"effect": "write"}, "two requests are the same"),
        ({"effect": "write", "idempotency": None}, "two requests are the same"),
        ({"effect": "write", "idempotency": ()}, "two requests are the same"),
        ({"effect": "write", "idempotency": "amount"}, "is one text"),
        ({"effect": "write", "idempotency": ("amuont",)}, "names no argument"),
        ({"effect": "read", "idempotency": ("amount",)}, "a read has no"),
        ({"labels": ("secret",)}, "no label"),
        ({"reconcile": lambda call, args: None}, "reconcile"),
        ({"effect": "write", "idempotency": ("amount",), "reconcile": lambda call: None}, "reconcile"),
        ({"result": None}, "no model"),
        ({"result": dict}, "no model"),
        ({"result": str}, "no model"),
        ({"result": list[Done]}, "no model"),
        ({"result": Open}, "undeclared data"),
        ({"result": Deep}, "undeclared data"),
        ({"result": Leaky}, "no call returns a credential"),
        ({"kind": lg.Args}, "subclass of lg.Args"),
        ({"kind": dict}, "subclass of lg.Args"),
        ({"kind": Done}, "subclass of lg.Args"),
        ({"kind": Loose}, "turns off"),
        ({"kind": args_of(text=Annotated[str, lg.Text(5), lg.Int(0, 5)])}, "cannot read"),
    ],
)
def test_a_declaration_that_cannot_be_held_is_refused(options: dict[str, Any], why: str) -> None:
    kind = options.pop("kind", args_of(amount=lg.Cents))
    with pytest.raises(RegistrationError, match=why) as caught:
        register(kind, **options)
    assert "op" in caught.value.message


def result_of(kind: Any = str, name: str = "x", **options: Any) -> Any:
    return msgspec.defstruct("Made", [(name, kind)], bases=(lg.Result,), frozen=True, kw_only=True, **options)


class Spelled(lg.Result, rename={"value": "apiKey"}):
    value: str


class Tagged(lg.Result, tag_field="token", tag="x"):
    value: str


class Named(NamedTuple):
    token: str


class Table(TypedDict):
    rest: Any


@dataclasses.dataclass
class Data:
    access_token: str


class Data2(msgspec.Struct):
    a: int


class Data3(msgspec.Struct):
    b: int


@dataclasses.dataclass
class Data4:
    plain: list[Data2]


class Page(lg.Result, Generic[Item]):
    items: list[Item]
    note: str


class OpenPage(lg.Result, Generic[Item]):
    items: list[Item]
    rest: Any


Loosened = NewType("Loosened", dict)  # type: ignore[type-arg]
OPEN_RESULTS: list[tuple[Any, str]] = [
    *(
        (result_of(name=name), "no call returns a credential")
        for name in ("api_key", "apiKey", "accessToken", "accesstoken", "private_key", "clientSecret", "passphrase")
    ),
    (Spelled, "no call returns a credential"),
    (Tagged, "no call returns a credential"),
    (result_of(name="t\u043eken"), "outside ASCII"),
    *(
        (result_of(kind), "undeclared data")
        for kind in (
            *(typing.List, typing.Dict, typing.Tuple, typing.Mapping, Mapping, MutableMapping, Sequence),  # noqa: UP006
            *(OrderedDict, defaultdict, Loosened, list[Loosened], object, type, Exception, complex, Item),
            *(Table, OpenPage[str], Page[Any], list[Page[dict]]),  # type: ignore[type-arg]
        )
    ),
    *((result_of(kind), "no call returns a credential") for kind in (Named, Data, list[Data], Page[Data] | None)),
    (result_of(Data2 | Data3), "cannot read"),
]


@pytest.mark.parametrize(("result", "why"), OPEN_RESULTS)
def test_a_result_that_could_carry_more_than_it_declares_is_refused(result: Any, why: str) -> None:
    """C1: whatever the kind of the type and the spelling of the name."""
    with pytest.raises(RegistrationError, match=why) as caught:
        register(result=result)
    assert "op.result" in caught.value.message


@pytest.mark.parametrize(
    "kind",
    [
        Page[str], Page[Done], list[Page[int]] | None, dict[str, Done], tuple[int, ...], dt.datetime, Color,
        Decimal, Annotated[float, msgspec.Meta(ge=0)], Literal["a"], Data4, Sequence[Done], frozenset[str],
    ],
)  # fmt: skip
def test_a_result_of_closed_types_is_taken(kind: Any) -> None:
    """The control of the test above."""
    assert register(result=result_of(kind)).result_type.__struct_fields__ == ("x",)


def test_a_write_may_say_why_it_has_no_idempotency() -> None:
    assert register(effect="write", idempotency=None, why="appends to a log").idempotency is None
    write = register(
        args_of(amount=lg.Cents), effect="write", idempotency=("amount",), reconcile=lambda call, args: None
    )
    assert write.idempotency == ("amount",)
    assert write.reconcile is not None


def test_the_function_takes_call_and_args_and_says_what_it_returns() -> None:
    ops = Operations()

    def no_result(call: lg.Call, args: Empty):  # type: ignore[no-untyped-def]
        return call, args

    def one(args: Empty) -> Done:
        return Done(ok=bool(args))

    def many(call: lg.Call, *args: Empty) -> Done:
        return Done(ok=bool(call and args))

    for fn, why in ((no_result, "no result type"), (one, "call, args"), (many, "call, args")):
        with pytest.raises(RegistrationError, match=why):
            ops.operation(effect="read", max_result=10)(fn)
    assert ops.names() == []


def test_names_are_plain_and_taken_once() -> None:
    ops = Operations()

    def Bad(call: lg.Call, args: Empty) -> Done:  # noqa: N802
        return Done(ok=bool(call and args))

    def good(call: lg.Call, args: Empty) -> Done:
        return Done(ok=bool(call and args))

    with pytest.raises(RegistrationError, match="lower-case"):
        ops.operation(effect="read", max_result=10)(Bad)
    assert ops.operation(effect="read", max_result=10)(good) is good
    with pytest.raises(RegistrationError, match="of that name"):
        ops.operation(effect="read", max_result=10)(good)
    digest = ops.digest
    ops.seal()
    good.__name__ = "other"
    with pytest.raises(RegistrationError, match="sealed"):
        ops.operation(effect="read", max_result=10)(good)
    assert ops.names() == ["good"]
    assert ops.digest == digest


def test_an_operation_has_no_method_that_enters_its_function() -> None:
    """C2: only the edge calls `fn`; nothing in the policy package does."""
    for module in (registry, inspect.getmodule(lg.authorize), inspect.getmodule(lg.Scope)):
        assert module is not None
        source = inspect.getsource(module)
        assert ".fn(" not in source
    assert not callable(register())


ARGS = args_of(
    order_id=Annotated[str, lg.Id("ord")],
    amount=lg.Cents,
    note=Annotated[str, lg.Text(10)] | None,
    ids=Annotated[list[Annotated[str, lg.Id("x")]], lg.ListOf(2)],
    part=Part,
)
BASE = {"order_id": "ord_1", "amount": 1, "note": "hi", "ids": ["x_1"], "part": {"note": "in"}}


@pytest.mark.parametrize(
    ("field", "value", "path"),
    [
        ("order_id", "ord_1\n", "/order_id"),
        ("order_id", "ord_", "/order_id"),
        ("order_id", "ord_1234567890123", "/order_id"),
        ("order_id", "xord_1", "/order_id"),
        ("order_id", "ord_\u0661", "/order_id"),  # an Arabic digit, which \d takes
        ("order_id", 5, "/order_id"),
        ("amount", 0, "/amount"),
        ("amount", -5, "/amount"),
        ("amount", 1.0, "/amount"),
        ("amount", 1e2, "/amount"),
        ("amount", True, "/amount"),
        ("amount", "1", "/amount"),
        ("amount", 2**53 + 1, "/amount"),
        ("amount", 2**64, "/amount"),
        ("amount", None, "/amount"),
        ("note", "a\x00b", "/note"),
        ("note", "a\nb", "/note"),
        ("note", "a\u202eb", "/note"),  # right-to-left override
        ("note", "a\u200bb", "/note"),  # zero width space
        ("note", "a\u2028b", "/note"),
        ("note", "a\ue000b", "/note"),  # private use
        ("note", "x" * 11, "/note"),
        ("ids", ["x_1", "y_1"], "/ids"),
        ("ids", ["x_1", 5], "/ids/1"),
        ("ids", ["x_1"] * 3, "/ids"),
        ("ids", {}, "/ids"),
        ("part", {"note": "\x1b"}, "/part/note"),
        ("part", {"note": 1}, "/part/note"),
        ("part", {"note": "a", "x": 1}, "/part"),
        ("extra", 1, ""),
        ("Amount", 1, ""),
        ("x` - at `$.amount", 1, "/amount"),  # a key that looks like the decoder's own words: misleads, shows nothing
    ],
)
def test_arguments_of_other_types_are_refused_with_their_place(field: str, value: Any, path: str) -> None:
    op = register(ARGS)
    assert op.decode_args(msgspec.json.encode(BASE))
    with pytest.raises(lg.BadArguments) as caught:
        op.decode_args(
            msgspec.json.encode(BASE | {field: value}) if value != 2**64 else b'{"amount":18446744073709551616}'
        )
    if value != 2**64:
        assert caught.value.path == path
    assert field not in caught.value.detail
    assert repr(value) not in str(caught.value) or value in (None, True, 0)


@pytest.mark.parametrize("raw", [b"", b"{", b"null", b"[]", b'{"amount":NaN}', b"\xff", b"[" * 100_000])
def test_arguments_that_are_no_object_are_refused(raw: bytes) -> None:
    with pytest.raises(lg.BadArguments) as caught:
        register(ARGS).decode_args(raw)
    assert caught.value.path == ""


def test_text_keeps_what_people_write() -> None:
    op = register(args_of(text=Annotated[str, lg.Text(99)], lines=Annotated[str, lg.Text(99, lines=True)]))
    for text in ("Grüße, 日本 😀", "1\u00a0000\u202f€", "", "a b"):
        assert op.decode_args(msgspec.json.encode({"text": text, "lines": text}))
    assert op.decode_args(msgspec.json.encode({"text": "a", "lines": "a\n\tb"}))
    with pytest.raises(lg.BadArguments):
        op.decode_args(msgspec.json.encode({"text": "a", "lines": "a\rb"}))


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "a/../b", "a//b", "a/.", ".", "", "a\\b", "a\x00", "a/", "x" * 256]
)
def test_a_path_is_lexically_beneath(path: str) -> None:
    op = register(args_of(report_path=Annotated[str, lg.PathBeneath("uploads")]))
    assert op.decode_args(b'{"report_path":"a/b.txt"}')
    with pytest.raises(lg.BadArguments):
        op.decode_args(msgspec.json.encode({"report_path": path}))


def test_results_are_of_the_declared_type_alone() -> None:
    class More(Done):
        extra: str = "backend detail"

    op = register()
    assert op.encode_result(Done()) == b'{"ok":true}'
    for other in (More(), {"ok": True}, None):
        with pytest.raises(TypeError):
            op.encode_result(other)


def test_descriptions_are_schemas_with_the_model_at_their_root() -> None:
    described = register(ARGS, labels=("private",)).describe()
    assert described["args"]["properties"]["order_id"]["pattern"] == "^ord_[0-9]{1,12}$"
    assert described["args"]["additionalProperties"] is False
    assert "Part" in described["args"]["$defs"]
    assert described["labels"] == ["private"]
    assert msgspec.json.encode(described)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("a$", "newline"),
        (r"\d", "Unicode"),
        (r"[\w]", "Unicode"),
        (r"(a)\1", "back-reference"),
        (r"(?=a)", "extension"),
        (r"(?i)a", "extension"),
        (r"(a|b)*", "repeats"),
        (r"(a+)+", "repeats"),
        (r"((a?)){9}", "repeats"),
        (r"(?:[a-z]*,){1,9}", "repeats"),
        ("(", "not a regular"),
        (")", "not a regular"),
        ("a\\", "not a regular"),
        ("[[a]", "set within a set"),
        ("[a--b]", "set within a set"),
        ("a" * 400, "longer"),
    ],
)
def test_patterns_that_mean_two_things_or_take_for_ever(pattern: str, why: str) -> None:
    assert why in (patterns.problem(pattern) or "")


@pytest.mark.parametrize(
    "pattern",
    [r"[$]", r"\$", r"(?:[0-9]{3},){1,3}", r"[]$]x", r"[^]$]", r"(ab)+", r"(?:a|b)?c", r"a{1,3}-[0-9]+", r"[\\]"],
)
def test_patterns_that_are_fine(pattern: str) -> None:
    assert patterns.problem(pattern) is None


def test_refusals_are_typed_errors_of_the_operator() -> None:
    with pytest.raises(LockgateError) as caught:
        register(args_of(x=Any))
    assert (caught.value.code, caught.value.fault, caught.value.exit_code) == ("registration", "operator", 2)
    for bad in (lambda: lg.Id("Ord"), lambda: lg.Int(5, 1), lambda: lg.Text(-1), lambda: lg.PathBeneath("../x")):
        with pytest.raises(RegistrationError):
            bad()


def test_an_annotation_that_cannot_be_resolved_is_named() -> None:
    def op(call: lg.Call, args: Empty) -> Done:
        return Done(ok=bool(call and args))

    op.__annotations__["args"] = "OnlyForCheckers"
    with pytest.raises(RegistrationError, match="OnlyForCheckers") as caught:
        Operations().operation(effect="read", max_result=10)(op)
    assert "TYPE_CHECKING" in caught.value.next_step


def test_nesting_of_arguments_has_an_end() -> None:
    kind: type[lg.Args] = Part
    for _ in range(20):
        kind = args_of(inner=kind)
    with pytest.raises(RegistrationError, match="nested too deep"):
        register(kind)


def test_url_rules_are_read_when_they_are_declared() -> None:
    for wrong in ("not a host", "https://*.example/", "https://user@example.com/"):
        with pytest.raises(LockgateError):
            lg.Url(wrong)
