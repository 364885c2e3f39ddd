"""The slot's filter, evaluated by a small interpreter against the policy, number by number (X4, X8)."""

from __future__ import annotations

import errno
import struct

import pytest

from lockgate.kernel import bpf, seccomp, tables
from lockgate.kernel.arch import AARCH64, KNOWN, X86_64, Arch

MARK = 133


def evaluate(program: bytes, nr: int, args: tuple[int, ...] = (), arch: int = X86_64.audit) -> int:
    """Run a classic BPF program on one seccomp_data and return its action."""
    data = struct.pack("<iIQ6Q", nr, arch, 0, *(args + (0,) * 6)[:6])
    code = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    at = accumulator = 0
    for _ in range(len(code)):
        op, true, false, k = code[at]
        at += 1
        if op == bpf.LD_W_ABS:
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif op == bpf.RET:
            return k
        elif op == bpf.JMP_JA:
            at += k
        elif op == bpf.ALU_AND:
            accumulator &= k
        elif op == bpf.JMP_JEQ:
            at += true if accumulator == k else false
        elif op == bpf.JMP_JGE:
            at += true if accumulator >= k else false
        elif op == bpf.JMP_JSET:
            at += true if accumulator & k else false
        else:
            raise AssertionError(f"unknown instruction {op:#x}")
    raise AssertionError("the program does not end")


FILTERS = {arch.machine: seccomp.build(arch, refusal=MARK) for arch in KNOWN}


@pytest.mark.parametrize("arch", KNOWN, ids=lambda arch: arch.machine)
def test_every_number_gets_what_the_table_says(arch: Arch) -> None:
    """X4, X8: allowed calls pass whatever their arguments; all others are refused; unknown ones do not exist."""
    program = FILTERS[arch.machine]
    names = {number: name for name, number in arch.calls.items()}
    seen = {"allowed": 0, "refused": 0}
    for number in range(tables.NEWEST + 1):
        name = names.get(number, "")
        if name in seccomp.BY_ARGUMENT:
            continue
        for args in ((), (0xFFFFFFFF,) * 6, (1, 2, 4, 8, 16, 32)):
            action = evaluate(program, number, args, arch.audit)
            if name in seccomp.ALLOWED:
                assert action == bpf.ALLOW, name
                seen["allowed"] += 1
            elif name in seccomp.FIXED:
                assert action == bpf.ERRNO | seccomp.FIXED[name], name
            else:
                assert action == bpf.ERRNO | MARK, (number, name)
                seen["refused"] += 1
    assert seen["allowed"] > 300
    assert seen["refused"] > 400
    for number in (tables.NEWEST + 1, 1000, 0x3FFFFFFF):
        assert evaluate(program, number, (), arch.audit) == bpf.ERRNO | errno.ENOSYS


@pytest.mark.parametrize("arch", KNOWN, ids=lambda arch: arch.machine)
def test_another_architecture_dies(arch: Arch) -> None:
    """X8: `int 0x80` and compat calls have other numbers, so they end the process."""
    for other in (0x40000003, 0xC000003E ^ 1, 0, 0xFFFFFFFF):
        assert evaluate(FILTERS[arch.machine], 39, (), other) == bpf.KILL_PROCESS
    if arch.x32 is not None:
        assert evaluate(FILTERS[arch.machine], arch.x32 + 39, (), arch.audit) == bpf.KILL_PROCESS
        assert evaluate(FILTERS[arch.machine], -1, (), arch.audit) == bpf.KILL_PROCESS


def decide(name: str, *args: int, arch: Arch = X86_64) -> int:
    return evaluate(FILTERS[arch.machine], arch.calls[name], args, arch.audit)


@pytest.mark.parametrize("arch", KNOWN, ids=lambda arch: arch.machine)
def test_namespace_flags_are_refused_and_threads_are_not(arch: Arch) -> None:
    """X8: no flag that makes a namespace passes clone; fork and threads do; clone3 looks missing."""
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert decide("clone", flag | 17, arch=arch) == bpf.ERRNO | errno.EPERM
    assert decide("clone", 17, arch=arch) == bpf.ALLOW
    assert decide("clone", 0x3D0F00, arch=arch) == bpf.ALLOW  # what glibc gives for a thread
    assert decide("clone3", 0, arch=arch) == bpf.ERRNO | errno.ENOSYS


def test_no_socket_of_any_family() -> None:
    """X4: socket() is refused for every family; a socket pair is unix only."""
    for family in range(64):
        assert decide("socket", family, 1) == bpf.ERRNO | errno.EAFNOSUPPORT
        expected = bpf.ALLOW if family == 1 else bpf.ERRNO | errno.EAFNOSUPPORT
        assert decide("socketpair", family, 1) == expected
    for name in ("connect", "bind", "listen", "accept", "accept4"):
        assert decide(name) == bpf.ERRNO | MARK


def test_ioctl_fcntl_and_prctl_are_lists() -> None:
    """X8: no terminal injection, no leases or signals on descriptors, no way to undo the hardening."""
    assert {cmd for cmd in range(0x10000) if decide("ioctl", 3, cmd) == bpf.ALLOW} == set(seccomp.IOCTLS)
    assert decide("ioctl", 3, 0x5412) == bpf.ERRNO | errno.ENOTTY  # TIOCSTI
    assert {cmd for cmd in range(2048) if decide("fcntl", 3, cmd) == bpf.ALLOW} == set(seccomp.FCNTLS)
    assert {option for option in range(256) if decide("prctl", option) == bpf.ALLOW} == {2, 3, 15, 16, 23, 27, 39}
    assert decide("prctl", 1, 0) == bpf.ERRNO | errno.EPERM  # a run may not outlive its template


def test_memory_is_never_writable_and_executable() -> None:
    """X8: W^X holds by the filter too, for kernels that lack PR_SET_MDWE."""
    for prot in range(8):
        mapped = decide("mmap", 0, 4096, prot)
        assert (mapped == bpf.ALLOW) == (prot & 6 != 6), prot
        changed = decide("mprotect", 0, 4096, prot)
        assert (changed == bpf.ALLOW) == (not prot & 4), prot


def test_the_list_names_calls_that_exist() -> None:
    """A misspelt name would be silently refused: every allowed name is a call of x86_64."""
    assert X86_64.calls.keys() >= seccomp.ALLOWED
    assert set(seccomp.BY_ARGUMENT) <= AARCH64.calls.keys()
    assert not seccomp.ALLOWED & set(seccomp.BY_ARGUMENT)
    for dangerous in (
        "execve", "execveat", "splice", "tee", "vmsplice", "sendfile", "copy_file_range", "memfd_create",
        "inotify_init1", "flock", "ptrace", "keyctl", "bpf", "mount", "umount2", "unshare", "setns",
        "io_uring_setup", "userfaultfd", "sysinfo", "chroot", "open_by_handle_at", "mknod", "sync",
    ):  # fmt: skip
        assert dangerous not in seccomp.ALLOWED
        assert decide(dangerous) == bpf.ERRNO | MARK


def test_the_tree_is_small_and_shallow() -> None:
    """A chain of comparisons took three times as long to install; the tree stays below 320 instructions."""
    assert len(FILTERS["x86_64"]) // 8 < 320


def test_far_jumps_are_widened() -> None:
    """The assembler bridges what eight bits cannot reach, and the result still means the same."""
    program = bpf.Program()
    program.load(bpf.NR)
    wide = [(number, bpf.ERRNO | (number % 4000)) for number in range(900)]
    bpf.tree(program, [*wide], "t")
    code = bpf.assemble(program)
    for number in (0, 1, 254, 255, 256, 449, 450, 899):
        assert evaluate(code, number) == bpf.ERRNO | number
    assert evaluate(code, 5000) == bpf.ERRNO | 899


def test_the_assembler_refuses_nonsense() -> None:
    """A jump backwards, past the end or to nowhere never becomes a filter."""
    backwards = bpf.Program()
    backwards.label("start")
    backwards.load(0)
    backwards.jump("start")
    backwards.ret(bpf.ALLOW)
    with pytest.raises(ValueError, match="outside"):
        bpf.assemble(backwards)
    endless = bpf.Program()
    endless.load(0)
    with pytest.raises(ValueError, match="outside"):
        bpf.assemble(endless)
    nowhere = bpf.Program()
    nowhere.jump("nowhere")
    nowhere.ret(bpf.ALLOW)
    with pytest.raises(KeyError):
        bpf.assemble(nowhere)
    with pytest.raises(ValueError, match="holds"):
        bpf.assemble(bpf.Program())
    twice = bpf.Program()
    twice.label("a")
    with pytest.raises(ValueError, match="twice"):
        twice.label("a")
