"""The worker's filter, evaluated by a small interpreter, number by number; and the machine's own words (X4, X5)."""

from __future__ import annotations

import errno

import pytest
from test_kernel_seccomp import evaluate

from lockgate.contract.bounds import Bounds
from lockgate.kernel import bpf, tables
from lockgate.kernel.arch import AARCH64, KNOWN, X86_64, Arch
from lockgate.runtimes.protocol import MachineFailed, MachineResult, MachineStopped
from lockgate.runtimes.wasm import calls, driver, layout, worker
from lockgate.runtimes.wasm.machine import Wall, WasmMachine
from lockgate.runtimes.wasm.zygote import Options

FILTERS = {arch.machine: calls.build(arch) for arch in KNOWN}
PROT = {"none": 0, "read": 1, "write": 3, "exec": 4, "read and exec": 5, "all": 7}


@pytest.mark.parametrize("arch", KNOWN, ids=lambda arch: arch.machine)
def test_a_call_that_is_not_named_is_the_end(arch: Arch) -> None:
    """X4: allowed calls pass whatever their arguments; every other number, known or not, ends the process."""
    program = FILTERS[arch.machine]
    names = {number: name for name, number in arch.calls.items()}
    for number in (*range(tables.NEWEST + 1), tables.NEWEST + 1, 1000, 0x3FFFFFFF):
        name = names.get(number, "")
        if name in calls.BY_ARGUMENT:
            continue
        for args in ((), (0xFFFFFFFF,) * 6, (1, 2, 4, 8, 16, 32)):
            expected = bpf.ALLOW if name in calls.ALLOWED else bpf.KILL_PROCESS
            assert evaluate(program, number, args, arch.audit) == expected, (number, name)


def test_nothing_that_opens_connects_or_starts_is_allowed() -> None:
    """X4, X8: by name, so that a later addition has to pass here."""
    never = """open openat openat2 creat socket socketpair connect sendto sendmsg recvmsg accept4 clone clone3 fork
    vfork execve execveat ptrace process_vm_readv kill tkill pidfd_open prctl seccomp mount unshare setns memfd_create
    dup dup2 fcntl ioctl io_uring_setup bpf keyctl shmget sendfile splice userfaultfd stat readlinkat getdents64
    unlinkat"""
    assert not calls.ALLOWED & set(never.split())


@pytest.mark.parametrize("arch", KNOWN, ids=lambda arch: arch.machine)
@pytest.mark.parametrize("name", ["mmap", "mprotect"])
def test_no_mapping_becomes_code(arch: Arch, name: str) -> None:
    """X8: the engine's machine code is mapped before; from then on nothing is."""
    for wanted, bits in PROT.items():
        action = evaluate(FILTERS[arch.machine], arch.calls[name], (0, 4096, bits), arch.audit)
        assert action == (bpf.KILL_PROCESS if bits & 4 else bpf.ALLOW), wanted


@pytest.mark.parametrize("arch", KNOWN, ids=lambda arch: arch.machine)
def test_a_signal_reaches_the_worker_itself_at_most(arch: Arch) -> None:
    own, host = FILTERS[arch.machine], calls.build(arch, own_namespace=False)
    assert evaluate(own, arch.calls["tgkill"], (1, 1, 6), arch.audit) == bpf.ALLOW
    assert evaluate(own, arch.calls["tgkill"], (2, 2, 6), arch.audit) == bpf.KILL_PROCESS
    assert evaluate(host, arch.calls["tgkill"], (1, 1, 6), arch.audit) == bpf.KILL_PROCESS  # that is the host's first
    assert evaluate(own, arch.calls["clone3"], (), arch.audit) == bpf.ERRNO | errno.ENOSYS


def test_another_architecture_dies() -> None:
    for other in (0x40000003, AARCH64.audit, 0):
        assert evaluate(FILTERS["x86_64"], X86_64.calls["read"], (), other) == bpf.KILL_PROCESS
    assert evaluate(FILTERS["x86_64"], 0x40000000 + 39, (), X86_64.audit) == bpf.KILL_PROCESS


def test_a_marker_takes_the_place_of_the_end() -> None:
    """Control for tests that ask for one thing after another."""
    marked = calls.build(X86_64, every=133)
    assert evaluate(marked, X86_64.calls["socket"]) == bpf.ERRNO | 133
    assert evaluate(marked, X86_64.calls["mmap"], (0, 0, 7)) == bpf.ERRNO | 133
    assert evaluate(marked, X86_64.calls["read"]) == bpf.ALLOW


# ---- what the supervisor's side makes of a worker's words ---------------------------------------------------------
@pytest.fixture
def machine():
    made = WasmMachine(Bounds(), None, 64 << 20)
    yield made
    made.close()


def test_the_header_carries_the_bounds_of_the_run(machine: WasmMachine) -> None:
    """X5 to X7: none was fixed when the worker was made; the soft stop comes before the wall clock, always."""
    bounds = Bounds(wall=3.0, memory=100 << 20, disk=1 << 20, inodes=7, value=999)
    fields = layout.CODE_HEADER.unpack(machine.header(b"code", bounds))
    assert fields[:6] == (b"WAS1", 4, 999, (100 << 20) + (64 << 20), 1 << 20, 7)
    assert 2.9 < fields[6] < 3.0
    short = layout.CODE_HEADER.unpack(machine.header(b"", Bounds(wall=0.01)))[6]
    assert 0 < short < 0.01
    assert layout.CODE_HEADER.unpack(machine.header(b"", Bounds(memory=8192 << 20)))[3] == 1 << 32


def test_how_a_run_was_stopped_is_a_claim(machine: WasmMachine) -> None:
    """X5: it can end the run that makes it, and nothing else."""
    assert machine.result(layout.STOPPED) == MachineStopped(by="wall")
    broke = machine.result(layout.BROKE)
    assert isinstance(broke, MachineFailed)
    assert broke.step == "protocol"
    body = b'{"value":1,"text":"1","error":null,"exit_code":0,"truncated":{}}'
    assert isinstance(machine.result(body), MachineResult)
    for near in (layout.STOPPED + b" ", b'{"stopped": "time"}', b'{"stopped":"memory"}'):
        event = machine.result(near)
        assert isinstance(event, MachineFailed), near


def test_a_process_that_gave_nothing_up_fails_the_look() -> None:
    """X3: this very process is no worker."""
    import os

    saw = Wall(range(1 << 31)).wrong(os.getpid())
    assert saw
    assert "cannot be looked at" in Wall(range(1 << 31)).wrong(1 << 22)


def test_switches_are_known_or_refused() -> None:
    assert Options.of(("--native", "--skip=a,b", "--marker=1")) == Options(
        skip=frozenset({"a", "b"}), marker=1, native=True
    )
    assert Options.of(("--early-thread",)).native
    assert Options.of(()) == Options()
    with pytest.raises(ValueError, match="unknown switches"):
        Options.of(("--nativ",))


@pytest.mark.parametrize("pieces", [1, 3, 7, 1 << 20])
def test_an_answer_is_read_whole_however_it_arrives(monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    """X9: the length first, then as much and no more; an early end or a length above the cap closes the door."""

    def channel(answer: bytes) -> None:
        left = bytearray(answer)

        def read(_fd: int, count: int) -> bytes:
            taken = bytes(left[: min(count, pieces)])
            del left[: len(taken)]
            return taken

        monkeypatch.setattr(worker.os, "read", read)
        monkeypatch.setattr(worker.os, "write", lambda _fd, data: len(data))

    channel(b"\0\0\0\5hello")
    assert worker.relay(b"{}") == b"hello"
    large = b"x" * 200_000
    channel(len(large).to_bytes(4, "big") + large)
    assert worker.relay(b"{}") == large
    for broken in (b"", b"\0\0", b"\0\0\0\5hell", b"\0\0\0\0", b"\xff\xff\xff\xff" + large):
        channel(broken)
        with pytest.raises(driver.Closed):
            worker.relay(b"{}")
