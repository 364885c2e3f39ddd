"""The microvm rung of a plain user: built, caged in a user namespace of its own, and run (X1, X3)."""

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

from lockgate.runtimes.microvm.store import Choice, Store
from microvm_fixtures import choices

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="gives a copy of everything to a user that has nothing"),
    pytest.mark.timeout(400),
]
NOBODY = 65534
PYTHON = Path("/usr/bin/python3")
PROGRAM = """
import json, os, sys
from pathlib import Path
from lockgate.contract.bounds import Bounds
from lockgate.contract.rungs import MicrovmChoices
from lockgate.runtimes.microvm.runtime import MicrovmRuntime
from lockgate.runtimes.protocol import TemplateSpec
from lockgate.runtimes.single import run_once
template = MicrovmRuntime(MicrovmChoices(store=sys.argv[1] + "/store")).start(TemplateSpec())
seen = []
def look(machine):
    status = dict(line.split(":\\t", 1) for line in open(f"/proc/{machine.host_pid}/status").read().splitlines())
    seen.append([status[name].split()[0] for name in ("Uid", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp")])
    seen.append(os.readlink(f"/proc/{machine.host_pid}/ns/net") != os.readlink("/proc/self/ns/net"))
done = run_once(template, b"import os\\n[6 * 7, os.getuid()]", Bounds(wall=120.0), patience=120.0, meanwhile=look)
template.close()
print(json.dumps([json.loads(done.result.value), seen]))
"""


@pytest.fixture
def plain_home(microvm_choice: Choice) -> Iterator[Path]:
    """A directory of nobody's with an environment that has lockgate and msgspec, and a store with a kernel."""
    version = subprocess.run(
        [PYTHON, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, check=True
    )
    if version.stdout.split() != [str(part).encode() for part in sys.version_info[:2]]:
        pytest.skip("msgspec of this Python is no good for the one that a plain user may start")
    root = Path(tempfile.mkdtemp(prefix="plain-user-"))
    try:
        package = Path(sys.modules["lockgate"].__file__ or "").parent
        shutil.copytree(package, root / "lib" / "lockgate", ignore=shutil.ignore_patterns("__pycache__"))
        if not (package / "_guest").is_dir():
            shutil.copytree(package.parents[1] / "guest", root / "lib" / "lockgate" / "_guest")
        shutil.copytree(Path(msgspec.__file__).parent, root / "lib" / "msgspec")
        subprocess.run([PYTHON, "-m", "venv", "--without-pip", root / "venv"], check=True, capture_output=True)
        packages = next((root / "venv" / "lib").glob("python3*")) / "site-packages"
        (packages / "here.pth").write_text(f"{root / 'lib'}\n")
        source = Store(Path(choices().store or "")).root
        shutil.copytree(
            source / "kernels" / microvm_choice.kernel.key, root / "store" / "kernels" / microvm_choice.kernel.key
        )
        shutil.copy(source / "choice.json", root / "store" / "choice.json")
        (root / "program.py").write_text(PROGRAM)
        for path in (root, *root.rglob("*")):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | stat.S_IRUSR | (stat.S_IXUSR | stat.S_IWUSR if path.is_dir() else 0))
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        yield root
    finally:
        shutil.rmtree(root)


def test_a_plain_user_has_machines_in_a_namespace_of_its_own(plain_home: Path) -> None:
    """X1, X3: the image is made of what that user can read; its VMM has no capability and no network."""
    done = subprocess.run(
        [plain_home / "venv" / "bin" / "python", "-I", plain_home / "program.py", plain_home],
        user=NOBODY, group=NOBODY, extra_groups=[], env={}, cwd="/", capture_output=True, timeout=390, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    zero = "0" * 16
    assert json.loads(done.stdout) == [[42, NOBODY], [[str(NOBODY), zero, zero, "1", "2"], True]]
