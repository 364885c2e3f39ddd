"""For all calls: what a child allows, its parent allows (C3). With a broken narrow as the negative control."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

import lockgate.policy as lg
from lockgate.contract.errors import ScopeError
from lockgate.contract.run import Principal
from lockgate.policy.constraints import Where
from lockgate.policy.registry import Operations

EXAMPLES = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
WHO = Principal("u1", "support", "t1", "run-1")
NAMES = ("pay", "look", "send")


class Pay(lg.Args):
    order: Annotated[str, lg.Id("o")]
    amount: Annotated[int, lg.Int(0, 20)]
    kind: Annotated[str, lg.Text(3)] | None = None
    tags: Annotated[list[Annotated[str, lg.Text(3)]], lg.ListOf(3)] = msgspec.field(default_factory=list)


class Done(lg.Result):
    ok: bool = True


def registry() -> Operations:
    ops = Operations()
    for name in NAMES:

        def op(call: lg.Call, args: Pay) -> Done:
            return Done(ok=bool(call and args))

        op.__name__ = name
        ops.operation(effect="read", max_result=10)(op)
    return ops.seal()


OPS = registry()

numbers = st.integers(0, 20)
constraints = {
    "order": st.lists(st.sampled_from(["o_1", "o_2", "o_3"]), min_size=1, max_size=2).map(lambda v: lg.one_of(*v))
    | st.sampled_from([lg.matches("o_[12]"), lg.length(3), lg.length(2)]),
    "amount": st.one_of(
        numbers.map(lg.at_most), numbers.map(lg.at_least), numbers.map(lg.more_than), numbers.map(lg.less_than),
        st.lists(numbers, min_size=1, max_size=3).map(lambda v: lg.one_of(*v)),
    ),
    "kind": st.sampled_from([lg.one_of("a"), lg.one_of("a", None), lg.matches("b"), lg.length(1)]),
    "tags": st.sampled_from([lg.one_of("x", "y"), lg.length(1), lg.length(3, 1), lg.matches("[a-x]")]),
}  # fmt: skip
conditions = st.fixed_dictionaries(
    {}, optional={name: st.lists(one, min_size=1, max_size=2) for name, one in constraints.items()}
)
whens = conditions.map(lambda given: lg.when(**given))
budgets = st.none() | st.builds(
    lambda calls, total: lg.budget(calls=calls, total={"amount": total}), st.integers(0, 4), st.integers(0, 40)
)
wheres = st.builds(
    lambda given, budget, approve: lg.where(budget=budget, approve=approve, **given),
    conditions, budgets, st.lists(whens, max_size=1),
)  # fmt: skip
allows = st.dictionaries(st.sampled_from(NAMES), wheres, max_size=3)
denies = st.dictionaries(st.sampled_from(NAMES), whens, max_size=1)
scopes = st.builds(
    lambda allow, deny, expires: lg.Scope(
        user="u1", agent="support", tenant="t1", expires=expires, allow=allow, deny=deny
    ),
    allows, denies, st.integers(1, 100),
)  # fmt: skip
calls = st.builds(
    lambda name, at, order, amount, kind, tags: lg.CallRequest(
        OPS.get(name), name, Pay(order=order, amount=amount, kind=kind, tags=tags), at
    ),
    st.sampled_from(NAMES), st.integers(0, 120).map(float), st.sampled_from(["o_1", "o_2", "o_3", "o_10"]), numbers,
    st.sampled_from([None, "a", "b"]), st.lists(st.sampled_from(["x", "y", "z"]), max_size=3),
)  # fmt: skip


@st.composite
def narrowings(draw: st.DrawFn, parent: lg.Scope) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if draw(st.booleans()):
        kept = draw(st.lists(st.sampled_from(sorted(parent.allow)), unique=True)) if parent.allow else []
        changes["allow"] = {name: draw(wheres) for name in kept}
    if draw(st.booleans()):
        changes["deny"] = draw(denies)
    if draw(st.booleans()):
        changes["expires"] = draw(st.floats(0.5, parent.expires))
    return changes


def order(verdict: lg.Verdict) -> int:
    """Deny < needs_approval < allow."""
    return ("deny", "needs_approval", "allow").index(verdict.effect)


@EXAMPLES
@given(st.data(), scopes, st.integers(0, 60).map(float))
def test_a_child_allows_no_more_than_its_parent(data: st.DataObject, given_scope: lg.Scope, later: float) -> None:
    parent = given_scope.compile(OPS, 0.0)
    changes = data.draw(narrowings(given_scope))
    child = parent.narrow(later, **changes)
    grandchild = child.narrow(later + 1, **data.draw(narrowings(child.source)))
    for call in data.draw(st.lists(calls, min_size=5, max_size=5)):
        chain = [lg.authorize(WHO, call, one) for one in (parent, child, grandchild)]
        assert order(chain[2]) <= order(chain[1]) <= order(chain[0])
        for above, below in ((chain[0], chain[1]), (chain[1], chain[2])):
            if below.effect != "deny":
                assert set(above.obligations.charges) <= set(below.obligations.charges), "a budget was dropped"
    assert parent.expires_at >= child.expires_at >= grandchild.expires_at
    assert set(parent.operations) >= set(child.operations) >= set(grandchild.operations)


@EXAMPLES
@given(st.data(), scopes)
def test_the_data_of_a_child_is_narrower_too(data: st.DataObject, parent: lg.Scope) -> None:
    """Also when a child's data is sent elsewhere and compiled there without its parent."""
    child = parent.narrow(**data.draw(narrowings(parent)))
    assert lg.Scope.from_json(child.canonical()) == child
    alone, above = child.compile(OPS, 0.0), parent.compile(OPS, 0.0)
    for call in data.draw(st.lists(calls, min_size=5, max_size=5)):
        assert order(lg.authorize(WHO, call, alone)) <= order(lg.authorize(WHO, call, above))
    for name, rule in child.allow.items():
        mine, theirs = rule.budget, parent.allow[name].budget
        if theirs is not None:
            assert mine is not None
            assert theirs.calls is None or (mine.calls is not None and mine.calls <= theirs.calls)
            assert all(mine.total[key] <= limit for key, limit in theirs.total.items())


@EXAMPLES
@given(st.data(), scopes, scopes)
def test_whatever_a_childs_data_says_its_parent_bounds_it(
    data: st.DataObject, above: lg.Scope, claimed: lg.Scope
) -> None:
    """A scope that was not narrowed at all is bounded when it is compiled beneath a parent, or refused."""
    parent = above.compile(OPS, 0.0)
    try:
        child = claimed.compile(OPS, 5.0, parent=parent)
    except ScopeError:
        return
    for call in data.draw(st.lists(calls, min_size=5, max_size=5)):
        assert order(lg.authorize(WHO, call, child)) <= order(lg.authorize(WHO, call, parent))
    assert child.expires_at <= parent.expires_at


@EXAMPLES
@given(st.data(), scopes)
def test_parent_and_children_share_one_ledger(data: st.DataObject, above: lg.Scope) -> None:
    """However calls are spread over a family, the parent's budget holds for their sum."""
    parent = above.compile(OPS, 0.0)
    family = [parent, parent.narrow(0.0), parent.narrow(0.0, **data.draw(narrowings(above)))]
    family.append(family[1].narrow(0.0))
    ledger = lg.Ledger()
    spent: dict[str, list[int]] = {name: [] for name in NAMES}
    for call in data.draw(st.lists(calls, max_size=12)):
        verdict = lg.authorize(WHO, call, data.draw(st.sampled_from(family)))
        if verdict.effect != "deny" and ledger.reserve(verdict.obligations.charges) is not None:
            args = call.args
            assert isinstance(args, Pay)
            spent[call.name].append(args.amount)
    for name, rule in above.allow.items():
        if rule.budget is not None:
            assert rule.budget.calls is None or len(spent[name]) <= rule.budget.calls
            assert sum(spent[name]) <= rule.budget.total.get("amount", 10**9)


def test_twins_have_budgets_of_their_own_beneath_their_parents() -> None:
    parent = lg.Scope(
        user="u1", agent="support", tenant="t1", expires=9, allow={"pay": lg.where(budget=lg.budget(calls=3))}
    ).compile(OPS, 0.0)
    twins = [parent.narrow(0.0, allow={"pay": {"budget": {"calls": 2}}}) for _ in range(2)]
    ledger = lg.Ledger()
    call = lg.CallRequest(OPS.get("pay"), "pay", Pay(order="o_1", amount=1), 1.0)

    def once(scope: lg.CompiledScope) -> bool:
        return ledger.reserve(lg.authorize(WHO, call, scope).obligations.charges) is not None

    assert [once(twins[0]), once(twins[0]), once(twins[0])] == [True, True, False]
    assert [once(twins[1]), once(twins[1])] == [True, False], "the parent's third call was the last"


def test_a_child_has_its_parents_principal() -> None:
    parent = lg.Scope(user="u1", agent="support", tenant="t1", expires=9, allow={}).compile(OPS, 0.0)
    other = lg.Scope(user="u1", agent="support", tenant="t2", expires=9, allow={})
    with pytest.raises(ScopeError, match="parent's user"):
        other.compile(OPS, 0.0, parent=parent)


def replaced(self: Where, other: Where) -> Where:
    """A narrow that lets the child's word stand instead of the parent's: the fault that is easy to make."""
    return Where(self.arguments | other.arguments, other.budget or self.budget, self.approve)


def test_the_property_catches_a_narrow_that_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the same search finds a counterexample as soon as narrowing is no conjunction."""

    def wider(found: tuple[Where, Where, lg.CallRequest]) -> bool:
        rule, more, asked = found
        call = lg.CallRequest(OPS.get("pay"), "pay", asked.args, 0.0)
        parent = lg.Scope(user="u1", agent="support", tenant="t1", expires=9, allow={"pay": rule})
        child = parent.narrow(allow={"pay": more})
        verdicts = [lg.authorize(WHO, call, one.compile(OPS, 0.0)) for one in (parent, child)]
        return order(verdicts[1]) > order(verdicts[0])

    search = settings(
        max_examples=1000,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=[Phase.generate],
    )
    cases = st.tuples(wheres, wheres, calls)
    with monkeypatch.context() as broken:
        broken.setattr(Where, "narrow", replaced)
        found = find(cases, wider, settings=search)
    assert not wider(found), "the real narrow holds where the broken one failed"
    with pytest.raises(NoSuchExample):
        find(cases, wider, settings=settings(search, max_examples=100))
