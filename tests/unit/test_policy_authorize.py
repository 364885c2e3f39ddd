"""One decision, pure and total; denials are values with a reason (C2, C3, C8, E6)."""

from __future__ import annotations

import threading
from typing import Annotated, Any, Literal

import msgspec
import pytest

import lockgate.policy as lg
from lockgate.contract.reasons import SENTENCES
from lockgate.contract.run import Principal
from lockgate.policy.registry import Operations


class OrderRef(lg.Args):
    order_id: Annotated[str, lg.Id("ord")]


class Refund(lg.Args):
    order_id: Annotated[str, lg.Id("ord")]
    amount: lg.Cents
    note: Annotated[str, lg.Text(50)] | None = None
    kind: Literal["full", "part"] = "part"
    ids: Annotated[list[Annotated[str, lg.Id("x")]], lg.ListOf(5)] = msgspec.field(default_factory=list)


class Hook(lg.Args):
    callback: Annotated[str, lg.Url("https://hooks.example/T1/*")]


class Done(lg.Result):
    ok: bool = True


class Touchy:
    """A check that raises where it should answer."""

    kind = "touchy"
    stage = "authorize"

    def refuse(self, value: Any) -> str | None:
        raise RuntimeError(value)


class Odd(lg.Args):
    text: Annotated[str, lg.Text(9), Touchy()]


def registry() -> Operations:
    ops = Operations()

    @ops.operation(effect="read", max_result=100, labels=("private",))
    def get_order(call: lg.Call, args: OrderRef) -> Done:
        return Done(ok=bool(call and args))

    @ops.operation(effect="write", idempotency=("order_id",), max_result=100)
    def refund(call: lg.Call, args: Refund) -> Done:
        return Done(ok=bool(call and args))

    @ops.operation(effect="read", max_result=100)
    def notify(call: lg.Call, args: Hook) -> Done:
        return Done(ok=bool(call and args))

    @ops.operation(effect="read", max_result=100)
    def odd(call: lg.Call, args: Odd) -> Done:
        return Done(ok=bool(call and args))

    return ops.seal()


OPS = registry()
WHO = Principal("u1", "support", "t1", "run-1")


def compiled(allow: Any, deny: Any = (), now: float = 100.0) -> lg.CompiledScope:
    given = lg.Scope(user="u1", agent="support", tenant="t1", expires=600, allow=allow, deny=deny)
    return given.compile(OPS, now)


def ask(scope: lg.CompiledScope, name: str, args: Any, *, who: Principal = WHO, at: float = 101.0) -> lg.Verdict:
    return lg.authorize(who, lg.request(scope, name, msgspec.json.encode(args), at), scope)


LIMITED = compiled(
    {
        "get_order": {},
        "refund": lg.where(
            order_id=lg.one_of("ord_1"),
            amount=lg.at_most(50_00),
            budget=lg.budget(calls=3, total={"amount": 100_00}),
            approve=lg.when(amount=lg.more_than(20_00)),
        ),
    }
)


def test_an_allowed_call_says_by_which_rule_and_what_to_reserve() -> None:
    verdict = ask(LIMITED, "refund", {"order_id": "ord_1", "amount": 500})
    assert (verdict.effect, verdict.rule, verdict.visible) == ("allow", "refund", None)
    assert [(one.key[1:], one.amount, one.limit) for one in verdict.obligations.charges] == [
        (("refund", "calls"), 1, 3),
        (("refund", "total.amount"), 500, 10000),
    ]
    assert ask(LIMITED, "get_order", {"order_id": "ord_9"}).obligations.labels == ("private",)


def test_a_denial_says_where_and_why_for_the_audit_and_a_fixed_sentence_for_the_code() -> None:
    verdict = ask(LIMITED, "refund", {"order_id": "ord_1", "amount": 5001})
    assert verdict == lg.Verdict(
        "deny", "refund.amount.at_most", "/amount", "amount 5001 > 5000", "argument_not_allowed"
    )
    assert verdict.visible is not None
    assert "5000" not in "".join(SENTENCES[verdict.visible])


def test_a_call_that_needs_a_person_reserves_like_any_other() -> None:
    verdict = ask(LIMITED, "refund", {"order_id": "ord_1", "amount": 2001})
    assert (verdict.effect, verdict.visible) == ("needs_approval", "approval_required")
    assert (verdict.rule, verdict.path) == ("refund.approve.amount.more_than", "/amount")
    assert verdict.obligations.approval
    assert len(verdict.obligations.charges) == 2
    always = compiled({"get_order": lg.where(approve=lg.when())})
    assert ask(always, "get_order", {"order_id": "ord_1"}).effect == "needs_approval"


def test_unknown_and_out_of_scope_are_one_and_the_same() -> None:
    """C8: the same verdict object by the same steps, and so the same text; well-formed or not does not matter."""
    only = compiled({"get_order": {}})
    outside = [ask(only, "refund", args) for args in ({"order_id": "ord_1", "amount": 1}, {}, {"amount": "x"}, [])]
    unknown = [ask(only, "refnd", args) for args in ({"order_id": "ord_1", "amount": 1}, {}, [])]
    denied = ask(compiled({"get_order": {}, "refund": {}}, deny=["refund"]), "refund", {})
    assert all(verdict is outside[0] for verdict in outside + unknown)
    assert outside[0].rule is None
    assert denied.visible == outside[0].visible == "not_available"
    assert denied.rule == "deny.refund", "the audit row still says that it was denied by name"
    assert SENTENCES["not_available"][0].count("{") == 0


def test_an_empty_allow_denies_all() -> None:
    for name in (*OPS.names(), "other"):
        assert ask(compiled({}), name, {}).visible == "not_available"


def test_deny_beats_allow() -> None:
    args = {"order_id": "ord_1", "amount": 500}
    rules = {"refund": lg.where(amount=lg.at_most(1000))}
    assert ask(compiled(rules), "refund", args).effect == "allow"
    assert ask(compiled(rules, deny=["refund"]), "refund", args).effect == "deny"
    some = compiled(rules, deny={"refund": lg.when(amount=lg.at_least(500), order_id=lg.one_of("ord_1"))})
    verdict = ask(some, "refund", args)
    assert (verdict.effect, verdict.visible) == ("deny", "argument_not_allowed")
    assert verdict.rule == "deny.refund.order_id.one_of"
    assert ask(some, "refund", args | {"amount": 499}).effect == "allow"
    assert ask(some, "refund", args | {"order_id": "ord_2"}).effect == "allow"


@pytest.mark.parametrize("at", [700.0, 700.1, 1e9, float("inf"), float("nan")])
def test_after_its_end_a_scope_allows_nothing(at: float) -> None:
    for name in ("get_order", "other"):
        assert ask(LIMITED, name, {"order_id": "ord_1"}, at=at).visible == "expired"
    assert ask(LIMITED, "get_order", {"order_id": "ord_1"}, at=699.9).effect == "allow"


@pytest.mark.parametrize("who", [("u2", "support", "t1"), ("u1", "other", "t1"), ("u1", "support", "t2")])
def test_a_scope_serves_its_own_principal_alone(who: tuple[str, str, str]) -> None:
    verdict = ask(LIMITED, "get_order", {"order_id": "ord_1"}, who=Principal(*who, "run-1"))
    assert (verdict.effect, verdict.rule, verdict.visible) == ("deny", "principal", "not_available")


@pytest.mark.parametrize(
    ("constraint", "args", "allowed"),
    [
        ({"amount": lg.at_most(5)}, {"amount": 5}, True),
        ({"amount": lg.at_most(5)}, {"amount": 6}, False),
        ({"amount": lg.at_least(5)}, {"amount": 5}, True),
        ({"amount": lg.at_least(5)}, {"amount": 4}, False),
        ({"amount": lg.more_than(5)}, {"amount": 5}, False),
        ({"amount": lg.more_than(5)}, {"amount": 6}, True),
        ({"amount": lg.less_than(5)}, {"amount": 5}, False),
        ({"amount": lg.less_than(5)}, {"amount": 4}, True),
        ({"amount": [lg.at_least(2), lg.at_most(3)]}, {"amount": 4}, False),
        ({"amount": [lg.at_least(2), lg.at_most(3)]}, {"amount": 3}, True),
        ({"note": lg.matches("[a-z]+")}, {"note": "abc"}, True),
        ({"note": lg.matches("[a-z]+")}, {"note": "abc1"}, False),
        ({"note": lg.matches("[a-z]+")}, {"note": "1abc"}, False),
        ({"note": lg.matches("[a-z]+")}, {"note": None}, False),
        ({"note": lg.matches("[a-z]+")}, {}, False),
        ({"note": lg.length(3)}, {"note": "日本語"}, True),
        ({"note": lg.length(3)}, {"note": "abcd"}, False),
        ({"note": lg.length(3, 2)}, {"note": "a"}, False),
        ({"note": lg.one_of("a", None)}, {}, True),
        ({"note": lg.one_of("a")}, {}, False),
        ({"kind": lg.one_of("full")}, {"kind": "full"}, True),
        ({"kind": lg.one_of("full")}, {}, False),
        ({"ids": lg.one_of("x_1", "x_2")}, {"ids": ["x_2", "x_1"]}, True),
        ({"ids": lg.one_of("x_1", "x_2")}, {"ids": ["x_1", "x_3"]}, False),
        ({"ids": lg.length(1)}, {"ids": ["x_1", "x_1"]}, False),
        ({"ids": [lg.length(2, 1), lg.matches("x_[0-9]")]}, {"ids": ["x_1"]}, True),
        ({"ids": [lg.length(2, 1), lg.matches("x_[0-9]")]}, {"ids": []}, False),
    ],
)
def test_constraints_compare_typed_values(constraint: dict[str, Any], args: dict[str, Any], allowed: bool) -> None:
    scope = compiled({"refund": lg.where(**constraint)})
    verdict = ask(scope, "refund", {"order_id": "ord_1", "amount": 1} | args)
    assert verdict.effect == ("allow" if allowed else "deny")
    if not allowed:
        assert verdict.visible == "argument_not_allowed"
        assert verdict.rule is not None
        assert verdict.rule.startswith(f"refund.{next(iter(constraint))}.")


def test_arguments_that_were_not_read_are_a_bad_request() -> None:
    verdict = ask(LIMITED, "refund", {"order_id": "ord_1", "amount": 1.5})
    assert (verdict.effect, verdict.visible, verdict.path) == ("deny", "bad_request", "/amount")
    assert "1.5" not in verdict.reason


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://hooks.example/T1/x", True),
        ("https://hooks.example/T2/x", False),
        ("https://hooks.example.evil.example/T1/x", False),
        ("https://hooks.example@evil.example/T1/x", False),
        ("http://hooks.example/T1/x", False),
        ("https://hooks.example/T1/../T2/x", False),
        ("https://hooks.example/T1/x?to=evil.example", False),
        ("javascript:alert(1)", False),
    ],
)
def test_url_arguments_pass_the_same_decision(url: str, allowed: bool) -> None:
    """E6."""
    verdict = ask(compiled({"notify": {}}), "notify", {"callback": url})
    assert verdict.effect == ("allow" if allowed else "deny"), verdict.reason
    if not allowed:
        assert (verdict.rule, verdict.path) == ("notify.callback.url", "/callback")
        assert verdict.visible == "argument_not_allowed"


def test_it_never_raises_and_what_raises_denies() -> None:
    verdict = ask(compiled({"odd": {}}), "odd", {"text": "x"})
    assert (verdict.effect, verdict.rule, verdict.visible) == ("deny", "internal", "unavailable")
    assert "RuntimeError" in verdict.reason
    operation = LIMITED.operations["refund"]
    for args in (None, {}, object(), "x", OrderRef(order_id="ord_1")):
        assert lg.authorize(WHO, lg.CallRequest(operation, "refund", args, 101.0), LIMITED).effect == "deny"
    wrong: list[Any] = [None, "x", object()]
    for one in wrong:
        assert lg.authorize(one, lg.CallRequest(operation, "refund", {}, 101.0), LIMITED).effect == "deny"
        assert lg.authorize(WHO, one, LIMITED).effect == "deny"
        assert lg.authorize(WHO, lg.CallRequest(operation, "refund", {}, one), LIMITED).effect == "deny"
        assert lg.authorize(WHO, lg.CallRequest(operation, one, {}, 101.0), LIMITED).effect == "deny"


def test_an_operation_of_another_registry_is_not_the_one_in_the_scope() -> None:
    other = registry().get("refund")
    call = lg.CallRequest(other, "refund", Refund(order_id="ord_1", amount=1), 101.0)
    assert lg.authorize(WHO, call, LIMITED).visible == "not_available"
    renamed = lg.CallRequest(LIMITED.operations["get_order"], "refund", OrderRef(order_id="ord_1"), 101.0)
    assert lg.authorize(WHO, renamed, LIMITED).visible == "not_available"


def test_a_constraint_that_raises_denies_and_a_condition_that_raises_restricts() -> None:
    args = {"order_id": "ord_1", "amount": 1}
    for scope, effect in (
        (compiled({"refund": lg.where(note=lg.length(3))}), "deny"),
        (compiled({"refund": {}}, deny={"refund": lg.when(note=lg.length(3))}), "deny"),
        (compiled({"refund": lg.where(approve=lg.when(note=lg.length(3)))}), "needs_approval"),
    ):
        assert ask(scope, "refund", args).effect == effect
        assert (
            ask(scope, "refund", args | {"note": "four"}).effect != ask(scope, "refund", args | {"note": "abc"}).effect
        )


# ---- the ledger ----------------------------------------------------------------------------------------------
def charge(amount: int = 1, limit: int = 3, key: str = "calls") -> lg.Charge:
    return lg.Charge(("", "refund", key), amount, limit)


def test_thirty_two_threads_against_a_budget_of_three_get_exactly_three() -> None:
    """C3: the charge is taken before the call, under one lock."""
    for _ in range(20):
        ledger, gate = lg.Ledger(), threading.Barrier(32)
        passed: list[lg.Reservation] = []

        def one(ledger: lg.Ledger = ledger, gate: threading.Barrier = gate, passed: list[Any] = passed) -> None:
            gate.wait(10)
            found = ledger.reserve((charge(), charge(30, 100, "total.amount")))
            if found is not None:
                passed.append(found)

        threads = [threading.Thread(target=one) for _ in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(passed) == 3
        assert ledger.taken(("", "refund", "total.amount")) == 90


def test_a_reservation_is_all_or_nothing() -> None:
    ledger = lg.Ledger()
    assert ledger.reserve((charge(), charge(101, 100, "total.amount"))) is None
    assert ledger.taken(("", "refund", "calls")) == 0
    assert ledger.reserve((charge(2), charge(2))) is None, "two charges of one budget are added"
    assert ledger.reserve((charge(-1),)) is None, "nothing ever pays in"
    assert ledger.reserve(()) is not None


def test_only_what_surely_did_not_run_is_given_back_and_only_once() -> None:
    ledger = lg.Ledger()
    first, second = ledger.reserve((charge(),)), ledger.reserve((charge(),))
    assert first is not None
    assert second is not None
    ledger.settle(first)
    ledger.release(first)  # an unknown outcome stays spent
    ledger.release(second)
    ledger.release(second)
    assert ledger.taken(("", "refund", "calls")) == 1


# ---- approvals -----------------------------------------------------------------------------------------------
def test_an_approval_is_bound_to_run_operation_and_exact_arguments() -> None:
    operation = OPS.get("refund")
    assert operation is not None
    one = operation.decode_args(b'{"order_id":"ord_1","amount":500}')
    again = operation.decode_args(b'{"amount":500,"order_id":"ord_\\u0031","kind":"part"}')
    edited = operation.decode_args(b'{"order_id":"ord_1","amount":501}')
    key = lg.approval_key("run-1", "refund", lg.canonical_args(one))
    assert key == lg.approval_key("run-1", "refund", lg.canonical_args(again)), (
        "the spelling does not matter, the value does"
    )
    assert lg.canonical_args(one) == lg.canonical_args(again)
    others = [
        lg.approval_key("run-1", "refund", lg.canonical_args(edited)),
        lg.approval_key("run-2", "refund", lg.canonical_args(one)),
        lg.approval_key("run-1", "refund2", lg.canonical_args(one)),
    ]
    assert len({key, *others}) == 4
