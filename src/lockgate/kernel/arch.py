"""Which architecture this is, and its numbers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from lockgate.kernel import tables


@dataclass(frozen=True)
class Arch:
    """One architecture.

    Attributes:
        machine: what uname(2) calls it.
        audit: AUDIT_ARCH_* of linux/audit.h, which seccomp reports for every call.
        calls: system call numbers by name.
        x32: first number of a second ABI that the same audit value covers, or None.
        tls_before_ctid: whether the raw clone(2) takes tls before the child tid pointer (clone(2), NOTES).

    """

    machine: str
    audit: int
    calls: dict[str, int]
    x32: int | None
    tls_before_ctid: bool


X86_64: Final = Arch("x86_64", 0xC000003E, tables.X86_64, 0x40000000, tls_before_ctid=False)
AARCH64: Final = Arch("aarch64", 0xC00000B7, tables.AARCH64, None, tls_before_ctid=True)
KNOWN: Final = (X86_64, AARCH64)


def current() -> Arch:
    """Return the architecture of this process.

    Raises:
        OSError: no table is known for it; nothing may be confined by guessed numbers.

    """
    machine = os.uname().machine
    for arch in KNOWN:
        if arch.machine == machine:
            return arch
    raise OSError(38, f"no system call table for the architecture {machine!r}")
