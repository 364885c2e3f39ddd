"""One suite that every rung must pass, shipped so that a rung of your own can be held to it.

Rule 1: a check speaks to a rung only through `Subject`, the shape of the public API: it proves what a user gets.
Rule 2: a check raises `NotConformant` with what it saw; it never repairs, retries or skips.
Rule 3: every check that hopes for a refusal also looks for the thing it would see if the refusal were missing.

Use: `failures = await run_suite(subject)`; an empty list is a pass. `CHECKS` can be parametrized one by one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, Protocol

from lockgate.contract.run import RunResult

MiB: Final = 1024 * 1024


class Subject(Protocol):
    """A rung under test, with a scope that allows the operation `echo(text)` and nothing else."""

    async def code(self, source: str, **bounds: float) -> RunResult:
        """Run `source` once in a fresh sandbox; `bounds` narrow the run's bounds by name."""
        ...

    async def processes(self) -> int:
        """Count the live processes of the rung once its warm machines are complete; compared, never judged alone."""
        ...

    async def supervisor_rss(self) -> int:
        """Resident bytes of the supervisor."""
        ...

    def may_fork(self) -> bool:
        """Whether this rung lets code make processes."""
        ...


class NotConformant(AssertionError):
    """A rung broke a promise; the message says what was seen."""


class Check(NamedTuple):
    """A named promise: `promise` is the id it proves."""

    name: str
    promise: str
    needs_fork: bool
    run: Callable[[Subject], Awaitable[None]]


CHECKS: Final[list[Check]] = []


def check(promise: str, *, needs_fork: bool = False) -> Callable[[Callable[[Subject], Awaitable[None]]], None]:
    """Add a check to the suite under its function's name."""

    def add(function: Callable[[Subject], Awaitable[None]]) -> None:
        CHECKS.append(Check(function.__name__, promise, needs_fork, function))

    return add


def expect(truth: object, saw: object) -> None:
    """Fail with what was seen unless `truth` holds."""
    if not truth:
        raise NotConformant(f"saw {saw!r}")


async def run_suite(subject: Subject) -> list[tuple[str, str]]:
    """Run every check that the rung's nature allows; return (name, what was seen) of each failure."""
    failures: list[tuple[str, str]] = []
    for one in CHECKS:
        if one.needs_fork and not subject.may_fork():
            continue
        try:
            await one.run(subject)
        except NotConformant as failure:
            failures.append((one.name, str(failure)))
    return failures


# ---- shape -----------------------------------------------------------------------------------------------------
@check("X1")
async def a_value_comes_back(subject: Subject) -> None:
    result = await subject.code("print('out'); [1, {'a': None}, 'x' * 3]")
    expect(result.ok and result.value == [1, {"a": None}, "xxx"] and result.stdout == "out\n", result)
    expect(result.killed_by is None and result.exit_code == 0 and result.truncated == {}, result)


@check("X1")
async def failing_code_is_a_result(subject: Subject) -> None:
    result = await subject.code("def f():\n    return 1 / 0\nf()")
    expect(result.error is not None and result.error.name == "ZeroDivisionError", result)
    expect(result.exit_code == 1 and result.killed_by is None, result)
    expect("line 2" in (result.error.traceback if result.error else ""), result)


@check("X1")
async def a_syntax_error_is_a_result(subject: Subject) -> None:
    result = await subject.code("def (:")
    expect(result.error is not None and result.error.name == "SyntaxError" and result.exit_code == 1, result)


@check("X1")
async def the_programs_exit_code_comes_through(subject: Subject) -> None:
    result = await subject.code("import sys\nsys.exit(7)")
    expect(result.exit_code == 7 and result.killed_by is None, result)


# ---- one run, once ---------------------------------------------------------------------------------------------
@check("X10")
async def nothing_of_one_run_is_seen_by_the_next(subject: Subject) -> None:
    plant = (
        "import builtins, sys, os\nbuiltins.planted = 1\nsys.planted = 1\nos.environ['PLANTED'] = '1'\n"
        "open('planted', 'w').close()\nimport json\njson.planted = 1"
    )
    look = (
        "import builtins, sys, os, json\n"
        "[hasattr(builtins, 'planted'), hasattr(sys, 'planted'), 'PLANTED' in os.environ,"
        " os.path.exists('planted'), hasattr(json, 'planted')]"
    )
    control = await subject.code(plant + "\n" + look)
    expect(control.value == [True] * 5, control)  # the look can see: else the next line proves nothing
    await subject.code(plant)
    result = await subject.code(look)
    expect(result.value == [False] * 5, result)


@check("X10")
async def two_runs_draw_different_randomness(subject: Subject) -> None:
    source = "import random, os, uuid\n[random.random(), os.urandom(8).hex(), str(uuid.uuid4())]"
    first, second = await subject.code(source), await subject.code(source)
    pairs = list(zip(first.value, second.value, strict=True))
    expect(all(a != b for a, b in pairs), pairs)


@check("X10", needs_fork=True)
async def nothing_goes_on_after_the_result(subject: Subject) -> None:
    before = await subject.processes()
    result = await subject.code("import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\n'done'")
    expect(result.value == "done", result)
    for _ in range(20):
        if await subject.processes() <= before:
            return
        await subject.code("1")
    raise NotConformant(f"saw {await subject.processes()} processes, {before} before")


# ---- clocks ----------------------------------------------------------------------------------------------------
WALL: Final = {
    "spin": "while True: pass",
    "sleep": "import time\ntime.sleep(60)",
    "signals_ignored": (
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass"
    ),
    "exception_swallowed": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
}
WALL_FORKING: Final = {
    "double_fork": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\ntime.sleep(60)",
    "children_stopped": (
        "import os, signal, time\nfor _ in range(4):\n    if os.fork() == 0:\n"
        "        os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(60)"
    ),
    "fork_bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "thread_bomb": (
        "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "    except RuntimeError: time.sleep(0.01)"
    ),
}


async def _wall(subject: Subject, source: str) -> None:
    result = await subject.code(source, wall=0.7)
    expect(result.killed_by == "wall" and result.exit_code == 124, result)
    expect(0.6 <= result.usage.wall < 10, result.usage)


def _wall_check(name: str, source: str, *, forks: bool) -> None:
    async def run(subject: Subject) -> None:
        await _wall(subject, source)

    CHECKS.append(Check(f"the_wall_clock_beats_{name}", "X5", forks, run))


for _name, _source in WALL.items():
    _wall_check(_name, _source, forks=False)
for _name, _source in WALL_FORKING.items():
    _wall_check(_name, _source, forks=True)


@check("X5")
async def cpu_seconds_end_a_spin(subject: Subject) -> None:
    result = await subject.code("while True: pass", cpu=1, wall=20)
    expect(result.killed_by == "cpu", result)


# ---- memory, disk, output --------------------------------------------------------------------------------------
@check("X6")
async def a_memory_hog_is_ended(subject: Subject) -> None:
    result = await subject.code(
        "x = []\nwhile True: x.append(bytearray(1 << 20))", memory=128 * MiB, disk=16 * MiB, wall=20
    )
    ended = result.killed_by == "memory" or (result.error is not None and result.error.name == "MemoryError")
    expect(ended and result.exit_code in (1, 137), result)


@check("X6", needs_fork=True)
async def a_hog_in_a_child_ends_the_whole_run(subject: Subject) -> None:
    source = (
        "import os, time\nif os.fork() == 0:\n    x = []\n    while True: x.append(bytearray(1 << 20))\ntime.sleep(60)"
    )
    result = await subject.code(source, memory=128 * MiB, disk=16 * MiB, wall=20)
    expect(result.killed_by == "memory" and result.exit_code == 137, result)


@check("X7")
async def the_disk_has_an_end(subject: Subject) -> None:
    source = (
        "n = 0\ntry:\n    with open('big', 'wb') as f:\n        while True: n += f.write(b'x' * 65536)\n"
        "except OSError: pass\nn"
    )
    result = await subject.code(source, disk=4 * MiB)
    expect(result.killed_by == "disk" or (type(result.value) is int and 0 < result.value <= 4 * MiB), result)


@check("X7")
async def the_disk_has_so_many_files(subject: Subject) -> None:
    source = "n = 0\ntry:\n    while n < 100000:\n        open(f'f{n}', 'w').close(); n += 1\nexcept OSError: pass\nn"
    result = await subject.code(source, inodes=256)
    expect(result.killed_by == "disk" or (isinstance(result.value, int) and 0 < result.value <= 256), result)


@check("X9")
async def output_is_cut_with_a_marker(subject: Subject) -> None:
    result = await subject.code(
        "import sys\nsys.stdout.write('a' * 200_000)\nsys.stderr.write('b' * 150_000)", output=65_536
    )
    expect(result.truncated.get("stdout") == 200_000 - 65_536, result.truncated)
    expect(result.truncated.get("stderr") == 150_000 - 65_536, result.truncated)
    expect(
        str(200_000 - 65_536) in result.stdout[-100:] and result.stdout.startswith("a" * 65_000), result.stdout[-100:]
    )


@check("X9")
async def a_flood_leaves_the_supervisor_flat(subject: Subject) -> None:
    await subject.code("print(1)")
    before = await subject.supervisor_rss()
    flood = "import os\nb = b'x' * 65536\nwhile True: os.write(1, b)"
    result = await subject.code(flood, wall=10)
    grown = await subject.supervisor_rss() - before
    expect(result.killed_by in ("wall", "output"), result)
    expect(result.usage.stdout_bytes > 16 * MiB, result.usage)  # it really flooded; an emulated machine is slow
    expect(grown < 4 * MiB, grown)


@check("X9")
async def a_huge_value_is_cut(subject: Subject) -> None:
    result = await subject.code("'v' * 10_000_000")
    expect(len(result.text) < 2 * MiB and (result.value is None or len(result.value) < 2 * MiB), len(result.text))
    expect(result.truncated.get("value", 0) or result.truncated.get("text", 0), result.truncated)


# ---- exits -----------------------------------------------------------------------------------------------------
@check("X4")
async def the_broker_is_reachable(subject: Subject) -> None:
    result = await subject.code("host.call('echo', text='hello')")
    expect(result.value == {"text": "hello"} and len(result.calls) == 1, result)


@check("C8")
async def nothing_else_is_reachable_through_it(subject: Subject) -> None:
    source = (
        "seen = []\nfor name in ('nope', 'os.system', 'host.secret'):\n    try: seen.append(host.call(name))\n"
        "    except host.Denied as e: seen.append(e.reason)\nseen"
    )
    result = await subject.code(source)
    expect(result.value == ["not_available"] * 3 and len(result.denials) == 3, result)


@check("X4")
async def there_is_no_socket(subject: Subject) -> None:
    source = (
        "import socket\nseen = []\nfor family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, 16, 17, 38, 40):\n"
        "    try: socket.socket(family, socket.SOCK_DGRAM); seen.append(int(family))\n    except OSError: pass\n"
        "try: seen.append(socket.getaddrinfo('localhost.test', 80)[0][4][0])\nexcept OSError: pass\nseen"
    )
    result = await subject.code(source)
    expect(
        result.value == [] or (result.error is not None and result.error.name in ("ImportError", "AttributeError")),
        result,
    )


@check("X8")
async def only_its_own_directory_is_writable(subject: Subject) -> None:
    source = (
        "import os\nseen = []\nname = 'planted-' + os.urandom(8).hex()\n"
        "for place in ('/', '/usr', '/etc', '/tmp', '/dev', '/proc', os.path.dirname(os.__file__)):\n"
        "    path = os.path.join(place, name)\n"
        "    try: open(path, 'w').close(); os.unlink(path); seen.append(place)\n    except OSError: pass\n"
        "open('mine', 'w').write('yes')\n[seen, open('mine').read()]"
    )
    result = await subject.code(source)
    expect(result.value == [[], "yes"], result)


@check("X8")
async def the_environment_is_bare(subject: Subject) -> None:
    result = await subject.code("import os\nsorted(set(os.environ) - {'HOME', 'TMPDIR', 'LC_CTYPE'})")
    expect(result.value == [], result)


# ---- the exit status is hearsay --------------------------------------------------------------------------------
@check("X5")
async def leaving_without_a_result_is_not_success(subject: Subject) -> None:
    # The library's _exit, past whatever a rung puts in the place of os._exit; where there is no ctypes, a plain fault.
    leave = "import ctypes\nctypes.CDLL(None)._exit(0)"
    result = await subject.code(leave)
    expect(not result.ok and result.value is None, result)


@check("X5")
async def a_forged_result_binds_nobody(subject: Subject) -> None:
    source = (
        "import os, struct\nfor fd in range(3, 10):\n"
        "    for body in (b'R{}\\n', struct.pack('>I', 2**31) + b'x', b'\\0' * 64):\n"
        "        try: os.write(fd, body)\n        except OSError: pass\nwhile True: pass"
    )
    result = await subject.code(source, wall=2)
    expect(not result.ok, result)
