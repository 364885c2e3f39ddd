"""The edge: the one place from which an operation's function is entered (C2).

Rule 1: the steps below stand in this order and each call takes them, whoever asked. `origin` is copied into rows;
        nothing here reads it to decide.
Rule 2: the typed object that was authorized is the object that the function gets. Nothing is parsed twice.
Rule 3: no durable intent, no write; no row, no answer. A call whose outcome row cannot be written stops the edge until
        the audit store takes rows again.
Rule 4: a call ends once: by its thread or by the watchdog, whoever takes its claim.
Rule 5: no text of an exception, a backend or an argument leaves; a reply is a result of the declared type or a member
        of `Reason`.

    authorize → look the key up → approval, authorize again → reserve → intent → (mint, backend) → encode, scan →
    outcome, settle → reply
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from lockgate.audit.client import AuditClient
from lockgate.audit.wire import Existing
from lockgate.broker import quiet
from lockgate.broker.approvals import Approvals, Grant
from lockgate.broker.call import BackendEntry, Call
from lockgate.broker.encoding import OK, canonical, encode, key
from lockgate.broker.hash_key import ArgumentHash
from lockgate.broker.outcomes import REASON_OF, SURELY_NOT, Outcome, of_deadline, of_exception
from lockgate.broker.runs import Origin, Run
from lockgate.broker.threads import MAX_STUCK, Threads
from lockgate.broker.watcher import Watcher
from lockgate.broker.work import Reply, Work
from lockgate.contract.errors import AuditUnavailable, HostFault
from lockgate.contract.reasons import Reason
from lockgate.policy import BadArguments, CallRequest, Operation, Verdict, authorize

GRACE: Final = 0.25
"""Seconds after a call's deadline before the watchdog takes it: a connector that keeps time ends it better typed."""
NAME_CHARS: Final = 64
_monotonic: Final = time.monotonic


class Abandoned(BaseException):
    """This thread's call was taken away by the watchdog; it must touch nothing of it and return."""


class Edge:
    """Executes operations.

    Args:
        audit: where rows go.
        approvals: who asks people.
        threads: whose watchdog keeps the deadlines.
        backends: what operations may call.
        hash_key: the deployment's key for argument hashes.
        watcher: keeps what runs have read, and looks for planted values.

    """

    def __init__(
        self,
        *,
        audit: AuditClient,
        approvals: Approvals,
        threads: Threads,
        backends: Mapping[str, BackendEntry],
        hash_key: bytes,
        watcher: Watcher,
    ) -> None:
        self._audit = audit
        self._approvals = approvals
        self._threads = threads
        self._backends = backends
        self._hash = ArgumentHash(hash_key)
        self.watcher = watcher
        self._local = threading.local()
        self._halted = False
        self._inside: set[Work] = set()

    @property
    def active(self) -> int:
        """How many calls are inside."""
        return len(self._inside)

    def call(self, run: Run, origin: Origin, name: str, raw: bytes, late: Callable[[Reply], None]) -> Reply:
        """Take one call through the edge.

        Args:
            run: whose call it is; identity, scope and budgets come from here.
            origin: for the row.
            name: the operation, as asked for.
            raw: the JSON of the arguments.
            late: gets the reply, on another thread, when the call passes its deadline while this thread is stuck.

        Raises:
            Abandoned: that happened; the reply went to `late`.

        """
        if len(name) > NAME_CHARS:
            name = f"{name[:NAME_CHARS]}…"  # no operation is called so; the row need not hold all of it
        work = Work(run, origin, name, late, _monotonic())
        self._inside.add(work)
        try:
            if self._halted:
                self._audit.flush()
                self._halted = False
            return self._marked(work, self._decide(work, raw))
        except Exception as error:  # noqa: BLE001 - the audit store failed, or we did: typed, and never with its text
            self._halted = self._halted or isinstance(error, AuditUnavailable)
            quiet.tell(error)
            return self._failed(work)
        finally:
            self._inside.discard(work)

    def _marked(self, work: Work, reply: Reply) -> Reply:
        """Take note of what the run is given with this answer, before it is given (E7)."""
        if reply.ok is not None:
            self.watcher.read(work.run, work.operation)
        return reply

    # ---- 2 to 6: may it run -------------------------------------------------------------------------------------
    def _decide(self, work: Work, raw: bytes) -> Reply:
        run = work.run
        self._type(work, raw)
        if self.watcher.planted(run, work.canonical or raw):
            return self._planted(work)
        verdict = work.verdict = self._authorize(work)
        if verdict.effect == "deny":
            return self._deny(work, verdict)
        operation = work.operation
        if operation is None:  # an allow without an operation is no allow
            return self._deny(work, Verdict("deny", "internal", None, "allowed without operation", "not_available"))
        if operation.idempotency:
            work.key = key(run.principal.tenant, operation, work.args)
            earlier = self._audit.lookup(work.key)
            if earlier is not None:
                return self._repeat(work, earlier)
        if verdict.effect == "needs_approval":
            grant = self._approvals.obtain(
                run, work.origin, operation.name, work.canonical, lambda request: self._asked(work, request)
            )
            if not isinstance(grant, Grant):
                if verdict.visible == "latched" and grant == "approval_required":  # nobody agreed: it stays closed
                    return self._deny(work, verdict, visible="latched", effect="deny")
                return self._deny(work, verdict, visible=grant, reason="no grant for this exact call")
            work.grant = grant
            verdict = work.verdict = self._authorize(work)  # the wait may have outlived the scope
            if verdict.effect == "deny":
                return self._deny(work, verdict)
        if run.over:
            return self._deny(work, verdict, visible="expired", reason="the run has ended", effect="deny")
        if self._threads.stuck >= MAX_STUCK or not run.enter():
            return self._deny(work, verdict, visible="busy", reason="calls in flight", effect="deny")
        try:
            charges = verdict.obligations.charges
            if charges:
                work.reservation = run.ledger.reserve(charges)
            if charges and work.reservation is None:
                return self._deny(
                    work,
                    verdict,
                    visible="budget_exhausted",
                    reason="budget",
                    effect="deny",
                    rule=f"{work.name}.budget",
                )
            return self._begin(work, operation)
        finally:
            # Also when the watchdog took the call: its outcome is then finished on another thread, and the place is
            # this thread's until it comes back.
            run.leave()

    def _type(self, work: Work, raw: bytes) -> None:
        """Make the typed object, for operations of the scope alone: others are not told apart from unknown ones."""
        name = work.name
        operation = work.run.scope.operations.get(name)
        if operation is None:
            work.args_hash = self._hash(name, raw)
            return
        work.operation = operation
        try:
            work.args = operation.decode_args(raw)
        except BadArguments as bad:
            work.args = bad
            work.args_hash = self._hash(name, raw)
            return
        work.canonical = canonical(work.args)
        work.args_hash = self._hash(name, work.canonical)

    def _authorize(self, work: Work) -> Verdict:
        request = CallRequest(work.operation, work.name, work.args, _monotonic(), work.run.seen)
        return authorize(work.run.principal, request, work.run.scope)

    def _deny(
        self,
        work: Work,
        verdict: Verdict,
        *,
        visible: Reason | None = None,
        reason: str | None = None,
        effect: Literal["deny", "needs_approval"] | None = None,
        rule: str | None = None,
    ) -> Reply:
        """Write the denial, then answer: the row is durable before the caller learns anything."""
        shown: Reason = visible or verdict.visible or "not_available"
        audit_id = self._audit.commit(
            work.row(
                "denied",
                verdict=effect or verdict.effect,
                rule=rule or verdict.rule,
                path=verdict.path,
                reason=reason or verdict.reason,
                visible=shown,
                status="denied",
                duration=_monotonic() - work.started,
            )
        )
        return Reply(work.name, audit_id, reason=shown, rule=rule or verdict.rule)

    def _planted(self, work: Work) -> Reply:
        """Refuse a call that carries a planted value, and end its run."""
        reply = self._deny(
            work, Verdict("deny", "canary", None, "canary: a planted value is in the arguments", "expired")
        )
        self.watcher.end(work.run)
        return reply

    def _asked(self, work: Work, request: str) -> None:
        self._audit.commit(work.row("approval", status="asked", detail={"request": request}))

    def _repeat(self, work: Work, earlier: Existing) -> Reply:
        """Answer from what an earlier call with the same key left; runs nothing, charges nothing."""
        rule = None if work.verdict is None else work.verdict.rule
        reason: Reason | None
        if earlier.by == "grant":
            reason, status = "approval_required", "grant_used"
        elif earlier.args_hash != work.args_hash:
            reason, status = "conflict", "conflict"
        elif earlier.state == "open":
            reason, status = "busy", "in_flight"
        elif earlier.state == "unknown":
            reason, status = "outcome_unknown", "unknown"
        elif earlier.status == "ok" and earlier.result is not None:
            reason, status = None, "replayed"
        else:
            reason, status = REASON_OF.get(earlier.status, "outcome_unknown"), earlier.status
        if status in {"grant_used", "conflict"}:
            row = work.row(
                "denied", verdict="deny", visible=reason, reason=status, status=status, ref=earlier.intent_id
            )
            return Reply(work.name, self._audit.commit(row), reason=reason, rule=rule, status=status)
        size = None if earlier.result is None else len(earlier.result)
        row = work.row("outcome", status=status, visible=reason, ref=earlier.intent_id, result_bytes=size)
        audit_id = self._audit.append(row)
        ok = earlier.result if reason is None else None
        return Reply(work.name, audit_id, ok, reason, verdict="allow", rule=rule, status=status)

    # ---- 6 to 8: run it -----------------------------------------------------------------------------------------
    def _begin(self, work: Work, operation: Operation) -> Reply:
        if work.claims:
            claimed = self._audit.intent(work.row("intent"), work.key, None if work.grant is None else work.grant.id)
            if isinstance(claimed, Existing):
                self._release(work)
                return self._repeat(work, claimed)
            work.intent_id = claimed
        else:
            prefix = work.origin.prefixes.get(work.name) or work.prepare()
            work.intent_id = self._audit.append_encoded(b'%b,"args_hash":"%b"}' % (prefix[0], work.args_hash.encode()))
        deadline = _monotonic() + operation.timeout
        call = work.call = Call(
            call_id=work.intent_id,
            operation=operation.name,
            principal=work.run.principal,
            deadline=deadline,
            idempotency_key=work.key,
            backends=self._backends,
            args=work.args,
        )
        self._threads.arm(deadline + GRACE, work.claim, lambda: self._expire(work))
        result: object = None
        outcome: Outcome | None = None
        try:
            result = self._drive(operation, call, work.args) if operation.is_async else operation.fn(call, work.args)
        except BaseException as error:  # noqa: BLE001 - an operation may raise anything; none of it may leave
            outcome = of_exception(error, write=operation.effect == "write", sent=call.sent, changed=call.changed)
        finally:
            self._threads.disarm()
        if not work.claim.take():
            self._threads.came_back()
            raise Abandoned
        return self._finish(work, operation, result, outcome)

    def _drive(self, operation: Operation, call: Call, args: Any) -> object:
        """Run a coroutine function on this thread's own loop, with its deadline; nothing of it survives the call."""
        loop: asyncio.AbstractEventLoop | None = getattr(self._local, "loop", None)
        if loop is None or loop.is_closed():
            loop = self._local.loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(asyncio.wait_for(operation.fn(call, args), call.remaining))
        finally:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.wait(left, timeout=GRACE))
                loop.close()  # what ignored its cancellation must not wake up inside another call

    def _expire(self, work: Work) -> None:
        """Finish a call whose thread is stuck; runs on a fresh thread that holds the claim."""
        operation = work.operation
        if operation is not None:
            work.late(self._finish(work, operation, None, of_deadline(write=operation.effect == "write")))

    # ---- 9 to 11: what came of it -------------------------------------------------------------------------------
    def _finish(self, work: Work, operation: Operation, result: object, outcome: Outcome | None) -> Reply:
        encoded: bytes | None = None
        if outcome is None:
            encoded, outcome = encode(operation, result, work.run.canary)
        call = work.call
        lease_id = None
        if call is not None:
            lease_id = call.lease_ids
            call.end()
        if outcome is OK and encoded is not None and not work.claims and lease_id is None:
            return self._plain(work, encoded)
        status = outcome.status
        reason = REASON_OF.get(status)
        row = work.row(
            "unknown" if status == "unknown" else "outcome",
            status=status,
            visible=reason,
            lease_id=lease_id,
            result_bytes=None if encoded is None else len(encoded),
            duration=_monotonic() - work.started,
            ref=work.intent_id,
            detail=outcome.detail,
        )
        surely_not = status in SURELY_NOT
        try:
            if work.claims:
                audit_id = self._audit.outcome(row, work.intent_id, encoded, release=surely_not)
            else:
                audit_id = self._audit.append(row)
        except HostFault:
            # The effect may be there and no row says so: nobody is told that all is well, and nothing more is taken.
            self._halted = True
            return self._failed(work)
        if surely_not:
            self._release(work)
        else:
            self._settle(work)
        rule = None if work.verdict is None else work.verdict.rule
        return Reply(work.name, audit_id, encoded, reason, "allow", rule, status)

    def _plain(self, work: Work, encoded: bytes) -> Reply:
        """The common end, a read that went well: the same row, put together from its prepared beginning."""
        verdict = work.verdict
        try:
            audit_id = self._audit.append_encoded(
                b'%b,"args_hash":"%b","result_bytes":%d,"duration":%.6f,"ref":"%b"}'
                % (
                    work.origin.prefixes[work.name][1],
                    work.args_hash.encode(),
                    len(encoded),
                    _monotonic() - work.started,
                    work.intent_id.encode(),
                )
            )
        except AuditUnavailable:
            self._halted = True
            return self._failed(work)
        self._settle(work)
        return Reply(work.name, audit_id, encoded, None, "allow", None if verdict is None else verdict.rule, "ok")

    def _settle(self, work: Work) -> None:
        if work.reservation is not None:
            work.run.ledger.settle(work.reservation)

    def _release(self, work: Work) -> None:
        if work.reservation is not None:
            work.run.ledger.release(work.reservation)

    def _failed(self, work: Work) -> Reply:
        """Answer for a failure of ours: "nothing was done" only when no function was entered."""
        if work.call is None:
            self._release(work)
            return Reply(work.name, work.intent_id, reason="unavailable", status="unavailable")
        work.call.end()
        self._settle(work)
        reason: Reason = "outcome_unknown" if work.effect == "write" else "unavailable"
        return Reply(work.name, work.intent_id, reason=reason, verdict="allow", status="unrecorded")
