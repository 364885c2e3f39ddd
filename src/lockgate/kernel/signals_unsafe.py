"""Signals as a descriptor, with who sent them.

Sources: signalfd(2) (mask of 8 bytes, bit n-1 for signal n; struct signalfd_siginfo, 128 bytes: u32 ssi_signo, i32
ssi_errno, i32 ssi_code first), sigaction(2) (SI_KERNEL = 0x80: a terminal, not a process).
"""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Iterable
from typing import Final

from lockgate.kernel.syscalls_unsafe import call

_SFD_CLOEXEC_NONBLOCK: Final = 0x80000 | 0x800
_INFO_BYTES: Final = 128
_SI_KERNEL: Final = 0x80


class Signals:
    """Blocks signals for this thread (and those it starts) and gives them one by one.

    Args:
        numbers: which; what a descriptor gives is never delivered otherwise.

    """

    def __init__(self, numbers: Iterable[int]) -> None:
        chosen = set(numbers)
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, chosen)
        mask = sum(1 << number - 1 for number in chosen)
        self._fd = call("signalfd4", -1, struct.pack("=Q", mask), 8, _SFD_CLOEXEC_NONBLOCK)

    def fileno(self) -> int:
        """Readable when a signal waits."""
        return self._fd

    def next(self) -> tuple[int, bool] | None:
        """Return (signal, whether the kernel made it, as for ^C at a terminal), or None when none waits."""
        try:
            info = os.read(self._fd, _INFO_BYTES)
        except BlockingIOError:
            return None
        number, _, code = struct.unpack_from("=Iii", info)
        return number, code == _SI_KERNEL

    def close(self) -> None:
        """Give the signals back to their handlers."""
        os.close(self._fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)
