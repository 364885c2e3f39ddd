"""What the broker gives up before it takes the first request (C6).

Rule 1: the order is the kernel's: limits, ids, no_new_privs, then dumpable (each change of ids resets it), then the
        filter, which can never be taken off again.
Rule 2: a step that fails ends the process; there is no broker that is a little hardened.
Rule 3: the filter refuses, it does not list what is needed: operations are the operator's code with libraries of their
        own. What it refuses is what a broker must never do: start a program, become another process, look into
        another process, listen.

Sources: prctl(2), setrlimit(2), seccomp(2), clone(2), proc(5).
"""

from __future__ import annotations

import os
import pwd
import resource
from typing import Any, Final

from lockgate.contract.errors import ConfigError, HostFault
from lockgate.kernel import arch, process_unsafe, refusing, seccomp_unsafe

_REFUSED: Final = """
    execve execveat fork vfork ptrace process_vm_readv process_vm_writev pidfd_getfd kcmp listen accept accept4
    mount umount2 move_mount open_tree fsopen fsmount mount_setattr pivot_root chroot setns unshare init_module
    finit_module delete_module kexec_load kexec_file_load bpf perf_event_open userfaultfd io_uring_setup
    io_uring_enter io_uring_register add_key request_key keyctl personality reboot swapon swapoff acct"""
REFUSED: Final = frozenset(_REFUSED.split())


def confinement(machine: arch.Arch) -> bytes:
    """Return the broker's filter as an array of struct sock_filter."""
    return refusing.program(machine, REFUSED)


def become(user: str) -> None:
    """Change to another user for good, supplementary groups included.

    Raises:
        ConfigError: there is no such user, or we are not root.

    """
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise ConfigError(f"there is no user {user!r}", next_step="create it, or leave out [broker] user") from None
    if os.geteuid() != 0:
        if entry.pw_uid == os.geteuid():
            return
        raise ConfigError("only root can start the broker as another user", next_step="leave out [broker] user")
    os.setgroups([])
    process_unsafe.become(entry.pw_uid, entry.pw_gid)


def harden(*, user: str | None = None, parent: int = 0) -> dict[str, Any]:
    """Give up what the broker does not need; returns facts for `doctor`.

    Args:
        user: the uid to take when started as root, None = keep ours.
        parent: pid of the parent, 0 = unknown; when it is gone already, the death signal would never come.

    Raises:
        ConfigError: `user` is not usable.
        HostFault: the kernel refused a step.

    """
    step = "RLIMIT_CORE"
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        step = "user"
        if user is not None:
            become(user)
        step = "PR_SET_PDEATHSIG"
        process_unsafe.die_with_parent()
        if parent and os.getppid() != parent:
            raise HostFault("the process that started the broker is gone", next_step="start a new gate")
        step = "PR_SET_NO_NEW_PRIVS"
        process_unsafe.no_new_privileges()
        step = "PR_SET_DUMPABLE"
        process_unsafe.set_dumpable(0)
        step = "seccomp"
        machine = arch.current()
        seccomp_unsafe.Filter(confinement(machine)).install()
    except OSError as error:
        raise HostFault(
            f"the broker could not harden itself: {step} failed ({error.strerror})",
            next_step="use a kernel with seccomp (CONFIG_SECCOMP_FILTER); lockgate doctor names what is missing",
        ) from None
    return {
        "uid": os.geteuid(),
        "core_limit": 0,
        "no_new_privs": True,
        "dumpable": False,
        "seccomp": "refuses execve, fork, ptrace, listen",
    }
