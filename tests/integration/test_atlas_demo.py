"""The main job, end to end, and that each of the demo's own checks can fail (X4 to X10, C1 to C6, C8)."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lockgate.contract.run import ErrorInfo, RunResult

ATLAS = Path(__file__).parents[2] / "examples" / "atlas"
SECONDS = 110


def demo(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the demo as a newcomer's shell would; its temporary directory is found by TMPDIR."""
    return subprocess.run(
        [sys.executable, "-m", "lockgate", "demo", *options],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={"PATH": os.defpath, **environment},
        check=False,
    )


def module(name: str) -> ModuleType:
    """Load a file of the example under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"atlas_{name}", ATLAS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


tickets = module("tickets")
HOSTILE = {
    "environment",
    "/proc",
    "files",
    "sockets",
    "dns",
    "other operations",
    "another tenant",
    "over the limit",
    "three at once",
    "a gigabyte of output",
    "a gigabyte of memory",
    "endless loop",
    "fork bomb",
}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Any:
    where = tmp_path_factory.mktemp("demo")
    done = demo("--json", "--rung", "container", TMPDIR=str(where))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert list(where.iterdir()) == []  # the state directory is gone
    return json.loads(done.stdout)


def test_every_check_of_the_demo_holds(document: Any) -> None:
    assert document["ok"] is True
    assert [one["name"] for one in document["checks"] if not one["held"]] == []
    assert len(document["checks"]) == 9


def test_every_attempt_of_the_ticket_was_made_and_held(document: Any) -> None:
    """The whole list of hostile attempts, each with what the code got."""
    assert {one["name"] for one in document["attempts"] if one["held"]} == HOSTILE
    assert all(one["got"] for one in document["attempts"])


def test_the_customer_got_the_refund_and_mallory_nothing_secret(document: Any) -> None:
    assert "49.00" in document["answers"]["1"]
    assert "sk-synthetic" not in json.dumps(document)


def test_tool_calls_and_code_leave_the_same_kind_of_row(document: Any) -> None:
    """C2, C5: both ways to an operation end in rows that differ in `via` and rung alone."""
    rows = [row for row in document["rows"] if row.get("operation") == "get_order" and row["phase"] == "outcome"]
    assert {row["via"] for row in rows} == {"tool", "code"}
    assert {row["rung"] for row in rows if row["via"] == "code"} == {"container"}
    assert all(row["shared_kernel"] for row in rows if row["via"] == "code")
    assert len({frozenset(row) - {"rung", "shared_kernel", "seq"} for row in rows}) == 1


def test_denials_say_who_what_and_why(document: Any) -> None:
    reasons = sorted(row["visible"] for row in document["denials"])
    assert reasons == sorted(
        ["not_available"] * 3 + ["bad_request"] + ["argument_not_allowed"] * 2 + ["budget_exhausted"] * 2
    )
    assert all(row["user"] == "mallory" and row["agent"] == "atlas" for row in document["denials"])


def test_the_text_is_for_strangers(tmp_path: Path) -> None:
    """First lines: rung, kind of boundary, what is stronger; no colour when none is wanted; never wider than asked."""
    terminal = {"NO_COLOR": "1", "COLUMNS": "72", "TERM": "xterm-256color", "FORCE_COLOR": "1"}
    done = demo("--rung", "container", TMPDIR=str(tmp_path), **terminal)
    assert done.returncode == 0, done.stderr
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.stdout)
    head = " ".join(plain[plain.index("lockgate demo") :].replace("│", " ").split())[:1500]
    for words in ("container", "kernel is shared", "accept_shared_kernel=True", "asked for by name", "one authorize()"):
        assert words in head
    colours = [code for code in re.findall(r"\x1b\[([0-9;]+)m", done.stdout) if re.search(r"\b(3|4|9|10)[0-9]\b", code)]
    assert colours == []
    assert max(map(len, plain.splitlines())) <= 72
    for part in ("Ticket one", "Ticket two", "Denials", "Audit rows", "The demo's own checks"):
        assert part in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_unasked_it_takes_the_strongest_rung_that_runs_here(tmp_path: Path) -> None:
    """X1, X2: every attempt holds there too, and the first lines say which, why, and what would be stronger."""
    done = demo("--json", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert {one["name"] for one in found["attempts"] if one["held"]} == HOSTILE
    rung = found["facts"]["rung"]
    assert {row["rung"] for row in found["rows"] if row.get("via") == "code"} == {rung}
    if os.geteuid() == 0:  # CI, where everything that can be installed is
        assert rung in {"gvisor", "microvm"}
        assert not any(row.get("shared_kernel") for row in found["rows"] if row.get("via") == "code")


@pytest.mark.parametrize(
    ("sabotage", "failing"),
    [
        ("leak", {"nothing leaked"}),
        ("row", {"no row is missing", "the audit chain verifies"}),
        ("process", {"nothing was left running"}),
        ("ledger", {"the ledger is exact"}),
    ],
)
def test_the_checks_can_fail(sabotage: str, failing: set[str], tmp_path: Path) -> None:
    """Negative control: a leaking operation, a row that is gone, a process that stays, a refund of nobody."""
    done = demo("--json", "--rung", "container", "--sabotage", sabotage, TMPDIR=str(tmp_path))
    assert done.returncode == 1, done.stderr
    assert {one["name"] for one in json.loads(done.stdout)["checks"] if not one["held"]} == failing


@pytest.mark.parametrize("attempt", tickets.ATTEMPTS, ids=lambda one: one.name)
def test_no_attempt_holds_by_default(attempt: Any) -> None:
    """A run that came to nothing, that failed at once or that was killed by something else proves nothing."""
    empty = RunResult(run_id="r", rung="container")
    failed = RunResult(run_id="r", rung="container", exit_code=1, error=ErrorInfo("NameError", "x", ""))
    killed = RunResult(run_id="r", rung="container", exit_code=137, killed_by="protocol")
    for result in (empty, failed, killed):
        assert attempt.got({attempt.name: result})[0] is False
    assert attempt.got({}) == (False, "was not tried")


@pytest.mark.parametrize("name", ["environment", "/proc", "sockets"])
def test_the_attempts_reach_something_where_nothing_holds_them(name: str) -> None:
    """Negative control: the same code in a plain process is judged as reached, so the attempt is alive."""
    attempt = next(one for one in tickets.ATTEMPTS if one.name == name)
    code = attempt.source({"pid": str(os.getpid()), "port": "9", "state": "/none", "home": "/none", "source": "/none"})
    # Reading is enough to show life; nothing is opened for writing outside a sandbox.
    code = "".join(line for line in code.splitlines(keepends=True) if "write core_pattern" not in line)
    body, _, last = code.rstrip().rpartition("\n")
    done = subprocess.run(
        [sys.executable, "-c", f"{body}\nimport json; print(json.dumps({last}))"],
        capture_output=True,
        timeout=30,
        env={"SECRET": "sk-synthetic-control"},
        check=True,
    )
    result = RunResult(run_id="r", rung="container", value=json.loads(done.stdout))
    held, got = attempt.got({name: result})
    assert not held
    assert dataclasses.is_dataclass(attempt)
    assert "REACHED" in got or "SECRET" in got


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demo_leaves_nothing(number: int, code: int, tmp_path: Path) -> None:
    """The state directory is gone, and so is every process that was started with it in its arguments."""
    # A shell without job control starts us with SIGINT ignored, and that is inherited: undo it first.
    start = "import os, signal as s, sys; s.signal(2, s.SIG_DFL); e = sys.executable; os.execv(e, [e, sys.argv[1]])"
    program = subprocess.Popen(
        [sys.executable, "-c", start, ATLAS / "demo.py"],
        env={"TMPDIR": str(tmp_path), "PATH": os.defpath},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert program.stdout is not None
    assert b"lockgate demo" in program.stdout.readline()  # the first lines: all processes are up by then
    program.send_signal(number)
    program.communicate(timeout=30)
    assert program.returncode == code
    assert list(tmp_path.iterdir()) == []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            assert str(tmp_path).encode() not in (process / "cmdline").read_bytes()


def test_no_text_is_markup(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What somebody wrote cannot style the screen, and a name in brackets is not lost."""
    monkeypatch.syspath_prepend(str(ATLAS))
    show = module("show")
    show.console(quiet=False).print(show.opening({"rung": "container"}, [("wasm", "get lockgate[wasm]")]))
    assert "lockgate[wasm]" in capsys.readouterr().out
