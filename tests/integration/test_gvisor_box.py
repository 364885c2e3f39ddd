"""One box of the gvisor rung: restored, asleep, awake, dead; and what becomes of a runsc that does not work."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from gvisor_fixtures import PATIENCE, GvisorRun, needs_gvisor
from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import CannotIsolate, HostFault
from lockgate.contract.rungs import GvisorChoices
from lockgate.runtimes.gvisor import GvisorMachine, GvisorRuntime, GvisorTemplate, binary, image, selftest
from lockgate.runtimes.protocol import Machine, MachineReady, TemplateSpec
from lockgate.runtimes.single import run_once
from supervisor_client import descendants

pytestmark = needs_gvisor


def status(pid: int) -> dict[str, str]:
    """The fields of a process's status, and its state."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def states(machine: Machine) -> str:
    """The states of what lives in the box, its keeper left out: T is stopped."""
    found: set[str] = set()
    for pid in descendants(machine.host_pid):
        with contextlib.suppress(OSError):  # a spare process of the sentry may end at any time
            found.add(status(pid)["State"][0])
    return "".join(sorted(found))


def until(true: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def warm(template: GvisorTemplate) -> GvisorMachine:
    """A box that is ready, made by hand."""
    machine = template.request(Bounds())
    assert isinstance(machine, GvisorMachine)
    poll = select.poll()
    poll.register(template.fileno(), select.POLLIN)
    while machine.pidfd < 0:
        assert poll.poll(PATIENCE * 1000)
        for one in template.on_readable():
            assert isinstance(one, GvisorMachine)
            one.placed()
    poll.unregister(template.fileno())
    poll.register(machine.control, select.POLLIN)
    assert poll.poll(PATIENCE * 1000)
    assert isinstance(machine.on_control()[0], MachineReady)
    return machine


@pytest.fixture
def ready_box(gvisor_template: GvisorTemplate) -> Iterator[GvisorMachine]:
    """A warm box that ends with the test."""
    machine = warm(gvisor_template)
    yield machine
    machine.kill()
    assert dead(machine)
    machine.close()


def dead(machine: Machine, seconds: float = PATIENCE) -> bool:
    poll = select.poll()
    poll.register(machine.pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


# ---- a run -------------------------------------------------------------------------------------------------------
def test_a_run_has_its_streams_apart_and_one_call(gvisor_run: GvisorRun) -> None:
    def broker(body: bytes) -> bytes:
        asked = msgspec.json.decode(body)
        return msgspec.json.encode({"id": asked["id"], "ok": {"doubled": asked["args"]["n"] * 2}})

    source = "import sys\nprint('out')\nprint('err', file=sys.stderr)\nhost.call('double', n=21)['doubled']"
    done = gvisor_run(source, broker=broker)
    assert done.result is not None, done.failed
    assert (done.result.value, done.stdout, done.stderr) == (b"42", b"out\n", b"err\n")
    assert done.facts["kernel"] != os.uname().release
    assert done.facts["filter"] > 200


def test_every_module_of_the_library_can_be_imported_though_nothing_may_be_mapped(gvisor_run: GvisorRun) -> None:
    """X8: libraries are mapped in the template; later no file can be mapped executable, whoever wrote it."""
    source = """
import ctypes, mmap, os
import _ctypes, bz2, curses, decimal, lzma, multiprocessing, sqlite3, ssl, xml.etree.ElementTree, zlib, zoneinfo
seen = [sqlite3.connect(':memory:').execute('select 1').fetchone()[0]]
with open(_ctypes.__file__, 'rb') as given, open('copied.so', 'wb') as taken: taken.write(given.read())
for attempt in (lambda: ctypes.CDLL(os.path.abspath('copied.so')),
                lambda: mmap.mmap(os.open(os.__file__, os.O_RDONLY), 4096, flags=2, prot=5)):
    try: attempt(); seen.append('mapped')
    except OSError as error: seen.append(type(error).__name__)
seen
"""
    done = gvisor_run(source)
    assert done.result is not None, done.failed
    assert done.result.value == b'[1,"OSError","PermissionError"]', done.result


def test_restored_boxes_draw_different_randomness(gvisor_run: GvisorRun) -> None:
    """X10: what was drawn before the checkpoint is not drawn again by the boxes that come of it."""
    source = "import os, random, uuid\n[random.random(), os.urandom(8).hex(), str(uuid.uuid4()), hash('x')]"
    drawn = []
    for _ in range(6):
        done = gvisor_run(source)
        assert done.result is not None, done.failed
        drawn.append(msgspec.json.decode(done.result.value or b""))
    for column in range(3):
        assert len({row[column] for row in drawn}) == len(drawn), column
    assert len({row[3] for row in drawn}) == 1, "the hash seed is the template's: docs/security/limits.md says so"


def test_the_codes_exit_status_and_its_end_come_through(gvisor_run: GvisorRun) -> None:
    left = gvisor_run("import os\nos._exit(7)")
    assert left.result is not None
    assert left.result.exit_code == 7
    gone = gvisor_run("import ctypes\nctypes.CDLL(None)._exit(0)")
    assert gone.result is None
    assert gone.failed is not None
    assert gone.failed.step == "ended"


# ---- asleep, awake, dead -----------------------------------------------------------------------------------------
def test_a_warm_box_sleeps_and_wakes_for_its_code(ready_box: GvisorMachine) -> None:
    assert until(lambda: states(ready_box) == "T"), states(ready_box)
    ready_box.take_channel().close()
    ready_box.send_code(b"import time; time.sleep(60)", Bounds())
    assert until(lambda: "T" not in states(ready_box)), states(ready_box)


def test_the_keepers_end_is_the_end_of_everything_in_the_box(ready_box: GvisorMachine) -> None:
    """X5: also of a box that is stopped; the pidfd says so only when the last process was reaped."""
    assert until(lambda: states(ready_box) == "T")
    inside = descendants(ready_box.host_pid)
    assert len(inside) >= 3
    ready_box.kill()
    assert dead(ready_box)
    assert not [pid for pid in inside if Path(f"/proc/{pid}").exists()]


def test_the_sentry_has_no_rights_and_no_file_of_the_host(ready_box: GvisorMachine) -> None:
    """X8: nobody, no capability, seccomp on, and no descriptor that leads to a directory of this host."""
    assert until(lambda: states(ready_box) == "T")  # nothing comes or goes any more
    sentries = [pid for pid in descendants(ready_box.host_pid) if status(pid)["Uid"].split()[0] == "65534"]
    assert sentries
    for pid in sentries:
        fields = status(pid)
        assert (fields["CapEff"], fields["Seccomp"], fields["NoNewPrivs"]) == ("0" * 16, "2", "1"), fields
    opened = {os.readlink(fd) for pid in sentries for fd in Path(f"/proc/{pid}/fd").iterdir()}
    kinds = {one.partition(":")[0] for one in opened if not one.startswith("/")}
    assert kinds <= {"socket", "pipe", "anon_inode"}, opened
    files = {one for one in opened if one.startswith("/") and not one.startswith(("/memfd:", "/dev/null"))}
    assert all(one.endswith((".erofs", "/pages.img", "/checkpoint.img", "/pages_meta.img")) for one in files), files


def test_nothing_of_a_box_lies_on_this_host(ready_box: GvisorMachine) -> None:
    """X10: bundle, checkpoint and the sentries' state are on a tmpfs that only the launcher's namespace has."""
    assert until(lambda: states(ready_box) == "T")
    work = GvisorRuntime().store / "work"
    assert list(work.iterdir()) == []
    assert str(work) not in Path("/proc/self/mountinfo").read_text()
    assert str(work) in Path(f"/proc/{ready_box.host_pid}/mountinfo").read_text()  # the look can see


def test_boxes_die_with_their_launcher() -> None:
    """X10: whoever kills the launcher leaves no sentry behind."""
    template = GvisorRuntime().start(TemplateSpec())
    machine = warm(template)
    inside = descendants(machine.host_pid)
    assert len(inside) >= 3
    template._launcher.kill()
    assert dead(machine)
    assert not [pid for pid in inside if Path(f"/proc/{pid}").exists()]
    with pytest.raises(HostFault):
        template.on_readable()
    machine.close()
    template.close()


# ---- a runsc that does not work ----------------------------------------------------------------------------------
def wrapped(tmp_path: Path, body: str) -> binary.Runsc:
    """A program that behaves like runsc but for what `body` does before."""
    real = GvisorRuntime().runsc()
    path = tmp_path / "runsc"
    path.write_text(f'#!/bin/sh\n{body}\nexec {real.path} "$@"\n')
    path.chmod(0o755)
    return binary.Runsc(path=str(path), sha256="0" * 64, version=real.version, release=real.release, go=real.go)


def start(runsc: binary.Runsc, *, restore: bool) -> GvisorTemplate:
    runtime = GvisorRuntime()
    packed = image.find_or_build(runtime.store / "images", None)
    return runtime._launch(runsc, packed, TemplateSpec(), restore=restore)


def test_where_a_checkpoint_fails_boxes_boot_cold(tmp_path: Path) -> None:
    """The same boxes, slower, and the template says why."""
    template = start(wrapped(tmp_path, 'case "$*" in *" checkpoint "*) echo no disk >&2; exit 1;; esac'), restore=True)
    try:
        assert template.facts["boot"] == "cold"
        assert "no disk" in template.facts["why_cold"]
        done = run_once(template, b"6*7", Bounds(wall=30), patience=PATIENCE)
        assert done.result is not None, done.failed
        assert done.result.value == b"42"
    finally:
        template.close()


def test_a_runsc_that_dies_without_a_word_is_refused_by_its_boots(tmp_path: Path) -> None:
    """X2: what a version cannot show. One failed boot of twenty is enough."""
    counter = tmp_path / "boots"
    body = f'case "$*" in *" run "*) echo x >> {counter}; [ $(wc -l < {counter}) -lt 3 ] || exit 2;; esac'
    runsc = wrapped(tmp_path, body)
    packed = image.find_or_build(GvisorRuntime().store / "images", None)
    with pytest.raises(CannotIsolate, match=r"boot 3 of 20 failed \(runsc ended with status 2\)"):
        selftest.run(tmp_path, runsc, packed, lambda: start(runsc, restore=False))
    assert selftest.cached(tmp_path, runsc, packed) is None, "a refusal leaves no verdict"


def test_a_runsc_that_hangs_is_refused_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "_PATIENCE", 2.0)
    runsc = wrapped(tmp_path, 'case "$*" in *" run "*) exec sleep 1000;; esac')
    packed = image.find_or_build(GvisorRuntime().store / "images", None)
    with pytest.raises(CannotIsolate, match=r"boot 1 of 20 failed \(not ready in time\)"):
        selftest.run(tmp_path, runsc, packed, lambda: start(runsc, restore=False))


def test_a_verdict_is_for_one_binary_and_each_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "BOOTS", 2)
    monkeypatch.setattr(selftest, "BOOTS_OF_AN_IMAGE", 1)
    runsc = GvisorRuntime().runsc()
    packed = image.find_or_build(GvisorRuntime().store / "images", None)
    assert selftest.cached(tmp_path, runsc, packed) is None
    verdict = selftest.run(tmp_path, runsc, packed, lambda: start(runsc, restore=False))
    assert verdict["boots"] == 2
    assert selftest.cached(tmp_path, runsc, packed) == verdict
    other = msgspec.structs.replace(runsc, sha256="1" * 64)
    assert selftest.cached(tmp_path, other, packed) is None


def test_a_preload_that_cannot_be_imported_is_a_typed_refusal() -> None:
    with pytest.raises(HostFault, match=r"preload no_such_module.*--preload"):
        GvisorRuntime().start(TemplateSpec(preload=("no_such_module",)))


def test_the_doctor_and_the_probe_boot_one(tmp_path: Path) -> None:
    assert GvisorRuntime().probe() is None
    missing = GvisorRuntime(GvisorChoices(runsc=str(tmp_path / "none"))).probe()
    assert missing is not None
    assert "no runsc at" in missing.missing
