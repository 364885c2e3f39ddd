"""Scope is data: read, written, hashed, and checked against the registry before it is used (C3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import pytest

import lockgate.policy as lg
from lockgate.contract.errors import ScopeError
from lockgate.policy.registry import Operations


class OrderRef(lg.Args):
    order_id: Annotated[str, lg.Id("ord")]


class Refund(lg.Args):
    order_id: Annotated[str, lg.Id("ord")]
    amount: lg.Cents
    note: Annotated[str, lg.Text(50)] | None = None
    kind: Literal["full", "part"] = "part"
    ids: Annotated[list[Annotated[str, lg.Id("x")]], lg.ListOf(5)] = msgspec.field(default_factory=list)
    change: Annotated[int, lg.Int(-100, 100)] = 0
    flag: bool = False


class Done(lg.Result):
    ok: bool = True


def registry() -> Operations:
    ops = Operations()

    @ops.operation(effect="read", max_result=100)
    def get_order(call: lg.Call, args: OrderRef) -> Done:
        return Done(ok=bool(call and args))

    @ops.operation(effect="write", idempotency=("order_id",), max_result=100)
    def refund(call: lg.Call, args: Refund) -> Done:
        return Done(ok=bool(call and args))

    return ops.seal()


OPS = registry()


def scope(**changes: Any) -> lg.Scope:
    given: dict[str, Any] = {
        "user": "u1",
        "agent": "support",
        "tenant": "t1",
        "expires": lg.minutes(10),
        "allow": {
            "get_order": {},
            "refund": lg.where(
                order_id=lg.one_of("ord_2", "ord_1"),
                amount=[lg.at_most(50_00), lg.at_least(1)],
                note=lg.matches("[a-z ]*"),
                budget=lg.budget(calls=3, total={"amount": 100_00}),
                approve=lg.when(amount=lg.more_than(20_00)),
            ),
        },
    }
    return lg.Scope(**(given | changes))


def rule(**changes: Any) -> lg.Scope:
    """A scope whose refund rule is this data."""
    return scope(allow={"refund": changes})


DATA: dict[str, Any] = {
    "user": "u1",
    "agent": "support",
    "tenant": "t1",
    "expires": 600,
    "allow": {
        "get_order": {},
        "refund": {
            "amount": {"at_least": 1, "at_most": 5000},
            "approve": [{"amount": {"more_than": 2000}}],
            "budget": {"calls": 3, "total": {"amount": 10000}},
            "note": {"matches": "[a-z ]*"},
            "order_id": {"one_of": ["ord_1", "ord_2"]},
        },
    },
    "deny": [],
}


def test_what_is_written_in_python_is_plain_data() -> None:
    assert scope().to_data() == DATA
    assert lg.Scope.from_data(DATA) == scope()


@pytest.mark.parametrize(
    "given",
    [
        scope(),
        scope(allow={}),
        scope(deny=["refund"]),
        scope(deny={"refund": lg.when(amount=lg.more_than(100)), "get_order": [lg.when(order_id=lg.one_of("ord_9"))]}),
        scope(expires=0.5, user='a "quoted" \\ user', agent="ägent"),
        rule(note={"matches": r'[^"\\]{1,9}'}, flag={"one_of": [True, False]}, ids={"length": [1, 2]}),
        rule(amount=[{"at_most": 10}, {"at_most": 5}], approve={}),
        scope().narrow(allow={"refund": lg.where(amount=lg.at_most(5))}, deny=["get_order"], expires=5),
    ],
)
def test_scopes_survive_json_and_toml(given: lg.Scope) -> None:
    assert lg.Scope.from_json(given.canonical()) == given
    assert lg.Scope.from_json(msgspec.json.format(given.canonical())) == given
    assert lg.Scope.from_toml(given.to_toml()) == given
    assert lg.Scope.from_toml(given.to_toml()).hash == given.hash
    given.compile(OPS, 0.0)


def test_the_hash_is_of_the_meaning_and_not_of_the_spelling() -> None:
    shuffled = dict(reversed(DATA.items())) | {
        "allow": {
            "refund": dict(reversed(DATA["allow"]["refund"].items()))
            | {"order_id": {"one_of": ["ord_2", "ord_1", "ord_2"]}, "approve": {"amount": {"more_than": 2000}}},
            "get_order": {},
        },
        "expires": 600.0,
    }
    assert lg.Scope.from_data(shuffled).hash == scope().hash
    assert len({scope().hash, scope(user="u2").hash, scope(expires=601).hash, scope(deny=["refund"]).hash}) == 4


def test_none_is_for_json_alone() -> None:
    given = rule(note={"one_of": ["a", None]})
    assert lg.Scope.from_json(given.canonical()) == given
    with pytest.raises(ScopeError, match="None"):
        given.to_toml()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"user": ""}, "user"),
        ({"tenant": "a\nb"}, "control"),
        ({"agent": 5}, "agent"),
        ({"agent": "x" * 201}, "too long"),
        ({"expires": 0}, "expired before"),
        ({"expires": -1}, "expired before"),
        ({"expires": float("nan")}, "no number"),
        ({"expires": float("inf")}, "no number"),
        ({"expires": True}, "no number"),
        ({"expires": "600"}, "no number"),
        ({"expires": 10**9}, "30 days"),
        ({"expires": 10**400}, "30 days"),
        ({"expires": 10**5000}, "30 days"),
        ({"expires": -(10**400)}, "expired before"),
        ({"allow": {"refund": {"amount": {"at_most": 10**5000}}}}, "very large one is no whole number"),
        ({"allow": {"refund": {"amount": {"one_of": [10**5000]}}}}, "very large one is no whole number"),
        ({"allow": {"refund": {"amount": {"one_of": [2**54]}}}}, "whole number"),
        ({"allow": {"refund": {"budget": {"calls": 10**5000}}}}, "very large one is no whole number"),
        ({"allow": []}, "no table"),
        ({"allow": {"refund": []}}, "no table"),
        ({"allow": {"": {}}}, "short text"),
        ({"allow": {"x" * 65: {}}}, "short text"),
        ({"allow": {f"op{n}": {} for n in range(1001)}}, "more than 1000"),
        ({"deny": "refund"}, "neither"),
        ({"deny": [5]}, "short text"),
        ({"deny": {"refund": []}}, "no condition"),
        ({"allow": {"refund": {"amount": {}}}}, "no constraint"),
        ({"allow": {"refund": {"amount": []}}}, "no constraint"),
        ({"allow": {"refund": {"amount": 5}}}, "no table"),
        ({"allow": {"refund": {"amount": {"at_mots": 5}}}}, "at_mots.*did you mean 'at_most'"),
        ({"allow": {"refund": {"amount": {"at_most": 1.5}}}}, "whole number"),
        ({"allow": {"refund": {"amount": {"at_most": True}}}}, "whole number"),
        ({"allow": {"refund": {"amount": {"at_most": "5"}}}}, "whole number"),
        ({"allow": {"refund": {"amount": {"at_most": 2**54}}}}, "whole number"),
        ({"allow": {"refund": {"amount": {"one_of": []}}}}, "empty set"),
        ({"allow": {"refund": {"amount": {"one_of": 5}}}}, "no list"),
        ({"allow": {"refund": {"amount": {"one_of": [[1]]}}}}, "plain values|no text"),
        ({"allow": {"refund": {"amount": {"one_of": [1.5]}}}}, "no text"),
        ({"allow": {"refund": {"note": {"matches": "a$"}}}}, "newline"),
        ({"allow": {"refund": {"note": {"matches": r"\d"}}}}, "Unicode"),
        ({"allow": {"refund": {"note": {"matches": "(a+)+"}}}}, "repeats"),
        ({"allow": {"refund": {"note": {"matches": 5}}}}, "no text"),
        ({"allow": {"refund": {"note": {"length": 5}}}}, "no list"),
        ({"allow": {"refund": {"note": {"length": [5, 1]}}}}, "no range"),
        ({"allow": {"refund": {"note": {"length": [1, 2, 3]}}}}, "wrong form"),
        ({"allow": {"refund": {"budget": {}}}}, "limits nothing"),
        ({"allow": {"refund": {"budget": {"call": 3}}}}, "did you mean 'calls'"),
        ({"allow": {"refund": {"budget": {"calls": -1}}}}, "below zero"),
        ({"allow": {"refund": {"budget": {"calls": 1.0}}}}, "whole number"),
        ({"allow": {"refund": {"budget": {"total": {"amount": -1}}}}}, "below zero"),
        ({"allow": {"refund": {"budget": {"total": 5}}}}, "no table"),
        ({"allow": {"refund": {"approve": True}}}, "no table"),
        ({"allow": {"refund": {"note": {"one_of": ["\ud800"]}}}}, "surrogate"),
        ({"allow": {"\udc80": {}}}, "surrogate"),
        ({"tenat": "t1"}, "did you mean 'tenant'"),
        ({5: "x"}, "there is no '5'"),
    ],
)
def test_a_malformed_scope_names_the_place_and_the_fix(change: dict[Any, Any], why: str) -> None:
    with pytest.raises(ScopeError, match=why) as caught:
        lg.Scope.from_data(DATA | change)
    assert caught.value.next_step
    assert (caught.value.fault, caught.value.exit_code) == ("caller", 2)


@pytest.mark.parametrize("missing", ["user", "agent", "tenant", "expires", "allow"])
def test_nothing_is_assumed(missing: str) -> None:
    with pytest.raises(ScopeError, match=f"{missing} is missing"):
        lg.Scope.from_data({name: value for name, value in DATA.items() if name != missing})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[", "no JSON"),
        ("NaN", "no number"),
        ("null", "no table"),
        ('{"user":"a","user":"b"}', "twice"),
        ('{"allow":{"refund":{"amount":{"at_most":1,"at_most":9}}}}', "twice"),
        (b"\xff", "UTF-8"),
        ('{"a":1} {}', "no JSON"),
        ("[" * 100_000, "no JSON"),
        (" " * (1024 * 1024 + 1), "larger"),
    ],
)
def test_json_is_read_strictly(text: str | bytes, why: str) -> None:
    with pytest.raises(ScopeError, match=why):
        lg.Scope.from_json(text)


@pytest.mark.parametrize("text", ["a = ", "user = 'a'\nuser = 'b'", "user = 'a'", "x" * (1024 * 1024 + 1)])
def test_toml_is_read_strictly(text: str) -> None:
    with pytest.raises(ScopeError):
        lg.Scope.from_toml(text)


def test_a_scope_does_not_change() -> None:
    given = scope()
    with pytest.raises(AttributeError):
        given.user = "root"  # type: ignore[misc]
    assert given == scope()
    assert hash(given) == hash(scope())
    assert given != scope(user="root")
    assert "u1@t1" in repr(given)


def test_words_take_words() -> None:
    for wrong in (
        lambda: lg.where(amount=5),  # type: ignore[arg-type]
        lambda: lg.where(amount=[]),
        lambda: lg.where(budget=3),  # type: ignore[arg-type]
        lambda: lg.where(approve=True),  # type: ignore[arg-type]
        lg.one_of,
        lambda: lg.one_of(1.5),  # type: ignore[arg-type]
        lg.budget,
        lambda: lg.length(-1),
        lambda: lg.at_most(1.0),  # type: ignore[arg-type]
    ):
        with pytest.raises(ScopeError):
            wrong()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (scope(allow={"refnd": {}}), "did you mean 'refund'"),
        (scope(deny=["get_oder"]), "did you mean 'get_order'"),
        (rule(amuont={"at_most": 5}), "did you mean 'amount'"),
        (rule(approve={"amuont": {"at_most": 5}}), "did you mean 'amount'"),
        (scope(deny={"refund": {"amuont": {"at_most": 5}}}), "did you mean 'amount'"),
        (rule(budget={"total": {"amuont": 5}}), "did you mean 'amount'"),
        (rule(order_id={"at_most": 5}), "whole numbers"),
        (rule(ids={"at_most": 5}), "whole numbers"),
        (rule(amount={"matches": "5"}), "matches speaks of text"),
        (rule(amount={"length": [0, 5]}), "length speaks"),
        (rule(flag={"length": [0, 5]}), "length speaks"),
        (rule(amount={"one_of": ["5"]}), "not of the argument's type"),
        (rule(amount={"one_of": [True]}), "not of the argument's type"),
        (rule(flag={"one_of": [1]}), "not of the argument's type"),
        (rule(kind={"one_of": ["whole"]}), "not of the argument's type"),
        (rule(order_id={"one_of": [None]}), "not of the argument's type"),
        (rule(ids={"one_of": [5]}), "not of the argument's type"),
        (rule(budget={"total": {"change": 5}}), "at least zero"),
        (rule(budget={"total": {"order_id": 5}}), "at least zero"),
        (rule(budget={"total": {"note": 5}}), "at least zero"),
    ],
)
def test_what_does_not_fit_the_registry_is_an_error_at_load(given: lg.Scope, why: str) -> None:
    with pytest.raises(ScopeError, match=why):
        given.compile(OPS, 0.0)


def test_only_a_sealed_registry_is_compiled_against() -> None:
    with pytest.raises(ScopeError, match="still open"):
        scope(allow={}).compile(Operations(), 0.0)


def test_narrowing_is_told_what_it_may_change() -> None:
    for changes, why in (
        ({"tenant": "t2"}, "inherited"),
        ({"alow": {}}, "did you mean 'allow'"),
        ({"expires": 601}, "later than the parent"),
        ({"allow": {"other": {}}}, "parent does not allow"),
    ):
        with pytest.raises(ScopeError, match=why):
            scope().narrow(**changes)  # type: ignore[arg-type]


def test_what_is_no_text_or_number_is_refused_by_name() -> None:
    """C3: whoever writes a scope in Python gets the same typed refusals as one who writes TOML."""
    calls: list[Callable[[], object]] = [
        *(partial(lg.Scope.from_json, one) for one in (None, 5, [])),
        *(partial(lg.Scope.from_toml, one) for one in (None, 5, {})),
        lambda: lg.minutes("5"),  # type: ignore[arg-type]
        lambda: lg.budget(total=[1]),  # type: ignore[arg-type]
        lambda: lg.budget(total="ab"),  # type: ignore[arg-type]
        lambda: scope().narrow(expires=10**400),
        lambda: scope().narrow(self=1),
    ]
    for call in calls:
        with pytest.raises(ScopeError) as caught:
            call()
        assert caught.value.next_step


@pytest.mark.parametrize("value", ["bogus", "ord_", "ord_1\n", "ORD_1", "ord_\u0661"])
def test_a_value_that_the_argument_can_never_have_is_an_error_at_load(value: str) -> None:
    """C3: the rules of an argument's own kind count too, not its plain type alone."""
    rule(order_id={"one_of": ["ord_1"]}).compile(OPS, 0.0)
    with pytest.raises(ScopeError, match="not of the argument's type"):
        rule(order_id={"one_of": ["ord_1", value]}).compile(OPS, 0.0)
