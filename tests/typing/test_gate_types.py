"""Both type checkers see the public names, and refuse what is wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
USE = Path(__file__).with_name("gate_use.py")
WRONG = {number for number, line in enumerate(USE.read_text().splitlines(), 1) if line.endswith("# error")}


@pytest.mark.parametrize(
    "checker",
    [
        ("mypy", "--strict", "--config-file=", "--cache-dir=.cache/mypy-typing", "--no-error-summary"),
        ("pyright", "--pythonpath", sys.executable),
    ],
    ids=lambda checker: checker[0],
)
def test_the_checkers_refuse_exactly_the_wrong_lines(checker: tuple[str, ...]):
    assert len(WRONG) == 5
    done = subprocess.run(
        [sys.executable, "-m", *checker, str(USE)], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    found = {int(line) for line in re.findall(rf"{USE.name}:(\d+)(?::\d+)?(?: -|:) error", done.stdout)}
    assert found == WRONG, done.stdout + done.stderr
