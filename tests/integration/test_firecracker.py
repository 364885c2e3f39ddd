"""The host side of Firecracker, whole and real, with the smallest guest: API, jailer, snapshot, vsock, kill, clean-up.

The guest is ours (guest/microvm/vsk): it runs also where the host's KVM boots no stock kernel, which is why nothing
here says anything about Linux in a microVM.
"""

from __future__ import annotations

import hashlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockgate.contract.errors import HostFault
from lockgate.runtimes.microvm.firecracker import binary, jail
from lockgate.runtimes.microvm.firecracker.api import Api, vsock
from lockgate.runtimes.microvm.firecracker.binary import Binaries
from lockgate.runtimes.microvm.firecracker.jail import UID_BASE, Jail
from lockgate.runtimes.microvm.firecracker.machine import Clone, Frozen, Recipe, Uids, freeze

VSK = Path(__file__).parents[2] / "guest" / "microvm" / "vsk" / "build.sh"
MiB = 1024 * 1024
SECONDS = 60.0
ECHO_PORT, COUNT_PORT = 54, 55  # vsk.c


def _kvm() -> bool:
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR))
    except OSError:
        return False
    return True


pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="Firecracker's jailer needs root"),
    pytest.mark.skipif(not _kvm(), reason="there is no /dev/kvm that opens"),
]


class Lab:
    """A directory of machines, a pair of binaries, and a snapshot of the smallest guest."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.binaries: Binaries = binary.fetch(top / "store")
        self.base = jail.yard(top / "fc")
        self.uids = Uids()
        self.kernel = top / "vsk.elf"
        subprocess.run([str(VSK), str(self.kernel)], check=True, timeout=SECONDS)
        self.frozen = self.freeze("t")

    def freeze(self, name: str) -> Frozen:
        recipe = Recipe(self.kernel, "quiet", 128 * MiB)
        return freeze(recipe, self.base, self.top / name, self.binaries, uids=self.uids, seconds=SECONDS)

    def clone(self) -> Clone:
        return Clone(self.base, self.frozen, self.binaries, self.uids)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with tempfile.TemporaryDirectory(prefix="fc") as top:  # pytest's own directories make paths too long for a socket
        made = Lab(Path(top))
        yield made
        jail.leave(made.base)


@pytest.fixture
def clone(lab: Lab) -> Iterator[Callable[[], Clone]]:
    made: list[Clone] = []

    def make() -> Clone:
        made.append(lab.clone())
        return made[-1]

    yield make
    for one in made:
        one.destroy()


def ask(one: Clone) -> tuple[bytes, bytes]:
    """Resume, and return (the letter of its counting port, what its echo says)."""
    for stream in one.resume(SECONDS):
        stream.close()
    with stream_to(one, ECHO_PORT) as echo, stream_to(one, COUNT_PORT) as count:
        letter = count.recv(1)
        echo.sendall(b"ping")
        said = b""
        while len(said) < 5:
            said += echo.recv(16)
    return letter, said


def stream_to(one: Clone, port: int) -> socket.socket:
    stream = vsock(one.jail.path("v.sock"), port, one.jail.pidfd, time.monotonic() + SECONDS)
    stream.settimeout(SECONDS)
    return stream


def status(pid: int, task: int | None = None) -> dict[str, str]:
    path = f"/proc/{pid}/task/{task}/status" if task else f"/proc/{pid}/status"
    return dict(line.split(":\t", 1) for line in Path(path).read_text().splitlines() if ":\t" in line)


def hardened(pid: int) -> list[str]:
    """Return what is missing of a cage, by name; empty = all is there."""
    missing: list[str] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        facts = status(pid, int(task))
        checks = {
            "uid": int(facts["Uid"].split()[0]) >= UID_BASE and len(set(facts["Uid"].split())) == 1,
            "gid": int(facts["Gid"].split()[0]) >= UID_BASE,
            "capabilities": int(facts["CapEff"], 16) == 0 and int(facts["CapPrm"], 16) == 0,
            "no_new_privs": facts["NoNewPrivs"] == "1",
            "seccomp": facts["Seccomp"] == "2",
        }
        missing += [name for name, holds in checks.items() if not holds]
    mounts = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    if len(mounts) != 1:
        missing.append("mounts")
    interfaces = [line.split(":")[0].strip() for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]]
    if interfaces != ["lo"]:
        missing.append("network")
    for kind in ("net", "ipc", "uts", "pid", "mnt"):
        if os.readlink(f"/proc/{pid}/ns/{kind}") == os.readlink(f"/proc/self/ns/{kind}"):
            missing.append(f"{kind} namespace")
    if "lockgate-fc" not in Path(f"/proc/{pid}/cgroup").read_text():
        missing.append("control group")
    limits = Path(f"/proc/{pid}/limits").read_text()
    for name, value in (("Max open files", 256), ("Max file size", MiB)):
        if re.search(rf"{name} +{value} ", limits) is None:
            missing.append(name)
    return missing


def test_clones_go_on_where_the_snapshot_was_taken_each_with_its_own_uid(lab: Lab, clone: Callable[[], Clone]) -> None:
    """X1, X10: twelve machines at once from one snapshot, which is the same file afterwards as before."""
    before = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (lab.frozen.state, lab.frozen.ram)]
    machines = [clone() for _ in range(12)]
    assert {one.state for one in machines} == {"LOADED"}
    uids = {status(one.jail.vmm())["Uid"].split()[0] for one in machines}
    assert len(uids) == 12
    for one in machines:
        assert ask(one) == (b"A", b"Eping")
        one.kill()  # the guest polls: twelve of them would take every core
    after = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (lab.frozen.state, lab.frozen.ram)]
    assert before == after


def test_the_cage_is_complete_and_an_uncaged_one_is_not(lab: Lab, clone: Callable[[], Clone]) -> None:
    """X3: each check is read from the living process; the same checks fail for a VMM that nobody caged."""
    one = clone()
    deadline = time.monotonic() + SECONDS
    while hardened(one.jail.vmm()) and time.monotonic() < deadline:
        time.sleep(0.01)  # the thread of the virtual CPU takes its filter when it starts, before the guest runs
    assert hardened(one.jail.vmm()) == []
    with (
        tempfile.TemporaryDirectory(prefix="fc") as folder,
        subprocess.Popen(
            [lab.binaries.firecracker, "--api-sock", f"{folder}/a"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        ) as bare,
    ):
        pidfd = os.pidfd_open(bare.pid)
        try:
            Api(f"{folder}/a", pidfd, time.monotonic() + SECONDS).close()
            missing = set(hardened(bare.pid))
            assert missing >= {"uid", "capabilities", "mounts", "control group", "net namespace", "Max file size"}
        finally:
            bare.kill()
            os.close(pidfd)


def test_a_machine_is_resumed_once(clone: Callable[[], Clone]) -> None:
    """X10: there is no second lease."""
    one = clone()
    ask(one)
    with pytest.raises(HostFault, match="once"):
        one.resume(1)


def test_no_guest_listens_on_another_port(clone: Callable[[], Clone]) -> None:
    one = clone()
    ask(one)
    with pytest.raises(HostFault, match="port 99"):
        vsock(one.jail.path("v.sock"), 99, one.jail.pidfd, time.monotonic() + SECONDS)


def test_a_killed_machine_is_gone_whatever_it_was_doing(clone: Callable[[], Clone]) -> None:
    """X5: the guest spins without end; one SIGKILL ends VMM, jailer and minder."""
    one = clone()
    ask(one)
    vmm = one.jail.vmm()
    assert vmm
    one.kill()
    assert one.wait(SECONDS)
    assert not Path(f"/proc/{vmm}").exists()


def test_a_machine_whose_vmm_died_is_an_error_at_once(clone: Callable[[], Clone]) -> None:
    one = clone()
    os.kill(one.jail.vmm(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(HostFault):
        one.resume(SECONDS)
    assert time.monotonic() - began < SECONDS / 2
    assert one.state == "DEAD"


def test_a_cap_on_files_would_end_a_template(lab: Lab) -> None:
    """The negative control of `Limits.fsize`: with the cap of a clone, writing the snapshot ends the VMM."""
    from lockgate.runtimes.microvm.firecracker import machine

    real = machine.Limits
    machine.Limits = lambda **given: real(**{**given, "fsize": True})  # type: ignore[assignment,misc]
    try:
        with pytest.raises(HostFault, match="snapshot/create"):
            lab.freeze("capped")
    finally:
        machine.Limits = real  # type: ignore[misc]
    assert not (lab.top / "capped").exists()


def test_files_that_others_may_change_are_not_linked(lab: Lab) -> None:
    """X3: a snapshot that somebody else could write would be in every later machine."""
    loose = lab.top / "loose"
    loose.write_bytes(b"x")
    loose.chmod(0o666)
    one = Jail(lab.base, "loose", UID_BASE)
    with pytest.raises(HostFault, match="0444"):
        one.prepare({"s": loose})
    one.destroy()


def test_two_hundred_machines_in_a_row_leave_nothing(lab: Lab) -> None:
    """X10: no process, directory, control group or descriptor."""
    lab.clone().destroy()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(200):
        one = lab.clone()
        if number % 4 == 0:
            assert ask(one) == (b"A", b"Eping")
        one.destroy()
    assert len(os.listdir("/proc/self/fd")) == before
    assert os.listdir(lab.base / "firecracker") == []
    for hierarchy in ("memory", "pids", "."):
        groups = Path("/sys/fs/cgroup", hierarchy, jail.GROUP, lab.base.name)
        assert not groups.is_dir() or not [one for one in groups.iterdir() if one.is_dir()]


ORPHAN = """
import os, sys, time
from pathlib import Path
from lockgate.runtimes.microvm.firecracker import binary, jail
from lockgate.runtimes.microvm.firecracker.machine import Clone, Frozen, Uids
top = Path(sys.argv[1])
one = Clone(jail.yard(top / "fc"), Frozen(top / "t/s", top / "t/m", (), 128 << 20), binary.find(top / "store"), Uids())
print(one.jail.vmm(), one.jail.base.name, flush=True)
time.sleep(600)
"""


def test_machines_die_with_the_process_that_made_them_and_the_next_sweeps(lab: Lab) -> None:
    """X10: kill -9 of the parent; nothing runs on, and what it left on disk goes at the next start."""
    with subprocess.Popen([sys.executable, "-c", ORPHAN, str(lab.top)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        vmm, name = parent.stdout.readline().split()
        pidfd = os.pidfd_open(int(vmm))
        parent.kill()
        parent.wait()
        assert select.select([pidfd], [], [], SECONDS)[0]
        os.close(pidfd)
    assert (lab.top / "fc" / name).is_dir()
    deadline = time.monotonic() + SECONDS
    while jail.sweep(lab.top / "fc") or (lab.top / "fc" / name).is_dir():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not Path("/sys/fs/cgroup/memory", jail.GROUP, name).exists()
    assert lab.base.is_dir()  # a living owner's is left alone


def test_what_a_guest_writes_without_end_is_cut(lab: Lab, clone: Callable[[], Clone]) -> None:
    """X9: the VMM's words are kept up to a cap, and a full pipe does not stop it."""
    one = clone()
    with open(f"/proc/{one.jail.vmm()}/fd/1", "wb", buffering=0) as words:
        os.set_blocking(words.fileno(), False)
        for _ in range(64):
            try:
                os.write(words.fileno(), b"x" * 4096)
            except BlockingIOError:
                break
    assert ask(one) == (b"A", b"Eping")
    assert len(one.jail.listen()) <= 16 * 1024
