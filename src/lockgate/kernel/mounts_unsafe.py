"""Mounts through the file-descriptor interface (open_tree and friends) and the few old calls that it lacks.

Sources: mount(2), umount2(2), pivot_root(2), mount_setattr(2), open_tree(2), move_mount(2), fsopen(2); struct
mount_attr: u64 attr_set, attr_clr, propagation, userns_fd = 32 bytes.
"""

from __future__ import annotations

import struct
from typing import Final

from lockgate.kernel.syscalls_unsafe import call

MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_REMOUNT: Final = 32
MS_BIND: Final = 4096
MS_REC: Final = 16384
MS_PRIVATE: Final = 1 << 18

ATTR_RDONLY: Final = 1
ATTR_NOSUID: Final = 2
ATTR_NODEV: Final = 4
ATTR_NOEXEC: Final = 8

AT_FDCWD: Final = -100
AT_EMPTY_PATH: Final = 0x1000
AT_RECURSIVE: Final = 0x8000
_OPEN_TREE_CLONE: Final = 1
_OPEN_TREE_CLOEXEC: Final = 0x80000
_MOVE_MOUNT_F_EMPTY_PATH: Final = 4
_MNT_DETACH: Final = 2
_FSOPEN_CLOEXEC: Final = 1
_FSCONFIG_SET_STRING: Final = 1
_FSCONFIG_CMD_CREATE: Final = 6
_FSMOUNT_CLOEXEC: Final = 1


def mount(kind: str, target: str, flags: int, options: str = "") -> None:
    """Mount a fresh file system of `kind` on `target` (mount(2))."""
    call("mount", kind.encode(), target.encode(), kind.encode(), flags, options.encode() or None)


def bind(source: str, target: str) -> None:
    """Show `source`, with what is mounted below it, at `target` as well."""
    call("mount", source.encode(), target.encode(), None, MS_BIND | MS_REC, None)


def make_private(target: str = "/") -> None:
    """Cut the tree at `target` off from mount propagation, or later mounts would reach the host."""
    call("mount", None, target.encode(), None, MS_REC | MS_PRIVATE, None)


def remount(target: str, flags: int, options: str = "") -> None:
    """Change the flags of the file system mounted on `target`."""
    call("mount", None, target.encode(), None, MS_REMOUNT | flags, options.encode() or None)


def clone_tree(path: str) -> int:
    """Return a descriptor of a detached copy of the mounts at `path` (open_tree(2) with OPEN_TREE_CLONE).

    Recursive, since in a user namespace a copy without its children is refused when those are locked.
    """
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | AT_RECURSIVE
    return call("open_tree", AT_FDCWD, path.encode(), flags)


def attach(tree: int, target: str) -> None:
    """Mount the detached tree on `target` (move_mount(2))."""
    call("move_mount", tree, b"", AT_FDCWD, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH)


def set_attributes(tree: int, attributes: int) -> None:
    """Set ATTR_* on every mount of the detached tree (mount_setattr(2))."""
    block = struct.pack("=QQQQ", attributes, 0, 0, 0)
    call("mount_setattr", tree, b"", AT_EMPTY_PATH | AT_RECURSIVE, block, len(block))


def new_filesystem(kind: str, attributes: int, **options: str) -> int:
    """Return a descriptor of a fresh detached mount of `kind` (fsopen(2), fsconfig(2), fsmount(2))."""
    context = call("fsopen", kind.encode(), _FSOPEN_CLOEXEC)
    try:
        for key, value in options.items():
            call("fsconfig", context, _FSCONFIG_SET_STRING, key.encode(), value.encode(), 0)
        call("fsconfig", context, _FSCONFIG_CMD_CREATE, None, None, 0)
        return call("fsmount", context, _FSMOUNT_CLOEXEC, attributes)
    finally:
        call("close", context)


def pivot_here() -> None:
    """Make the working directory the root and let the old tree go (pivot_root(2), NOTES: pivot_root(".", "."))."""
    call("pivot_root", b".", b".")
    call("umount2", b".", _MNT_DETACH)
    call("chdir", b"/")


def set_hostname(name: str) -> None:
    """Name this UTS namespace."""
    call("sethostname", name.encode(), len(name.encode()))
