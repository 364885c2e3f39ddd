"""syscall(2) with numbers from our own tables.

Rule 1: calls go through `PyDLL`, which keeps the GIL: after a raw clone the child would wait for it for ever.
Rule 2: a failed call raises OSError with the call's name; nobody checks return values by hand.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

from lockgate.kernel import arch as _arch

ARCH: Final = _arch.current()
_libc: Final = ctypes.PyDLL(None, use_errno=True)
_syscall: Final = _libc.syscall
_syscall.restype = ctypes.c_long

Argument = int | bytes | None


def call(name: str, *args: Argument) -> int:
    """Make the system call `name` with integers, addresses (as int), None, or bytes.

    Bytes are passed as the address of their content, NUL-terminated: for names and for structures that the kernel
    only reads. (A buffer object would make a type of its own in every slot, which costs pages.)

    Raises:
        OSError: the kernel refused; `filename` is the call's name.

    """
    number = ARCH.calls[name]
    converted = [ctypes.c_char_p(one) if isinstance(one, bytes) else ctypes.c_long(one or 0) for one in args]
    ctypes.set_errno(0)
    result: int = _syscall(ctypes.c_long(number), *converted)
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)
    return result
