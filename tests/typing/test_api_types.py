"""The API that people write is taken by mypy strict and pyright strict, with the types that it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCE = HERE / "api_examples.py"
# The spelling of the first sketch: short, and no type checker can take it (docs/adr/0003).
UNTYPED = """
import lockgate as lg

class A(lg.Args):
    order_id: lg.Id["ord"]
"""


def check(tool: str, file: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    if tool == "mypy":
        command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--strict"]
        command += ["--warn-unused-ignores", "--cache-dir", str(cache), str(file)]
    else:
        settings = cache / "pyrightconfig.json"
        settings.write_text(
            json.dumps(
                {
                    "include": [str(file)],
                    "typeCheckingMode": "strict",
                    "reportUnnecessaryTypeIgnoreComment": "error",
                    "enableTypeIgnoreComments": False,
                    "extraPaths": [str(ROOT / "src")],
                }
            )
        )
        command = [sys.executable, "-m", "pyright", "-p", str(settings), "--pythonpath", sys.executable]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=110, check=False)


@pytest.mark.parametrize("tool", ["mypy", "pyright"])
def test_the_public_spelling_has_types(tool: str, tmp_path: Path) -> None:
    done = check(tool, SOURCE, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("tool", ["mypy", "pyright"])
def test_the_checkers_do_look(tool: str, tmp_path: Path) -> None:
    """Negative control."""
    file = tmp_path / "untyped.py"
    file.write_text(UNTYPED)
    done = check(tool, file, tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "untyped.py" in done.stdout
