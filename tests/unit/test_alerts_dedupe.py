"""First at once, counts after, critical always, escalation once (E4)."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from lockgate.alerts.dedupe import FIRSTS, MAX_GROUPS, MAX_RUNS, Alert, Dedupe, Memory, key_of
from lockgate.alerts.event import CRITICAL, Event


def event(number: int = 1, **fields: Any) -> Event:
    made = {"audit_id": f"a-{number}", "seq": number, "at": float(number), "kind": "network", "reason": "not_allowed",
            "agent": "atlas", "run": "run-1", "host": "evil.test", **fields}  # fmt: skip
    return Event(**made)


def dedupe(**options: Any) -> Dedupe:
    return Dedupe(**{"window": 300.0, "escalate": 100_000, **options})


def whys(told: list[Alert]) -> list[tuple[str, int]]:
    return [(one.why, one.count) for one in told]


def test_first_at_once_then_a_count_then_silence() -> None:
    one = dedupe()
    assert whys(one.take(event(1), 0.0)) == [("first", 1)]
    for number in range(2, 12):
        assert one.take(event(number), 100.0) == []
    assert one.due(299.0) == []
    (count,) = one.due(300.0)
    assert (count.why, count.count, count.since, count.event.audit_id) == ("count", 10, 2.0, "a-11")
    assert one.take(event(12), 400.0) == []  # a new window began with the count
    assert whys(one.due(600.0)) == [("count", 1)]
    assert one.due(900.0) == []
    assert one.memory.groups == {}
    assert whys(one.take(event(13), 1000.0)) == [("first", 1)]


def test_a_count_that_is_due_is_told_before_the_next_first() -> None:
    one = dedupe()
    one.take(event(1), 0.0)
    one.take(event(2), 1.0)
    assert whys(one.take(event(3), 500.0)) == [("count", 1), ("first", 1)]


def test_critical_ones_are_never_held_back() -> None:
    one = dedupe()
    for number in range(500):
        assert whys(one.take(event(number, severity=CRITICAL, reason="sni_mismatch"), 0.0)) == [("critical", 1)]


def test_a_run_escalates_once() -> None:
    """E4: the fifth denial of a run, whatever they were."""
    one = dedupe(escalate=5)
    told = [one.take(event(number, host=f"h{number}.test", reason="x" + str(number)), 0.0) for number in range(12)]
    assert [whys(each)[1:] for each in told] == [[]] * 4 + [[("escalation", 5)]] + [[]] * 7
    raised = told[4][1]
    assert raised.critical
    assert raised.event.reason == "escalation"
    one.ended("run-1")
    assert "run-1" not in one.memory.runs


def test_many_at_once_escalate_too() -> None:
    assert whys(dedupe(escalate=5).take(event(count=50), 0.0))[1:] == [("escalation", 50)]


def test_what_an_attacker_varies_is_bounded() -> None:
    """E4: ten thousand names are twenty alerts and one count, not ten thousand."""
    one = dedupe()
    told: list[Alert] = []
    for number in range(10_000):
        told += one.take(event(number, host=f"{number}.evil{number}.test"), 0.0)
    assert len(told) == FIRSTS + 1  # the last is the first of "others"
    assert len(one.memory.groups) == FIRSTS + 1
    assert sum(alert.count for alert in one.due(300.0)) == 10_000 - FIRSTS - 1
    # Another agent, and another reason, have places of their own.
    assert whys(one.take(event(1, agent="other"), 301.0)) == [("first", 1)]


def test_the_key_knows_registrable_domains_and_not_labels() -> None:
    assert key_of(event(host="a.evil.com")) == key_of(event(host="b.c.evil.com"))
    assert key_of(event(host="a.evil.com")) != key_of(event(host="a.other.com"))
    assert key_of(event(host="a.github.io")) != key_of(event(host="b.github.io"))  # strangers to each other
    assert key_of(event(host="10.0.0.1")) != key_of(event(host="10.9.0.1"))
    assert key_of(event(host="h.test", path="/a/b/c")) == key_of(event(host="h.test", path="/a/b/d"))
    assert key_of(event(host="h.test", path="/a/b")) != key_of(event(host="h.test", path="/x/b"))
    assert key_of(event(kind="operation", host="", operation="a")) == key_of(
        event(kind="operation", host="", operation="b")
    )
    assert key_of(event(user="x")) == key_of(event(user="y"))


def test_memory_is_bounded_and_survives_writing_down() -> None:
    one = dedupe(escalate=3)
    for number in range(MAX_GROUPS + 50):
        one.take(event(number, agent=f"agent-{number}", run=f"run-{number}"), 0.0)
    assert len(one.memory.groups) <= MAX_GROUPS
    assert len(one.memory.runs) <= MAX_RUNS
    again = dedupe(escalate=3, memory=msgspec.json.decode(msgspec.json.encode(one.memory), type=Memory))
    last = f"{MAX_GROUPS + 49}"
    assert again.take(event(1, agent=f"agent-{last}", run=f"run-{last}"), 1.0) == []  # still counted, not first again


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1000)), max_size=60))
def test_no_denial_is_lost_or_told_twice(steps: list[tuple[int, float]]) -> None:
    """E4: the counts of all alerts add up to the denials, whatever the order of windows."""
    one = dedupe()
    now, told = 0.0, 0
    for number, (which, pause) in enumerate(steps):
        now += pause
        told += sum(alert.count for alert in one.due(now) + one.take(event(number, host=f"h{which}.test"), now))
    told += sum(alert.count for alert in one.due(now + 1000))
    assert told == len(steps)


@settings(deadline=None)
@given(st.text(max_size=40), st.text(max_size=40))
def test_keys_take_any_text(host: str, path: str) -> None:
    assert len(key_of(event(host=host, path=path))) == 32
