"""Follows one audit log and tells the sinks.

Rule 1: a batch of rows, what it means and where it was read up to are kept in one transaction; then the sinks are told.
Rule 2: each sink has a thread of its own: one that is slow or down holds back no other.
Rule 3: nothing here stops anything else: who writes rows does not wait for who reads them.
"""

from __future__ import annotations

import select
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from lockgate.alerts import metrics
from lockgate.alerts.dedupe import Alert, Dedupe, Memory
from lockgate.alerts.event import CRITICAL, Event, classify
from lockgate.alerts.follow import BATCH, Follower, Read
from lockgate.alerts.sinks import Sink, build
from lockgate.alerts.state import SUFFIX, State
from lockgate.config import Config

POLL_SECONDS: Final = 0.05
"""How long a row may be on the disk before the alerter looks."""
CHECK_SECONDS: Final = 1.0
DRAIN_SECONDS: Final = 3.0
LONGEST_WAIT: Final = 300.0
_PAUSE_SECONDS: Final = 1.0


def state_path(audit: Path) -> Path:
    """Return where the alerter of an audit log keeps its state."""
    return audit.with_name(audit.name + SUFFIX)


class Alerter:
    """One log, its state and its sinks.

    Args:
        config: `[alerts]` and the secrets it names.
        audit: the log.
        source: names the log in metrics, where one configuration has several.

    Raises:
        HostFault: the state cannot be opened, or the address of the metrics not bound.

    """

    def __init__(self, config: Config, audit: Path, *, source: str = "") -> None:
        table = config.alerts
        self._table = table
        self._source = source
        self._state = State(state_path(audit), queue=table.queue)
        self._follower = Follower(audit)
        self._endpoint: metrics.Endpoints | None = None
        try:
            self._sinks: Mapping[str, Sink] = build(table.sinks, config.secrets, timeout=table.timeout)
            if table.metrics is not None and not source:
                self._endpoint = metrics.Endpoints(table.metrics, self._state, source=source or "gate")
            place = self._state.place()
            if place is None:  # the first time: what was denied before there were alerts is history
                place = (*self._follower.end(), Memory())
                with self._state.transaction():
                    self._state.keep(place[0], place[1], msgspec.json.encode(place[2]))
            self._state.forget_sinks(self._sinks)
        except BaseException:
            self.close()
            raise
        self._seq, self._hash, memory = place
        self._dedupe = Dedupe(window=table.window, escalate=table.escalate, memory=memory)
        self._opened: int = 0
        self._more = False
        self._stop = threading.Event()
        self._senders = [_Sender(name, sink, self._state, self._stop) for name, sink in self._sinks.items()]

    def run(self, life: int = -1, ended: Callable[[], bool] = lambda: False) -> None:
        """Work until `ended()`, or until the other end of `life` is closed; then tell what is left, bounded.

        Args:
            life: a descriptor that becomes readable at the end of whoever started us; -1 = none.
            ended: asked between two looks.

        """
        for sender in self._senders:
            sender.start()
        poller = select.poll()
        if life >= 0:
            poller.register(life, select.POLLIN)
        checked = 0.0
        while not ended() and not poller.poll(0 if self._more else POLL_SECONDS * 1000):
            now = time.time()
            try:
                self.look(now)
                if now - checked >= CHECK_SECONDS:
                    checked = now
                    self._follower.replaced()
                    self._write_textfile(now)
            except sqlite3.Error as error:
                self._take_back(error)
        self._finish()

    def look(self, now: float) -> int:
        """Take what is new in the log; returns how many rows that were."""
        changed = self._follower.changed()  # opens the log again where it was replaced
        if not self._more and not changed:
            self._tell([], self._dedupe.due(now))
            return 0
        self._check_place(now)
        found = self._follower.after(self._seq)
        self._more = found is None or len(found) == BATCH
        self._tell(found or [], self._dedupe.due(now), now)
        return len(found or [])

    def close(self) -> None:
        """Let go of everything; idempotent enough for a start that failed."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
        self._follower.close()
        self._state.close()

    # ---- the log ---------------------------------------------------------------------------------------------
    def _check_place(self, now: float) -> None:
        """Say it when the log is not the one that was read so far, and read that one from its beginning."""
        if self._follower.opened == self._opened:
            return
        self._opened = self._follower.opened
        if self._follower.holds(self._seq, self._hash):
            return
        event = Event(
            audit_id=f"audit-{self._seq}",
            seq=self._seq,
            at=now,
            kind="audit",
            reason="audit_replaced",
            severity=CRITICAL,
            agent="lockgate",
        )
        self._seq, self._hash = 0, bytes(32)
        with self._state.transaction():
            self._state.count(event)
            for alert in self._dedupe.take(event, now):
                self._spool(alert)
            self._keep()

    def _tell(self, found: list[Read], told: list[Alert], now: float = 0.0) -> None:
        if not found and not told:
            return
        with self._state.transaction():
            for alert in told:
                self._spool(alert)
            for read in found:
                self._take(read, now)
            if found:
                self._seq, self._hash = found[-1].seq, found[-1].hash
            self._keep()
        for sender in self._senders:
            sender.wake.set()

    def _take(self, read: Read, now: float) -> None:
        row = read.row
        if row is None:
            event: Event | None = Event(
                audit_id=f"audit-{read.seq}",
                seq=read.seq,
                at=now,
                kind="audit",
                reason="audit_gap",
                severity=CRITICAL,
                agent="lockgate",
            )
        else:
            event = classify(row)
            if row.phase == "run" and row.status == "closed":
                self._dedupe.ended(row.run)
        if event is None:
            return
        self._state.count(event)
        for alert in self._dedupe.take(event, now):
            self._spool(alert)
        if any(sink.table.every for sink in self._sinks.values()):
            each = Alert(uid=f"each-{event.audit_id}", key="", why="each", event=event, since=event.at, at=now)
            self._spool(each)

    def _spool(self, alert: Alert) -> None:
        """Put an alert before the sinks that want it."""
        for name, sink in self._sinks.items():
            table = sink.table
            if table.at_least == "critical" and not alert.critical:
                continue
            if table.every == (alert.why == "each") or (table.every and alert.why in {"escalation", "overflow"}):
                self._state.spool(name, alert)

    def _keep(self) -> None:
        self._state.keep(self._seq, self._hash, msgspec.json.encode(self._dedupe.memory))

    def _take_back(self, error: sqlite3.Error) -> None:
        """The state took nothing: go back to what it holds, and wait a little."""
        sys.stderr.write(f"lockgate-alerter: the spool takes nothing ({error})\n")
        time.sleep(_PAUSE_SECONDS)
        with suppress(sqlite3.Error):
            place = self._state.place()
            if place is not None:
                self._seq, self._hash, self._dedupe.memory = place
                self._more = True

    # ---- the end ---------------------------------------------------------------------------------------------
    def _finish(self) -> None:
        deadline = time.monotonic() + DRAIN_SECONDS
        try:
            while time.monotonic() < deadline and (self.look(time.time()) or self._more):
                pass
            while time.monotonic() < deadline and self._state.waiting(self._sinks, time.time()):
                time.sleep(POLL_SECONDS / 5)
            self._write_textfile(time.time())
        except sqlite3.Error as error:
            sys.stderr.write(f"lockgate-alerter: the spool takes nothing ({error})\n")
        self._stop.set()
        for sender in self._senders:
            sender.wake.set()
        for sender in self._senders:
            sender.join(max(deadline - time.monotonic(), 0.2))

    def _write_textfile(self, now: float) -> None:
        if self._table.textfile is None:
            return
        path = Path(self._table.textfile)
        if self._source:
            path = path.with_name(f"{path.stem}.{self._source}{path.suffix}")
        metrics.write_textfile(path, metrics.exposition(self._state, source=self._source or "gate", now=now))


class _Sender(threading.Thread):
    """Tells one sink what waits for it."""

    def __init__(self, name: str, sink: Sink, state: State, stop: threading.Event) -> None:
        super().__init__(name=f"sink-{name}", daemon=True)
        self.wake = threading.Event()
        self._sink_name = name
        self._sink = sink
        self._state = state
        self._stop_all = stop

    def run(self) -> None:
        while not self._stop_all.is_set():
            self.wake.clear()
            try:
                if self._one():
                    continue
                due = self._state.earliest(self._sink_name)
            except sqlite3.Error:
                due = time.time() + _PAUSE_SECONDS  # what was told may be told again
            self.wake.wait(None if due is None else max(due - time.time(), 0.01))

    def _one(self) -> bool:
        """Tell the next alert; False when none is due."""
        waiting = self._state.next(self._sink_name, time.time())
        if waiting is None:
            return False
        outcome = self._sink.send(waiting.alert)
        now = time.time()
        if outcome.result == "later":
            wait = min(2.0**waiting.tries, LONGEST_WAIT)
            self._state.later(self._sink_name, waiting, now + max(wait, outcome.wait or 0.0), outcome.problem)
        else:
            self._state.done(self._sink_name, waiting, outcome.result, now)
        return True
