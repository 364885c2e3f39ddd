"""Messages between the broker's `AuditClient` and the writer process.

Client to writer: one header and a payload. `n` numbers the rows of one client without a hole, whatever the kind.

    length u32 BE   bytes of the payload
    kind   u8       one of the constants below
    id     u64 BE   the reply repeats it; 0 = no reply is wanted
    n      u64 BE   number of the row in the payload; 0 = there is no row

    HELLO    source, ASCII; carries the bell (an eventfd) as the only SCM_RIGHTS descriptor
    APPEND   row                            no reply
    COMMIT   row                            Stored when durable
    INTENT   u32 BE length, msgpack `IntentHead`, row       Stored or Taken
    OUTCOME  u32 BE length, msgpack `OutcomeHead`, row      Stored or Rejected
    LOOKUP   idempotency key, UTF-8         Found
    FLUSH    nothing                        Stored when all before it is durable

Writer to client: u32 BE length, then one msgpack `Reply`.
"""

from __future__ import annotations

import struct
from typing import Final, Literal

import msgspec

from lockgate.contract.errors import AuditUnavailable

HEADER: Final = struct.Struct(">IBQQ")
LENGTH: Final = struct.Struct(">I")
HELLO: Final = 1
APPEND: Final = 2
COMMIT: Final = 3
INTENT: Final = 4
OUTCOME: Final = 5
LOOKUP: Final = 6
FLUSH: Final = 7

RESULT_BYTES: Final = 16 * 1024 * 1024
"""Largest stored result of one write."""
PAYLOAD_BYTES: Final = RESULT_BYTES + 256 * 1024
SOURCE_CHARS: Final = 12

State = Literal["open", "done", "unknown", "released"]


class IntentHead(msgspec.Struct, frozen=True, array_like=True):
    """What the intent claims: at most one live intent per key, one ever per grant."""

    key: str | None
    grant: str | None


class OutcomeHead(msgspec.Struct, frozen=True, array_like=True):
    """Which intent ends, whether its key may be used again, and the result to answer repeats with."""

    intent: str
    release: bool
    status: str
    result: bytes | None


class Existing(msgspec.Struct, frozen=True, array_like=True):
    """An earlier intent that holds the key or the grant.

    Attributes:
        state: "open" = still running, "done" = `status` and `result` say how it ended, "unknown" = nobody knows;
            "released" only for a grant whose call surely did not happen (a grant stays used all the same).
        by: what it holds.
        intent_id: audit id of its intent row. run: the run that made it.
        args_hash: its argument hash; another one than yours is a conflict.
        status: status of its outcome, "" without one. result: the stored result, None without one.
        audit_id: audit id of the row that records *this* attempt (phase "refused"); "" for a look-up.

    """

    state: State
    by: Literal["key", "grant"]
    intent_id: str
    run: str
    args_hash: str
    status: str
    result: bytes | None
    audit_id: str = ""


class _Reply(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Ready(_Reply, frozen=True, array_like=True, tag=True):
    """The database is open, the chain ends at `seq`/`hash`, `unknown` intents of earlier sessions were closed."""

    pid: int
    seq: int
    hash: bytes
    unknown: int
    gaps: int


class Failed(_Reply, frozen=True, array_like=True, tag=True):
    """The writer cannot start, or ends because of what it was sent. It exits after this message."""

    message: str
    next_step: str


class Stored(_Reply, frozen=True, array_like=True, tag=True):
    """Everything up to request `id` is durable; the chain ends at `seq`/`hash`."""

    id: int
    seq: int
    hash: bytes


class Taken(_Reply, frozen=True, array_like=True, tag=True):
    """The key or grant of request `id` is held by an earlier intent; nothing was claimed."""

    id: int
    existing: Existing


class Found(_Reply, frozen=True, array_like=True, tag=True):
    """Answer to a look-up."""

    id: int
    existing: Existing | None


class Rejected(_Reply, frozen=True, array_like=True, tag=True):
    """Request `id` did not happen: the store failed (`transient`), or the claim was wrong."""

    id: int
    transient: bool
    message: str
    next_step: str


class Health(_Reply, frozen=True, array_like=True, tag=True):
    """Pushed when the store stops or starts taking rows."""

    ok: bool
    message: str
    next_step: str


Reply = Ready | Failed | Stored | Taken | Found | Rejected | Health

_reply_encoder: Final = msgspec.msgpack.Encoder()
_reply_decoder: Final = msgspec.msgpack.Decoder(Reply)


def encode_reply(reply: Reply) -> bytes:
    """Return `reply` as one frame."""
    body = _reply_encoder.encode(reply)
    return LENGTH.pack(len(body)) + body


class Replies:
    """Feeds on bytes from the writer and yields whole replies.

    Raises (from `feed`):
        AuditUnavailable: the bytes are none of a writer.
    """

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Reply]:
        """Take bytes, return the replies they complete."""
        self._buffer += data
        out: list[Reply] = []
        at = 0
        view = self._buffer
        while len(view) - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(view, at)
            if length > PAYLOAD_BYTES:
                raise AuditUnavailable(f"the audit writer announced {length} bytes", next_step="restart the gate")
            end = at + LENGTH.size + length
            if len(view) < end:
                break
            try:
                out.append(_reply_decoder.decode(bytes(view[at + LENGTH.size : end])))
            except msgspec.MsgspecError:
                raise AuditUnavailable("the audit writer sent what is no reply", next_step="restart the gate") from None
            at = end
        del self._buffer[:at]
        return out
