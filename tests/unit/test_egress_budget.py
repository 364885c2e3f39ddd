"""Budgets say no before they are exceeded (E1, E7)."""

from __future__ import annotations

from lockgate.policy.egress import Verdict
from lockgate.policy.egress_budget import RunBudget
from lockgate.policy.egress_spec import Limits
from lockgate.policy.host import Host, Refusal

STAR = Verdict(True, "ok", "allow *.pages.partner.example:443")
EXACT = Verdict(True, "ok", "allow api.partner.example:443")


def host(text: str) -> Host:
    found = Host.parse(text.encode())
    assert isinstance(found, Host)
    return found


def why(refusal: Refusal | None) -> str:
    return "" if refusal is None else refusal.reason


def test_names_under_a_wildcard() -> None:
    budget = RunBudget(Limits(names_per_wildcard=2, names=4))
    assert [why(budget.take_name(STAR, host(f"{one}.pages.partner.example"))) for one in "aabbc"] == [
        "", "", "", "", "label_budget",
    ]  # fmt: skip
    assert why(budget.take_name(EXACT, host("api.partner.example"))) == ""
    other = Verdict(True, "ok", "allow *.other.example:443")
    assert why(budget.take_name(other, host("a.other.example"))) == ""
    assert why(budget.take_name(other, host("b.other.example"))) == "name_budget"


def test_bytes_are_counted_per_owner() -> None:
    budget = RunBudget(Limits(bytes_out=100))
    assert why(budget.take_bytes(host("a.partner.example"), 60)) == ""
    assert why(budget.take_bytes(host("b.partner.example"), 41)) == "byte_budget"
    assert why(budget.take_bytes(host("b.partner.example"), 40)) == ""
    assert why(budget.take_bytes(host("x.other.example"), 100)) == ""
    assert why(budget.take_bytes(host("10.0.0.1"), 100)) == ""
    assert budget.used == {"partner.example": 100, "other.example": 100, "10.0.0.1": 100}


def test_requests_and_connections() -> None:
    budget = RunBudget(Limits(requests=1, connections=1))
    assert why(budget.take_connection()) == ""
    assert why(budget.take_connection()) == "connection_budget"
    budget.drop_connection()
    assert why(budget.take_connection()) == ""
    assert why(budget.take_request()) == ""
    assert why(budget.take_request()) == "request_budget"


def test_zero_is_none_at_all() -> None:
    budget = RunBudget(Limits(bytes_out=0, names_per_wildcard=0, names=0, requests=0, connections=0))
    assert why(budget.take_connection()) == "connection_budget"
    assert why(budget.take_request()) == "request_budget"
    assert why(budget.take_name(STAR, host("a.pages.partner.example"))) == "label_budget"
    assert why(budget.take_bytes(host("a.example"), 1)) == "byte_budget"
    assert why(budget.take_bytes(host("a.example"), 0)) == ""
