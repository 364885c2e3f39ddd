"""HostDoS: code that takes memory, disk, processes or output (X6, X7, X9)."""

from __future__ import annotations

import pytest

MiB = 1 << 20
HOG = "x = []\nwhile True: x.append(bytearray(1 << 20))"
CHILD_HOG = f"import os, time\nif os.fork() == 0:\n    {HOG.replace(chr(10), chr(10) + '    ')}\ntime.sleep(60)"


def test_a_hog_is_ended(supervisor):
    """X6: by the group where there is one; under the accepted fallback by an exception or by the watch."""
    result = supervisor.code(HOG, memory=128 * MiB, wall=20)
    if supervisor.ready.facts["memory_by"] == "rlimit":
        assert result.killed_by == "memory" or (result.error is not None and result.error.name == "MemoryError"), result
    else:
        assert (result.killed_by, result.exit_code) == ("memory", 137), result
        assert result.usage.memory_peak <= 128 * MiB


def test_a_hog_in_a_child_ends_the_whole_run(forking_supervisor):
    """X6: v1 kills one process only, so the supervisor ends the rest on the kernel's event."""
    result = forking_supervisor.code(CHILD_HOG, memory=96 * MiB, wall=20)
    assert (result.killed_by, result.exit_code) == ("memory", 137), result
    assert result.usage.wall < 15


def test_many_small_hogs_are_one_run(forking_supervisor):
    code = (
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        x = bytearray(24 << 20)\n"
        "        for i in range(0, len(x), 4096): x[i] = 1\n        time.sleep(60)\ntime.sleep(60)"
    )
    assert forking_supervisor.code(code, memory=96 * MiB, wall=20).killed_by == "memory"


def test_the_disk_counts_as_memory(forking_supervisor):
    """A tmpfs holds memory: what the run writes is charged to it, so the cap cannot be doubled by files."""
    code = (
        "x = bytearray(60 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\nopen('f', 'wb').write(b'y' * (60 << 20))"
    )
    assert forking_supervisor.code(code, memory=96 * MiB, wall=20).killed_by == "memory"


def test_under_the_cap_nothing_is_killed(supervisor):
    """Negative control."""
    result = supervisor.code("len(bytearray(32 << 20))", memory=160 * MiB)
    assert (result.killed_by, bytes(result.value)) == (None, str(32 * MiB).encode())


def test_the_disk_has_an_end(supervisor):
    """X7: ENOSPC inside; the code may handle it, and then nothing is killed."""
    code = (
        "n = 0\ntry:\n    with open('big', 'wb') as f:\n        while True: n += f.write(b'x' * 65536)\n"
        "except OSError as e: n = [n, e.errno]\nn"
    )
    result = supervisor.code(code, disk=4 * MiB)
    assert result.killed_by is None
    assert bytes(result.value) in (b"[4194304,28]", b"[4194304,27]"), bytes(result.value)


def test_files_have_an_end(supervisor):
    code = "n = 0\ntry:\n    while n < 9999:\n        open(f'f{n}', 'w').close(); n += 1\nexcept OSError: pass\nn"
    result = supervisor.code(code, inodes=128)
    assert result.killed_by is None
    assert 100 < int(bytes(result.value)) < 128


@pytest.mark.parametrize(
    "code",
    [
        "f = open('big', 'wb')\nwhile True: f.write(b'x' * 65536)",
        "n = 0\nwhile True:\n    open(f'f{n}', 'w').close(); n += 1",
    ],
)
def test_code_that_fails_by_the_disk_is_reported_so(forking_supervisor, code):
    """killed_by="disk" needs both: the code failed by it, and the kernel says that the disk is full (ADR 0017)."""
    result = forking_supervisor.code(code)
    assert (result.killed_by, result.exit_code) == ("disk", 137), result
    assert result.error is not None


def test_a_lie_about_the_disk_is_not_believed(supervisor):
    """The exception alone proves nothing: with room left it is the code's own error."""
    result = supervisor.code("raise OSError(28, 'No space left on device')")
    assert result.killed_by is None
    assert result.exit_code == 1


def test_code_that_fails_by_the_process_bound_is_reported_so(forking_supervisor):
    result = forking_supervisor.code("import os, time\nwhile True:\n    if os.fork() == 0: time.sleep(60)", wall=20)
    assert (result.killed_by, result.exit_code) == ("processes", 137), result
    assert result.error is not None
    assert result.error.name == "BlockingIOError"


def test_a_lie_about_processes_is_not_believed(supervisor):
    result = supervisor.code("raise BlockingIOError(11, 'Resource temporarily unavailable')")
    assert (result.killed_by, result.exit_code) == (None, 1)


def test_refused_threads_are_reported_so(forking_supervisor):
    code = "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()"
    assert forking_supervisor.code(code, wall=20).killed_by == "processes"


def test_the_bound_is_the_number(forking_supervisor):
    code = (
        "import os, time\nn = 1\ntry:\n    while n < 999:\n        if os.fork() == 0: time.sleep(60)\n        n += 1\n"
        "except OSError: pass\nn"
    )
    result = forking_supervisor.code(code, processes=12, wall=20)
    assert (result.killed_by, bytes(result.value)) == (None, b"12"), result


def test_a_patient_fork_bomb_is_ended_before_its_wall_clock(forking_supervisor):
    """Refused hundreds of times over two seconds and still asking: that is a bomb, not a program."""
    code = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    result = forking_supervisor.code(code, wall=25, cpu=20)
    assert (result.killed_by, result.exit_code) == ("processes", 137), result
    assert result.usage.wall < 20
    assert forking_supervisor.quiet()["fault"] is None


def test_a_fork_bomb_under_a_short_wall_clock(forking_supervisor):
    code = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert forking_supervisor.code(code, wall=0.5).killed_by == "wall"


def test_a_thread_bomb_under_a_short_wall_clock(forking_supervisor):
    code = (
        "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "    except RuntimeError: time.sleep(0.01)"
    )
    assert forking_supervisor.code(code, wall=0.7).killed_by == "wall"


FLOOD = "import os\nb = b'x' * 65536\nwhile True: os.write({fd}, b)"


@pytest.mark.parametrize(("fd", "stream"), [(1, "stdout"), (2, "stderr")])
def test_a_flood_is_ended_and_leaves_the_supervisor_flat(supervisor, fd, stream):
    """X9: half a gigabyte; the supervisor's memory does not move by a megabyte."""
    supervisor.code("print(1)")
    before = supervisor.quiet()["rss"]
    result = supervisor.code(FLOOD.format(fd=fd), output_kill=512 * MiB, wall=25)
    assert (result.killed_by, result.exit_code) == ("output", 137), result
    text = getattr(result, stream)
    assert text.startswith("x" * 65536)
    dropped = result.truncated[stream]
    assert text.endswith(f"[lockgate: {dropped} bytes dropped]")
    assert dropped > 511 * MiB
    assert supervisor.quiet()["rss"] - before < 1 * MiB


def test_output_is_cut_with_the_number_of_bytes(supervisor):
    """X9, both streams apart."""
    result = supervisor.code(
        "import sys\nsys.stdout.write('a' * 200_000)\nsys.stderr.write('b' * 150_000)\nNone", output=65_536
    )
    assert result.killed_by is None
    assert result.truncated == {"stdout": 134_464, "stderr": 84_464}
    assert result.stdout == "a" * 65_536 + "\n[lockgate: 134464 bytes dropped]"
    assert (result.usage.stdout_bytes, result.usage.stderr_bytes) == (200_000, 150_000)


def test_a_streaming_flood_pushes_no_more_than_is_kept(supervisor):
    """The agent of a streaming run is not flooded either."""
    from lockgate.contract import wire

    ident = supervisor.start(FLOOD.format(fd=1), stream=True, output=50_000, output_kill=64 * MiB, wall=20)
    pushed = b""
    while True:
        message = supervisor.receive()
        assert message.id == ident
        if isinstance(message, wire.Finished):
            break
        pushed += message.data
    assert pushed == b"x" * 50_000
    assert message.killed_by == "output"


def test_a_huge_value_is_cut(supervisor):
    result = supervisor.code("'v' * 10_000_000")
    assert bytes(result.value) == b"null"
    assert len(result.text) < 300_000
    assert result.truncated["text"] > 9_000_000 or result.truncated["value"] > 9_000_000


def test_bytes_that_are_no_result_end_the_run(supervisor):
    """GuestProtocolError: what is not the machine's frame is hostile."""
    result = supervisor.code("import os\nos.write(4, b'\\xff' * 64)\nwhile True: pass", wall=10)
    assert (result.killed_by, result.exit_code) == ("protocol", 137), result


def test_leaving_without_a_result_is_told_with_its_signal(supervisor):
    result = supervisor.code("import ctypes\nctypes.string_at(0)")
    assert result.killed_by is None
    assert result.exit_code in (139, 1)
    assert result.error is not None
    assert result.error.name == "NoResult"
