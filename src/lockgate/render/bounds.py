"""Bounds of one message, and the signal that one was passed."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from lockgate.contract.errors import HostFault

MAX_BYTES: Final = 256 * 1024  # of one message; narrow or widen in the policy
MAX_DEPTH: Final = 32  # containers and spans inside one another
MAX_NODES: Final = 200_000  # nodes of one tree: a message of MAX_BYTES stays below it unless it is a flood


class TooComplex(Exception):
    """The message nests too deep or has too many parts; it is shown as plain text instead."""


def panicked(error: BaseException) -> bool:
    """Whether a Rust parser panicked: such an error is no Exception, and would pass every ordinary handler."""
    return type(error).__module__ == "pyo3_runtime"


def need(module: str) -> Any:
    """Import a parser of the extra `[render]`.

    Raises:
        HostFault: it is not installed.

    """
    try:
        return import_module(module)
    except ImportError:
        raise HostFault(
            f"this sink needs the parser {module.partition('.')[0]}, which is not installed",
            next_step="install lockgate[render]; text(), terminal(), log_line() and csv() work without it",
        ) from None
