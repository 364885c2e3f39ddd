"""Errors that say whose fault it is and what to do next.

Rule 1: failing user code is a `RunResult`, never one of these.
Rule 2: every message ends with the next step; `next_step` is a separate argument so that none is forgotten.
Rule 3: no error text ever carries a credential, a URL, a provider's message or a value from the sandbox that
        was not escaped.
"""

from __future__ import annotations

from typing import ClassVar, Literal

Fault = Literal["caller", "operator", "code", "host"]


class LockgateError(Exception):
    """Base of every typed error.

    Args:
        message: what happened, one sentence, no trailing full stop needed.
        next_step: what the reader should do now.

    Attributes:
        code: stable snake_case name, the same in `--json`.
        fault: whose fault it is.
        exit_code: what the command line exits with.

    """

    code: ClassVar[str] = "error"
    fault: ClassVar[Fault] = "host"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, next_step: str) -> None:
        super().__init__(message, next_step)
        self.message = message
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.message.rstrip('.')}. Next step: {self.next_step}"


class ConfigError(LockgateError):
    """The configuration file or an option is wrong: unknown key, literal secret, widened bound."""

    code = "config"
    fault = "operator"
    exit_code = 2


class RegistrationError(LockgateError):
    """An operation was declared in a way that could not be held to its promise."""

    code = "registration"
    fault = "operator"
    exit_code = 2


class ScopeError(LockgateError):
    """A run scope is malformed, empty where it may not be, already expired, or names what is not registered."""

    code = "scope"
    fault = "caller"
    exit_code = 2


class BadScript(LockgateError):
    """The code handed over cannot be run at all: not UTF-8, holds a NUL, or is over the code cap."""

    code = "bad_script"
    fault = "caller"
    exit_code = 2


class UnknownRung(LockgateError):
    """The rung asked for is not one lockgate knows."""

    code = "unknown_rung"
    fault = "caller"
    exit_code = 2


class UnknownEnv(LockgateError):
    """The package set asked for was never built on this host."""

    code = "unknown_env"
    fault = "caller"
    exit_code = 2


class EnvBuildFailed(LockgateError):
    """A package set could not be resolved, pinned or installed."""

    code = "env_build"
    fault = "operator"
    exit_code = 2


class CannotIsolate(LockgateError):
    """The host cannot give the isolation that was asked for; nothing was run (X3)."""

    code = "cannot_isolate"
    fault = "host"
    exit_code = 3


class Denied(LockgateError):
    """The caller has no right to this call. `reason` is a member of `Reason`; `operation` is what was asked."""

    code = "denied"
    fault = "caller"

    def __init__(
        self, message: str, *, next_step: str, operation: str, reason: str, audit_id: str | None = None
    ) -> None:
        super().__init__(message, next_step=next_step)
        self.operation = operation
        self.reason = reason
        self.audit_id = audit_id


class CallFailed(LockgateError):
    """The call was allowed and did not succeed, and it surely had no effect."""

    code = "call_failed"
    fault = "host"

    def __init__(
        self, message: str, *, next_step: str, operation: str, reason: str, audit_id: str | None = None
    ) -> None:
        super().__init__(message, next_step=next_step)
        self.operation = operation
        self.reason = reason
        self.audit_id = audit_id


class OutcomeUnknown(CallFailed):
    """A write may or may not have happened. Never retried by lockgate; reconcile with the backend."""

    code = "outcome_unknown"


class ResultWithheld(CallFailed):
    """The call ran, and its result did not pass the edge. A write has taken effect; do not repeat it."""

    code = "result_withheld"


class ExportRefused(LockgateError):
    """An exported file could not be written where the caller asked. `result` is the run's own result: it is kept."""

    code = "export_refused"
    fault = "caller"

    def __init__(self, message: str, *, next_step: str, result: object = None) -> None:
        super().__init__(message, next_step=next_step)
        self.result = result


class GuestProtocolError(LockgateError):
    """Bytes from the sandbox broke the protocol. Hostile until shown otherwise: the run is killed and audited."""

    code = "guest_protocol"
    fault = "code"


class HostFault(LockgateError):
    """Something of ours or of the host failed. Nothing ran unaudited because of it."""

    code = "host_fault"
    fault = "host"


class ProcessDied(HostFault):
    """A lockgate process is gone. `process`: "broker", "supervisor", "audit writer", or "" when not known."""

    code = "process_died"

    def __init__(self, message: str, *, next_step: str, process: str = "") -> None:
        super().__init__(message, next_step=next_step)
        self.process = process


class AuditUnavailable(HostFault):
    """The audit store cannot take rows (full disk, lost writer): no audit, no write."""

    code = "audit_unavailable"
