"""HostDoS: code that does not want to end (X5). Each ends by the bound that names it, and leaves nothing."""

from __future__ import annotations

import time

import pytest

from lockgate.contract import wire

SPINS = {
    "endless loop": "while True: pass",
    "signals blocked": (
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n"
        "for n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "while True: pass"
    ),
    "every exception swallowed": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "asleep": "import time\nwhile True: time.sleep(1000)",
    "waiting for nothing": "import threading\nthreading.Lock().acquire() or threading.Event().wait()\n"
    "a = threading.Lock()\na.acquire()\na.acquire()",
    "a C loop that holds the interpreter": "sum(iter(int, 1))",
}
FORKS = {
    "double fork": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        while True: pass\n"
        "    os._exit(0)\nwhile True: time.sleep(9)"
    ),
    "stopped children": (
        "import os, signal, time\nfor _ in range(4):\n    if os.fork() == 0:\n"
        "        os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(60)"
    ),
    "vfork that never returns": (
        "import ctypes, time\nlibc = ctypes.CDLL(None)\nif libc.vfork() == 0:\n    while True: time.sleep(9)\n"
    ),
    "children that ignore their death": (
        "import os, signal\nfor _ in range(8):\n    if os.fork() == 0:\n"
        "        for n in range(1, 65):\n            try: signal.signal(n, signal.SIG_IGN)\n"
        "            except (OSError, ValueError): pass\n"
        "        while True: pass\nwhile True: pass"
    ),
}


def check(client, code):
    begun = time.monotonic()
    result = client.code(code, wall=0.5)
    assert (result.killed_by, result.exit_code) == ("wall", 124), result
    assert 0.5 <= result.usage.wall < 5
    assert time.monotonic() - begun < 10
    stats = client.quiet()
    assert stats["fault"] is None


@pytest.mark.parametrize("name", SPINS)
def test_the_wall_clock_beats(supervisor, name):
    check(supervisor, SPINS[name])


@pytest.mark.parametrize("name", FORKS)
def test_the_wall_clock_beats_processes(forking_supervisor, name):
    check(forking_supervisor, FORKS[name])


def test_a_run_that_ends_in_time_is_not_killed(supervisor):
    """Negative control: the same clock lets good code be."""
    result = supervisor.code("import time\ntime.sleep(0.05)\n'done'", wall=5)
    assert (result.killed_by, result.exit_code, bytes(result.value)) == (None, 0, b'"done"')


def test_stopping_itself_is_no_escape(forking_supervisor):
    """Pid 1 of a namespace is not stopped by its own SIGSTOP; either it ends or the wall clock ends it."""
    result = forking_supervisor.code(
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nwhile True: pass", wall=0.5
    )
    assert result.killed_by == "wall"


def test_cpu_seconds_are_counted_over_the_whole_run(forking_supervisor):
    """X5: RLIMIT_CPU would give each of two children its own limit; the run gets one."""
    result = forking_supervisor.code("import os\nos.fork()\nwhile True: pass", cpu=0.4, wall=20)
    assert (result.killed_by, result.exit_code) == ("cpu", 137)
    assert 0.4 <= result.usage.cpu < 1.2


def test_cpu_seconds_of_one_process(supervisor):
    result = supervisor.code("while True: pass", cpu=0.3, wall=20)
    assert result.killed_by == "cpu"
    assert 0.3 <= result.usage.cpu < 1.0


def test_dead_children_count_too(forking_supervisor):
    """A chain of short-lived children that nobody waits for still spends the run's seconds."""
    code = (
        "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True:\n"
        "    if os.fork() == 0:\n        end = time.process_time() + 0.02\n"
        "        while time.process_time() < end: pass\n        os.kill(os.getpid(), 9)\n    time.sleep(0.02)"
    )
    assert forking_supervisor.code(code, cpu=0.4, wall=20).killed_by == "cpu"


def test_a_share_of_a_core_is_a_share(forking_supervisor):
    result = forking_supervisor.code("while True: pass", cpu_share=0.25, wall=1.0)
    assert result.killed_by == "wall"
    assert result.usage.cpu < 0.6


def test_nothing_lives_on_after_the_result(forking_supervisor):
    """X10: what the code left running dies with its run. Its last descriptor of the channel is closed by the kernel."""
    client = forking_supervisor
    client.quiet(warm=1)
    client.broker.silent = True
    try:
        ident = client.start(
            "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\n    os._exit(0)\n'done'"
        )
        deadline = time.monotonic() + 20
        while f"t{ident}" not in client.broker.channels:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        channel = client.broker.channels[f"t{ident}"].dup()
    finally:
        client.broker.silent = False
    with channel:
        channel.settimeout(0.2)
        with pytest.raises(TimeoutError):
            channel.recv(1)  # the control: a living run holds it open
        client.broker.send(wire.Attached(ticket=f"t{ident}", ok=True))
        assert bytes(client.finish(ident).value) == b'"done"'
        channel.settimeout(30)
        assert channel.recv(1) == b""
