"""A seccomp filter that refuses some calls and lets the rest pass, for processes that run code of the operator's.

Rule 1: what is refused fails with EPERM; a thread may be made, a process may not.
Rule 2: calls that are unknown to our table are allowed only up to the newest that it knows; another architecture ends
        the process.

Sources: seccomp(2), clone(2), Documentation/userspace-api/seccomp_filter.rst.
"""

from __future__ import annotations

import errno
from typing import Final

from lockgate.kernel import arch, bpf, tables

_CLONE_THREAD: Final = 0x00010000


def program(machine: arch.Arch, refused: frozenset[str]) -> bytes:
    """Return the filter as an array of struct sock_filter.

    Args:
        machine: the running architecture.
        refused: names of calls; `clone` for a process and `clone3` are refused in any case.

    """
    actions: list[int | str] = [bpf.ALLOW] * (tables.NEWEST + 1)
    for name in refused & machine.calls.keys():
        actions[machine.calls[name]] = bpf.ERRNO | errno.EPERM
    actions[machine.calls["clone"]] = "clone"
    actions[machine.calls["clone3"]] = bpf.ERRNO | errno.ENOSYS  # flags behind a pointer; glibc falls back to clone
    segments = bpf.joined(actions)
    made = bpf.begin(machine.audit, machine.x32, segments)
    made.label("clone")
    made.load(bpf.arg(0))
    made.emit(bpf.JMP_JSET, _CLONE_THREAD, "thread", "process")
    made.label("thread")
    made.ret(bpf.ALLOW)
    made.label("process")
    made.ret(bpf.ERRNO | errno.EPERM)
    return bpf.assemble(made)
