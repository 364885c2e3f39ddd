"""What README.md and the documents show is true: it type-checks, it runs, the tables are those of the code."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return script("check_docs")


def test_python_blocks_type_check_and_tables_are_fresh(check: ModuleType) -> None:
    blocks = [block for page in check.PAGES for block in check.blocks(page)]
    assert sum(1 for block in blocks if block.language == "python") >= 9
    assert check.type_check(blocks) == []
    assert check.generated(write=False) == []


def test_a_wrong_block_is_found(check: ModuleType) -> None:
    """Negative control."""
    wrong = check.Block("docs/x.md", 7, "python", None, "import lockgate as lg\nlg.minutes('10')\n", run=False)
    problems = check.type_check([wrong])
    assert len(problems) == 1
    assert problems[0].startswith("docs/x.md:7")


def test_the_tutorial_runs(check: ModuleType) -> None:
    blocks = list(check.blocks(ROOT / "docs" / "tutorial.md"))
    assert sum(1 for block in blocks if block.language == "console") >= 4
    assert check.run_page(blocks) == []


def test_a_command_that_prints_something_else_is_found(check: ModuleType) -> None:
    """Negative control, for output and for exit codes."""
    lie = check.Block("docs/x.md", 1, "console", None, "$ python -c print(1)\n2\n$ python -c exit(3)\n", run=False)
    assert [problem.split(" ", 1)[1][:8] for problem in check.run_page([lie])] == ["did not ", "python -"]


def test_every_promise_has_its_test(capsys: pytest.CaptureFixture[str]) -> None:
    assert script("check_spec").main() == 0, capsys.readouterr().err


def test_a_promise_that_stands_on_nothing_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Negative control."""
    checker = script("check_spec")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("def test_b(): pass\n")
    rows = "| Z1 | x | `tests/test_a.py::test_b` |\n| Z2 | x | `tests/test_a.py::test_c` |\n"
    (tmp_path / "SPECIFICATION.md").write_text(rows + "| Z3 | x | |\n| Z4 | x | [test pending] |\n")
    checker.ROOT, checker.REQUIRED = tmp_path, ["Z1", "Z9"]
    assert checker.main() == 1
    found = capsys.readouterr().err
    assert all(f"Z{number}" in found for number in (2, 3, 4, 9))
    assert "Z1:" not in found
