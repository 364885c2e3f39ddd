"""The public surface: lazy names, a light and innocent import, a twin that is the same."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import lockgate as lg
from lockgate.gate import sync
from lockgate.gate._async import render
from lockgate.gate._sync import render as render_twin

ROOT = Path(__file__).resolve().parents[2]


def fresh(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_names_for_checkers_and_names_at_run_time_are_the_same():
    tree = ast.parse(Path(lg.__file__).read_text("utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    typed = {alias.asname or alias.name: node.module for node in block.body for alias in node.names}
    assert typed == lg._HOME
    for name in typed:
        assert getattr(lg, name) is not None
    assert sorted(typed) == dir(lg)
    with pytest.raises(AttributeError):
        lg.no_such_name  # noqa: B018 - the access is the test


def test_importing_the_package_loads_nothing_heavy():
    loaded = fresh("import sys, lockgate; print(*sys.modules)").split()
    for heavy in ("asyncio", "msgspec", "typer", "rich", "socket", "subprocess", "sqlite3", "lockgate.gate"):
        assert heavy not in loaded


def test_an_agent_loads_neither_broker_nor_secrets_nor_supervisor_nor_cli():
    """Rule of the agent process: what could hold a secret or the operations' code is not in it (C4)."""
    program = (
        "import sys, lockgate as lg\n"
        "lg.Gate, lg.sync.Gate, lg.Scope, lg.where, lg.RunResult, lg.Denied, lg.Config\n"
        "lg.sync.Gate({}).render, lg.Gate({}).render\n"  # there, and not loaded before it shows something
        "print(*sys.modules)"
    )
    loaded = fresh(program).split()
    assert "lockgate.gate" in loaded
    for name in loaded:
        assert not name.startswith(
            (
                "lockgate.broker",
                "lockgate.secrets",
                "lockgate.supervisor",
                "lockgate.runtimes",
                "lockgate.cli",
                "lockgate.render",
                "typer",
            )
        ), name


def test_the_blocking_twin_has_the_same_names_and_signatures():
    pairs = [(lg.Gate, sync.Gate), (lg.Run, sync.Run)]
    pairs += [(getattr(render, name), getattr(render_twin, name)) for name in ("GateRender", "RunRender", "RunStream")]
    for written, twin in pairs:
        names = [name for name in vars(written) if not name.startswith("_")]
        assert names == [name for name in vars(twin) if not name.startswith("_")]
        for name in ["__init__", *names]:
            here, there = vars(written)[name], vars(twin)[name]
            if inspect.isfunction(here):
                assert inspect.signature(here).parameters.keys() == inspect.signature(there).parameters.keys(), name
                assert not inspect.iscoroutinefunction(there), name
                assert here.__doc__ or name == "__init__", name
        assert [hasattr(written, name) for name in ("__aenter__", "__aexit__")].count(True) == [
            hasattr(twin, name) for name in ("__enter__", "__exit__")
        ].count(True)
    assert inspect.iscoroutinefunction(lg.Run.code)
    assert inspect.iscoroutinefunction(render.GateRender.markdown)


def test_the_twin_is_generated_and_drift_is_found(tmp_path: Path):
    script = ROOT / "scripts" / "unasync.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    # The same check over a copy in which one line differs: it can fail.
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "unasync.py").write_text(script.read_text("utf-8"))
    gate = tmp_path / "src" / "lockgate" / "gate"
    for folder in ("_async", "_sync"):
        (gate / folder).mkdir(parents=True)
        for path in (ROOT / "src" / "lockgate" / "gate" / folder).glob("*.py"):
            (gate / folder / path.name).write_text(path.read_text("utf-8"))
    copy = tmp_path / "scripts" / "unasync.py"
    assert subprocess.run([sys.executable, copy, "--check"], timeout=60, check=False).returncode == 0
    (gate / "_sync" / "run.py").write_text((gate / "_sync" / "run.py").read_text("utf-8") + "\n")
    failed = subprocess.run([sys.executable, copy, "--check"], capture_output=True, text=True, timeout=60, check=False)
    assert failed.returncode == 1
    assert "run.py" in failed.stderr
