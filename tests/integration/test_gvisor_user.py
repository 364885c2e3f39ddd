"""The gvisor rung of a plain user: cold boots in a user namespace of its own (X1, X5)."""

from __future__ import annotations

import json
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

from lockgate.runtimes.gvisor import GvisorRuntime

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="gives a copy of everything to a user that has nothing")

NOBODY = 65534
PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1] + "/lib")
from lockgate.contract.bounds import Bounds
from lockgate.contract.rungs import GvisorChoices
from lockgate.runtimes.gvisor import GvisorRuntime, selftest
from lockgate.runtimes.protocol import TemplateSpec
from lockgate.runtimes.single import run_once
selftest.BOOTS = 1  # the other nineteen are root's; what differs is tested by one
runtime = GvisorRuntime(GvisorChoices(runsc=sys.argv[2], store=sys.argv[1] + "/store"))
template = runtime.start(TemplateSpec())
said = [template.facts["boot"]]
for source, wall in (("import os; [os.getuid(), os.listdir('/proc')]", 30.0), ("while True: pass", 1.0)):
    done = run_once(template, source.encode(), Bounds(wall=wall), patience=60.0)
    said.append([done.killed, json.loads(done.result.value) if done.result else None])
template.close()
print(json.dumps(said))
"""


@pytest.fixture
def plain_home() -> Iterator[Path]:
    """A directory of nobody's with lockgate and msgspec in it."""
    root = Path(tempfile.mkdtemp(prefix="plain-user-"))
    try:
        package = Path(sys.modules["lockgate"].__file__ or "").parent
        shutil.copytree(package, root / "lib" / "lockgate", ignore=shutil.ignore_patterns("__pycache__"))
        if not (package / "_guest").is_dir():
            shutil.copytree(package.parents[1] / "guest", root / "lib" / "lockgate" / "_guest")
        shutil.copytree(Path(msgspec.__file__).parent, root / "lib" / "msgspec")
        shutil.copy(GvisorRuntime().runsc().path, root / "runsc")
        (root / "program.py").write_text(PROGRAM)
        for path in (root, *root.rglob("*")):
            path.chmod(path.stat().st_mode | stat.S_IROTH | (stat.S_IXOTH if path.is_dir() else 0))
            os.chown(path, NOBODY, NOBODY)
        yield root
    finally:
        shutil.rmtree(root)


@pytest.mark.timeout(240)
def test_a_plain_user_has_boxes_that_boot_cold_and_die_as_a_whole(plain_home: Path) -> None:
    """No right of root is used; the keeper's end is the box's end here too. Bounds need a delegated group."""
    setpriv = shutil.which("setpriv")
    python = Path("/usr/bin/python3")
    if setpriv is None or not python.exists() or f"python3.{sys.version_info[1]}" not in str(python.resolve()):
        pytest.skip("no setpriv, or no Python of this version outside a private home")
    drop = [setpriv, "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    argv = [*drop, str(python), "-I", str(plain_home / "program.py"), str(plain_home), str(plain_home / "runsc")]
    done = subprocess.run(argv, capture_output=True, env={}, timeout=200, check=False, cwd="/")
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert json.loads(done.stdout) == ["cold", [False, [NOBODY, []]], [True, None]]
    left = [one for one in Path("/proc").glob("[0-9]*") if _runs(one, str(plain_home))]
    assert left == []


def _runs(process: Path, word: str) -> bool:
    try:
        return word.encode() in (process / "cmdline").read_bytes()
    except OSError:
        return False
