"""The bounds of a run in the gvisor rung, held by a real supervisor around sentry and stubs (X5 to X7, X10)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from gvisor_fixtures import needs_gvisor
from lockgate.contract.bounds import Bounds, MiB
from lockgate.runtimes.gvisor import GvisorRuntime
from supervisor_client import Client, descendants, groups_of

pytestmark = needs_gvisor

HOG = "x = []\nwhile True: x.append(bytearray(1 << 20))"
CHOICES = {
    "rung": "gvisor",
    "pool": 1,
    "gvisor": {"allow_old": True},
    "acquire": 120.0,
    "bounds": msgspec.to_builtins(Bounds(wall=200.0, cpu=200.0)),
}


@pytest.fixture(scope="module")
def boxes() -> Iterator[Callable[..., object]]:
    """Run code in a box of one supervisor."""
    with Client(**CHOICES) as client:

        def run(code: str, **bounds: object) -> object:
            return client.finish(client.start(code, rung="gvisor", **bounds), seconds=150)

        run.client = client  # type: ignore[attr-defined]
        yield run


def test_a_hog_is_ended_though_its_group_pays_for_the_image(boxes: Callable[..., object]) -> None:
    """X6: a group that was charged for pages of a file is reclaimed for ever instead of killed; the watch ends it."""
    client: Client = boxes.client  # type: ignore[attr-defined]
    client.quiet(120, warm=1)
    for path in (GvisorRuntime().store / "images").glob("*.erofs"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # who comes next pays for it
        os.close(fd)
    for _ in range(2):
        done = boxes(HOG, memory=96 * MiB, disk=16 * MiB, wall=60.0)
        assert (done.killed_by, done.exit_code) == ("memory", 137), done  # type: ignore[attr-defined]
        assert done.usage.wall < 50  # type: ignore[attr-defined]


def test_a_disk_that_is_filled_counts_as_memory(boxes: Callable[..., object]) -> None:
    """X6, X7: the working directory is memory of the sentry; its own bound comes first when it is the smaller."""
    fill = "n = 0\ntry:\n    while True: n += open(f'{n}', 'wb').write(b'x' * (1 << 20))\nexcept OSError: pass\nn"
    done = boxes(fill, disk=8 * MiB, wall=60.0)
    assert 0 < int(bytes(done.value)) <= 8 * MiB  # type: ignore[attr-defined]


def test_files_above_their_bound_end_the_run(boxes: Callable[..., object]) -> None:
    """X7: in directories too, and whatever the code does about signals."""
    deep = (
        "import os, signal\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except OSError: pass\nn = 0\ntry:\n    while n < 200000:\n"
        "        os.makedirs(f'd{n}/e/f'); open(f'd{n}/e/f/g', 'w').close(); n += 1\n"
        "except OSError: pass\nn"
    )
    done = boxes(deep, inodes=512, wall=60.0)
    assert done.killed_by == "disk" or int(bytes(done.value)) <= 512, done  # type: ignore[attr-defined]


def test_processes_are_refused_at_their_bound_and_the_sentry_lives(boxes: Callable[..., object]) -> None:
    """X5: the sentry refuses, the host's pids group has room for what the sentry itself needs."""
    code = (
        "import os, time\nn = 1\ntry:\n    while n < 500:\n        if os.fork() == 0: time.sleep(30)\n        n += 1\n"
        "except OSError as error: seen = error.errno\n[n, seen]"
    )
    done = boxes(code, processes=12, wall=60.0)
    assert bytes(done.value) in (b"[12,11]", b"[11,11]"), done  # type: ignore[attr-defined]


def test_cpu_seconds_count_sentry_and_children(boxes: Callable[..., object]) -> None:
    """X5: RLIMIT_CPU means nothing to a sentry of 2024; the group's counter does."""
    done = boxes("import os\nos.fork()\nwhile True: pass", cpu=1.0, wall=100.0)
    assert done.killed_by == "cpu", done  # type: ignore[attr-defined]


def test_the_clock_beats_a_sentry_that_hangs() -> None:
    """X5: the sentry is stopped from outside, as one that hangs is; the run ends at its wall clock all the same."""
    with Client(**CHOICES) as client:
        client.quiet(120, warm=1)
        sentry = [pid for pid in descendants(client.process.pid) if _field(pid, "Uid") == "65534"]
        assert sentry
        ident = client.start("while True: pass", rung="gvisor", wall=5.0)
        deadline = time.monotonic() + 60
        while _field(sentry[0], "State") == "T" and time.monotonic() < deadline:
            time.sleep(0.005)
        for pid in sentry:
            with contextlib.suppress(ProcessLookupError):  # a spare process of the sentry may be gone by now
                os.kill(pid, signal.SIGSTOP)
        done = client.finish(ident, 60)
        assert (done.killed_by, done.exit_code) == ("wall", 124), done
        client.quiet(120)
        assert not [pid for pid in sentry if Path(f"/proc/{pid}").exists()]


def _field(pid: int, name: str) -> str:
    """The first word of a field of a process's status, "" when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return ""
    return next(line.split()[1] for line in lines if line.startswith(name + ":"))


def test_a_killed_supervisor_leaves_no_sentry_and_no_group() -> None:
    """X10: SIGKILL to the supervisor, with one box asleep and one at work."""
    client = Client(**CHOICES)
    client.quiet(120, warm=1)
    client.start("while True: pass", rung="gvisor", wall=100.0)
    client.stats()
    family = descendants(client.process.pid)
    assert len(family) > 5
    supervisor = client.process.pid
    client.process.kill()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        left = [pid for pid in family if Path(f"/proc/{pid}/cmdline").exists() and _alive(pid)]
        if not left and not groups_of(supervisor):
            break
        time.sleep(0.05)
    assert not left
    assert groups_of(supervisor) == []
    client.close()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_hundred_runs_leak_nothing() -> None:
    """X10: descriptors, groups, processes and memory are as before; every box is used once."""
    with Client(**{**CHOICES, "pool": 2}) as client:
        codes = ("1+1", "1/0", "import os; os._exit(3)", "print('x' * 1000)", "open('a', 'w').write('b')")
        for turn in range(10):
            client.finish(client.start(codes[turn % len(codes)], rung="gvisor"), 120)
        before = client.quiet(120, warm=2)
        family = len(descendants(client.process.pid))
        for turn in range(190):
            client.finish(client.start(codes[turn % len(codes)], rung="gvisor"), 120)
        after = client.quiet(120, warm=2)
        assert after["reaped"] - before["reaped"] == 190
        assert (after["fds"], after["groups"], after["watched"]) == (before["fds"], before["groups"], before["watched"])
        assert len(descendants(client.process.pid)) == family
        assert after["rss"] - before["rss"] < 2 * MiB, (before["rss"], after["rss"])
        launcher_fds = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in _launchers(client.process.pid)]
        assert max(launcher_fds) < 20, launcher_fds
    assert groups_of(client.process.pid) == []


def _launchers(pid: int) -> list[int]:
    return [one for one in descendants(pid) if b"gvisor/launcher.py" in Path(f"/proc/{one}/cmdline").read_bytes()]
