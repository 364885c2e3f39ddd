"""What one audit row says.

Rule 1: `user`, `agent` and `run` are never empty: a row that names nobody is refused where it is made.
Rule 2: arguments stand here in clear only where the operation declared them; otherwise their keyed hash does.
Rule 3: a row is never refused for its size or its text: what is too long is clipped and says so.
Rule 4: nothing in a row is a credential; a lease is named by its id or `jti`.
"""

from __future__ import annotations

import hmac
from typing import Any, Final, Literal

import msgspec

from lockgate.contract.run import Via

Phase = Literal[
    "intent",  # a call is about to happen; durable before a write's backend is called
    "outcome",  # how it ended; `ref` names the intent
    "denied",  # it was refused
    "unknown",  # a write began and nobody learned how it ended; `ref` names the intent
    "approval",  # a person was asked, or answered
    "bound",  # a bound of the run was reached
    "run",  # a run was opened, attached, ended
    "egress",  # a network decision of the gateway
    "render",  # a decision of the render guard
    "refused",  # the writer did not take this row's claim (key or grant already used); `ref` names the earlier intent
    "gap",  # the writer states that rows are missing, and which
]
Value = str | int | float | bool | None

ROW_BYTES: Final = 64 * 1024
CLIP_CHARS: Final = 256
_SHORT: Final = 64
_ENTRIES: Final = 16
_MARK: Final = "…[clipped]"


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One row, before it has a number.

    Attributes:
        phase: what this row is about, see `Phase`.
        user: on whose behalf. agent: which agent. tenant: whose data. run: which run. All from the run's scope.
        via: whether a tool call or generated code asked; None where nobody called.
        rung: the isolation rung of the code that asked, None for tool calls.
        shared_kernel: that rung shares the host's kernel (X3: flagged in every row).
        weakness: what of that rung's wall was missing on this host, and accepted (X3: the same).
        operation: the operation's name as it was asked for, hostile text when `via` is code.
        effect: "read" or "write" for a registered operation.
        verdict: what `authorize()` said. rule, path, reason: why, for people who may read the audit log.
        visible: the reason that the caller was shown.
        scope_hash: SHA-256 of the run's scope, hexadecimal.
        args_hash: keyed hash of the canonical typed arguments (`argument_hash`).
        args: the arguments that the operation declared as loggable, in clear.
        idempotency_key: SHA-256 over tenant, operation and the declared fields, hexadecimal.
        grant_id: the approval that this call used. approver: who gave it.
        lease_id: id or `jti` of the credential that was minted for this call.
        status: how it ended, an enumeration of the edge ("ok", "failed", "timeout", "unknown", ...).
        result_bytes: size of the encoded result. truncated: bytes dropped from it.
        duration: seconds.
        ref: audit id of the row that this one completes.
        detail: further facts of this phase (exit code, killed_by, digest of the code, ...), small and flat.

    """

    phase: Phase
    user: str
    agent: str
    run: str
    tenant: str = ""
    via: Via | None = None
    rung: str | None = None
    shared_kernel: bool = False
    weakness: str | None = None
    operation: str | None = None
    effect: Literal["read", "write"] | None = None
    verdict: Literal["allow", "deny", "needs_approval"] | None = None
    rule: str | None = None
    path: str | None = None
    reason: str | None = None
    visible: str | None = None
    scope_hash: str = ""
    args_hash: str = ""
    args: dict[str, Any] = {}
    idempotency_key: str | None = None
    grant_id: str | None = None
    approver: str | None = None
    lease_id: str | None = None
    status: str = ""
    result_bytes: int | None = None
    truncated: int = 0
    duration: float | None = None
    ref: str | None = None
    detail: dict[str, Value] = {}

    def __post_init__(self) -> None:
        if not (self.user and self.agent and self.run):
            raise ValueError("an audit row needs user, agent and run; take all three from the run's scope")


class StoredRow(Row, frozen=True, kw_only=True, omit_defaults=True):
    """A row as it was stored.

    Attributes:
        id: the audit id, `SOURCE-N`: N counts the rows of one source without a hole.
        at: wall clock, seconds since the epoch. mono: the same moment on the monotonic clock.
        result_sha256: digest of the stored result that came with an outcome.
        seq: place in the chain, from 1; not part of the stored bytes.

    """

    id: str
    at: float
    mono: float
    result_sha256: str | None = None
    seq: int = 0

    @property
    def source(self) -> str:
        """Who numbered this row."""
        return self.id.rpartition("-")[0]

    @property
    def number(self) -> int:
        """Its number among the rows of its source, from 1; 0 when the id has none."""
        number = self.id.rpartition("-")[2]
        return int(number) if number.isascii() and number.isdigit() else 0


_row: Final = msgspec.json.Encoder()
_stored: Final = msgspec.json.Decoder(StoredRow)


def encode(row: Row) -> bytes:
    """Return the JSON of `row`, at most `ROW_BYTES` long; over-long or unencodable text is clipped, never refused."""
    try:
        body = _row.encode(row)
    except (UnicodeEncodeError, TypeError, ValueError, OverflowError):
        return _row.encode(clipped(row))
    return body if len(body) <= ROW_BYTES else _row.encode(clipped(row))


def stamp(body: bytes, audit_id: str, at: float, mono: float) -> bytes:
    """Return the stored bytes of an encoded row: its id first, so that a row is found by a prefix, then its clocks."""
    return b'{"id":"%b","at":%.6f,"mono":%.6f,%b' % (audit_id.encode(), at, mono, body[1:])


def unstored(row: StoredRow, **changes: Any) -> Row:
    """Return what `row` said before it was stored, with some fields changed."""
    return Row(**{**{name: getattr(row, name) for name in Row.__struct_fields__}, **changes})


def decode(body: bytes) -> StoredRow:
    """Return the row in `body`.

    Raises:
        msgspec.MsgspecError: these are not the bytes of a row.
        ValueError: it names no user, agent or run.

    """
    return _stored.decode(body)


def clipped(row: Row) -> Row:
    """Return `row` with every text at most `CLIP_CHARS` long and valid UTF-8, and `detail["clipped"]` set."""
    changes: dict[str, Any] = {}
    for name in row.__struct_fields__:
        value = getattr(row, name)
        if isinstance(value, str):
            changes[name] = clip(value)
    changes["args"] = {clip(str(key), _SHORT): _flat(value) for key, value in list(row.args.items())[:_ENTRIES]}
    detail = {clip(str(key), _SHORT): _flat(value) for key, value in list(row.detail.items())[:_ENTRIES]}
    return msgspec.structs.replace(row, **changes, detail={**detail, "clipped": True})


def clip(text: str, limit: int = CLIP_CHARS) -> str:
    """Return `text` as encodable text of at most `limit` characters, with a mark when something was cut off."""
    text = text.encode("utf-8", "backslashreplace").decode() if not text.isascii() else text
    return text if len(text) <= limit else text[: limit - len(_MARK)] + _MARK


def argument_hash(key: bytes, operation: str, canonical: bytes) -> str:
    """Return HMAC-SHA-256 over an operation's name and its canonical typed arguments, hexadecimal.

    Args:
        key: the deployment's key: arguments have so little entropy that a plain hash would give them away.
        operation: the registry's name.
        canonical: the arguments, encoded again from the typed object.

    """
    return hmac.digest(key, operation.encode() + b"\0" + canonical, "sha256").hex()


def _flat(value: object) -> Value:
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else clip(hex(value), _SHORT)
    return clip(value if isinstance(value, str) else repr(value), _SHORT)
