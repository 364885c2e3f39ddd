"""The agent's end of a model link: takes the gateway's calls and makes them as the run.

Rule 1: there is no run in a frame. The link was opened by the program that holds the run, and every call on it is made
        as that run, through the one authorize() that its other calls pass.
Rule 2: only the declared operations are passed on; the link is no way to the others.
Rule 3: frames are bounded, and so is what is in flight.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol, Self

import msgspec

FRAME_BYTES: Final = 4 * 1024 * 1024
_CALLS: Final = 16
MODEL_OPERATIONS: Final = ("anthropic_messages", "openai_chat", "model_stream")


class Question(msgspec.Struct, frozen=True):
    """One call."""

    id: int
    operation: str
    args: dict[str, Any]


class Answer(msgspec.Struct, frozen=True):
    """What came of it: a value, or the reason why there is none."""

    id: int
    ok: bool
    value: dict[str, Any] | None = None
    reason: str = ""


class Outcome(Protocol):
    """The part of `lockgate.CallOutcome` that is used here."""

    @property
    def ok(self) -> bool:
        """Whether there is a value."""
        ...

    @property
    def value(self) -> Any:
        """The result."""
        ...

    @property
    def reason(self) -> str | None:
        """Why there is none."""
        ...


class Bridge:
    """Serves one link from a thread.

    Args:
        call: makes a call as the run, such as `lockgate.sync.Run.try_call`.
        operations: which ones may be called over the link.

    Attributes:
        theirs: the gateway's end, for `client.Control(..., broker=...)`, which closes it here.

    """

    def __init__(self, call: Callable[..., Outcome], operations: tuple[str, ...] = MODEL_OPERATIONS) -> None:
        self._call = call
        self._operations = frozenset(operations)
        self._ours, self.theirs = socket.socketpair()
        self._sending = threading.Lock()
        self._pool = ThreadPoolExecutor(_CALLS, "lockgate-bridge")
        self._thread = threading.Thread(target=self._run, name="lockgate-bridge", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the link and wait for its thread; idempotent."""
        with contextlib.suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._ours.close()
        self.theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> None:
        buffer = bytearray()
        with contextlib.suppress(OSError, msgspec.MsgspecError, RuntimeError):
            while data := self._ours.recv(65536):
                buffer += data
                while len(buffer) >= 4 and len(buffer) >= 4 + (size := int.from_bytes(buffer[:4])):
                    asked = msgspec.json.decode(buffer[4 : 4 + size], type=Question)
                    del buffer[: 4 + size]
                    self._pool.submit(self._serve, asked)
                if len(buffer) >= 4 and int.from_bytes(buffer[:4]) > FRAME_BYTES:
                    return

    def _serve(self, asked: Question) -> None:
        answer = Answer(asked.id, ok=False, reason="not_available")
        if asked.operation in self._operations:
            try:
                outcome = self._call(asked.operation, **asked.args)
                answer = Answer(asked.id, outcome.ok, _plain(outcome.value), outcome.reason or "")
            except Exception:  # noqa: BLE001 - the run or its gate is gone; the client is told so
                answer = Answer(asked.id, ok=False, reason="unavailable")
        frame = msgspec.json.encode(answer)
        if len(frame) > FRAME_BYTES:
            frame = msgspec.json.encode(Answer(asked.id, ok=False, reason="result_too_large"))
        with self._sending, contextlib.suppress(OSError):
            self._ours.sendall(len(frame).to_bytes(4) + frame)


def _plain(value: object) -> dict[str, Any] | None:
    """Return a result as JSON holds it: the operations of models return records."""
    found: Any = msgspec.to_builtins(value) if isinstance(value, msgspec.Struct) else value
    return found if isinstance(found, dict) else None  # pyright: ignore[reportUnknownVariableType]
