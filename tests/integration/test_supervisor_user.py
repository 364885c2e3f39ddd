"""The same supervisor under a plain user without any cgroup: what holds, what is refused, what is degraded (X3, X6)."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from lockgate.contract import wire
from supervisor_client import Client, descendants

NOBODY = 65534
MiB = 1 << 20


@pytest.fixture(scope="module")
def launch() -> Iterator[dict]:
    """How to start a supervisor as a user that has nothing: prefix and interpreter."""
    if os.getuid() != 0:
        yield {}
        return
    setpriv = shutil.which("setpriv")
    python = next((p for p in ("/usr/bin/python3", "/usr/local/bin/python3") if usable(p)), None)
    if setpriv is None or python is None:
        pytest.skip(f"no setpriv, or no Python {sys.version_info[0]}.{sys.version_info[1]} outside a private home")
    root = Path(tempfile.mkdtemp(prefix="plain-user-"))
    try:
        root.chmod(0o755)
        subprocess.run([python, "-m", "venv", "--without-pip", root / "venv"], check=True, capture_output=True, env={})
        site = next((root / "venv" / "lib").glob("python*")) / "site-packages"
        package = Path(sys.modules["lockgate"].__file__).parent
        shutil.copytree(package, site / "lockgate")
        if not (package / "_guest").is_dir():
            shutil.copytree(package.parents[1] / "guest", site / "lockgate" / "_guest")
        shutil.copytree(Path(msgspec.__file__).parent, site / "msgspec")
        for path in (root, *root.rglob("*")):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | stat.S_IROTH | (stat.S_IXOTH if path.is_dir() else 0))
        yield {
            "prefix": [setpriv, "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"],
            "python": str(root / "venv" / "bin" / "python"),
        }
    finally:
        shutil.rmtree(root)


def usable(python: str) -> bool:
    """Whether everybody may run it and it is of our version."""
    try:
        command = [python, "-c", "import sys; print(sys.version_info[:2])"]
        out = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError:
        return False
    return out.stdout.strip() == str(sys.version_info[:2])


@pytest.fixture(scope="module")
def plain(launch) -> Iterator[Client]:
    with Client(pool=1, memory="rlimit", **launch) as client:
        if client.ready.facts["memory_by"] != "rlimit":
            pytest.skip("this user may make control groups; the other tests cover that")
        yield client


def test_without_the_accepted_fallback_nothing_runs(launch):
    """X3: no silent downgrade. The refusal names the missing piece and both ways out."""
    with Client(pool=1, **launch) as client:
        if client.ready.facts["memory_by"].startswith("cgroup"):
            pytest.skip("this user may make control groups")
        facts = client.ready.facts
        assert facts["available"] is False
        assert facts["error"]["code"] == "cannot_isolate"
        refused = client.code("1")
        assert isinstance(refused, wire.Refused)
        assert refused.fault.code == "cannot_isolate"
        assert "memory" in refused.fault.message
        assert 'memory = "rlimit"' in refused.fault.next_step
        assert "Delegate=yes" in refused.fault.next_step


def test_code_runs_and_the_broker_is_told_what_caps_memory(plain):
    result = plain.code("print('hi'); 6 * 7")
    assert (bytes(result.value), result.stdout) == (b"42", "hi\n")
    assert plain.broker.attached[f"t{result.id}"].memory_by == "rlimit"


def test_memory_is_capped(plain):
    result = plain.code("x = []\nwhile True: x.append(bytearray(1 << 20))", memory=128 * MiB, wall=20)
    assert result.killed_by == "memory" or result.error.name == "MemoryError", result


def test_one_process_and_no_threads(plain):
    """The price of the fallback: with more than one process an address-space limit caps nothing."""
    assert plain.code("import os\nos.fork()").error.name == "BlockingIOError"
    assert plain.code("import threading\nthreading.Thread(target=print).start()").error.name == "RuntimeError"


def test_cpu_seconds_without_any_group(plain):
    result = plain.code("while True: pass", cpu=0.3, wall=20)
    assert result.killed_by == "cpu"
    assert result.usage.cpu >= 0.3


def test_the_wall_clock(plain):
    code = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass"
    result = plain.code(code, wall=0.4)
    assert (result.killed_by, result.exit_code) == ("wall", 124)


def test_disk_and_output(plain):
    disk = plain.code("f = open('x', 'wb')\nwhile True: f.write(b'x' * 65536)", disk=8 * MiB)
    # Who may not look at the disk does not claim to know that it was full (ADR 0017).
    assert (disk.killed_by, disk.error.name) in ((None, "OSError"), ("disk", "OSError"))
    flood = plain.code("import os\nwhile True: os.write(1, b'x' * 65536)", output_kill=64 * MiB)
    assert flood.killed_by == "output"


def test_nothing_is_left(launch):
    client = Client(pool=1, memory="rlimit", **launch)
    client.start("while True: pass")
    client.code("1")
    below = descendants(client.process.pid)
    client.process.kill()
    client.process.wait()
    import time

    deadline = time.monotonic() + 15
    while any(Path(f"/proc/{pid}").exists() for pid in below):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    client.close()
