"""Real machines of the microvm rung, without a Gate: what a clone is, what confines its VMM, what is left of it."""

from __future__ import annotations

import errno
import mmap
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import CannotIsolate
from lockgate.runtimes.microvm import build, snapshot
from lockgate.runtimes.microvm.machine import MicrovmMachine
from lockgate.runtimes.microvm.runtime import MicrovmRuntime, MicrovmTemplate
from lockgate.runtimes.microvm.store import Choice, Store
from lockgate.runtimes.protocol import Machine, TemplateSpec
from lockgate.runtimes.single import Outcome, run_once
from microvm_fixtures import OPEN, VENV, choices, emulated
from supervisor_client import descendants

pytestmark = pytest.mark.timeout(300)
BOUNDS = Bounds(wall=60)
DRAWS = "import os, random, uuid\n[os.urandom(8).hex(), random.random(), str(uuid.uuid4())]"


def run(template: MicrovmTemplate, code: str, *, meanwhile: Callable[[Machine], None] | None = None) -> Outcome:
    return run_once(template, code.encode(), BOUNDS, meanwhile=meanwhile, patience=60)


def value(outcome: Outcome) -> object:
    assert outcome.result is not None, outcome
    assert outcome.result.error is None, outcome.result.error
    return msgspec.json.decode(outcome.result.value or b"null")


def children(pid: int) -> set[int]:
    return set(descendants(pid))


def test_a_template_says_what_it_is(microvm_template: MicrovmTemplate, microvm_choice: Choice) -> None:
    """X3: emulated is never called a boundary; hardware is."""
    assert microvm_template.weakness == ("emulated" if emulated() else None)
    assert microvm_template.boundary == ("emulated" if emulated() else "hardware")
    assert microvm_template.facts["sha256"] == microvm_choice.sha256


def test_twenty_clones_draw_twenty_times(microvm_template: MicrovmTemplate) -> None:
    """X10: the handshake reseeds the guest's kernel and every generator of its interpreter."""
    drawn = [value(run(microvm_template, DRAWS)) for _ in range(20)]
    for at in range(3):
        assert len({one[at] for one in drawn if isinstance(one, list)}) == 20, drawn


def test_without_the_handshake_clones_draw_the_same(microvm_choice: Choice) -> None:
    """Negative control: else the test above could not fail. A kernel that gets to reseed itself first makes one draw
    of its own, on a slow host more than one; two that are the same are enough."""
    template = MicrovmRuntime(choices(), settings=OPEN).start(TemplateSpec())
    drawn: list[object] = []
    try:
        while len(drawn) < 12 and all(drawn.count(one) == 1 for one in drawn):
            drawn.append(value(run(template, DRAWS)))
    finally:
        template.close()
    assert any(drawn.count(one) > 1 for one in drawn), drawn


@pytest.fixture(scope="module")
def numpy_tree() -> str:
    """A package tree with numpy alone, kept beside the store so that its images are made once."""
    tree = VENV / "microvm-sets" / f"numpy-{np.__version__}-{sys.implementation.cache_tag}"
    if not tree.is_dir():
        packages = Path(np.__file__).parents[1]
        made = tree.with_name(f"new-{os.getpid()}")
        for name in ("numpy", "numpy.libs"):
            if (packages / name).is_dir():
                shutil.copytree(packages / name, made / name, ignore=shutil.ignore_patterns("tests", "__pycache__"))
        try:
            made.rename(tree)
        except OSError:  # another worker was first
            shutil.rmtree(made)
    return str(tree)


def test_a_package_set_is_a_second_disk_and_numpy_is_seeded(microvm_choice: Choice, numpy_tree: str) -> None:
    """X10, X11: preloaded before the snapshot, seeded after it; the set cannot be written."""
    template = MicrovmRuntime(choices()).start(TemplateSpec(env="numbers", tree=numpy_tree, preload=("numpy",)))
    code = (
        "import numpy as n, os\ntry:\n    open('/packages/x', 'w')\n    w = 'written'\nexcept OSError as e:\n"
        "    w = e.errno\n[n.random.random(), n.random.default_rng().random(), int(n.arange(10).sum()), w]"
    )
    try:
        drawn = [value(run(template, code)) for _ in range(3)]
    finally:
        template.close()
    assert len({one[0] for one in drawn if isinstance(one, list)}) == 3
    assert len({one[1] for one in drawn if isinstance(one, list)}) == 3
    assert all(one[2:] == [45, errno.EROFS] for one in drawn if isinstance(one, list))


def test_the_clock_of_a_clone_is_right(microvm_template: MicrovmTemplate) -> None:
    """A clone does not wake in the past of its snapshot."""
    before = time.time()
    seen = value(run(microvm_template, "import time\ntime.time()"))
    assert isinstance(seen, float)
    assert before - 2 < seen < time.time() + 2


# ---- the cage ----------------------------------------------------------------------------------------------------
def faults_of_cage(pid: int) -> list[str]:
    """What is wrong with the cage around process `pid`, as the kernel shows it."""
    found = []
    tasks = [Path(f"/proc/{pid}/task/{one}/status") for one in os.listdir(f"/proc/{pid}/task")]
    for task in tasks:
        status = dict(line.split(":\t", 1) for line in task.read_text().splitlines())
        if status["Uid"].split()[0] == str(os.getuid()) and os.getuid() == 0:
            found.append("it is root")
        if any(int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")):
            found.append("it has capabilities")
        if status["NoNewPrivs"].strip() != "1":
            found.append("it may gain privileges")
        if status["Seccomp"].strip() != "2":
            found.append("a thread has no filter")
    found += [
        f"the {name} namespace is ours"
        for name in ("user", "net", "mnt", "pid", "ipc", "uts", "cgroup")
        if os.readlink(f"/proc/{pid}/ns/{name}") == os.readlink(f"/proc/self/ns/{name}")
    ]
    tree = set(os.listdir(f"/proc/{pid}/root"))
    if tree != {"dev", "lib64", "proc", "usr"}:
        found.append(f"it sees {sorted(tree)}")
    elif set(os.listdir(f"/proc/{pid}/root/dev")) - {"null", "zero", "urandom", "kvm"}:
        found.append("it has devices")
    limits = Path(f"/proc/{pid}/limits").read_text()
    zero = ("Max core", "Max file size", "Max locked")
    found += [line for line in limits.splitlines() if line.startswith(zero) and line.split()[-3] != "0"]
    return found


def test_a_vmm_is_caged(microvm_template: MicrovmTemplate) -> None:
    """X1, X4, X8: own id, no capability, filters on every thread, namespaces and a tree of its own."""
    seen: list[list[str]] = []
    uids: list[int] = []

    def look(machine: Machine) -> None:
        seen.append(faults_of_cage(machine.host_pid))
        uids.append(os.stat(f"/proc/{machine.host_pid}").st_uid)

    assert value(run(microvm_template, "1", meanwhile=look)) == 1
    assert value(run(microvm_template, "2", meanwhile=look)) == 2
    assert seen == [[], []]
    if os.getuid() == 0:
        assert len(set(uids)) == 2  # no id is used again at once
        assert 0 not in uids


def test_the_cage_check_sees_a_process_without_one() -> None:
    """Negative control: the same look at this very process finds everything."""
    found = faults_of_cage(os.getpid())
    assert {"a thread has no filter", "it may gain privileges", "the net namespace is ours"} <= set(found)


def test_the_memory_of_a_snapshot_cannot_be_changed(tmp_path: Path) -> None:
    """X10: a VMM that a guest took over opens it for writing, as QEMU does, and changes nothing for later clones."""
    plain = tmp_path / "ram"
    plain.write_bytes(b"snapshot".ljust(8192, b"\0"))
    fd = snapshot.sealed(str(plain), 8192)
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.pwrite(again, b"hostile!", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(again, 0)
        with pytest.raises(PermissionError):
            mmap.mmap(again, 8192, mmap.MAP_SHARED)
        with mmap.mmap(again, 8192, mmap.MAP_PRIVATE) as own:
            own[:8] = b"hostile!"
        assert os.pread(fd, 8, 0) == b"snapshot"
    finally:
        os.close(again)
        os.close(fd)
    open_one = snapshot.fresh(8192)  # negative control: what is not sealed can be changed
    assert os.pwrite(open_one, b"hostile!", 0) == 8
    os.close(open_one)
    with pytest.raises(OSError, match="4096"):
        snapshot.sealed(str(plain), 4096)


def test_a_changed_snapshot_is_noticed(microvm_choice: Choice, tmp_path: Path) -> None:
    """X11: its files are held to the hashes of the day they were made."""
    source = Store(Path(choices().store or ""))
    key = build.Builder(source).snapshot(microvm_choice, TemplateSpec())[1]
    place = Store(tmp_path)
    (tmp_path / "snapshots").mkdir()
    shutil.copytree(source.root / "snapshots" / key, tmp_path / "snapshots" / key)
    builder = build.Builder(place)
    assert builder.verify(key)
    state = tmp_path / "snapshots" / key / "state"
    state.chmod(0o600)
    with state.open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))
    assert not builder.verify(key)
    assert not builder.verify("0" * 32)


def test_what_this_hosts_kvm_boots_is_found_out_by_booting(microvm_choice: Choice) -> None:
    """X3: where /dev/kvm is there and no stock kernel boots, that is a refusal within its deadline, and no fallback."""
    builder = build.Builder(Store(Path(choices().store or "")))
    kvm = msgspec.structs.replace(
        microvm_choice, accel="kvm", append=build.append_for(microvm_choice.kernel, "kvm"), vmm="qemu"
    )
    refused: CannotIsolate | None = None
    plan = None
    try:
        plan = builder.snapshot(kvm, TemplateSpec())[0]
    except CannotIsolate as error:
        refused = error
    assert (refused is None) == (plan is not None and plan.accel == "kvm")
    if refused is not None:
        assert "the guest did not boot" in refused.message
        assert "--accel tcg" in refused.next_step


# ---- ends --------------------------------------------------------------------------------------------------------
@pytest.fixture
def own_template(microvm_choice: Choice) -> Iterator[MicrovmTemplate]:
    template = MicrovmRuntime(choices()).start(TemplateSpec())
    yield template
    template.close()


def loader_of(template: MicrovmTemplate) -> int:
    return template._launcher.pid


def test_runs_leave_nothing(own_template: MicrovmTemplate) -> None:
    """X10: no process, no descriptor here or in the loader, after as many runs as each way to end has."""
    ways = ["1", "1/0", "import os\nos._exit(3)", "import os\nos.kill(os.getpid(), 9)", "import os, time\nos.fork()\n7"]
    run(own_template, "1")
    loader = loader_of(own_template)
    ours, theirs = len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{loader}/fd"))
    for code in ways * 2:
        run(own_template, code)
    deadline = time.monotonic() + 30
    while children(loader) or len(os.listdir(f"/proc/{loader}/fd")) > theirs:
        assert time.monotonic() < deadline, (children(loader), os.listdir(f"/proc/{loader}/fd"))
        time.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) == ours


def test_a_killed_loader_takes_its_machines_along(own_template: MicrovmTemplate) -> None:
    """X10: nothing outlives who would have killed it."""
    machine = own_template.request(BOUNDS)
    assert isinstance(machine, MicrovmMachine)
    deadline = time.monotonic() + 60
    while machine.host_pid == 0:
        own_template.on_readable()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(loader_of(own_template), signal.SIGKILL)
    assert select.select([machine.pidfd], [], [], 60)[0]  # readable: dead (pidfd_open(2))
    machine.close()


def test_a_guest_without_memory_ends_as_a_whole(microvm_template: MicrovmTemplate) -> None:
    """X6: a child's hog ends the run, and it is told as memory."""
    hog = (
        "import os, time\nif os.fork() == 0:\n    x = []\n    while True: x.append(bytearray(1 << 20))\ntime.sleep(60)"
    )
    outcome = run_once(microvm_template, hog.encode(), Bounds(wall=60, memory=64 << 20), patience=60)
    assert outcome.killed
    assert outcome.run_seconds < 60
    assert outcome.result is None


def test_the_worker_sees_no_agent_and_no_device(microvm_template: MicrovmTemplate) -> None:
    """X8: the first process of its own namespace, in a tree without the agent, with four harmless devices."""
    code = (
        "import os, sys\nframes = []\nf = sys._getframe()\nwhile f:\n    frames.append(f.f_code.co_filename)\n"
        "    names = sorted(set(f.f_globals) & {'Agent', 'Pump', 'mounts', 'caps', 'process', 'main'})\n"
        "    f = f.f_back\n"
        "[os.getpid(), sorted(os.listdir('/dev')), os.listdir('/tmp'), os.listdir('/proc'), names,"
        " sorted(m for m in sys.modules if 'lockgate' in m or m == 'agent')]"
    )
    assert value(run(microvm_template, code)) == [1, ["null", "random", "urandom", "zero"], [], [], [], []]
