"""What a run is asked to be and what came of it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from lockgate.contract.bounds import Bounds

Rung = Literal["container", "gvisor", "microvm", "wasm"]
KilledBy = Literal["wall", "cpu", "memory", "disk", "processes", "output", "protocol"]
Via = Literal["tool", "code"]


class Principal(msgspec.Struct, frozen=True):
    """On whose behalf a call is made. Taken from the run, never from a message or an argument."""

    user: str
    agent: str
    tenant: str
    run: str


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One execution of code. `ticket` is one-use and binds the channel to the run (never shown to the code)."""

    ticket: str
    code: str
    rung: Rung = "container"
    env: str | None = None
    bounds: Bounds = Bounds()
    accept_shared_kernel: bool = False
    accept_memory_rlimit: bool = False
    accept_weaker: tuple[str, ...] = ()
    stream: bool = False


class ErrorInfo(msgspec.Struct, frozen=True):
    """An exception of the code that ran. Every field is text from the sandbox: hostile until escaped."""

    name: str
    message: str
    traceback: str


class CallRecord(msgspec.Struct, frozen=True):
    """One call that reached the edge during a run. `audit_id` names its row."""

    operation: str
    verdict: Literal["allow", "deny"]
    rule: str | None
    reason: str | None
    status: str
    audit_id: str


class ExportInfo(msgspec.Struct, frozen=True):
    """A file the run exported through the broker: its name inside the run, its size and its digest."""

    name: str
    size: int
    sha256: str


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What the run used. None = this host has no counter for it.

    `wall` and `cpu` are seconds, `memory_peak` bytes, `stdout_bytes`/`stderr_bytes` bytes written before truncation.
    """

    wall: float
    cpu: float | None = None
    memory_peak: int | None = None
    stdout_bytes: int = 0
    stderr_bytes: int = 0


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one run. A non-zero exit is data, not an exception.

    Attributes:
        value: the value of the last expression, decoded from JSON; None when it has none or none that JSON can hold.
        text: `repr` of that value as the sandbox made it (hostile text).
        exit_code: the program's own; 124 wall clock, 137 memory or any other kill.
        killed_by: the bound that ended the run, or None.
        truncated: bytes dropped per stream ("stdout", "stderr", "value", "text").
        weakness: what of the rung's wall was missing on this host, and accepted (`contract.rungs`); None = nothing.

    """

    run_id: str
    rung: Rung
    value: Any = None
    text: str = ""
    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0
    error: ErrorInfo | None = None
    killed_by: KilledBy | None = None
    truncated: dict[str, int] = {}
    calls: tuple[CallRecord, ...] = ()
    exports: tuple[ExportInfo, ...] = ()
    usage: Usage = Usage(wall=0.0)
    weakness: str | None = None

    @property
    def denials(self) -> tuple[CallRecord, ...]:
        """The calls that were refused."""
        return tuple(call for call in self.calls if call.verdict == "deny")

    @property
    def ok(self) -> bool:
        """Whether the code ran to its end with exit code 0 and nothing killed it."""
        return self.exit_code == 0 and self.killed_by is None and self.error is None
