"""What a worker may ask of the kernel once the engine stands. Pure: `build` makes the filter's bytes.

Rule 1: an allow list, and everything else ends the process: there is no code in here that copes with a refusal.
Rule 2: nothing opens, connects, makes a process or a thread, or maps code. The engine's machine code is mapped before.
Rule 3: what is allowed works on what the worker holds already: two sockets, two pipes, its memory, its clocks.

What each call is for: read and write (control, channel, output), poll (waiting for them); mmap to mremap and brk (the
heap, and the guest's linear memory, which grows by mprotect); futex (the alarm thread); the clocks and the sleeps;
getrandom (the guest's randomness); the signal calls (the engine turns a fault of the guest into a trap); close and
fstat (Python's own). tgkill reaches only process 1 of the worker's own pid namespace: itself.
"""

from __future__ import annotations

import errno
from typing import Final

from lockgate.kernel import bpf, tables
from lockgate.kernel.arch import Arch

_CALLS: Final = """read write close fstat poll ppoll munmap mremap madvise brk futex clock_gettime clock_getres
clock_nanosleep nanosleep gettimeofday time getrandom rt_sigreturn rt_sigprocmask rt_sigaction sigaltstack sched_yield
getpid gettid restart_syscall exit exit_group"""
ALLOWED: Final = frozenset(_CALLS.split())
BY_ARGUMENT: Final = ("mmap", "mprotect", "tgkill", "clone3")
PROT_EXEC: Final = 4
_SELF: Final = 1  # a worker is process 1 of its own pid namespace


def segments(arch: Arch, refusal: int) -> list[tuple[int, int | str]]:
    """Return the numbers 0 to NEWEST and above as (first number, action), neighbours of equal action joined."""
    actions: list[int | str] = [refusal] * (tables.NEWEST + 1)
    for name in ALLOWED & arch.calls.keys():  # an architecture lacks the calls it never had
        actions[arch.calls[name]] = bpf.ALLOW
    for name in BY_ARGUMENT:
        actions[arch.calls[name]] = name
    actions.append(refusal)
    return bpf.joined(actions)


def build(arch: Arch, *, every: int | None = None, own_namespace: bool = True) -> bytes:
    """Return the worker's filter as an array of struct sock_filter.

    Args:
        arch: for which architecture; any other ends the process.
        own_namespace: whether the worker has a pid namespace of its own, in which process 1 is itself.
        every: errno of every refusal, in the place of an end: with it a test can ask for one thing after another.

    """
    refusal = bpf.KILL_PROCESS if every is None else bpf.ERRNO | every
    program = bpf.begin(arch.audit, arch.x32, segments(arch, refusal))
    for name in ("mmap", "mprotect"):
        program.label(name)
        program.load(bpf.arg(2))
        program.emit(bpf.JMP_JSET, PROT_EXEC, "refused", "allow")
    program.label("tgkill")
    program.load(bpf.arg(0))
    program.emit(bpf.JMP_JEQ, _SELF, "allow" if own_namespace else "refused", "refused")
    program.label("clone3")  # what makes a thread asks this first, and falls back to clone, which ends it
    program.ret(bpf.ERRNO | (every or errno.ENOSYS))
    program.label("refused")
    program.ret(refusal)
    program.label("allow")
    program.ret(bpf.ALLOW)
    return bpf.assemble(program)
