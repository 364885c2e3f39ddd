# Generated from gate/_async/gate.py by scripts/unasync.py. Edit that file, then run the script.
"""`Gate`: starts the processes, opens runs, ends all of it.

Rule 1: this process never imports the operations, the broker or a secret; it holds links to processes that do.
Rule 2: this directory is the written one. `gate/_sync` is generated from it (scripts/unasync.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, cast

import msgspec

from lockgate.config import Config, from_dict, load
from lockgate.contract import wire
from lockgate.contract.rungs import AUTO
from lockgate.gate import checks
from lockgate.gate._sync.render import GateRender
from lockgate.gate._sync.run import RunScope
from lockgate.gate._sync.session import ANSWER_SECONDS, Session
from lockgate.gate.pump_sync import OnApproval
from lockgate.gate.start import default_audit_path
from lockgate.policy import Scope
from lockgate.policy.choose import Choice

PREWARM_SECONDS: Final = 120.0
DOCTOR_SECONDS: Final = 120.0


class Gate:
    """Starts the processes, opens runs, and ends all of it.

    Args:
        config: a file, the directory that holds one, the shape of the file as a dict, a `Config`, or None for one
            without operations.
        on_approval: asked for calls that a person must approve; without it they are denied at once.
        accept_shared_kernel: overrides `[execution] accept_shared_kernel` of the configuration (X3).
        log: file that also takes what the child processes print, up to a cap.

    Attributes:
        render: the render guard, one method per place where an answer is shown (E5).

    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | Config | None = None,
        *,
        on_approval: OnApproval | None = None,
        accept_shared_kernel: bool | None = None,
        log: str | Path | None = None,
    ) -> None:
        if config is None:
            config = from_dict({"audit": {"path": default_audit_path()}}, Path.cwd())
        elif isinstance(config, str | Path):
            config = load(config)
        elif isinstance(config, Mapping):
            config = from_dict(config, Path.cwd())
        accepted = config.execution.accept_shared_kernel if accept_shared_kernel is None else accept_shared_kernel
        self._session = Session(config, accept_shared_kernel=accepted, on_approval=on_approval, log=log)
        self.render = GateRender(self._session)

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self._session.config

    @property
    def accept_shared_kernel(self) -> bool:
        """Whether runs may share the host's kernel when the call does not say (X3)."""
        return self._session.accept_shared_kernel

    @property
    def facts(self) -> dict[str, dict[str, Any]]:
        """What "broker" and "supervisor" said of themselves when they were ready."""
        return self._session.facts

    # ---- life ------------------------------------------------------------------------------------------------
    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start audit writer, broker and supervisor, and wait until they take requests.

        Raises:
            ConfigError: the broker could not use the configuration.
            CannotIsolate: the supervisor cannot give the rung on this host.
            ProcessDied: one of them ended early; named, with its last words where they may be shown.
            HostFault: not ready within 75 s, or this Gate was started before.

        """
        self._session.start()

    def close(self) -> None:
        """End everything: runs, broker, audit writer, in this order. Idempotent; bounded by a few seconds."""
        self._session.close()

    # ---- runs ------------------------------------------------------------------------------------------------
    def run_scope(self, scope: Scope | Mapping[str, Any]) -> RunScope:
        """Open a run under `scope`: `with gate.run_scope(scope) as run`.

        Raises:
            ScopeError: on entry: the scope is malformed, expired, or allows what is not registered.

        """
        data = scope.to_data() if isinstance(scope, Scope) else dict(scope)
        return RunScope(self._session, lambda id_: wire.OpenRun(id=id_, scope=data))

    def operations(self) -> list[dict[str, Any]]:
        """Return the registry: name, effect, argument and result schema of each operation."""
        return cast("list[dict[str, Any]]", self._session.operations(None))

    def explain(
        self, scope: Scope | Mapping[str, Any], operation: str, args: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the verdict that a call would get: effect, rule, path, reason, visible. Nothing is executed.

        Raises:
            ScopeError: the scope is malformed.

        """
        data = scope.to_data() if isinstance(scope, Scope) else dict(scope)
        id_ = self._session.core().next_id()
        message = wire.ExplainCall(id=id_, scope=data, op=operation, args=msgspec.json.encode(args))
        return cast("dict[str, Any]", (self._session.ask_broker(message, id_, wire.Done)).data)

    def doctor(self) -> dict[str, Any]:
        """Boot a slot and return which bounds hold on this host, and by what."""
        id_ = self._session.core().next_id()
        return cast("dict[str, Any]", self._session.ask_supervisor(wire.Doctor(id=id_), id_, DOCTOR_SECONDS))

    def stats(self) -> dict[str, Any]:
        """Return the supervisor's counters: warm and live slots, descriptors, cgroups, memory."""
        id_ = self._session.core().next_id()
        return cast("dict[str, Any]", self._session.ask_supervisor(wire.Stats(id=id_), id_, ANSWER_SECONDS))

    def choice(self, *, env: str | None = None) -> Choice:
        """Return what `rung="auto"` means on this host: the rung, why, and why not each other one (X2).

        Raises:
            CannotIsolate: nothing that runs here is strong enough for a model's code; names the fix.

        """
        return self._session.auto(env or self.config.execution.env)

    def prewarm(self, count: int, *, rung: str | None = None, env: str | None = None) -> None:
        """Return when `count` warm slots of this rung and package set are there.

        Raises:
            CannotIsolate, UnknownRung, UnknownEnv: as for `Run.code`.

        """
        execution = self.config.execution
        asked: str = rung or execution.rung
        if asked == AUTO:
            asked = (self._session.auto(env or execution.env)).rung
        checked = checks.rung(asked, accept_shared_kernel=self.accept_shared_kernel)
        id_ = self._session.core().next_id()
        message = wire.Prewarm(id=id_, rung=checked, env=env or execution.env, count=count)
        self._session.ask_supervisor(message, id_, PREWARM_SECONDS)
