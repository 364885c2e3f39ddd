"""What the machine says of itself, made fit to pass on: every field is hostile, exit code included.

Rule 1: the value is passed on as JSON text only after it was parsed here: it is spliced into a message to the agent.
Rule 2: what is over its cap is dropped and counted, never passed on in part as if it were whole.
"""

from __future__ import annotations

import signal
from typing import Any, Final

import msgspec

from lockgate.contract.bounds import KiB
from lockgate.contract.run import ErrorInfo
from lockgate.contract.wire import NULL
from lockgate.runtimes.protocol import MachineResult
from lockgate.supervisor.output import cut_text

_NAME_BYTES: Final = 256
_MESSAGE_BYTES: Final = 8 * KiB
_TRACEBACK_BYTES: Final = 32 * KiB
_MARKER_BYTES: Final = 128
_SMALL: Final = 1024
_json: Final = msgspec.json.Decoder(Any)


class Outcome(msgspec.Struct, kw_only=True):
    """A `MachineResult` within its bounds."""

    value: msgspec.Raw = NULL
    text: str = ""
    error: ErrorInfo | None = None
    exit_code: int = 0
    truncated: dict[str, int] = {}


def _whole(value: object) -> int:
    """Return a count that the machine gave, as a sane one."""
    return value if isinstance(value, int) and 0 <= value < 1 << 63 else 0


def clean(result: MachineResult, cap: int) -> Outcome:
    """Return what may be passed on of `result`; value and text hold at most `cap` bytes each."""
    if not (result.truncated or result.error) and 4 * len(result.text) + len(result.value or b"") <= min(cap, _SMALL):
        return Outcome(value=_checked(result.value), text=result.text, exit_code=result.exit_code & 0xFF)
    truncated = {name: _whole(result.truncated.get(name, 0)) for name in ("value", "text")}
    value = NULL
    if result.value is not None:
        if len(result.value) > cap:
            truncated["value"] += len(result.value)
        else:
            value = _checked(result.value)
    text, dropped = cut_text(result.text, cap + _MARKER_BYTES)  # the rung's own marker may stand at its end
    truncated["text"] += dropped
    return Outcome(
        value=value,
        text=text,
        error=clean_error(result.error),
        exit_code=result.exit_code & 0xFF,
        truncated={name: count for name, count in truncated.items() if count},
    )


def _checked(value: bytes | None) -> msgspec.Raw:
    """Return the value if it is one JSON value that this side can hold (no NaN, no lone surrogate), else null."""
    if value is None:
        return NULL
    try:
        _json.decode(value)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return NULL  # `text` still shows it
    return msgspec.Raw(value)


def clean_error(error: ErrorInfo | None) -> ErrorInfo | None:
    """Return an exception's texts within their caps."""
    if error is None:
        return None
    return ErrorInfo(
        cut_text(error.name, _NAME_BYTES)[0],
        cut_text(error.message, _MESSAGE_BYTES)[0],
        cut_text(error.traceback, _TRACEBACK_BYTES)[0],
    )


def ended_without_result(status: int | None) -> Outcome:
    """Return the outcome of code that ended its own process: by os._exit, a fault, or a refused system call.

    Never a success: the exit status of hostile code proves nothing, so 0 becomes 1.
    """
    if status is None:
        return Outcome(exit_code=1, error=_no_result("the sandbox ended before the code gave a result"))
    number = status & 0x7F
    if number:
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        hint = ": a system call that this sandbox never allows" if number == signal.SIGSYS else ""
        return Outcome(exit_code=128 + number, error=_no_result(f"the code was ended by {name}{hint}"))
    code = (status >> 8) & 0xFF
    return Outcome(exit_code=code or 1, error=_no_result(f"the code ended its process with status {code}"))


def _no_result(message: str) -> ErrorInfo:
    return ErrorInfo("NoResult", message, "")


_FORK_REFUSED: Final = ("BlockingIOError", "RuntimeError", "OSError")
_DISK_REFUSED: Final = ("[Errno 28]", "[Errno 27]", "[Errno 122]")  # ENOSPC, EFBIG, EDQUOT


def blames_processes(error: ErrorInfo | None) -> bool:
    """Whether the code failed as one does that was refused a process or a thread."""
    return error is not None and (
        (error.name in _FORK_REFUSED and error.message.startswith("[Errno 11]"))
        or (error.name == "RuntimeError" and error.message.startswith("can't start new thread"))
    )


def blames_disk(error: ErrorInfo | None) -> bool:
    """Whether the code failed as one does that was refused space."""
    return error is not None and error.name == "OSError" and error.message.startswith(_DISK_REFUSED)
