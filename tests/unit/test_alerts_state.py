"""The spool: bounded, counted, whole (E4)."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lockgate.alerts import metrics
from lockgate.alerts.dedupe import Alert, Memory
from lockgate.alerts.event import CRITICAL, Event
from lockgate.alerts.state import SERIES, State, read
from lockgate.contract.errors import ConfigError, HostFault


def alert(number: int, **fields: Any) -> Alert:
    made = {"audit_id": f"a-{number}", "seq": number, "at": float(number), "kind": "network", "reason": "not_allowed",
            **fields}  # fmt: skip
    return Alert(uid=f"first-a-{number}", key="k", why="first", event=Event(**made))


@pytest.fixture
def state(tmp_path: Path) -> Iterator[State]:
    made = State(tmp_path / "audit.db.alerts", queue=10)
    yield made
    made.close()


def spool(state: State, *alerts: Alert) -> None:
    with state.transaction():
        for one in alerts:
            state.spool("hook", one)


def drain(state: State) -> list[Alert]:
    found: list[Alert] = []
    while (waiting := state.next("hook", 1e12)) is not None:
        state.done("hook", waiting, "delivered", 1.0)
        found.append(waiting.alert)
    return found


def test_ordinary_alerts_are_dropped_before_critical_ones_and_counted(state: State) -> None:
    spool(state, *(alert(number) for number in range(15)))
    spool(state, *(alert(100 + number, severity=CRITICAL) for number in range(10)))
    spool(state, alert(200))
    (tally,) = state.tallies()
    assert (tally.waiting, tally.dropped) == (10, 16)
    assert [one.event.seq for one in drain(state)] == list(range(100, 110))


def test_critical_ones_that_find_no_room_are_told_together(state: State) -> None:
    """E4: what cannot be kept is said, with the rows to look for."""
    spool(state, *(alert(number, severity=CRITICAL) for number in range(14)))
    found = drain(state)
    assert len(found) == 10
    told = [one for one in found if one.why == "overflow"]
    assert told
    assert all(one.critical for one in told)
    assert sum(one.count for one in found) == 14


def test_critical_ones_go_first_and_one_that_fails_waits(state: State) -> None:
    spool(state, alert(1), alert(2), alert(3, severity=CRITICAL))
    first = state.next("hook", 0.0)
    assert first is not None
    assert first.alert.event.seq == 3
    state.later("hook", first, 50.0, "no connection")
    assert state.next("hook", 49.0) is None  # a sink that is down is asked once
    assert state.earliest("hook") == 50.0
    spool(state, alert(4))
    fresh = state.next("hook", 0.0)
    assert fresh is not None
    assert fresh.alert.event.seq == 4  # what is new is tried at once
    again = state.next("hook", 51.0)
    assert again is not None
    assert (again.alert.event.seq, again.tries) == (3, 1)


def test_a_transaction_that_fails_keeps_nothing(state: State) -> None:
    def broken() -> None:
        with state.transaction():
            state.spool("hook", alert(1))
            state.keep(9, b"h" * 32, msgspec.json.encode(Memory()))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert state.place() is None
    assert drain(state) == []


def test_series_are_bounded_whatever_rules_are_called(state: State) -> None:
    with state.transaction():
        for number in range(SERIES + 50):
            state.count(alert(1, rule=f"rule-{number}").event)
    found = state.denied()
    assert len(found) == SERIES + 1
    assert sum(one[2] for one in found) == SERIES + 50


def test_the_exposition_counts_by_reason_and_rule(state: State) -> None:
    with state.transaction():
        state.count(alert(1, rule='a"b\\c', count=3).event)
        state.count(alert(2, reason="canary", severity=CRITICAL, host="evil.test").event)
        state.spool("hook", alert(1))
    text = metrics.exposition(state, source="gate", now=1.5)
    assert 'lockgate_denied_total{reason="not_allowed",rule="a\\"b\\\\c",log="gate"} 3' in text
    assert 'lockgate_denied_critical_total{log="gate"} 1' in text
    assert 'lockgate_alerts_waiting{sink="hook",log="gate"} 1' in text
    assert "evil" not in text


def test_a_state_is_one_process_s_and_of_this_version(tmp_path: Path, state: State) -> None:
    with pytest.raises(HostFault, match="another alerter"):
        State(tmp_path / "audit.db.alerts", queue=10)
    other = tmp_path / "other.alerts"
    other.write_bytes(b"x" * 4096)
    other.chmod(0o600)
    with pytest.raises(HostFault, match="cannot be used"):
        State(other, queue=10)
    newer = tmp_path / "newer.alerts"
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version=9")
    with pytest.raises(HostFault, match="another version"):
        State(newer, queue=10)
    with pytest.raises(ConfigError, match="no alerts' spool"):
        read(tmp_path / "nothing.alerts", 5)
