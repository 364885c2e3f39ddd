"""Messages between the trusted processes, one tagged union per link and direction.

Framing on stream sockets is `contract.frames` (u32 big-endian length, JSON body) with the cap `LINK_BYTES`. The
supervisor's link to the broker is SOCK_SEQPACKET instead, one message a packet, because it carries descriptors.
No message from the sandbox is ever decoded with a type of this file.

    agent  <-> broker      AgentToBroker / BrokerToAgent           stream
    agent  <-> supervisor  AgentToSupervisor / SupervisorToAgent   stream
    supervisor <-> broker  SupervisorToBroker / BrokerToSupervisor seqpacket, SCM_RIGHTS on Attach
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from lockgate.contract.bounds import Bounds
from lockgate.contract.run import CallRecord, ErrorInfo, ExportInfo, KilledBy, Rung, RunSpec, Usage

LINK_BYTES: Final = 64 * 1024 * 1024
MAX_RENDER_ROWS: Final = 32
EXPORT_CHUNK: Final = 4 * 1024 * 1024
# A field that holds raw JSON has this default and never None: msgspec decodes `Raw | None` as null alone.
NULL: Final = msgspec.Raw(b"null")


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base: the tag is the class name."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A typed error in transit: `code` is `LockgateError.code`."""

    code: str
    message: str
    next_step: str


# ---- either child -> agent, first message -------------------------------------------------------------------
class Ready(Message, frozen=True, kw_only=True):
    """The child is hardened and takes requests. `facts` is for `doctor` and for the demo's first lines."""

    pid: int
    facts: dict[str, Any] = {}


class Failed(Message, frozen=True, kw_only=True):
    """The child could not start; it exits after this message."""

    fault: Fault


# ---- agent -> broker -----------------------------------------------------------------------------------------
class OpenRun(Message, frozen=True, kw_only=True):
    """Open a run under `scope` (data of `policy.Scope.to_data()`)."""

    id: int
    scope: dict[str, Any]


class NewTicket(Message, frozen=True, kw_only=True):
    """Ask for one more one-use ticket of an open run."""

    id: int
    run: str
    bounds: Bounds | None = None


class ToolCall(Message, frozen=True, kw_only=True):
    """A model's tool call. `args` is the JSON of the arguments, byte for byte as it came."""

    id: int
    run: str
    op: str
    args: bytes


class NarrowRun(Message, frozen=True, kw_only=True):
    """Open a child run whose scope can only be narrower. `changes` are those of `Scope.narrow`."""

    id: int
    run: str
    scope: dict[str, Any]


class CloseRun(Message, frozen=True, kw_only=True):
    """End a run: its channels close, its pending approvals are void."""

    id: int
    run: str


class ListOperations(Message, frozen=True, kw_only=True):
    """Ask for the registry (`lockgate ops`), or for what one run may use."""

    id: int
    run: str | None = None


class ExplainCall(Message, frozen=True, kw_only=True):
    """Dry-run `authorize()` for `lockgate policy explain`; nothing is executed."""

    id: int
    scope: dict[str, Any]
    op: str
    args: bytes


class Decide(Message, frozen=True, kw_only=True):
    """A person's answer to an `ApprovalAsked`."""

    id: int
    request: str
    grant: bool
    approver: str


class FetchExport(Message, frozen=True, kw_only=True):
    """Ask for `EXPORT_CHUNK` bytes of an export from `offset`."""

    id: int
    ticket: str
    name: str
    offset: int


class RenderDenial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that the render guard did not let live.

    Attributes:
        reason: stable class, of the guard. kind: "link", "image", "markup", "text" or "file".
        destination: its host, defanged; never a path, a query or a label, which may be the secret.
        count: how often the same was found.

    """

    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=96)]
    kind: Literal["link", "image", "markup", "text", "file"]
    destination: Annotated[str, msgspec.Meta(max_length=300)] | None = None
    severity: Literal["medium", "high", "critical"] = "high"
    count: Annotated[int, msgspec.Meta(ge=1)] = 1


class RenderDenied(Message, frozen=True, kw_only=True):
    """Record what the render guard refused for `sink`; answered with `Done` once every row is durable.

    `left_out` counts the denials beyond `MAX_RENDER_ROWS`: they get one row together.
    """

    id: int
    run: str
    sink: Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
    denials: Annotated[tuple[RenderDenial, ...], msgspec.Meta(max_length=MAX_RENDER_ROWS)]
    left_out: Annotated[int, msgspec.Meta(ge=0)] = 0


class RungRefused(Message, frozen=True, kw_only=True):
    """Record that code of a run was not started for want of a wall (X3); answered with `Done` once that is durable."""

    id: int
    run: str
    rung: Annotated[str, msgspec.Meta(max_length=32)]
    why: Literal["shared_kernel", "cannot_isolate"]


AgentToBroker = (
    OpenRun
    | NewTicket
    | ToolCall
    | NarrowRun
    | CloseRun
    | ListOperations
    | ExplainCall
    | Decide
    | FetchExport
    | RenderDenied
    | RungRefused
)


# ---- broker -> agent -----------------------------------------------------------------------------------------
class RunOpened(Message, frozen=True, kw_only=True):
    """`ticket` is the first one-use ticket, so that a first `code()` needs no round trip.

    `latched`: its parent had read private and untrusted data (E7). `canary`: the value planted in it, "" for none.
    """

    id: int
    run: str
    scope_hash: str
    ticket: str
    operations: list[str]
    latched: bool = False
    canary: str = ""


class Ticket(Message, frozen=True, kw_only=True):
    """A one-use ticket."""

    id: int
    ticket: str


class CallReply(Message, frozen=True, kw_only=True):
    """The edge's answer: `ok` (JSON) counts where `reason` is None.

    `urls` are the values in `ok` of fields that the operation declares `lg.SafeUrl`.
    """

    id: int
    audit_id: str
    ok: msgspec.Raw = NULL
    reason: str | None = None
    urls: tuple[str, ...] = ()


class Done(Message, frozen=True, kw_only=True):
    """Acknowledges a request that returns `data` or nothing."""

    id: int
    data: Any = None


class Refused(Message, frozen=True, kw_only=True):
    """A request failed with a typed error."""

    id: int
    fault: Fault


class ExportChunk(Message, frozen=True, kw_only=True):
    """Bytes of an export; `last` closes it and frees the broker's copy."""

    id: int
    data: bytes
    last: bool


class ApprovalAsked(Message, frozen=True, kw_only=True):
    """Pushed: a call waits for a person. `arguments` are the typed arguments, canonical JSON."""

    request: str
    run: str
    operation: str
    arguments: msgspec.Raw
    expires_in: float


class RunLatched(Message, frozen=True, kw_only=True):
    """Pushed before the result that made a run latched: it has read private and untrusted data (E7)."""

    run: str


class CodeClosed(Message, frozen=True, kw_only=True):
    """Pushed once per attached ticket, after its channel is closed and its calls are settled.

    `next_ticket` is a fresh one-use ticket of the same run ("" when there is none), so that no round trip is needed.
    `urls` are the values of `lg.SafeUrl` fields in the results that its calls were given.
    """

    ticket: str
    next_ticket: str = ""
    calls: tuple[CallRecord, ...] = ()
    exports: tuple[ExportInfo, ...] = ()
    audit_id: str = ""
    urls: tuple[str, ...] = ()


BrokerToAgent = (
    Ready
    | Failed
    | RunOpened
    | Ticket
    | CallReply
    | Done
    | Refused
    | ExportChunk
    | ApprovalAsked
    | RunLatched
    | CodeClosed
)


# ---- agent -> supervisor -------------------------------------------------------------------------------------
class Start(Message, frozen=True, kw_only=True):
    """Run `spec` once in a sandbox that has never seen a run."""

    id: int
    spec: RunSpec


class Cancel(Message, frozen=True, kw_only=True):
    """Kill the run started with `id`; its `Finished` still comes."""

    id: int


class Prewarm(Message, frozen=True, kw_only=True):
    """Bring the pool of (rung, env) to `count` warm slots; answered with `Answer` when they are there."""

    id: int
    rung: Rung
    env: str | None = None
    count: int = 1


class Doctor(Message, frozen=True, kw_only=True):
    """Boot a slot and report which bounds hold and by what."""

    id: int


class Stats(Message, frozen=True, kw_only=True):
    """Ask for counters: warm and live slots, fds, cgroups, RSS."""

    id: int


AgentToSupervisor = Start | Cancel | Prewarm | Doctor | Stats


# ---- supervisor -> agent -------------------------------------------------------------------------------------
class Output(Message, frozen=True, kw_only=True):
    """Pushed while a streaming run writes: already bounded by `Bounds.output`."""

    id: int
    stream: str
    data: bytes


class Finished(Message, frozen=True, kw_only=True):
    """The run is over, its channel is closed, its kill is under way. Text is bounded, UTF-8 repaired."""

    id: int
    value: msgspec.Raw = NULL
    text: str = ""
    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0
    error: ErrorInfo | None = None
    killed_by: KilledBy | None = None
    truncated: dict[str, int] = {}
    usage: Usage = Usage(wall=0.0)
    weakness: str | None = None


class Answer(Message, frozen=True, kw_only=True):
    """Reply to `Prewarm`, `Doctor`, `Stats`."""

    id: int
    data: Any = None


SupervisorToAgent = Ready | Failed | Output | Finished | Answer | Refused


# ---- supervisor -> broker (seqpacket) ------------------------------------------------------------------------
class Attach(Message, frozen=True, kw_only=True):
    """Carries the host end of a fresh slot's channel as the only SCM_RIGHTS descriptor."""

    ticket: str
    rung: Rung
    shared_kernel: bool
    weakness: str | None = None
    memory_by: str
    code_sha256: str
    code_bytes: int
    env: str | None = None


class Detach(Message, frozen=True, kw_only=True):
    """The run of `ticket` is over: close the channel, write its row, tell the agent (`CodeClosed`)."""

    ticket: str
    exit_code: int
    killed_by: KilledBy | None = None
    truncated: dict[str, int] = {}
    duration: float = 0.0


SupervisorToBroker = Attach | Detach


# ---- broker -> supervisor (seqpacket) ------------------------------------------------------------------------
class Attached(Message, frozen=True, kw_only=True):
    """The channel is bound (`ok`), or the ticket was unknown, used or expired: then no code may be sent."""

    ticket: str
    ok: bool


class Kill(Message, frozen=True, kw_only=True):
    """The code behind `ticket` broke the protocol: kill it with `killed_by="protocol"`."""

    ticket: str


BrokerToSupervisor = Attached | Kill
