"""What of the denials is told: the first at once, then counts, critical ones always.

Rule 1: a critical denial is told as it is, each time. Nothing here can hold it back.
Rule 2: any other is told at once the first time; within the window after that it is counted, and the count is told
        when the window ends. A window without a count ends silently, and then the next one is a first one again.
Rule 3: keys come from what attackers choose, so there is a bound of first ones for an agent and a reason; what is
        beyond it is counted under one key.
Rule 4: the n-th denial of one run is told as a critical alert of its own, once.
Rule 5: pure: time enters as an argument, and the state can be written down (`dump`) and taken up again (`load`).
"""

from __future__ import annotations

import hashlib
from typing import Final, Literal

import msgspec

from lockgate.alerts.event import CRITICAL, Event
from lockgate.policy.suffixes import registrable

Why = Literal["first", "critical", "count", "escalation", "each", "overflow", "test", "replay"]
FIRSTS: Final = 20
"""Different keys of one agent and one reason that are told at once within a window."""
MAX_GROUPS: Final = 10_000
MAX_RUNS: Final = 2_000
_OTHERS: Final = "*"


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to tell.

    Attributes:
        uid: the same at each try to deliver it, so a receiver can drop what it has.
        key: the same for denials of one kind.
        why: what it is told for.
        event: the denial; of a count, the latest one.
        count: how many denials it stands for. since: wall clock of the first of them. at: when it was raised.

    """

    uid: str
    key: str
    why: Why
    event: Event
    count: int = 1
    since: float = 0.0
    at: float = 0.0

    @property
    def critical(self) -> bool:
        """Whether it is told whatever was told before."""
        return self.event.critical


class Group(msgspec.Struct):
    """Denials of one key since the last alert about them."""

    ends: float
    count: int
    since: float
    event: Event


class Memory(msgspec.Struct):
    """The state, as it is written down."""

    groups: dict[str, Group] = {}
    runs: dict[str, int] = {}


def key_of(event: Event) -> str:
    """Return the dedupe key: agent, rule, reason, and the registrable domain, or host and two path segments."""
    address = event.host.startswith("[") or event.host.replace(".", "").isdigit()
    place = event.host if address or not event.host else registrable(event.host)
    if event.path:
        place = event.host + "/".join(event.path.split("/")[:3])
    elif not place and event.kind in {"operation", "export"} and event.rule:
        place = event.operation
    return _key(event, place)


def _key(event: Event, place: str) -> str:
    parts = f"{event.agent}\0{event.rule}\0{event.reason}\0{place}"
    return hashlib.sha256(b"lockgate/alert/1\0" + parts.encode("utf-8", "replace")).hexdigest()[:32]


class Dedupe:
    """Turns denials into alerts.

    Args:
        window: seconds in which what was told is only counted.
        escalate: how many denials of one run raise a critical alert.
        memory: the state to go on from.

    """

    def __init__(self, *, window: float, escalate: int, memory: Memory | None = None) -> None:
        self._window = window
        self._escalate = escalate
        self.memory = memory if memory is not None else Memory()
        self._firsts: dict[tuple[str, str], tuple[float, int]] = {}

    def take(self, event: Event, now: float) -> list[Alert]:
        """Return what is to be told at once about `event`."""
        key = key_of(event)
        if event.critical:
            told = [_alert(key, "critical", event, event.count, event.at, now)]
        else:
            told = self._ordinary(key, event, now)
        return told + self._escalated(event, now)

    def _ordinary(self, key: str, event: Event, now: float) -> list[Alert]:
        groups = self.memory.groups
        group = groups.get(key)
        if group is None and not self._first(event, now):
            key = _key(event, _OTHERS)
            group = groups.get(key)
        if group is not None and now < group.ends:
            group.count += event.count
            group.since = group.since or event.at
            group.event = event
            return []
        told = [] if group is None or not group.count else [self._count(key, group, now)]
        self._make_room()
        groups[key] = Group(now + self._window, 0, 0.0, event)
        return [*told, _alert(key, "first", event, event.count, event.at, now)]

    def _first(self, event: Event, now: float) -> bool:
        """Take one of the places for first ones of this agent and reason."""
        if len(self._firsts) > MAX_GROUPS:
            self._firsts = {name: one for name, one in self._firsts.items() if now < one[0]}
        name = event.agent, event.reason
        ends, used = self._firsts.get(name, (now + self._window, 0))
        if now >= ends:
            ends, used = now + self._window, 0
        self._firsts[name] = ends, used + 1
        return used < FIRSTS

    def _escalated(self, event: Event, now: float) -> list[Alert]:
        runs = self.memory.runs
        if not event.run:
            return []
        before = runs.pop(event.run, 0)
        runs[event.run] = before + event.count  # last again, so that the longest idle one goes first
        while len(runs) > MAX_RUNS:
            del runs[next(iter(runs))]
        if not before < self._escalate <= before + event.count:
            return []
        raised = msgspec.structs.replace(event, kind="finding", reason="escalation", severity=CRITICAL)
        return [_alert(key_of(raised), "escalation", raised, before + event.count, event.at, now)]

    def due(self, now: float) -> list[Alert]:
        """Return the counts of windows that have ended."""
        told: list[Alert] = []
        for key, group in list(self.memory.groups.items()):
            if now < group.ends:
                continue
            if group.count:
                told.append(self._count(key, group, now))
                self.memory.groups[key] = Group(now + self._window, 0, 0.0, group.event)
            else:
                del self.memory.groups[key]
        return told

    @property
    def next_due(self) -> float | None:
        """When `due` will have something to do, or None."""
        return min((group.ends for group in self.memory.groups.values()), default=None)

    def ended(self, run: str) -> None:
        """Forget a run that was closed."""
        self.memory.runs.pop(run, None)

    def _count(self, key: str, group: Group, now: float) -> Alert:
        return _alert(key, "count", group.event, group.count, group.since, now)

    def _make_room(self) -> None:
        groups = self.memory.groups
        while len(groups) >= MAX_GROUPS:
            quiet = next((key for key, group in groups.items() if not group.count), None)
            del groups[quiet if quiet is not None else next(iter(groups))]


def _alert(key: str, why: Why, event: Event, count: int, since: float, now: float) -> Alert:  # noqa: PLR0917 - local
    uid = f"{why}-{event.audit_id}" if why != "count" else f"count-{key[:12]}-{event.audit_id}"
    return Alert(uid=uid, key=key, why=why, event=event, count=count, since=since, at=now)
