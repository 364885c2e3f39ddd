"""Landlock: which files a slot may touch, whatever the mounts say.

Rule 1: every right that the kernel's ABI knows is handled, so a right that is not granted is refused.
Rule 2: no rule grants EXECUTE, and none grants making devices, sockets or pipes.

Sources: Documentation/userspace-api/landlock.rst, linux/landlock.h. struct landlock_ruleset_attr: u64 fs, u64 net,
u64 scoped (8, 16 or 24 bytes by ABI); struct landlock_path_beneath_attr is packed: u64 access, i32 fd = 12 bytes.
"""

from __future__ import annotations

import os
import struct
from typing import Final

from lockgate.kernel.syscalls_unsafe import call

_VERSION: Final = 1
_PATH_BENEATH: Final = 1

EXECUTE: Final = 1 << 0
WRITE_FILE: Final = 1 << 1
READ_FILE: Final = 1 << 2
READ_DIR: Final = 1 << 3
MAKE_CHAR: Final = 1 << 6
MAKE_SOCK: Final = 1 << 9
MAKE_FIFO: Final = 1 << 10
MAKE_BLOCK: Final = 1 << 11
REFER: Final = 1 << 13
TRUNCATE: Final = 1 << 14
IOCTL_DEV: Final = 1 << 15

READ: Final = READ_FILE | READ_DIR
NEVER: Final = EXECUTE | MAKE_CHAR | MAKE_SOCK | MAKE_FIFO | MAKE_BLOCK | IOCTL_DEV
ON_FILES: Final = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
_NET: Final = 3  # bind and connect TCP
_SCOPED: Final = 3  # abstract unix sockets, signals


def handled(abi: int) -> int:
    """Return the file-system rights that `abi` knows."""
    return {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF}.get(abi, 0xFFFF)


def attribute(abi: int) -> bytes:
    """Return struct landlock_ruleset_attr for `abi`: everything handled, no rule for the network."""
    if abi < 4:
        return struct.pack("=Q", handled(abi))
    if abi < 6:
        return struct.pack("=QQ", handled(abi), _NET)
    return struct.pack("=QQQ", handled(abi), _NET, _SCOPED)


def path_rule(access: int, fd: int) -> bytes:
    """Return the packed struct landlock_path_beneath_attr."""
    return struct.pack("=Qi", access, fd)


def abi() -> int:
    """Return the kernel's Landlock ABI, 0 when it has none or it is switched off."""
    try:
        return call("landlock_create_ruleset", None, 0, _VERSION)
    except OSError:
        return 0


def confine(
    version: int,
    writable: tuple[str, ...],
    writable_files: tuple[str, ...],
    readable: tuple[str, ...] = ("/",),
    readable_files: tuple[str, ...] = (),
) -> None:
    """Confine this thread, and the threads and children that it makes later: read and write beneath these names only.

    Args:
        version: the ABI that `abi` returned, at least 1.
        writable: directories; everything but `NEVER` is allowed beneath them.
        writable_files: single files that may also be written.
        readable: directories that may be read and listed.
        readable_files: single files that may be read.

    """
    block = attribute(version)
    ruleset = call("landlock_create_ruleset", block, len(block), 0)
    try:
        everything = handled(version) & ~NEVER
        for path in readable:
            _allow(ruleset, path, READ)
        for path in readable_files:
            _allow(ruleset, path, READ_FILE)
        for path in writable:
            _allow(ruleset, path, everything)
        for path in writable_files:
            _allow(ruleset, path, everything & ON_FILES)
        call("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        call("landlock_add_rule", ruleset, _PATH_BENEATH, path_rule(access, fd), 0)
    finally:
        os.close(fd)
