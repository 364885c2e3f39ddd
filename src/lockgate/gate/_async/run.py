"""One run: a tool dispatcher's calls and generated code, under the same scope and through the same edge.

Rule 1: what an argument is not fit for is refused before anything is sent. Code is never compiled here.
Rule 2: a call that was sent and has no answer is an unknown outcome, never a failure.
Rule 3: an interrupted `code()` has its run killed, and waits for that, bounded, before the interrupt goes on.
"""

from __future__ import annotations

import codecs
import collections
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, cast

import msgspec

from lockgate.contract import wire
from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import (
    AuditUnavailable,
    CannotIsolate,
    ConfigError,
    ExportRefused,
    HostFault,
    LockgateError,
    OutcomeUnknown,
    ProcessDied,
)
from lockgate.contract.run import ExportInfo, RunResult, RunSpec
from lockgate.contract.rungs import AUTO, Weakness
from lockgate.gate import checks
from lockgate.gate._async.render import RunRender
from lockgate.gate._async.session import ANSWER_SECONDS, Session
from lockgate.gate.core import Core, Stream, unwrap
from lockgate.gate.exports import Target
from lockgate.gate.faults import died, from_reason, sentence
from lockgate.gate.pump_async import Waiter
from lockgate.gate.values import CallOutcome

# Backstops only: the broker ends a call, and the supervisor a run, much earlier and says why.
CALL_SECONDS: Final = 4200.0
START_SECONDS: Final = 60.0
CANCEL_SECONDS: Final = 5.0
# The broker forgets an unused ticket after 300 s.
TICKET_SECONDS: Final = 240.0

OnText = Callable[[str], object]
OnBytes = Callable[[str, bytes], object]


class RunScope:
    """A run that opens on entry and closes on exit, whatever happened inside."""

    def __init__(self, session: Session, message: Callable[[int], wire.Message]) -> None:
        self._session, self._message = session, message
        self._run: Run | None = None

    async def __aenter__(self) -> Run:
        session = self._session
        id_ = session.core().next_id()
        opened = await session.ask_broker(self._message(id_), id_, wire.RunOpened)
        self._run = Run(session, opened)
        return self._run

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        try:
            await run.close()
        except LockgateError:
            if kind is None:
                raise


class Run:
    """What one scope may do: calls of a tool dispatcher and generated code, through the same edge.

    Attributes:
        id: the run's id, as in the audit rows.
        scope_hash: SHA-256 of the scope's canonical form.
        operations: names that the scope allows.
        render: what this run makes known to the render guard; the sinks are in `Gate.render`.

    """

    def __init__(self, session: Session, opened: wire.RunOpened) -> None:
        self._session = session
        self.id = opened.run
        self.scope_hash = opened.scope_hash
        self.operations: tuple[str, ...] = tuple(opened.operations)
        self._tickets: collections.deque[tuple[float, str]] = collections.deque([(time.monotonic(), opened.ticket)])
        self._closed = False
        self.render = RunRender(session, self, canary=opened.canary)
        session.core().latches[self.id] = self.render.latch
        if opened.latched:
            self.render.latch()

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return self._closed

    # ---- calls -----------------------------------------------------------------------------------------------
    async def call(self, operation: str, /, **args: Any) -> Any:
        """Call an operation as a tool dispatcher does; returns its result, decoded from JSON.

        Raises:
            Denied: the scope does not allow it, or a person declined; `reason` says which.
            CallFailed: it was allowed and did not succeed.
            ResultWithheld: it ran, and its result did not pass the edge.
            OutcomeUnknown: a write may have happened, or the broker died while the call was in flight.
            ProcessDied: the broker is gone; nothing was sent.

        """
        reply = await self._call(operation, args)
        if reply.reason is not None:
            raise from_reason(operation, reply.reason, reply.audit_id or None)
        return msgspec.json.decode(reply.ok)

    async def try_call(self, operation: str, /, **args: Any) -> CallOutcome:
        """Like `call`, with a denial or failure as a value. A dead broker still raises.

        Raises:
            ProcessDied: the broker is gone; nothing was sent.

        """
        try:
            reply = await self._call(operation, args)
        except OutcomeUnknown as error:
            return CallOutcome(operation=operation, reason=error.reason, text=str(error))
        audit_id = reply.audit_id or None
        if reply.reason is None:
            return CallOutcome(operation=operation, value=msgspec.json.decode(reply.ok), audit_id=audit_id)
        reason, message, step = sentence(reply.reason)
        return CallOutcome(operation=operation, reason=reason, text=f"{message}. Next step: {step}.", audit_id=audit_id)

    async def _call(self, operation: str, args: dict[str, Any]) -> wire.CallReply:
        session = self._session
        core = self._usable()
        id_ = core.next_id()
        try:
            raw = msgspec.json.encode(args)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"the arguments of {operation!r} are no JSON: {type(error).__name__}",
                next_step="pass text, whole numbers, booleans, None, lists and dicts of these",
            ) from None
        if core.broker.lost is not None:
            raise died(core.broker.lost.process, core.broker.lost.message)
        try:
            message = wire.ToolCall(id=id_, run=self.id, op=operation, args=raw)
            reply = await session.ask_broker(message, id_, wire.CallReply, CALL_SECONDS)
        except (ProcessDied, HostFault) as error:
            if type(error) not in (ProcessDied, HostFault):
                raise
            # It was sent, and nobody can say what became of it.
            raise OutcomeUnknown(
                f"{operation}: {error.message} while the call was in flight, so it is unknown whether it took effect",
                next_step="do not repeat it; a new Gate records it as unknown, see: lockgate audit tail",
                operation=operation,
                reason="outcome_unknown",
            ) from error
        self.render.vouched(reply.urls)
        return reply

    async def allowed(self) -> list[dict[str, Any]]:
        """Return what this run may use, described as `Gate.operations` does."""
        self._usable()
        return cast("list[dict[str, Any]]", await self._session.operations(self.id))

    def narrow(self, **changes: Any) -> RunScope:
        """Open a child run whose scope can only be narrower: `async with run.narrow(allow={...}) as child`.

        Args:
            changes: those of `Scope.narrow`; both runs draw on the same budgets.

        Raises:
            ScopeError: on entry: a change would widen the scope.

        """
        self._usable()
        data = {name: _scope_data(value) for name, value in changes.items()}
        return RunScope(self._session, lambda id_: wire.NarrowRun(id=id_, run=self.id, scope=data))

    async def close(self) -> None:
        """End the run: its channels close and its pending approvals are void. Idempotent."""
        if self._closed:
            return
        self._closed = True
        session = self._session
        core = session.core()
        core.latches.pop(self.id, None)
        id_ = core.next_id()
        await session.ask_broker(wire.CloseRun(id=id_, run=self.id), id_, wire.Done)

    def _usable(self) -> Core:
        core = self._session.core()
        if self._closed:
            raise HostFault("this run is closed", next_step="open a new one with gate.run_scope(scope)")
        return core

    # ---- code ------------------------------------------------------------------------------------------------
    async def code(
        self,
        source: str | bytes,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - a bound of the run, enforced by the supervisor (X5)
        rung: str | None = None,
        env: str | None = None,
        bounds: Bounds | Mapping[str, float] | None = None,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
        on_bytes: OnBytes | None = None,
        export_to: str | Path | None = None,
        accept_shared_kernel: bool | None = None,
        accept_weaker: Iterable[Weakness] = (),
    ) -> RunResult:
        """Run Python in a sandbox that has never seen a run and never sees another.

        Args:
            source: Python, text or UTF-8 bytes.
            timeout: seconds of wall clock, at most the configured `wall`.
            rung: isolation rung, or "auto" for one that is strong enough for a model's code and runs here; None = the
                configured one. env: package set; None = the configured one.
            bounds: bounds to narrow, by name.
            on_stdout: called with text while the code writes, at most `Bounds.output` bytes. on_stderr: the same.
            on_bytes: called with "stdout" or "stderr" and the bytes as they were written, under the same bound.
            export_to: directory that takes exported files; nothing that is there is followed or replaced.
            accept_shared_kernel: accept a rung that shares the host's kernel, for this call (X3).
            accept_weaker: what of the rung's wall may be missing on this host, for this call beside what is configured.

        Raises:
            BadScript: the code is not UTF-8, holds a NUL or is over the cap.
            UnknownRung, UnknownEnv, ConfigError: an argument names what does not exist or would widen a bound.
            CannotIsolate: the isolation asked for cannot be had; nothing was run.
            ExportRefused: a file could not be written where asked; `result` is the run's result.
            ProcessDied: a lockgate process died; named.
            HostFault: something of ours or of the host failed.

        """
        session = self._session
        core = self._usable()
        execution = session.config.execution
        limits = checks.bounds(execution.bounds, bounds, timeout)
        text = checks.script(source, limits.code)
        accepted = session.accept_shared_kernel if accept_shared_kernel is None else accept_shared_kernel
        asked: str = rung or execution.rung
        try:
            if asked == AUTO:
                asked = (await session.auto(env or execution.env)).rung
            checked = checks.rung(asked, accept_shared_kernel=accepted)
        except CannotIsolate:
            await self._not_isolated(core, asked, "cannot_isolate" if accepted else "shared_kernel")
            raise
        target = Target(export_to) if export_to is not None else None
        try:
            spec = RunSpec(
                ticket=await self._ticket(core, checks.broker_bounds(execution.bounds, limits)),
                code=text,
                rung=checked,
                env=env or execution.env,
                bounds=limits,
                accept_shared_kernel=accepted,
                accept_memory_rlimit=execution.memory == "rlimit",
                accept_weaker=checks.weaknesses(accept_weaker),
                stream=on_stdout is not None or on_stderr is not None or on_bytes is not None,
            )
            sink = _sink(on_stdout, on_stderr, on_bytes) if spec.stream else None
            try:
                result = await self._run(core, spec, sink)
            except CannotIsolate:
                await self._not_isolated(core, asked, "cannot_isolate")
                raise
            if target is not None:
                await self._fetch(core, spec.ticket, target, result)
            return result
        finally:
            if target is not None:
                target.close()

    async def _not_isolated(self, core: Core, rung: str, why: Literal["shared_kernel", "cannot_isolate"]) -> None:
        """Return when it is on record that no code was run for want of a wall (X3, E4)."""
        message = wire.RungRefused(id=core.next_id(), run=self.id, rung=rung[:32], why=why)
        await self._session.ask_broker(message, message.id, wire.Done)

    async def _ticket(self, core: Core, narrowed: Bounds | None) -> str:
        """Return a one-use ticket: one that came with the last answer, unless the run narrows the broker's bounds."""
        oldest = time.monotonic() - TICKET_SECONDS
        while narrowed is None and self._tickets:
            since, ticket = self._tickets.popleft()
            if since > oldest:
                return ticket
        message = wire.NewTicket(id=core.next_id(), run=self.id, bounds=narrowed)
        return (await self._session.ask_broker(message, message.id, wire.Ticket)).ticket

    async def _run(self, core: Core, spec: RunSpec, sink: OnBytes | None) -> RunResult:
        pump, supervisor = self._session.pump, core.supervisor
        id_ = core.next_id()
        finished, closed = pump.waiter(), pump.waiter()
        stream: Stream | None = None
        if sink is not None:
            stream = core.streams[id_] = Stream(sink)
        core.closings[spec.ticket] = closed
        seconds = spec.bounds.wall + START_SECONDS
        try:
            supervisor.ask(wire.Start(id=id_, spec=spec), id_, finished)
            try:
                done = unwrap(await pump.wait(finished, seconds), wire.Finished, supervisor, seconds)
            except pump.Interrupted:
                await self._cancel(core, id_, finished, closed)
                raise
            settled = unwrap(await pump.wait(closed, ANSWER_SECONDS), wire.CodeClosed, core.broker, ANSWER_SECONDS)
        finally:
            supervisor.pending.pop(id_, None)
            core.closings.pop(spec.ticket, None)
            core.streams.pop(id_, None)
        if stream is not None and stream.error is not None:
            raise stream.error
        self.render.vouched(settled.urls)
        if settled.next_ticket:
            self._tickets.append((time.monotonic(), settled.next_ticket))
        if not settled.audit_id:
            raise AuditUnavailable(
                "the end of a run has no audit row", next_step="see the disk of the audit file; then open a new Gate"
            )
        return RunResult(
            run_id=self.id,
            rung=spec.rung,
            value=_value(done.value),
            text=done.text,
            stdout=done.stdout,
            stderr=done.stderr,
            exit_code=done.exit_code,
            error=done.error,
            killed_by=done.killed_by,
            truncated=done.truncated,
            calls=settled.calls,
            exports=settled.exports,
            usage=done.usage,
            weakness=done.weakness,
        )

    async def _cancel(self, core: Core, id_: int, finished: Waiter, closed: Waiter) -> None:
        """Have the run killed and wait until it is, at most a few seconds; the caller's interrupt goes on after it."""
        pump, supervisor = self._session.pump, core.supervisor
        if supervisor.lost is not None:
            return
        supervisor.tell(wire.Cancel(id=id_))
        if finished.cancelled() or not finished.done():
            again = supervisor.pending[id_] = pump.waiter()
            if not isinstance(await pump.wait(again, CANCEL_SECONDS), wire.Finished):
                return
        await pump.wait(closed, CANCEL_SECONDS)

    async def _fetch(self, core: Core, ticket: str, target: Target, result: RunResult) -> None:
        for info in result.exports:
            try:
                await self._fetch_one(core, ticket, target, info)
            except ExportRefused as error:
                error.result = result
                raise

    async def _fetch_one(self, core: Core, ticket: str, target: Target, info: ExportInfo) -> None:
        with target.create(info) as file:
            last = False
            while not last:
                id_ = core.next_id()
                message = wire.FetchExport(id=id_, ticket=ticket, name=info.name, offset=file.size)
                chunk = await self._session.ask_broker(message, id_, wire.ExportChunk)
                if not chunk.data and not chunk.last:
                    break
                file.write(chunk.data)
                last = chunk.last
            file.finish()


def _sink(on_stdout: OnText | None, on_stderr: OnText | None, on_bytes: OnBytes | None) -> OnBytes:
    """Return what takes chunks as they come: text goes on in whole characters, whatever the chunks cut."""
    sinks = {"stdout": on_stdout, "stderr": on_stderr}
    decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in sinks}

    def sink(stream: str, data: bytes) -> None:
        if on_bytes is not None:
            on_bytes(stream, data)
        on_text = sinks.get(stream)
        if on_text is not None and (text := decoders[stream].decode(data)):
            on_text(text)

    return sink


def _value(raw: msgspec.Raw) -> Any:
    """Decode what the sandbox says its value is; what is no JSON is no value."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None


def _scope_data(part: Any) -> Any:
    """Turn the parts of a scope (`where(...)`, `when(...)`) into data, wherever they stand."""
    if hasattr(part, "to_data"):
        return part.to_data()
    if isinstance(part, Mapping):
        return {name: _scope_data(value) for name, value in cast("Any", part).items()}
    if isinstance(part, list | tuple):
        return [_scope_data(value) for value in cast("Any", part)]
    return part
