"""Open runs, and who they belong to. Identity comes from here and from nowhere else.

Rule 1: a principal is made once, from the scope the agent opened the run with; no call and no channel carries one.
Rule 2: a ticket is worth one channel, once, for a short time; what comes with a used, unknown or old one is closed.
Rule 3: a child run ends with its parent, and both charge one ledger.
Rule 4: what a child reads its parents have read, and what comes from a child is untrusted to them. A child begins with
        what its parent had read when it was opened.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Final

from lockgate.audit.rows import Value
from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import HostFault, ScopeError
from lockgate.contract.run import Principal, Via
from lockgate.policy import CompiledScope, Ledger
from lockgate.policy.canary import RANDOM_BYTES, Needles, mint
from lockgate.policy.latch import CLEAN, TAINTS

TICKET_SECONDS: Final = 300.0
MAX_RUNS: Final = 10_000
MAX_TICKETS: Final = 256


class UnknownRun(ScopeError):
    """The run is not open (any more)."""

    code = "unknown_run"


class Run:
    """One open run.

    Attributes:
        id: names it in every row. principal: on whose behalf. scope: what it may do.
        bounds: the configuration's, for tool calls and as ceiling of tickets. parent: the run it was narrowed from.
        over: it was closed; nothing starts in it any more. tickets: how many are unused.
        seen: labels of the results it was given ("private", "untrusted"). canary: the value planted in it and its
            children, "" when no operation of its scope declares a field for one.

    """

    __slots__ = (
        "_labels",
        "_needles",
        "_places",
        "bounds",
        "canary",
        "children",
        "id",
        "ledger",
        "over",
        "parent",
        "principal",
        "scope",
        "seen",
        "tickets",
    )

    def __init__(self, scope: CompiledScope, *, bounds: Bounds, ledger: Ledger, parent: Run | None = None) -> None:
        self.id = f"run-{os.urandom(12).hex()}"
        self.principal = Principal(scope.user, scope.agent, scope.tenant, self.id)
        self.scope = scope
        self.bounds = bounds
        self.ledger = ledger
        self.parent = parent
        self.children: list[Run] = []
        self.over = False
        self.tickets = 0
        self.seen: frozenset[str] = CLEAN if parent is None else parent.seen
        self.canary: str = "" if parent is None else parent.canary
        if not self.canary and any(one.decoys for one in scope.operations.values()):
            self.canary = mint(os.urandom(RANDOM_BYTES))
        self._needles: Needles | None = None if parent is None else parent._needles  # noqa: SLF001
        self._labels: threading.Lock = threading.Lock() if parent is None else parent._labels  # noqa: SLF001
        self._places = [None] * bounds.calls_in_flight

    def enter(self) -> bool:
        """Take a place among the calls in flight; False when all are taken."""
        try:
            self._places.pop()  # one step of the interpreter: no two threads get the same place
        except IndexError:
            return False
        return True

    def leave(self) -> None:
        """Give the place back."""
        self._places.append(None)

    @property
    def latched(self) -> bool:
        """Whether it has read private and untrusted data (E7)."""
        return self.seen >= TAINTS

    def learn(self, labels: frozenset[str]) -> list[Run]:
        """Take the labels of a result; returns the runs, this and those above, that are latched from now on."""
        fell: list[Run] = []
        run: Run | None = self
        with self._labels:
            while run is not None:
                before, run.seen = run.seen, run.seen | labels
                if run.seen >= TAINTS and not before >= TAINTS:
                    fell.append(run)
                run, labels = run.parent, labels | {"untrusted"}
        return fell

    @property
    def needles(self) -> Needles:
        """The forms in which its planted value is looked for; made at the first use."""
        if self._needles is None:
            self._needles = Needles.of((self.canary,) if self.canary else ())
        return self._needles

    def family(self) -> list[Run]:
        """This run and all below it."""
        return [self, *(one for child in self.children for one in child.family())]


class Origin:
    """Where a call came from. The edge copies it into rows and takes no decision from it (C2).

    Attributes:
        via: "tool" or "code". rung: the rung of the code, None for tools. shared_kernel: that rung shares the kernel.
        weakness: what of the rung's wall was missing, and accepted. code: further facts for the rows.
        over: nobody waits for an answer any more, so no approval is worth waiting for.
        prefixes: the encoded beginnings of the two rows of an allowed read, by operation.

    """

    __slots__ = ("code", "over", "prefixes", "rung", "shared_kernel", "via", "weakness")

    def __init__(
        self,
        via: Via,
        *,
        rung: str | None = None,
        shared_kernel: bool = False,
        weakness: str | None = None,
        code: dict[str, Value] | None = None,
    ) -> None:
        self.via: Via = via
        self.rung = rung
        self.shared_kernel = shared_kernel
        self.weakness = weakness
        self.code: dict[str, Value] = code or {}
        self.over = False
        self.prefixes: dict[str, tuple[bytes, bytes]] = {}


class Ticket:
    """The right to attach one channel to a run."""

    __slots__ = ("bounds", "expires", "run", "value")

    def __init__(self, run: Run, bounds: Bounds, expires: float) -> None:
        self.value = os.urandom(24).hex()
        self.run = run
        self.bounds = bounds
        self.expires = expires


class Runs:
    """All open runs and unused tickets. Any thread may call."""

    def __init__(self, *, ticket_seconds: float = TICKET_SECONDS) -> None:
        self._ticket_seconds = ticket_seconds
        self._lock = threading.Lock()
        self._runs: dict[str, Run] = {}
        self._tickets: dict[str, Ticket] = {}

    def add(self, run: Run) -> None:
        """Open `run`.

        Raises:
            HostFault: too many are open.
            UnknownRun: its parent has ended.

        """
        with self._lock:
            if len(self._runs) >= MAX_RUNS:
                raise HostFault(f"{MAX_RUNS} runs are open", next_step="close runs that are done")
            if run.parent is not None:
                if run.parent.over:
                    raise UnknownRun("the parent run has ended", next_step="open a new run")
                run.parent.children.append(run)
            self._runs[run.id] = run

    def get(self, run_id: str) -> Run:
        """Return an open run.

        Raises:
            UnknownRun: there is none.

        """
        run = self._runs.get(run_id)
        if run is None or run.over:
            raise UnknownRun("there is no open run of that id", next_step="open a run first; ids end with their run")
        return run

    def ticket(self, run: Run, bounds: Bounds | None = None) -> Ticket:
        """Make a one-use ticket.

        Args:
            run: which run it is good for.
            bounds: of the execution, narrower than the run's; None = the run's.

        Raises:
            ScopeError: `bounds` are wider than the run's.
            HostFault: too many unused tickets of this run.

        """
        if bounds is None:
            bounds = run.bounds
        else:
            for name in bounds.__struct_fields__:
                if getattr(bounds, name) > getattr(run.bounds, name):
                    raise ScopeError(
                        f"bound {name} is wider than the configuration allows",
                        next_step=f"give at most {getattr(run.bounds, name)!r}",
                    )
        now = time.monotonic()
        ticket = Ticket(run, bounds, now + self._ticket_seconds)
        with self._lock:
            if run.over:
                raise UnknownRun("the run has ended", next_step="open a new run")
            while self._tickets and (oldest := next(iter(self._tickets.values()))).expires <= now:
                self._forget(oldest)  # all live equally long, so the oldest stand first
            if run.tickets >= MAX_TICKETS:
                raise HostFault(f"{MAX_TICKETS} tickets of this run are unused", next_step="use or await them first")
            self._tickets[ticket.value] = ticket
            run.tickets += 1
        return ticket

    def redeem(self, value: str) -> Ticket | None:
        """Use a ticket up; None when it is unknown, used, too old, or its run has ended."""
        with self._lock:
            ticket = self._tickets.get(value)
            if ticket is not None:
                self._forget(ticket)
        if ticket is None or ticket.run.over or time.monotonic() >= ticket.expires:
            return None
        return ticket

    def close(self, run: Run) -> list[Run]:
        """End `run` and all below it; returns those that ended now."""
        with self._lock:
            ended = [one for one in run.family() if not one.over]
            for one in ended:
                one.over = True
                self._runs.pop(one.id, None)
            if any(one.tickets for one in ended):
                gone = set(map(id, ended))
                for old in [one for one in self._tickets.values() if id(one.run) in gone]:
                    self._forget(old)
            if run.parent is not None and run in run.parent.children:
                run.parent.children.remove(run)
        return ended

    def _forget(self, ticket: Ticket) -> None:
        del self._tickets[ticket.value]
        ticket.run.tickets -= 1

    @property
    def open(self) -> list[Run]:
        """The open runs."""
        with self._lock:
            return list(self._runs.values())
