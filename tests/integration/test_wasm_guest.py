"""The guest by itself: what code sees of it, how it ends, what it cannot do (X4, X5, X7, X8, X10)."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("wasmtime", reason="the wasm extra is not installed")

from lockgate.runtimes.wasm.driver import Closed, GuestBroke
from wasm_guest_fixtures import GuestRun

MiB = 1 << 20


def test_a_value_and_output_come_back(wasm_guest: GuestRun) -> None:
    seen = wasm_guest("import sys\nprint('é', 1)\nprint('e', file=sys.stderr)\n[1, {'a': None}]")
    assert (seen.value, seen.text, seen.stdout, seen.stderr) == ([1, {"a": None}], "[1, {'a': None}]", "é 1\n", "e\n")
    assert (seen.error, seen.exit_code, seen.finished.stopped) == (None, 0, None)


@pytest.mark.parametrize(
    ("source", "name", "code"),
    [
        ("1/0", "ZeroDivisionError", 1),
        ("def (:", "SyntaxError", 1),
        ("def f(): f()\nf()", "RecursionError", 1),
        ("eval('(' * 100000)", "MemoryError", 1),
        ("import marshal\nmarshal.loads(b'xyz')", "EOFError", 1),
    ],
)
def test_failing_code_is_a_result(wasm_guest: GuestRun, source: str, name: str, code: int) -> None:
    seen = wasm_guest(source)
    assert seen.error is not None
    assert (seen.error["name"], seen.exit_code) == (name, code)


@pytest.mark.parametrize("leave", ["import sys\nsys.exit(7)", "import os\nos._exit(7)", "raise SystemExit(7)"])
def test_the_exit_code_comes_through(wasm_guest: GuestRun, leave: str) -> None:
    assert wasm_guest(leave).exit_code == 7


@pytest.mark.parametrize("fault", ["import os\nos.abort()", "import _lockgate\n_lockgate.runner._exit(3)"])
def test_an_end_without_a_result_is_told(wasm_guest: GuestRun, fault: str) -> None:
    seen = wasm_guest(fault)
    assert seen.finished.result is None
    assert seen.finished.stopped in {"trap", "exit"}


# ---- clocks ----------------------------------------------------------------------------------------------------------
STOPPED = {
    "spin": "while True: pass",
    "swallowed": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "sleep": "import time\ntime.sleep(3600)",
    "many sleeps": "import time\nwhile True: time.sleep(0.001)",
    "select": "import select\nselect.select([], [], [], 3600)",
    "asyncio": "import asyncio\nasyncio.run(asyncio.sleep(3600))",
    "regex": "import re\nre.match('(a*)*b', 'a' * 40)",
    "power": "pow(7, 10**9)",
    "sum": "sum(range(10**12))",
    "repr": "class A:\n    def __repr__(self):\n        while True: pass\nA()",
    "print": "while True: print('x' * 1000)",
    "files": "n = 0\nwhile True:\n    open('f', 'w').close()",
}


@pytest.mark.parametrize("name", STOPPED)
def test_the_soft_stop_ends_it(wasm_guest: GuestRun, name: str) -> None:
    seen = wasm_guest(STOPPED[name], seconds=0.3)
    assert seen.finished.stopped == "time"
    assert seen.finished.result is None


def test_what_waits_for_the_word_does_not_begin(wasm_guest: GuestRun) -> None:
    """Code is compiled before the host says go, and nothing of it runs."""
    order: list[str] = []
    seen = wasm_guest(
        "host.call('mark')",
        wait=lambda: order.append("go"),
        relay=lambda body: order.append("call") or json.dumps({"id": 1, "ok": {}}).encode(),
    )
    assert order == ["go", "call"]
    assert seen.error is None


def test_a_syntax_error_waits_for_the_word_too(wasm_guest: GuestRun) -> None:
    said: list[str] = []
    seen = wasm_guest("def (:", wait=lambda: said.append("go"))
    assert said == ["go"]
    assert seen.error is not None


# ---- memory, files ---------------------------------------------------------------------------------------------------
def test_memory_has_an_end_inside(wasm_guest: GuestRun) -> None:
    seen = wasm_guest("x = []\nwhile True: x.append(bytearray(1 << 20))", memory=128 * MiB)
    assert seen.error is not None
    assert seen.error["name"] == "MemoryError"


def test_the_directory_is_like_any_other(wasm_guest: GuestRun) -> None:
    source = """
import os, pathlib, shutil, sqlite3, tempfile
os.makedirs('a/b'); pathlib.Path('a/b/f').write_text('hi')
shutil.copytree('a', 'z'); os.rename('a/b/f', 'g'); shutil.rmtree('a')
c = sqlite3.connect('x.db'); c.execute('create table t(a)'); c.execute('insert into t values(1)'); c.commit()
with tempfile.TemporaryDirectory() as d: inside = d.startswith('/run/')
[os.getcwd(), sorted(os.listdir()), open('z/b/f').read(), open('g', 'rb').read().decode(), inside,
 sqlite3.connect('x.db').execute('select * from t').fetchall()]
"""
    assert wasm_guest(source).value == ["/run", ["g", "x.db", "z"], "hi", "hi", True, [[1]]]


def test_disk_and_files_have_an_end(wasm_guest: GuestRun) -> None:
    """X7, unbuffered, so that every byte that was taken is a byte that is there."""
    fill = (
        "n = 0\ntry:\n    with open('big', 'wb', buffering=0) as f:\n"
        "        while True: n += f.write(b'x' * 65536)\nexcept OSError as e: print(e.errno)\nn"
    )
    seen = wasm_guest(fill, disk=MiB)
    assert MiB - 128 * 1024 <= seen.value <= MiB
    assert seen.stdout == "51\n"  # ENOSPC
    many = "n = 0\ntry:\n    while True: open(f'f{n}', 'w').close(); n += 1\nexcept OSError: pass\nn"
    assert wasm_guest(many, inodes=64).value == 63  # the directory is one itself


def test_a_hole_is_no_way_past_the_disk_bound(wasm_guest: GuestRun) -> None:
    source = (
        "import os\nf = os.open('s', os.O_RDWR | os.O_CREAT)\nout = []\n"
        "for do in (lambda: os.ftruncate(f, 1 << 30), lambda: os.pwrite(f, b'x', 1 << 30)):\n"
        "    try: do(); out.append('done')\n    except OSError as e: out.append(e.errno)\n"
        "out + [os.fstat(f).st_size]"
    )
    assert wasm_guest(source).value == [51, 51, 0]


def test_there_are_no_links(wasm_guest: GuestRun) -> None:
    source = (
        "import os\nout = []\nopen('f', 'w').close()\nfor make in (os.symlink, os.link):\n"
        "    for to in ('f', '/etc/passwd', '../../etc/passwd'):\n"
        "        try: make(to, 'l'); out.append(to)\n        except OSError: pass\nout + os.listdir()"
    )
    assert wasm_guest(source).value == ["f"]


def test_nothing_of_the_host_is_in_the_tree(wasm_guest: GuestRun) -> None:
    """X8, with the walk that would find it: the library is there."""
    source = "import os\nsorted(os.path.join(d, f) for d, _, fs in os.walk('/') for f in fs)"
    assert wasm_guest(source).value == ["/usr/local/lib/python315.zip"]
    stat = (
        "import os\ns = os.stat('/usr/local/lib/python315.zip')\n"
        "[s.st_ino < 10, s.st_dev, s.st_uid, s.st_atime == s.st_mtime]"
    )
    assert wasm_guest(stat).value == [True, 1, 0, True]


def test_the_host_is_not_named(wasm_guest: GuestRun) -> None:
    source = (
        "import os, platform, sys, socket\n"
        "[dict(os.environ), os.getpid(), platform.node(), socket.gethostname(), sys.argv, os.cpu_count()]"
    )
    environ, pid, node, name, argv, count = wasm_guest(source).value
    assert environ == {"HOME": "/run", "TMPDIR": "/run"}
    assert (pid, argv, count) == (42, [""], 1)
    assert {node, name} <= {"", "(none)", "sandbox"}


# ---- the door --------------------------------------------------------------------------------------------------------
def test_calls_exports_and_operations_go_through_the_door(wasm_guest: GuestRun) -> None:
    seen = wasm_guest("host.call('get', a=1), host.export('f.txt', 'hello'), host.operations()")
    assert [one["op"] for one in seen.asked] == ["get", "host.export", "host.operations"]
    assert [one["id"] for one in seen.asked] == [1, 2, 3]
    assert seen.value == [{"a": 1}, {"name": "f.txt", "data": "aGVsbG8=", "last": True}, {}]


def test_a_denial_is_an_exception_with_a_reason(wasm_guest: GuestRun) -> None:
    denial = {"id": 1, "error": {"reason": "not_available", "message": "no", "operation": "x"}}
    seen = wasm_guest(
        "try: host.call('x')\nexcept host.Denied as e: r = [e.reason, e.operation]\nr",
        relay=lambda _: json.dumps(denial).encode(),
    )
    assert seen.value == ["not_available", "x"]


def test_a_channel_that_is_closed_is_a_connection_error(wasm_guest: GuestRun) -> None:
    def gone(_body: bytes) -> bytes:
        raise Closed

    seen = wasm_guest("host.call('x')", relay=gone)
    assert seen.error is not None
    assert seen.error["name"] == "ConnectionError"


def test_a_request_above_the_frame_cap_is_an_error_inside_and_hostile_past_it(wasm_guest: GuestRun) -> None:
    seen = wasm_guest("host.call('x', a='y' * (1 << 20))")
    assert seen.error is not None
    assert seen.error["name"] == "ValueError"
    assert seen.asked == []
    with pytest.raises(GuestBroke):
        wasm_guest("import _host\n_host.call(b'Q' + b'x' * (1 << 21))")


@pytest.mark.parametrize("message", ["b''", "b'Z'", "b'S'", "b'G'", "b'Q'", "b'R' + b'x' * (1 << 24)", "b'\\0' * 100"])
def test_a_message_out_of_order_is_hostile(wasm_guest: GuestRun, message: str) -> None:
    with pytest.raises(GuestBroke):
        wasm_guest(f"import _host\n_host.call({message})")


def test_after_its_result_a_run_does_nothing(wasm_guest: GuestRun) -> None:
    seen = wasm_guest("import _host\ntry: _host.call(b'R{}')\nfinally: host.call('late')")
    assert seen.asked == []
    assert seen.finished.result == b"{}"


# ---- one run, once ---------------------------------------------------------------------------------------------------
def test_nothing_of_one_run_is_in_the_next(wasm_guest: GuestRun) -> None:
    """X10, with the look that sees it where it is."""
    plant = (
        "import builtins, sys, json\nbuiltins.planted = sys.planted = json.planted = 1\n"
        "sys.modules['planted'] = 1\nopen('planted', 'w').close()\n"
    )
    look = (
        "import builtins, sys, json, os\n"
        "[*(hasattr(one, 'planted') for one in (builtins, sys, json)),"
        " 'planted' in sys.modules, os.path.exists('planted')]"
    )
    assert wasm_guest(plant + look).value == [True] * 5
    assert wasm_guest(look).value == [False] * 5


def test_seeds_differ(wasm_numbers: GuestRun) -> None:
    """Restored instances share their memory, so each generator of it must be seeded anew."""
    source = (
        "import random, os, uuid, secrets, numpy as np\n"
        "[random.random(), os.urandom(8).hex(), str(uuid.uuid4()), secrets.token_hex(8), "
        "float(np.random.random()), float(np.random.default_rng().random()), int(np.random.randint(1 << 40))]"
    )
    first, second = wasm_numbers(source).value, wasm_numbers(source).value
    assert all(a != b for a, b in zip(first, second, strict=True)), (first, second)


def test_the_users_globals_are_bare(wasm_guest: GuestRun) -> None:
    assert wasm_guest("sorted(globals())").value == [
        "__builtins__",
        "__doc__",
        "__loader__",
        "__name__",
        "__package__",
        "__spec__",
        "host",
    ]


def test_an_instance_runs_once(wasm_guest: GuestRun) -> None:
    kept = []
    wasm_guest("1", prepared=kept.append)
    with pytest.raises(ValueError, match="runs once"):
        kept[0].run(b"1", 100, lambda: None)


# ---- what is not there says so ---------------------------------------------------------------------------------------
ABSENT = {
    "import subprocess": ("ImportError", "no processes"),
    "import importlib\nimportlib.import_module('subprocess').run(['ls'])": ("OSError", "no processes"),
    "import multiprocessing": ("ImportError", "no processes"),
    "import os\nos.fork()": ("AttributeError", "no processes"),
    "import os\nos.system('ls')": ("AttributeError", "no processes"),
    "import threading\nthreading.Thread(target=print).start()": ("RuntimeError", "no threads"),
    "from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor().submit(print)": (
        "RuntimeError",
        "no threads",
    ),
    "import asyncio\nasyncio.run(asyncio.to_thread(print))": ("RuntimeError", "no threads"),
    "import socket\nsocket.socket()": ("OSError", "no network"),
    "import socket\nsocket.create_connection(('192.0.2.1', 80))": ("OSError", "no network"),
    "import socket\nsocket.getaddrinfo('a.test', 80)": ("gaierror", "no network"),
    "import ssl": ("ImportError", "no network"),
    "import urllib.request\nurllib.request.urlopen('http://192.0.2.1/')": ("URLError", "no network"),
    "import asyncio\nasyncio.run(asyncio.open_connection('192.0.2.1', 80))": ("OSError", "no network"),
    "import asyncio\nasyncio.run(asyncio.create_subprocess_exec('ls'))": ("OSError", "no processes"),
    "import ctypes": ("ImportError", "no native libraries"),
    "import signal\nsignal.alarm(1)": ("AttributeError", "no signals"),
    "import fcntl": ("ImportError", "no Unix system"),
    "import requests": ("ModuleNotFoundError", "lockgate env build"),
    "import torch.nn": ("ModuleNotFoundError", "linked into its guest"),
}


@pytest.mark.parametrize("source", ABSENT)
def test_what_is_absent_names_the_rung_and_what_to_do(wasm_guest: GuestRun, source: str) -> None:
    name, says = ABSENT[source]
    error = wasm_guest(source).error
    assert error is not None
    assert error["name"] == name
    assert "wasm rung" in error["message"]
    assert says in error["message"]


def test_an_import_of_the_runs_own_that_fails_keeps_its_own_words(wasm_guest: GuestRun) -> None:
    source = (
        "open('mine.py', 'w').write('import nothing_here')\ntry: import mine\n"
        "except ImportError as e: r = [e.name, 'wasm' in str(e)]\nr"
    )
    assert wasm_guest(source).value == ["nothing_here", False]


def test_coroutines_run(wasm_guest: GuestRun) -> None:
    source = """
import asyncio, time
async def step(n, seen):
    await asyncio.sleep(0.02 * n)
    seen.append(n)
    return n
async def main():
    seen = []
    got = await asyncio.gather(step(3, seen), step(1, seen), step(2, seen))
    queue = asyncio.Queue()
    async with asyncio.TaskGroup() as group:
        group.create_task(queue.put('item'))
        item = group.create_task(queue.get())
    try: await asyncio.wait_for(asyncio.Event().wait(), 0.01)
    except TimeoutError: late = True
    lock = asyncio.Lock()
    async with lock: held = lock.locked()
    return [got, seen, item.result(), late, held]
asyncio.run(main())
"""
    assert wasm_guest(source).value == [[3, 1, 2], [1, 2, 3], "item", True, True]


def test_a_loop_that_nothing_can_wake_says_so(wasm_guest: GuestRun) -> None:
    error = wasm_guest("import asyncio\nasync def m(): await asyncio.Event().wait()\nasyncio.run(m())").error
    assert error is not None
    assert "nothing can wake" in error["message"]


def test_data_beside_a_packages_code_can_be_read(wasm_guest: GuestRun) -> None:
    """Packages look for files beside their modules; those lie in the archive, and in archives inside of it."""
    source = (
        "import importlib.resources, os\n"
        "top = '/usr/local/lib/python315.zip'\n"
        "[importlib.resources.files('tzdata').joinpath('zones').read_text()[:14],\n"
        " open(top + '/sklearn/datasets/data/iris.csv').readline()[:5],\n"
        " os.path.getsize(top + '/matplotlib/mpl-data/matplotlibrc') > 1000,\n"
        " os.path.isfile(top), os.path.isdir(top), os.path.isdir(top + '/tzdata'),\n"
        " os.path.exists(top + '/nothing'), os.path.exists('/usr/local/lib/python315')]"
    )
    assert wasm_guest(source).value == ["Africa/Abidjan", "150,4", True, True, False, True, False, False]


@pytest.mark.parametrize("where", ["", "/tzdata", "/matplotlib/mpl-data", "/matplotlib/mpl-data/fonts"])
def test_nothing_can_be_put_beside_it(wasm_guest: GuestRun, where: str) -> None:
    source = f"""
import os
place, out = '/usr/local/lib/python315.zip{where}', []
for do in (lambda: open(place + '/x', 'w'), lambda: os.mkdir(place + '/d'), lambda: os.rename('mine', place + '/x'),
           lambda: os.unlink(place + '/matplotlibrc'), lambda: os.rmdir(place + '/fonts')):
    open('mine', 'w').close()
    try: do(); out.append('done')
    except OSError: pass
out
"""
    assert wasm_guest(source).value == []
