"""The outer wall: native code in a worker, as a defect of the engine would give it, is refused everywhere (X4, X8).

The code is placed there by a switch of the zygote that no configuration has; it is the same list of probes, with raw
system calls, that the container rung is held to.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import CannotIsolate
from lockgate.runtimes.protocol import MachineFailed, MachineReady, TemplateSpec
from lockgate.runtimes.single import run_once
from lockgate.runtimes.wasm import artifacts, worker
from lockgate.runtimes.wasm.machine import Wall
from lockgate.runtimes.wasm.runtime import WasmRuntime, WasmTemplate
from lockgate.supervisor.slot import exit_status
from wasm_rung_fixtures import WasmStart, answers, value

# What native code in a worker still learns: that it is ours, how long the host is up (a clock that is read without a
# system call), and a constant that the C library answers when it may not ask for the number of processors.
KNOWN = {"template-globals-through-frames", "clock-boottime", "cpu-count"}
READ = "open('/etc/passwd').read(4)"


# ---- the whole list, natively --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def native(wasm_start: WasmStart) -> list[set[str]]:
    """Ids reached by native code behind the whole wall, for two errnos that stand in the place of the end."""
    found: list[set[str]] = []
    for marker in (1, 38):  # each of them is what some real handler says too: only both together prove a hit
        with wasm_start("--native", f"--marker={marker}") as template:
            rows = answers(template)
        assert len(rows) >= 250
        found.append({row.id for row in rows.values() if row.reached})
    return found


def test_native_code_in_a_worker_reaches_nothing(native: list[set[str]]) -> None:
    """X4, X8: every probe of the attack suite, with raw system calls, in the process that the engine runs in."""
    assert set.intersection(*native) == KNOWN


def test_without_the_filter_the_same_list_reaches(wasm_start: WasmStart) -> None:
    """Negative control: the probes can see, and the filter is what stands before most of them."""
    with wasm_start("--native", "--skip=seccomp") as template:
        rows = answers(template)
    reached = {row.id for row in rows.values() if row.reached}
    assert {"socket-inet", "clone-newuser", "memfd-create", "execveat", "sysinfo", "uname-release"} <= reached
    assert len(reached) >= 40
    # What is left without it: no file of the host, no way to make one, no other process, no new code.
    assert not {ident for ident in reached if ident.startswith(("read-proc", "create-in", "see-", "write-"))}
    assert not reached & {"rwx-mapping", "rwx-mprotect", "int80", "exec-interpreter", "subprocess-shell"}


def test_without_any_of_it_the_list_reaches_the_host(wasm_start: WasmStart) -> None:
    """Negative control for root, Landlock and the refusal of new code."""
    with wasm_start("--native", "--skip=seccomp,mdwe,landlock,root") as template:
        reached = {row.id for row in answers(template).values() if row.reached}
    assert {"read-proc-version", "create-in-tmp", "rwx-mapping", "rwx-mprotect"} <= reached
    assert len(reached) >= 120


# ---- the real filter: the end ----------------------------------------------------------------------------------------
ENDS = {
    "socket": "socket.socket()",
    "connected pair": "socket.socketpair()",
    "fork": "os.fork()",
    "exec": "os.execv('/bin/true', ['true'])",
    "open": READ,
    "stat": "os.stat('/')",
    "signal another": "os.kill(2, 0)",
    "thread": "threading.Thread(target=int).start()",
    "executable mapping": "mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC)",
    "pass a descriptor": "socket.socket(fileno=3)",
    "duplicate": "os.dup(3)",
    "a raw call": "ctypes.CDLL(None).syscall(157, 15, 0)",
}
IMPORTS = "import ctypes, mmap, os, socket, threading\n"


def _end(template: WasmTemplate, source: str) -> int | None:
    """Run native code that must not give a result; return the wait status, None on kernels that do not tell it."""
    seen: list[int] = []
    outcome = run_once(
        template, source.encode(), Bounds(wall=20), meanwhile=lambda machine: seen.append(os.dup(machine.pidfd))
    )
    try:
        assert outcome.result is None, outcome
        assert outcome.failed is not None, outcome
        assert select.select(seen, [], [], 10)[0]
        return exit_status(seen[0])
    finally:
        os.close(seen[0])


@pytest.fixture(scope="module")
def native_template(wasm_start: WasmStart) -> Iterator[WasmTemplate]:
    with wasm_start("--native") as template:
        yield template


@pytest.fixture(scope="module")
def unfiltered(wasm_start: WasmStart) -> Iterator[WasmTemplate]:
    with wasm_start("--native", "--skip=seccomp,mdwe") as template:
        yield template


@pytest.mark.parametrize("name", ENDS)
def test_a_refused_call_is_the_end_of_the_worker(
    native_template: WasmTemplate, unfiltered: WasmTemplate, name: str
) -> None:
    """X4, X8: by SIGSYS, at once. The control: without the filter the same line comes back with an answer."""
    status = _end(native_template, IMPORTS + ENDS[name])
    assert status is None or status & 0x7F == signal.SIGSYS, status
    if name not in ("fork", "exec"):  # those two leave the worker by themselves
        tried = f"{IMPORTS}try:\n    {ENDS[name]}\nexcept OSError: pass\n'went on'"
        assert value(run_once(unfiltered, tried.encode(), Bounds(wall=20))) == "went on"


def test_what_a_run_needs_is_not_refused(native_template: WasmTemplate) -> None:
    """Control for the tests above: native code that stays within its own memory and descriptors gives its result."""
    source = "import os, time\nb = bytearray(8 << 20)\ntime.sleep(0.01)\n[len(b), len(os.urandom(8)), os.getpid()]"
    assert value(run_once(native_template, source.encode(), Bounds(wall=20))) == [8 << 20, 8, 1]


# ---- Landlock must come before the engine ----------------------------------------------------------------------------
def test_landlock_that_comes_late_guards_nothing(wasm_start: WasmStart) -> None:
    """Why it stands where it does: a thread that is older than Landlock reads the host's files, one after it cannot."""
    source = f"try: seen = {READ}\nexcept OSError as error: seen = type(error).__name__\nseen"
    with wasm_start("--early-thread", "--skip=seccomp,root") as late:
        assert value(run_once(late, source.encode(), Bounds(wall=20))) == "root"  # REACHED
    with wasm_start("--native", "--skip=seccomp,root") as first:
        assert value(run_once(first, source.encode(), Bounds(wall=20))) == "PermissionError"
    with wasm_start("--native", "--skip=seccomp") as whole:
        assert value(run_once(whole, source.encode(), Bounds(wall=20))) == "FileNotFoundError"  # an empty root


def test_the_compiled_module_is_the_only_file_and_cannot_be_written(wasm_start: WasmStart) -> None:
    """X8: native code behind root and Landlock alone sees one name; it can neither list nor change anything."""
    source = """
import os
def ask(call):
    try: return call()
    except OSError as error: return type(error).__name__
[ask(lambda: os.listdir('/')), ask(lambda: open('/engine', 'rb').read(4).hex()), ask(lambda: open('/engine', 'r+b')),
 ask(lambda: open('/x', 'w')), ask(lambda: os.open('..', os.O_RDONLY)), ask(lambda: os.chmod('/engine', 0o777))]
"""
    with wasm_start("--native", "--skip=seccomp,ids") as template:  # the id of the module's owner: the worst case
        seen = value(run_once(template, source.encode(), Bounds(wall=20)))
    assert seen[0] == "PermissionError"
    assert seen[1] == b"\x7fELF".hex()
    assert set(seen[2:]) <= {"PermissionError", "OSError"}, seen


# ---- the supervisor looks for itself ---------------------------------------------------------------------------------
def _ready(template: WasmTemplate) -> MachineReady | MachineFailed:
    machine = template.request(Bounds())
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            select.select([template.fileno(), machine.control], [], [], 1)
            template.on_readable()
            for event in machine.on_control() if machine.pidfd >= 0 else ():
                assert isinstance(event, MachineReady | MachineFailed)
                return event
        raise AssertionError("no worker in time")
    finally:
        machine.kill()
        machine.close()


@pytest.mark.parametrize(("skip", "words"), [("ids", "it runs as"), ("seccomp", "Seccomp is 0"), ("caps", "Cap")])
def test_a_worker_that_did_not_give_something_up_is_never_used(
    wasm_template: WasmTemplate, wasm_start: WasmStart, skip: str, words: str
) -> None:
    """X3: the worker says that it is ready; what its tasks show in procfs says otherwise, and that decides."""
    if skip == "ids" and wasm_template.facts["mode"] != "root":
        pytest.skip("a plain user's workers have the one id that there is")
    with wasm_start(f"--skip={skip}") as template:
        template.wall = wasm_template.wall
        if wasm_template.facts["mode"] == "root":
            template.wall = Wall(range(1 << 16, 1 << 31))  # any id that is ours to give; the range differs by zygote
        event = _ready(template)
    assert isinstance(event, MachineFailed)
    assert event.step == "check"
    assert words in event.detail


def test_a_whole_worker_passes_the_look(wasm_template: WasmTemplate) -> None:
    """Control for the test above; and each live worker has an id of its own where there are ids to give."""
    machines = [wasm_template.request(Bounds()) for _ in range(3)]
    ready: set[int] = set()
    uids: set[str] = set()
    deadline = time.monotonic() + 30
    while len(ready) < 3:
        assert time.monotonic() < deadline
        select.select([wasm_template.fileno(), *(machine.control for machine in machines)], [], [], 1)
        wasm_template.on_readable()
        for machine in machines:
            for event in machine.on_control() if machine.pidfd >= 0 else ():
                assert isinstance(event, MachineReady), event
                ready.add(machine.host_pid)
                with open(f"/proc/{machine.host_pid}/status") as status:
                    uids.add(next(line for line in status if line.startswith("Uid:")))
    assert len(uids) == (3 if wasm_template.facts["mode"] == "root" else 1)
    for machine in machines:
        machine.kill()
        machine.close()


@pytest.mark.parametrize("step", worker.STEPS)
def test_a_step_that_fails_ends_the_worker(wasm_start: WasmStart, step: str) -> None:
    """X3: there is no second try, and nothing is left out: the machine says which step it was."""
    with wasm_start(f"--fail={step}") as template:
        event = _ready(template)
    assert isinstance(event, MachineFailed)
    assert event.step == step


# ---- where a host cannot give all of it ------------------------------------------------------------------------------
def test_without_user_namespaces_the_rung_is_weaker_and_says_so(wasm_start: WasmStart) -> None:
    """X3: the template is marked, what is missing is named, and the rest of the wall stands all the same."""
    with wasm_start("--skip=namespaces") as template:
        assert template.weakness == "no outer wall"
        assert "user namespaces" in template.lacks
        assert value(run_once(template, b"6*7", Bounds(wall=20))) == 42
    with wasm_start("--skip=namespaces", "--native") as template:
        for name in ("open", "socket", "fork", "signal another"):
            assert _end(template, IMPORTS + ENDS[name]) in (None, signal.SIGSYS)


def test_the_zygote_has_no_engine_and_one_thread(wasm_template: WasmTemplate) -> None:
    """The fork comes before the engine: one task, and no machine code of the guest in its memory."""
    pid = wasm_template._launcher.pid
    assert os.listdir(f"/proc/{pid}/task") == [str(pid)]
    if os.geteuid() == 0:
        with open(f"/proc/{pid}/maps") as maps:
            assert not [line for line in maps if line.rstrip().endswith(("/engine", "python.cwasm"))]


def run_once_in(store: Path) -> object:
    template = WasmRuntime(store=store).start(TemplateSpec())
    try:
        return value(run_once(template, b"6*7", Bounds(wall=20)))
    finally:
        template.close()


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copy(source, target)
        os.chmod(target, 0o600)


def test_a_damaged_file_is_refused_before_anything_is_made(wasm_start: WasmStart, tmp_path: Path) -> None:
    """X3: the zygote checks what it maps against its digest."""
    store = artifacts.default_store()
    copy = tmp_path / "store"
    copy.mkdir(mode=0o700)
    for name in (artifacts.compiled_name(str(artifacts.engine_version())), artifacts.guest_name()):
        shutil.copytree(store / name, copy / name, copy_function=_link)
    shutil.copytree(store / artifacts.image_name("stdlib"), copy / artifacts.image_name("stdlib"))
    assert run_once_in(copy) == 42  # the copy is whole
    image = copy / artifacts.image_name("stdlib") / "memory.image"
    data = bytearray(image.read_bytes())
    data[1 << 20] ^= 1
    image.write_bytes(data)
    with pytest.raises(CannotIsolate, match="altered or is damaged"):
        WasmRuntime(store=copy).start(TemplateSpec())
