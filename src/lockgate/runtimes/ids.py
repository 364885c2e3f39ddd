"""Ids of this host that sandboxes may have: who may map them, and which range nobody else maps now."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
from pathlib import Path
from typing import Final

from lockgate.contract.errors import HostFault

# Blocks of 65,536 ids that neither subuid files nor container managers use by default.
_FIRST_BLOCK: Final = 0x7000
_BLOCKS: Final = 0x0FFE
_TRIES: Final = 64


def is_host_root() -> bool:
    """Whether this is id 0 of the initial user namespace, which may map any range of ids (user_namespaces(7)).

    Root of another namespace (a rootless container) has few ids to give away and works like a plain user.
    """
    return os.getuid() == 0 and Path("/proc/self/uid_map").read_text("ascii").split() == ["0", "0", str(2**32 - 1)]


def claim(owned: contextlib.ExitStack) -> int:
    """Return the first of 65,536 host ids that no other template of this host maps now.

    The claim is a name in the abstract socket namespace: the kernel gives it to one holder and takes it back when
    that one dies, so there is no lock file to go stale.

    Raises:
        HostFault: every try met a claim of somebody else.

    """
    for _ in range(_TRIES):
        block = _FIRST_BLOCK + random.randrange(_BLOCKS)  # noqa: S311 - spreads claims, guards nothing
        held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            held.bind(f"\0lockgate-ids-{block:x}")
        except OSError as error:
            held.close()
            if error.errno != errno.EADDRINUSE:
                raise HostFault(
                    f"no id range could be claimed: {error.strerror}", next_step="see the errno in unix(7)"
                ) from error
            continue
        owned.callback(held.close)
        return block << 16
    raise HostFault(
        f"no free id range in {_TRIES} tries",
        next_step="stop other lockgate supervisors, or whoever binds lockgate-ids-*",
    )


def number_of(taken: set[int], last: int, most: int) -> int:
    """Return the next number after `last` that is not taken.

    Raises:
        OSError: all are taken.

    """
    for step in range(1, most + 1):
        number = (last + step) % most
        if number not in taken:
            return number
    raise OSError(errno.EAGAIN, "every id is in use")
