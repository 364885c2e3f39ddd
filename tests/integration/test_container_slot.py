"""One slot at a time: what code gets back, what bounds it, what happens when anything of it is odd."""

from __future__ import annotations

import os
import resource
import select
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import HostFault
from lockgate.runtimes import dialog
from lockgate.runtimes.container import ContainerRuntime, ContainerTemplate, plan, slot
from lockgate.runtimes.framed import FramedMachine as ContainerMachine
from lockgate.runtimes.protocol import MachineEvent, MachineFailed, MachineReady, MachineResult, TemplateSpec
from lockgate.runtimes.single import Outcome, run_once

Run = Callable[..., Outcome]


def result(outcome: Outcome) -> MachineResult:
    assert outcome.result is not None, outcome
    return outcome.result


def take(
    template: ContainerTemplate, bounds: Bounds | None = None
) -> tuple[ContainerMachine, MachineReady | MachineFailed]:
    """Ask for a slot and wait, at most ten seconds, for its first word."""
    machine = template.request(bounds or Bounds())
    poll = select.poll()
    poll.register(template.fileno(), select.POLLIN)
    poll.register(machine.control, select.POLLIN)
    deadline = time.monotonic() + 10
    word: MachineEvent | None = None
    while time.monotonic() < deadline:
        poll.poll(1000)
        for one in template.on_readable():
            assert one is machine, one
        word = word or next(iter(machine.on_control()), None)
        assert not isinstance(word, MachineResult)
        if word is not None and machine.pidfd >= 0:  # two sockets: either may be first
            return machine, word
        time.sleep(0.001)
    raise AssertionError("no word from the slot in ten seconds")


def wait_dead(pidfd: int, seconds: float = 10) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


# ---- values ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("source", "value", "text"),
    [
        ("1 + 1", b"2", "2"),
        ("x = 1\nx * 2.5", b"2.5", "2.5"),
        ("'a\\u00e9\\u2028'", '"a\u00e9\u2028"'.encode(), "'a\u00e9\\u2028'"),
        ("[1, (2, 3), {'k': None}]", b'[1,[2,3],{"k":null}]', "[1, (2, 3), {'k': None}]"),
        ("x = 1", None, ""),
        ("", None, ""),
        ("# nothing", None, ""),
        ("None", None, ""),
        ("float('nan')", None, "nan"),
        ("[float('inf')]", None, "[inf]"),
        ("{1: 2}", None, "{1: 2}"),
        ("'\\ud800'", None, "'\\ud800'"),
        ("{1, 2}", None, "{1, 2}"),
        ("b'x'", None, "b'x'"),
        ("2 ** 100", str(2**100).encode(), str(2**100)),
        ("x = []\nx.append(x)\nx", None, "[[...]]"),
        ("(lambda: 0).__name__", b'"<lambda>"', "'<lambda>'"),
        ("def f():\n    return 7\nf()", b"7", "7"),
        ("for i in range(3):\n    i", None, ""),
        ("import host as h\nh is host", b"true", "True"),
        ("__name__", b'"__main__"', "'__main__'"),
        ("import os\nsorted(os.environ.items())", b'[["HOME","/run"],["TMPDIR","/run"]]', None),
        ("import os\n[os.getcwd(), os.listdir('.'), os.getpid(), os.getuid()]", b'["/run",[],1,65534]', None),
    ],
)
def test_value_of_the_last_expression(container_run: Run, source: str, value: bytes | None, text: str | None) -> None:
    """X1: code runs like a notebook cell; what JSON cannot hold has a text only."""
    got = result(container_run(source))
    assert (got.error, got.exit_code, got.truncated) == (None, 0, {})
    assert got.value == value
    if text is not None:
        assert got.text == text


def test_deep_and_long_numbers_have_a_text_only(container_run: Run) -> None:
    """X9: what a reader of JSON might choke on never becomes a value."""
    assert result(container_run("x = 1\nfor _ in range(200):\n    x = [x]\nx")).value is None
    assert result(container_run("10 ** 4000")).value is None


@pytest.mark.parametrize(
    ("source", "name", "inside"),
    [
        ("1 / 0", "ZeroDivisionError", "line 1"),
        ("def f(n):\n    return f(n)\nf(1)", "RecursionError", "repeated"),
        ("def (:", "SyntaxError", "line 1"),
        ("raise KeyboardInterrupt('stop')", "KeyboardInterrupt", "stop"),
        ("raise BaseException('b')", "BaseException", "b"),
        ("class E(Exception):\n    def __str__(self):\n        raise E()\nraise E()", "E", "failed"),
        ("x = '\x00'", "SyntaxError|ValueError", "null bytes"),
        ("(" * 5000, "SyntaxError|MemoryError|RecursionError", ""),
        (
            "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('v') from e",
            "ValueError",
            "direct cause",
        ),
        ("x = 1\nassert x == 2, 'no'", "AssertionError", "assert x == 2"),
        ("import json\njson.loads('{')", "JSONDecodeError", "json.loads('{')"),
    ],
)
def test_failing_code_is_a_result(container_run: Run, source: str, name: str, inside: str) -> None:
    """X8: the error names what happened, and its traceback starts at the code's own first frame."""
    got = result(container_run(source))
    assert got.exit_code == 1 and got.value is None  # noqa: PT018 - one fact
    assert got.error is not None
    assert got.error.name in name.split("|")
    assert inside in got.error.traceback + got.error.message
    frames = [line for line in got.error.traceback.splitlines() if line.startswith('  File "')]
    assert all('"<run>"' in line or '"/usr/lib/python3' in line for line in frames)


def test_code_that_is_not_utf8_is_an_error_of_the_code(container_run: Run) -> None:
    """A caller that sends such bytes past the gate still gets a typed answer."""
    got = result(container_run(b"x = '\xff'"))
    assert got.error is not None
    assert got.error.name == "UnicodeDecodeError"


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("import sys\nsys.exit()", 0),
        ("import sys\nsys.exit(7)", 7),
        ("import sys\nsys.exit(-1)", 255),
        ("raise SystemExit('last words')", 1),
        ("import os\nos._exit(9)", 9),
        ("import sys\ndef f():\n    sys.exit(3)\nf()", 3),
    ],
)
def test_exit_codes(container_run: Run, source: str, code: int) -> None:
    """X1: the program's own status comes through, and it is no error."""
    outcome = container_run(source)
    got = result(outcome)
    assert (got.exit_code, got.error) == (code, None)
    assert outcome.stderr == (b"last words\n" if "last words" in source else b"")


def test_streams_are_apart_and_flushed(container_run: Run) -> None:
    """X9: both streams arrive whole before the result, in their own order, whatever the code did to them."""
    outcome = container_run(
        "import sys, os\nprint('out')\nprint('err', file=sys.stderr)\nsys.stdout.write('no newline')\n"
        "os.write(2, b'raw')\nprint('\\ud800')\nsys.stdout.buffer.write(b'\\xff')"
    )
    assert outcome.stdout == b"out\nno newline\\ud800\n\xff"
    assert outcome.stderr == b"err\nraw"
    broken = container_run("import sys\nprint('kept')\nsys.stdout.close()\nsys.stderr = None\n5")
    assert (broken.stdout, result(broken).value) == (b"kept\n", b"5")


def test_threads_are_awaited(container_run: Run) -> None:
    """X1: what a thread prints before the end of the run is not lost."""
    source = (
        "import threading, time\n"
        "def f():\n    time.sleep(0.05)\n    print('late')\n"
        "threading.Thread(target=f).start()\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n'done'"
    )
    outcome = container_run(source)
    assert outcome.stdout == b"late\n"
    assert result(outcome).value == b'"done"'


def test_a_forgotten_child_sends_no_second_result(container_run: Run) -> None:
    """X10: a fork that falls out of the code ends there; one run gives one result."""
    outcome = container_run("import os\npid = os.fork()\nif pid:\n    os.waitpid(pid, 0)\nprint(bool(pid))\n'value'")
    assert sorted(outcome.stdout.split()) == [b"False", b"True"]
    assert result(outcome).value == b'"value"'


# ---- caps ------------------------------------------------------------------------------------------------------
def test_value_and_text_are_capped_with_the_count(container_run: Run) -> None:
    """X9: a value above its cap is dropped with its size; a text is cut with a marker that says how much."""
    got = result(container_run("'x' * 5000", value=1000))
    assert got.value is None
    assert got.truncated == {"value": 5002, "text": 4002}
    assert got.text.startswith("'" + "x" * 999)
    assert got.text.endswith("… [4002 bytes dropped]")
    fits = result(container_run("'x' * 990", value=1000))
    assert (fits.truncated, len(fits.value or b"")) == ({}, 992)


def test_hostile_repr(container_run: Run) -> None:
    """X9: a repr that raises becomes a text, a huge one is cut, one that never ends is ended by the wall clock."""
    raises = result(container_run("class C:\n    def __repr__(self):\n        raise ValueError(1)\nC()"))
    assert raises.text == "<repr of C failed: ValueError>"
    huge = result(container_run("class C:\n    def __repr__(self):\n        return 'y' * 10_000_000\nC()", value=4096))
    assert huge.truncated == {"text": 10_000_000 - 4096}
    exits = result(container_run("class C:\n    def __repr__(self):\n        raise SystemExit(3)\nC()"))
    assert exits.exit_code == 1
    endless = container_run("class C:\n    def __repr__(self):\n        while True: pass\nC()", wall=0.5)
    assert endless.killed
    assert endless.run_seconds < 2


def test_long_tracebacks_and_messages_are_cut(container_run: Run) -> None:
    """X9: an error is as bounded as a value."""
    got = result(container_run("raise ValueError('m' * 1_000_000)"))
    assert got.error is not None
    assert len(got.error.message) == dialog.ERROR_MESSAGE_BYTES
    assert len(got.error.traceback) < 2 * dialog.ERROR_TRACEBACK_BYTES


# ---- the wire --------------------------------------------------------------------------------------------------
def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


GOOD = b'{"value":1,"text":"1","error":null,"exit_code":0,"truncated":{}}'


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\x00\x00\x00",
        b"\xff\xff\xff\xff",
        struct.pack(">I", 300_000 * 8),
        frame(b"[]"),
        frame(b"not json"),
        frame(b'{"value":NaN,"text":"1","error":null,"exit_code":0,"truncated":{}}'),
        frame(b'{"value":1e999,"text":"1","error":null,"exit_code":0,"truncated":{}}'),
        frame(b'{"value":"\\ud800","text":"1","error":null,"exit_code":0,"truncated":{}}'),
        frame(GOOD.replace(b'"exit_code":0', b'"exit_code":256')),
        frame(GOOD.replace(b'"exit_code":0', b'"exit_code":"0"')),
        frame(GOOD.replace(b'"truncated":{}', b'"truncated":{"stdout":1}')),
        frame(GOOD.replace(b'"truncated":{}', b'"truncated":{"text":-1}')),
        frame(GOOD.replace(b'"text":"1"', b'"text":5')),
        frame(GOOD.replace(b'"value":1', b'"value":1,"more":2')),
        frame(
            b'{"value":' + b"[" * 100_000 + b"]" * 100_000 + b',"text":"","error":null,"exit_code":0,"truncated":{}}'
        ),
        frame(b"\xff\xfe"),
    ],
    ids=lambda sent: repr(bytes(sent[:40])),
)
def test_odd_results_are_protocol_failures(container_run: Run, sent: bytes) -> None:
    """X9: what a slot says is typed and capped again outside; anything odd ends the run as a protocol failure."""
    outcome = container_run(f"import os, time\nos.write(4, {sent!r})\ntime.sleep(60)", wall=10)
    assert outcome.failed is not None, outcome
    assert outcome.failed.step == "protocol"


def test_a_forged_result_is_only_a_claim(container_run: Run) -> None:
    """X9: code may forge its own result, within the same caps, and what follows it is nobody's."""
    got = result(container_run(f"import os, time\nos.write(4, {frame(GOOD) + frame(GOOD)!r})\ntime.sleep(60)"))
    assert got.value == b"1"
    body = GOOD.replace(b'"text":"1"', b'"text":"' + b"z" * 3000 + b'"')
    cut = result(container_run(f"import os, time\nos.write(4, {frame(body)!r})\ntime.sleep(60)", value=1000))
    assert cut.truncated == {"text": 2000}


def test_a_flood_on_control_costs_nothing(container_run: Run) -> None:
    """X9: the first header decides; the rest is not read."""
    outcome = container_run("import os\nwhile True:\n    os.write(4, b'\\x7f' * 65536)", wall=10)
    assert outcome.failed is not None
    assert outcome.failed.step == "protocol"


def test_an_end_without_a_word(container_run: Run) -> None:
    """X1: a crash of the interpreter is an event, not a hang."""
    outcome = container_run("import os\nos.close(4)\nimport time\ntime.sleep(60)", wall=10)
    assert outcome.failed is not None
    assert outcome.failed.step == "ended"
    crash = container_run("import ctypes\nctypes.string_at(0)", wall=10)
    assert crash.failed is not None
    assert crash.failed.step == "ended"


def test_one_machine_one_run(container_template: ContainerTemplate) -> None:
    """X10: there is no second run: not through the interface, and not by bytes on the socket."""
    machine, event = take(container_template)
    try:
        assert isinstance(event, MachineReady)
        machine.send_code(b"'first'", Bounds())
        poll = select.poll()
        poll.register(machine.control, select.POLLIN)
        assert poll.poll(5000)
        assert isinstance(machine.on_control()[0], MachineResult)
        with pytest.raises(ValueError, match="once"):
            machine.send_code(b"'second'", Bounds())
        machine.control.send(dialog.CODE_HEADER.pack(dialog.CODE_MAGIC, 3, 1000) + b"1+1")
        assert not poll.poll(300)
        machine.take_channel().close()
        with pytest.raises(ValueError, match="before"):
            machine.take_channel()
    finally:
        machine.kill()
        assert wait_dead(machine.pidfd)
        machine.close()
        machine.close()


def test_a_large_source_is_sent_in_parts(container_template: ContainerTemplate) -> None:
    """X9: a megabyte of code does not block the sender."""
    outcome = run_once(container_template, b"# " + b"x" * 1_000_000 + b"\nlen('abc')", Bounds(wall=10))
    assert result(outcome).value == b"3"


# ---- the broker channel ----------------------------------------------------------------------------------------
def answering(body: bytes) -> bytes:
    """Stand in for the broker: echo the arguments, deny `forbidden`, fail `broken`, know not of `unsure`."""
    request = msgspec.json.decode(body)
    assert list(request) == ["id", "op", "args"]
    reasons = {"forbidden": "not_available", "broken": "backend_failed", "unsure": "outcome_unknown"}
    if request["op"] in reasons:
        error = {"reason": reasons[request["op"]], "operation": request["op"], "message": "No. Next step: stop."}
        return msgspec.json.encode({"id": request["id"], "error": error})
    return msgspec.json.encode({"id": request["id"], "ok": [request["op"], request["args"]]})


def test_host_module(container_run: Run) -> None:
    """C1, C8: call, export and operations are the only way out, and a denial is typed in code."""
    outcome = container_run(
        "import host\n"
        "seen = [host.call('get_order', order_id='ord_1', amount=2), host.operations()]\n"
        "seen.append(host.export('a.txt', 'text'))\n"
        "for name in ('forbidden', 'broken', 'unsure'):\n"
        "    try:\n        host.call(name)\n"
        "    except host.HostError as e:\n"
        "        seen.append([type(e).__name__, e.reason, e.operation, str(e), isinstance(e, host.Denied)])\n"
        "seen",
        broker=answering,
    )
    assert msgspec.json.decode(result(outcome).value or b"") == [
        ["get_order", {"order_id": "ord_1", "amount": 2}],
        ["host.operations", {}],
        ["host.export", {"name": "a.txt", "data": "dGV4dA==", "last": True}],
        ["Denied", "not_available", "forbidden", "No. Next step: stop.", True],
        ["CallFailed", "backend_failed", "broken", "No. Next step: stop.", False],
        ["OutcomeUnknown", "outcome_unknown", "unsure", "No. Next step: stop.", False],
    ]


def test_exports_go_out_in_chunks(container_run: Run) -> None:
    """X7: a file of more than half a MiB is several frames, each below the frame's cap, the last one marked."""
    sizes: list[tuple[int, bool]] = []

    def broker(body: bytes) -> bytes:
        request = msgspec.json.decode(body)
        sizes.append((len(request["args"]["data"]), request["args"]["last"]))
        return msgspec.json.encode({"id": request["id"], "ok": None})

    outcome = container_run("host.export('b', bytes(1_200_000))\nhost.export('empty', b'')", broker=broker)
    assert result(outcome).error is None
    assert sizes == [(699052, False), (699052, False), (201_900, True), (0, True)]


def test_threads_share_the_channel_and_children_do_not(container_run: Run) -> None:
    """C3: ids rise strictly whoever calls; a forked child is told no before it can break the order."""
    ids: list[int] = []

    def broker(body: bytes) -> bytes:
        ids.append(msgspec.json.decode(body)["id"])
        return answering(body)

    outcome = container_run(
        "import threading, os\ngot = []\n"
        "def f(n):\n    for i in range(10):\n        got.append(host.call('op', n=n)[1]['n'] == n)\n"
        "ts = [threading.Thread(target=f, args=(n,)) for n in range(4)]\n"
        "[t.start() for t in ts]\n[t.join() for t in ts]\n"
        "r, w = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    try:\n        host.call('op')\n"
        "    except RuntimeError as e:\n        os.write(w, str(e).encode())\n"
        "    os._exit(0)\n"
        "os.wait()\n[len(got), all(got), os.read(r, 100).decode()]",
        broker=broker,
    )
    assert msgspec.json.decode(result(outcome).value or b"") == [
        40,
        True,
        "only the process that was started with this run may call the host",
    ]
    assert ids == list(range(1, 41))


def test_a_closed_channel_is_an_error_in_code(container_run: Run) -> None:
    """C8: when the broker hangs up, code gets an exception and goes on; nothing hangs."""
    outcome = container_run(
        "try:\n    host.call('op')\nexcept OSError as e:\n    x = type(e).__name__\nx",
        meanwhile=lambda machine: machine.on_control(),
        broker=lambda _: None,
        wall=1,
    )
    assert outcome.killed  # control: an open channel without an answer waits

    def hang_up(_: bytes) -> bytes:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        container_run("host.call('op')", broker=hang_up)


# ---- bounds ----------------------------------------------------------------------------------------------------
def test_disk_and_inodes_are_bounded(container_run: Run) -> None:
    """X7: ENOSPC at the size and at the number of files, EFBIG for one file above the size."""
    got = result(
        container_run(
            "import errno\n"
            "def fill():\n    n = 0\n    with open('big', 'wb') as f:\n"
            "        while True:\n            n += f.write(b'x' * 65536)\n"
            "seen = []\n"
            "try:\n    fill()\nexcept OSError as e:\n    seen.append(errno.errorcode[e.errno])\n"
            "import os\nos.remove('big')\n"
            "try:\n    os.truncate(os.open('sparse', os.O_CREAT | os.O_WRONLY), 1 << 40)\n"
            "except OSError as e:\n    seen.append(errno.errorcode[e.errno])\n"
            "try:\n    for i in range(1000):\n        open(str(i), 'w').close()\n"
            "except OSError as e:\n    seen.append(errno.errorcode[e.errno])\n    seen.append(i)\nseen",
            disk=1 << 20,
            inodes=64,
        )
    )
    seen = msgspec.json.decode(got.value or b"")
    assert seen[0] in {"ENOSPC", "EFBIG"}
    assert seen[1:3] == ["EFBIG", "ENOSPC"]
    assert 50 < seen[3] < 64


def test_processes_and_descriptors_are_bounded(container_run: Run) -> None:
    """X5: EAGAIN at the number of processes, EMFILE at 256 descriptors."""
    got = result(
        container_run(
            "import os, time, errno\nn = 0\ntry:\n    while True:\n"
            "        if os.fork() == 0:\n            time.sleep(60)\n            os._exit(0)\n        n += 1\n"
            "except OSError as e:\n    why = errno.errorcode[e.errno]\n"
            "fds = 0\ntry:\n    while True:\n        os.dup(0)\n        fds += 1\n"
            "except OSError as e:\n    more = errno.errorcode[e.errno]\n[n, why, fds, more]",
            processes=8,
        )
    )
    assert msgspec.json.decode(got.value or b"") == [7, "EAGAIN", 251, "EMFILE"]


def test_cpu_seconds_end_a_spin(container_run: Run) -> None:
    """X5: RLIMIT_CPU is hard: ignoring SIGXCPU does not help."""
    outcome = container_run("import signal\nsignal.signal(24, signal.SIG_IGN)\nwhile True: pass", cpu=1, wall=10)
    assert outcome.failed is not None
    assert outcome.failed.step == "ended"
    assert 0.8 < outcome.run_seconds < 8


RUNAWAYS = {
    "loop": "while True:\n    pass",
    "signals": (
        "import signal\nfor n in range(1, 65):\n    try:\n        signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError):\n        pass\nwhile True:\n    pass"
    ),
    "daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        while True:\n            time.sleep(1)\n    os._exit(0)\ntime.sleep(60)"
    ),
    "stopped": (
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nif os.fork() == 0:\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\nwhile True:\n    pass"
    ),
    "forks": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "threads": (
        "import threading, time\nwhile True:\n    try:\n"
        "        threading.Thread(target=time.sleep, args=(60,)).start()\n    except RuntimeError:\n        pass"
    ),
}


@pytest.mark.parametrize("source", RUNAWAYS.values(), ids=RUNAWAYS.keys())
def test_the_kill_beats_everything(container_run: Run, source: str) -> None:
    """X5: one SIGKILL to the slot's first process takes the whole pid namespace, reaped, within seconds."""
    outcome = container_run(source, wall=0.5)
    assert outcome.killed
    assert outcome.run_seconds < 3
    assert outcome.death_seconds < 5


def test_memory_by_rlimit() -> None:
    """X6: without a memory cgroup the accepted fallback caps the address space of the one process there may be."""
    template = ContainerRuntime().start(TemplateSpec(memory_by_rlimit=True))
    try:
        bounds = Bounds(wall=10, memory=64 << 20)
        fits = result(run_once(template, b"len(bytearray(40 << 20))", bounds))
        assert fits.value == str(40 << 20).encode()
        hog = result(run_once(template, b"x = []\nwhile True: x.append(bytes(1 << 20))", bounds))
        assert hog.error is not None
        assert hog.error.name == "MemoryError"
        fork = result(run_once(template, b"import os\nos.fork()", bounds))
        assert fork.error is not None
        assert fork.error.name == "BlockingIOError"
    finally:
        template.close()


# ---- failing closed --------------------------------------------------------------------------------------------
STEPS = slot.STEPS


@pytest.mark.parametrize("step", STEPS)
def test_a_failed_step_ends_the_slot_before_code(step: str) -> None:
    """X3: each hardening step, made to fail, gives MachineFailed with its name, and the slot is dead without code."""
    template = ContainerRuntime((f"--fail={step}",)).start(TemplateSpec())
    try:
        machine, event = take(template)
        assert isinstance(event, MachineFailed)
        assert (event.step, event.errno) == (step, 1)
        with pytest.raises(ValueError, match="ready"):
            machine.send_code(b"1", Bounds())
        assert wait_dead(machine.pidfd)
        machine.close()
    finally:
        template.close()


def test_the_steps_tested_are_all_steps() -> None:
    """A step added to the slot without a test of its failure is a hole: the slot's own report names every one."""
    template = ContainerRuntime().start(TemplateSpec())
    try:
        machine, event = take(template)
        assert isinstance(event, MachineReady)
        assert list(event.facts["stages_us"]) == ["clone", *STEPS]
        assert (event.facts["mdwe"], event.facts["open"]) == (True, False)
        assert event.facts["landlock"] >= 1
        machine.kill()
        machine.close()
    finally:
        template.close()


def test_unknown_template_arguments_are_refused() -> None:
    """X3: the hooks of the tests are a closed list."""
    with pytest.raises(HostFault, match="unknown template argument"):
        ContainerRuntime(("--skip-seccomp",)).start(TemplateSpec())


def test_a_preload_that_fails_names_itself(open_folder: Path) -> None:
    """X11: a package set that cannot be preloaded is a typed error with the module's name."""
    (open_folder / "sick.py").write_text("raise RuntimeError('sick')\n")
    (open_folder / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(9,)).start()\n"
    )
    for name, words in (("sick", "preload sick"), ("threads", "2 threads"), ("missing", "preload missing")):
        with pytest.raises(HostFault, match=words):
            ContainerRuntime().start(TemplateSpec(env="e", tree=str(open_folder), preload=(name,)))


def test_packages_are_seen_read_only(open_folder: Path) -> None:
    """X11: a package tree is importable, cannot be written, and nothing else of its folder is there."""
    tree = open_folder / "tree"
    tree.mkdir()
    (tree / "pkg.py").write_text("ANSWER = 42\n")
    (open_folder / "beside.py").write_text("")
    template = ContainerRuntime().start(TemplateSpec(env="e", tree=str(tree), preload=("pkg",)))
    try:
        source = (
            b"import pkg, os\nseen = [pkg.ANSWER, pkg.__file__, os.listdir('/packages')]\n"
            b"try:\n    open('/packages/new.py', 'w')\nexcept OSError as e:\n    seen.append(e.errno)\nseen"
        )
        seen = msgspec.json.decode(result(run_once(template, source)).value or b"")
        assert seen[:2] == [42, "/packages/pkg.py"]
        assert set(seen[2]) <= {"pkg.py", "__pycache__"}
        assert seen[3] in {13, 30}
    finally:
        template.close()


# ---- life and death --------------------------------------------------------------------------------------------
def test_closing_the_template_takes_its_slots_along(container_template: ContainerTemplate) -> None:
    """X10: nothing outlives the template, not even a spinning slot; close is idempotent."""
    template = ContainerRuntime().start(TemplateSpec())
    machine, event = take(template)
    assert isinstance(event, MachineReady)
    machine.send_code(b"while True: pass", Bounds())
    template.close()
    template.close()
    assert wait_dead(machine.pidfd)
    machine.close()
    with pytest.raises(HostFault, match="closed"):
        template.request(Bounds())


def test_a_killed_launcher_takes_template_and_slots_along() -> None:
    """X10: whatever dies first, the rest follows, and the supervisor hears of it."""
    template = ContainerRuntime().start(TemplateSpec())
    machine, _ = take(template)
    machine.send_code(b"while True: pass", Bounds())
    template._launcher.kill()
    assert wait_dead(machine.pidfd)
    poll = select.poll()
    poll.register(template.fileno(), select.POLLIN)
    assert poll.poll(5000)
    with pytest.raises(HostFault, match="gone"):
        template.on_readable()
    machine.close()
    template.close()


def test_a_killed_supervisor_leaves_nothing(tmp_path: Path) -> None:
    """X10: SIGKILL of the process that owns the template ends template and slots through the lifeline."""
    program = (
        "import sys, time, select\n"
        "from lockgate.runtimes.container import ContainerRuntime\n"
        "from lockgate.runtimes.protocol import TemplateSpec\n"
        "from lockgate.contract.bounds import Bounds\n"
        "t = ContainerRuntime().start(TemplateSpec())\n"
        "m = t.request(Bounds())\n"
        "while m.host_pid == 0:\n    select.select([t.fileno()], [], [], 5)\n    t.on_readable()\n"
        "print(m.host_pid, t._launcher.pid, flush=True)\ntime.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=tmp_path, text=True)
    assert owner.stdout is not None
    pids = [int(one) for one in owner.stdout.readline().split()]
    fds = [os.pidfd_open(pid) for pid in pids]
    owner.kill()
    owner.wait()
    owner.stdout.close()
    try:
        assert all(wait_dead(fd) for fd in fds)
    finally:
        for fd in fds:
            os.close(fd)


def test_kill_before_the_pidfd_is_there(container_template: ContainerTemplate) -> None:
    """X5: a kill that comes early is kept and done."""
    machine = container_template.request(Bounds())
    machine.kill()
    deadline = time.monotonic() + 10
    while machine.pidfd < 0 and time.monotonic() < deadline:
        select.select([container_template.fileno()], [], [], 1)
        container_template.on_readable()
    assert wait_dead(machine.pidfd)
    machine.close()


def test_many_requests_at_once(container_template: ContainerTemplate) -> None:
    """X10: requests queue without waiting, every slot is another one, and closing gives every descriptor back."""
    before = len(os.listdir("/proc/self/fd"))
    machines = [container_template.request(Bounds()) for _ in range(60)]
    ready: set[int] = set()
    deadline = time.monotonic() + 30
    while len(ready) < len(machines) and time.monotonic() < deadline:
        open_fds = [one.control for one in machines if one.control.fileno() not in ready]
        readable = select.select([container_template.fileno(), *open_fds], [], [], 5)[0]
        for one in readable:
            if isinstance(one, socket.socket):
                machine = next(m for m in machines if m.control is one)
                assert isinstance(machine.on_control()[0], MachineReady)
                ready.add(one.fileno())
            else:
                assert not [f for f in container_template.on_readable() if isinstance(f, MachineFailed)]
    assert len({machine.host_pid for machine in machines}) == len(machines)
    for machine in machines:
        machine.kill()
    assert all(wait_dead(machine.pidfd) for machine in machines)
    for machine in machines:
        machine.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_descriptors_left_is_a_typed_error(container_template: ContainerTemplate) -> None:
    """X3: out of descriptors, a request says so and leaks none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(os.listdir("/proc/self/fd"))
    taken = {int(one) for one in os.listdir("/proc/self/fd")}
    lowest_free = next(number for number in range(len(taken) + 1) if number not in taken)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 4, hard))  # a number far above may be inherited
    try:
        with pytest.raises(HostFault, match="descriptors"):  # noqa: PT012 - one of them, whichever
            for _ in range(50):
                container_template.request(Bounds())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    deadline = time.monotonic() + 10
    while container_template._waiting and time.monotonic() < deadline:
        select.select([container_template.fileno()], [], [], 1)
        for one in container_template.on_readable():
            if isinstance(one, ContainerMachine):
                one.kill()
                one.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_slots_of_one_template_do_not_share_chance(container_run: Run) -> None:
    """X10: random, uuid, tempfile names and os.urandom differ between two slots of one template."""
    source = (
        "import random, uuid, tempfile, os, ssl\n"
        "[random.random(), str(uuid.uuid4()), tempfile.mktemp(), os.urandom(8).hex(), ssl.RAND_bytes(8).hex()]"
    )
    one, two = (msgspec.json.decode(result(container_run(source)).value or b"") for _ in range(2))
    assert all(left != right for left, right in zip(one, two, strict=True))


def test_the_probe_boots_a_real_machine() -> None:
    """X2: probe() is None because code really ran, and names the step when it cannot."""
    assert ContainerRuntime().probe() is None
    broken = ContainerRuntime(("--fail=seccomp",)).probe()
    assert broken is not None
    assert "seccomp" in broken.missing


def test_a_cold_machine_works_and_says_how_long_each_step_took(container_template: ContainerTemplate) -> None:
    """X10: without the warm-up a slot is ready sooner and runs the same."""
    machine = container_template.request(Bounds(), cold=True)
    deadline = time.monotonic() + 10
    events: list[object] = []
    while len(events) < 2 and time.monotonic() < deadline:
        select.select([container_template.fileno(), machine.control], [], [], 1)
        container_template.on_readable()
        for event in machine.on_control():
            events.append(event)
            if isinstance(event, MachineReady):
                machine.send_code(b"'cold'", Bounds())
    assert isinstance(events[1], MachineResult)
    assert events[1].value == b'"cold"'
    machine.kill()
    assert wait_dead(machine.pidfd)
    machine.close()


def test_rootless(container_template: ContainerTemplate, open_folder: Path) -> None:
    """X1: the same rung as a plain user; when the tests run as a plain user all of this file is that test."""
    if os.getuid() != 0:
        assert container_template.facts["mode"] == "rootless"
        return
    assert container_template.facts["mode"] in {"root", "rootless"}  # the second: root of a user namespace
    python = "/usr/bin/python3"
    ask = [python, "-c", "import sys; print(sys.version_info[:2])"]
    if subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip() != str(sys.version_info[:2]):
        pytest.skip("no system interpreter of this version that a plain user can start")
    source = open_folder / "src"
    shutil.copytree(Path(plan.__file__).parents[2], source / "lockgate")
    shutil.copytree(Path(msgspec.__file__).parent, source / "msgspec")
    shutil.copytree(plan.guest_directory(), open_folder / "guest")
    subprocess.run(["chmod", "-R", "a+rX", str(open_folder)], check=True)
    program = (
        f"import sys; sys.path[:0] = [{str(source)!r}]\n"
        "from lockgate.runtimes.container import ContainerRuntime\n"
        "from lockgate.runtimes.protocol import TemplateSpec\n"
        "from lockgate.runtimes.single import run_once\n"
        "t = ContainerRuntime().start(TemplateSpec())\n"
        "o = run_once(t, b'import os\\n[os.getuid(), os.getcwd()]')\n"
        "print(t.facts['mode'], o.facts['userns'], o.result and o.result.value)\nt.close()\n"
    )
    done = subprocess.run(
        [python, "-c", program], user=12345, group=12345, extra_groups=[], capture_output=True, text=True,
        timeout=60, check=False, env={}, cwd="/",
    )  # fmt: skip
    assert done.stdout == "rootless rootless b'[65534,\"/run\"]'\n", done


@pytest.mark.parametrize(
    "namespace", ["-m", "-Urm"], ids=["masked procfs", "masked procfs and root of a user namespace"]
)
def test_inside_a_container(namespace: str) -> None:
    """X1: where a container runtime covered parts of procfs no fresh one can be mounted; the rung works anyway."""
    if namespace == "-m" and os.getuid() != 0:
        namespace = "-Urm"  # a plain user has a mount namespace only inside a user namespace
    program = (
        "from lockgate.runtimes.container import ContainerRuntime\n"
        "from lockgate.runtimes.protocol import TemplateSpec\n"
        "from lockgate.runtimes.single import run_once\n"
        "t = ContainerRuntime().start(TemplateSpec())\n"
        "o = run_once(t, b'6*7')\n"
        "print(t.facts['proc'], o.facts['userns'], o.result and o.result.value)\nt.close()\n"
    )
    mask = 'mount --bind /dev/null /proc/interrupts && exec "$0" "$@"'
    done = subprocess.run(
        ["unshare", namespace, "sh", "-c", mask, sys.executable, "-c", program],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    mode = "root" if namespace == "-m" else "rootless"
    assert done.stdout == f"host's view {mode} b'42'\n", done


def test_signals_reach_nobody_else(container_run: Run) -> None:
    """X8: kill(-1) finds no one (ESRCH), and the slot's own stop does nothing to it."""
    source = (
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n"
        "try:\n    os.kill(-1, 9)\nexcept OSError as e:\n    x = e.errno\nx"
    )
    assert result(container_run(source)).value == b"3"
