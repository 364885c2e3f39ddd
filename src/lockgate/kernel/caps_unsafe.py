"""Give up every capability, for good.

Sources: capabilities(7), capset(2) (header u32 version 0x20080522, i32 pid; data 2 x 3 u32), prctl(2).
"""

from __future__ import annotations

import errno
import struct
from typing import Final

from lockgate.kernel.syscalls_unsafe import call

_PR_CAPBSET_DROP: Final = 24
_PR_SET_SECUREBITS: Final = 28
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4
_VERSION_3: Final = 0x20080522
_MOST: Final = 64
# NOROOT, NO_SETUID_FIXUP and NO_CAP_AMBIENT_RAISE on, KEEP_CAPS off, all four locked.
SECUREBITS: Final = 0xEF


def drop_bounding() -> None:
    """Empty the bounding set: nothing that is executed later can have a capability (needs CAP_SETPCAP)."""
    for capability in range(_MOST):
        try:
            call("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0)
        except OSError as error:
            if error.errno == errno.EINVAL and capability:
                break
            raise


def drop_sets() -> None:
    """Empty the permitted, effective and inheritable sets."""
    call("capset", struct.pack("=Ii", _VERSION_3, 0), bytes(24))


def drop_all() -> None:
    """Empty bounding, ambient, permitted, effective and inheritable sets and lock the securebits, in that order.

    The first three steps need CAP_SETPCAP, so the sets themselves go last.
    """
    drop_bounding()
    call("prctl", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    call("prctl", _PR_SET_SECUREBITS, SECUREBITS, 0, 0, 0)
    drop_sets()
