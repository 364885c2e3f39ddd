"""Install a seccomp filter on this process.

Sources: seccomp(2); struct sock_fprog: u16 len, then the pointer at byte 8.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Final

from lockgate.kernel.syscalls_unsafe import call

_SET_MODE_FILTER: Final = 1
_TSYNC: Final = 1
_INSTRUCTION: Final = 8


class Filter:
    """A filter whose memory is laid out once, so that installing it is one call.

    Args:
        program: an array of struct sock_filter.

    """

    def __init__(self, program: bytes) -> None:
        self.length = len(program) // _INSTRUCTION
        self._code = ctypes.create_string_buffer(program, len(program))
        self._fprog = ctypes.create_string_buffer(
            struct.pack("=HxxxxxxQ", self.length, ctypes.addressof(self._code)), 16
        )

    def install(self, *, every_thread: bool = False) -> None:
        """Confine this thread and all that it makes for good; needs no_new_privs.

        Args:
            every_thread: confine the threads that exist as well (SECCOMP_FILTER_FLAG_TSYNC), all or none.

        Raises:
            OSError: it was refused, or a thread could not be confined.

        """
        got = call("seccomp", _SET_MODE_FILTER, _TSYNC if every_thread else 0, ctypes.addressof(self._fprog))
        if got:  # the id of the thread that has a filter of its own
            raise OSError(1, f"thread {got} cannot be confined with the others", "seccomp")
