"""What the agent may ask of the broker, and what happens to a run from its opening to its end.

Rule 1: every request gets one answer with its id, a typed refusal included; nothing an agent sends ends the broker but
        closing the link.
Rule 2: a tool call goes through the same edge as code, on a thread of its own, and differs in the row's `via` alone.
Rule 3: no request returns a secret, a token or another run's data.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from lockgate.audit.client import AuditClient
from lockgate.audit.rows import Value
from lockgate.broker import quiet
from lockgate.broker.agent_link import AgentLink
from lockgate.broker.approvals import Approvals
from lockgate.broker.attachment import OPERATION, Attachment, row
from lockgate.broker.channel import Channel
from lockgate.broker.edge import Abandoned, Edge
from lockgate.broker.rendered import render_rows
from lockgate.broker.runs import MAX_RUNS, Origin, Run, Runs
from lockgate.broker.supervisor_link import SupervisorLink
from lockgate.broker.threads import Threads
from lockgate.broker.work import Reply
from lockgate.contract import wire
from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import AuditUnavailable, GuestProtocolError, HostFault, LockgateError, ScopeError
from lockgate.contract.run import CallRecord
from lockgate.contract.strictjson import check_unique_keys
from lockgate.policy import BadArguments, CallRequest, CompiledScope, Ledger, Operations, Scope, authorize

DRAIN_SECONDS: Final = 3.0
"""How long calls in flight may take to end when the agent is gone; the rest becomes `unknown` at the next start."""
_TOOL: Final = Origin("tool")


class Broker:
    """Everything of a broker behind its two links.

    Args:
        agent: the agent's link. supervisor: the supervisor's socket.
        operations: the sealed registry. edge, approvals, threads, audit: see there.
        bounds: of the configuration, for every run.

    """

    def __init__(
        self,
        agent: AgentLink,
        supervisor: socket.socket,
        *,
        operations: Operations,
        edge: Edge,
        approvals: Approvals,
        threads: Threads,
        audit: AuditClient,
        bounds: Bounds,
    ) -> None:
        self._agent = agent
        self._operations = operations
        self._edge = edge
        self._approvals = approvals
        self._threads = threads
        self._audit = audit
        self._bounds = bounds
        self._runs = Runs()
        self._ended_here: dict[str, None] = {}  # by us, not by the agent, which closes them all the same
        edge.watcher.attach(latched=self._latched, end=self._end_at_once)
        self._exports: dict[str, Attachment] = {}
        self._supervisor = SupervisorLink(
            supervisor,
            runs=self._runs,
            attached=self._attached,
            serve=lambda channel: threads.run(channel.serve),
            detached=self._code_closed,
            settle=lambda attachment: threads.run(lambda: self._give_up(attachment)),
            void=approvals.void,
        )
        self._handlers: dict[type, Callable[[Any], None]] = {
            wire.OpenRun: self._open_run,
            wire.NewTicket: self._new_ticket,
            wire.ToolCall: self._tool_call,
            wire.NarrowRun: self._narrow_run,
            wire.CloseRun: self._close_run,
            wire.ListOperations: self._list_operations,
            wire.ExplainCall: self._explain_call,
            wire.Decide: self._decide,
            wire.FetchExport: self._fetch_export,
            wire.RenderDenied: self._render_denied,
            wire.RungRefused: self._rung_refused,
        }

    def serve(self) -> None:
        """Answer the agent until it is gone; then end all runs and wait, bounded, for calls in flight."""
        self._threads.run(self._supervisor.serve)
        for message in self._agent.messages():
            try:
                self._handlers[type(message)](message)
            except LockgateError as error:
                self._agent.refuse(message.id, error)
            except Exception as error:  # noqa: BLE001 - ours; its text stays here
                quiet.tell(error)
                fault = HostFault(
                    f"the broker failed on {type(message).__name__} ({type(error).__name__})",
                    next_step="report this; the broker goes on",
                )
                self._agent.refuse(message.id, fault)
        deadline = time.monotonic() + DRAIN_SECONDS
        for run in self._runs.open:
            self._end(run)
        while self._edge.active and time.monotonic() < deadline:
            time.sleep(0.01)

    # ---- runs -----------------------------------------------------------------------------------------------
    def _open_run(self, message: wire.OpenRun) -> None:
        scope = Scope.from_data(message.scope).compile(self._operations, time.monotonic())
        self._opened(message.id, scope, None)

    def _narrow_run(self, message: wire.NarrowRun) -> None:
        parent = self._runs.get(message.run)
        # Compiled beneath the parent's own: its budgets are charged, not a copy of them.
        self._opened(message.id, parent.scope.narrow(time.monotonic(), **message.scope), parent)

    def _opened(self, ident: int, scope: CompiledScope, parent: Run | None) -> None:
        ledger = Ledger() if parent is None else parent.ledger
        run = Run(scope, bounds=self._bounds, ledger=ledger, parent=parent)
        self._runs.add(run)
        try:
            detail = {} if parent is None else {"parent": parent.id}
            self._audit.append(row(run, _TOOL, "run", None, status="opened", detail=detail))
            ticket = self._runs.ticket(run)
        except BaseException:
            self._runs.close(run)
            raise
        self._agent.send(
            wire.RunOpened(
                id=ident,
                run=run.id,
                scope_hash=scope.hash,
                ticket=ticket.value,
                operations=sorted(scope.operations),
                latched=run.latched,
                canary=run.canary,
            )
        )

    def _latched(self, run: Run) -> None:
        """Tell the agent that a run has read private and untrusted data, before it gets the result that did it."""
        self._agent.send(wire.RunLatched(run=run.id))
        with contextlib.suppress(AuditUnavailable):  # the calls that it closes have rows of their own
            self._audit.append(row(run, _TOOL, "run", None, status="latched"))

    def _new_ticket(self, message: wire.NewTicket) -> None:
        ticket = self._runs.ticket(self._runs.get(message.run), message.bounds)
        self._agent.send(wire.Ticket(id=message.id, ticket=ticket.value))

    def _close_run(self, message: wire.CloseRun) -> None:
        if message.run not in self._ended_here:
            self._end(self._runs.get(message.run))
        self._ended_here.pop(message.run, None)
        self._agent.send(wire.Done(id=message.id))

    def _end_at_once(self, run: Run) -> None:
        """End a run because of what it did."""
        for one in run.family():
            self._ended_here[one.id] = None
        while len(self._ended_here) > MAX_RUNS:
            self._ended_here.pop(next(iter(self._ended_here)), None)
        self._end(run)

    def _end(self, run: Run) -> None:
        ended = self._runs.close(run)
        ids = {one.id for one in ended}
        self._supervisor.shut_run(ids)
        for one in ended:
            self._approvals.void(one)
        for ticket in [ticket for ticket, attachment in self._exports.items() if attachment.run.id in ids]:
            self._exports.pop(ticket).spool.close()
        for one in ended:
            try:
                self._audit.append(row(one, _TOOL, "run", None, status="closed"))
            except AuditUnavailable:  # it has ended all the same, and its calls have their rows
                return

    # ---- code -----------------------------------------------------------------------------------------------
    def _attached(self, sock: socket.socket, attachment: Attachment) -> Channel:
        attachment.intent_id = self._audit.append(
            attachment.row("run", status="attached", detail=attachment.origin.code)
        )
        return Channel(
            sock,
            attachment,
            edge=self._edge,
            operations=self._operations,
            audit=self._audit,
            kill=self._supervisor.kill,
            closed=self._code_closed,
        )

    def _give_up(self, attachment: Attachment) -> None:
        """The run is over and a call of it is not: tell the agent, and let the call's rows follow."""
        detach = attachment.give_up()
        if detach is not None:
            attachment.calls.append(CallRecord(attachment.running, "allow", None, None, "running", ""))
            self._code_closed(attachment, detach)

    def _code_closed(self, attachment: Attachment, detach: wire.Detach) -> None:
        detail: dict[str, Value] = {
            "exit_code": detach.exit_code,
            "killed_by": detach.killed_by,
            "calls": len(attachment.calls),
        }
        if attachment.violation is not None:
            detail["violation"] = attachment.violation
        try:
            audit_id = self._audit.append(
                attachment.row(
                    "run",
                    status="killed" if detach.killed_by else "ended",
                    ref=attachment.intent_id,
                    duration=detach.duration,
                    truncated=sum(detach.truncated.values()),
                    detail=detail,
                )
            )
        except AuditUnavailable:
            audit_id = ""  # the agent takes an empty id as: this run has no row of its end
        infos = attachment.spool.infos
        if infos and not attachment.run.over:
            self._exports[attachment.ticket] = attachment
        else:
            attachment.spool.close()
        try:
            following = self._runs.ticket(attachment.run).value
        except LockgateError:  # the run has ended, or has tickets enough
            following = ""
        self._agent.send(
            wire.CodeClosed(
                ticket=attachment.ticket,
                next_ticket=following,
                calls=tuple(attachment.calls),
                exports=infos,
                audit_id=audit_id,
                urls=tuple(attachment.urls),
            )
        )

    def _fetch_export(self, message: wire.FetchExport) -> None:
        attachment = self._exports.get(message.ticket)
        found = None
        if attachment is not None:
            found = attachment.spool.read(message.name, message.offset, wire.EXPORT_CHUNK)
        if attachment is None or found is None:
            raise ScopeError("there is no such export", next_step="fetch exports of an open run, each once")
        data, last = found
        self._agent.send(wire.ExportChunk(id=message.id, data=data, last=last))
        if last and attachment.spool.fetched(message.name):
            del self._exports[message.ticket]
            attachment.spool.close()

    # ---- calls ----------------------------------------------------------------------------------------------
    def _tool_call(self, message: wire.ToolCall) -> None:
        run = self._runs.get(message.run)
        raw = message.args
        try:
            check_unique_keys(raw)
        except GuestProtocolError:
            raw = b"\0" + raw  # no decoder takes it: the edge answers `bad_request`, with a row, as for wrong types
        origin = Origin("tool")

        def answer(reply: Reply) -> None:
            ok, urls = wire.NULL, tuple[str, ...]()
            if reply.ok is not None:
                operation = self._operations.get(reply.operation)
                ok = msgspec.Raw(reply.ok)
                urls = () if operation is None else operation.safe_urls(reply.ok)
            self._agent.send(
                wire.CallReply(id=message.id, audit_id=reply.audit_id, ok=ok, reason=reply.reason, urls=urls)
            )

        def work() -> None:
            try:
                answer(self._edge.call(run, origin, message.op, raw, answer))
            except Abandoned:
                return

        self._threads.run(work)

    # ---- rendered output ------------------------------------------------------------------------------------
    def _render_denied(self, message: wire.RenderDenied) -> None:
        rows = render_rows(self._runs.get(message.run), message)

        def work() -> None:
            try:
                for one in rows[:-1]:
                    self._audit.append(one)
                if rows:
                    self._audit.commit(rows[-1])  # rows become durable in their order
                self._agent.send(wire.Done(id=message.id))
            except LockgateError as error:
                self._agent.refuse(message.id, error)

        self._threads.run(work)

    def _rung_refused(self, message: wire.RungRefused) -> None:
        run = self._runs.get(message.run)
        refused = row(
            run,
            Origin("code", rung=message.rung),
            "denied",
            OPERATION,
            via="code",
            verdict="deny",
            rule=f"rung.{message.why}",
            reason=message.why,
            status="denied",
        )

        def work() -> None:
            try:
                self._audit.commit(refused)
                self._agent.send(wire.Done(id=message.id))
            except LockgateError as error:
                self._agent.refuse(message.id, error)

        self._threads.run(work)

    def _explain_call(self, message: wire.ExplainCall) -> None:
        now = time.monotonic()
        scope = Scope.from_data(message.scope).compile(self._operations, now)
        run = Run(scope, bounds=self._bounds, ledger=Ledger())
        operation = scope.operations.get(message.op)
        args: object = None
        if operation is not None:
            try:
                check_unique_keys(message.args)
                args = operation.decode_args(message.args)
            except BadArguments as bad:
                args = bad
            except GuestProtocolError as bad:
                args = BadArguments("", bad.message)
        verdict = authorize(run.principal, CallRequest(operation, message.op, args, now), scope)
        self._agent.send(wire.Done(id=message.id, data=msgspec.to_builtins(verdict)))

    def _list_operations(self, message: wire.ListOperations) -> None:
        scope = None if message.run is None else self._runs.get(message.run).scope
        self._agent.send(wire.Done(id=message.id, data=self._operations.describe(scope)))

    def _decide(self, message: wire.Decide) -> None:
        found = self._approvals.find(message.request)
        if found is not None and message.approver:
            run, operation = found
            self._audit.commit(
                row(
                    run,
                    _TOOL,
                    "approval",
                    operation,
                    status="granted" if message.grant else "declined",
                    approver=message.approver,
                    grant_id=message.request,
                )
            )
            if self._approvals.decide(message.request, grant=message.grant, approver=message.approver):
                self._agent.send(wire.Done(id=message.id))
                return
        raise ScopeError(
            "there is no such open request, or the answer names no approver",
            next_step="answer a request once, before it expires, while its run is open",
        )


__all__ = ["OPERATION", "Broker"]
