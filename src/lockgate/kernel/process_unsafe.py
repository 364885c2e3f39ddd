"""Processes: clone, unshare, ids, prctl, descriptors.

Sources: clone(2), unshare(2), prctl(2), close_range(2), set_tid_address(2), setresuid(2), user_namespaces(7).
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

from lockgate.kernel.syscalls_unsafe import ARCH, call

NEWNS: Final = 0x00020000
NEWCGROUP: Final = 0x02000000
NEWUTS: Final = 0x04000000
NEWIPC: Final = 0x08000000
NEWUSER: Final = 0x10000000
NEWPID: Final = 0x20000000
NEWNET: Final = 0x40000000
ALL_NAMESPACES: Final = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET

_CLONE_PIDFD: Final = 0x1000
_CLONE_CHILD_CLEARTID: Final = 0x00200000
_CLONE_CHILD_SETTID: Final = 0x01000000
_SIGCHLD: Final = 17

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_GET_TID_ADDRESS: Final = 40
_PR_SET_MDWE: Final = 65
_MDWE_REFUSE_EXEC_GAIN: Final = 1
_EINVAL: Final = 22
_LAST_FD: Final = 0xFFFFFFFF


def unshare(flags: int) -> None:
    """Leave namespaces for fresh ones; the user namespace is made first and owns the rest."""
    call("unshare", flags)


def clone_slot(namespaces: int = ALL_NAMESPACES) -> tuple[int, int]:
    """Clone this process into fresh namespaces; returns (0, -1) in the child, (pid, pidfd) in the parent.

    Args:
        namespaces: which; all seven unless the caller is root and keeps some.

    All three fork hooks of CPython run: with the child's alone CPython 3.13 aborts. The child's cached thread id is
    set by the kernel (SETTID at the address of PR_GET_TID_ADDRESS), since glibc's fork handlers do not run.
    """
    tid = ctypes.c_uint64(0)
    call("prctl", _PR_GET_TID_ADDRESS, ctypes.addressof(tid))
    pidfd = ctypes.c_int(-1)
    flags = namespaces | _CLONE_PIDFD | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | _SIGCHLD
    tail = (0, tid.value) if ARCH.tls_before_ctid else (tid.value, 0)
    ctypes.pythonapi.PyOS_BeforeFork()
    try:
        pid = call("clone", flags, 0, ctypes.addressof(pidfd), *tail)
    except OSError:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
        raise
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0, -1
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    os.set_inheritable(pidfd.value, False)
    return pid, pidfd.value


def die_with_parent(signal: int = 9) -> None:
    """Have the kernel send `signal` when the parent ends (PR_SET_PDEATHSIG; any change of credentials clears it)."""
    call("prctl", _PR_SET_PDEATHSIG, signal, 0, 0, 0)


def set_dumpable(value: int) -> None:
    """PR_SET_DUMPABLE: 1 lets the owner write this process's maps, 0 hides its memory and environment."""
    call("prctl", _PR_SET_DUMPABLE, value, 0, 0, 0)


def no_new_privileges() -> None:
    """PR_SET_NO_NEW_PRIVS: Landlock and seccomp demand it from a process without capabilities."""
    call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def refuse_exec_gain() -> bool:
    """PR_SET_MDWE with value 1 (value 3 would spare children); False on kernels before 6.3, which lack it."""
    try:
        call("prctl", _PR_SET_MDWE, _MDWE_REFUSE_EXEC_GAIN, 0, 0, 0)
    except OSError as error:
        if error.errno == _EINVAL:
            return False
        raise
    return True


def close_from(first: int) -> None:
    """Close every descriptor from `first` on (close_range(2))."""
    call("close_range", first, _LAST_FD, 0)


def become(uid: int, gid: int) -> None:
    """Take the ids as real, effective and saved ones; the group first, or the right to change it is gone."""
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
