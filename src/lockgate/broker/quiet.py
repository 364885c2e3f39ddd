"""What the broker prints of its own failures: kind and place, never a value (C6)."""

from __future__ import annotations

import sys
import threading


def place(error: BaseException) -> str:
    """Name the kind of an error and the line it came from; its text may quote a secret and stays out."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" at {trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"
    return f"{type(error).__name__}{where}"


def tell(error: BaseException | None) -> None:
    """Print kind and place of a failure that nobody was told about; the gate keeps what we print."""
    if error is not None:
        print(f"lockgate.broker: {place(error)}", file=sys.stderr, flush=True)  # noqa: T201 - see above


def install() -> None:
    """Replace the hooks that would print source lines and texts."""
    sys.excepthook = lambda _, error, __: tell(error)
    sys.unraisablehook = lambda what: tell(what.exc_value)
    threading.excepthook = lambda what: tell(what.exc_value)
