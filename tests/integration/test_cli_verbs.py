"""The verbs as a person or a program runs them: exit codes, what goes to stdout, JSON, escaping, bad input."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest

from gate_fixtures import gate_home
from lockgate.audit import reader
from lockgate.cli.app import guarded
from lockgate.contract.rungs import RUNGS
from lockgate.gate.sync import Gate
from lockgate.runtimes.container import ContainerRuntime
from lockgate.supervisor import doctor, engine
from lockgate.supervisor.settings import Settings

SCOPE = """
user = "dana"
agent = "atlas"
tenant = "acme"
expires = 600

[allow.echo]

[allow.pay.amount]
at_most = 5000
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    gate_home(folder)
    (folder / "scope.toml").write_text(SCOPE)
    return folder


class Ended(NamedTuple):
    """What a verb left behind."""

    returncode: int
    stdout: bytes
    stderr: bytes


class Verb(Protocol):
    def __call__(self, *args: str | Path, cwd: Path | None = None, stdin: bytes = b"") -> Ended: ...


@pytest.fixture
def lockgate(home: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Verb:
    """Run a verb in this process, as the entry point does, over the descriptors 1 and 2."""

    def run(*args: str | Path, cwd: Path | None = None, stdin: bytes = b"") -> Ended:
        capfdbinary.readouterr()
        monkeypatch.chdir(cwd or home)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = guarded([str(arg) for arg in args])
        return Ended(code, *capfdbinary.readouterr())

    return run


def document(done: Ended) -> Any:
    return json.loads(done.stdout)


# ---- run ------------------------------------------------------------------------------------------------------------
def test_run_passes_bytes_and_exit_code_through(lockgate: Verb, home: Path):
    code = b"import os, sys\nos.write(1, b'\\xff\\x1b[31m\\n'); os.write(2, b'err\\n'); sys.exit(7)"
    done = lockgate("run", "-", stdin=code)
    assert done.returncode == 7
    assert done.stdout == b"\xff\x1b[31m\n"
    assert b"err\n" in done.stderr


def test_run_says_the_bound_that_ended_it(lockgate: Verb, home: Path):
    done = lockgate("run", "--timeout", "0.4", "-", stdin=b"while True: pass")
    assert done.returncode == 124
    assert b"wall" in done.stderr
    as_json = lockgate("run", "--json", "--timeout", "0.4", "-", stdin=b"while True: pass")
    assert as_json.returncode == 124
    assert document(as_json)["killed_by"] == "wall"


def test_run_json_is_one_document_with_calls_and_denials(lockgate: Verb, home: Path):
    (home / "program.py").write_text(
        "print('out')\nx = host.call('echo', text='a')['text']\n"
        "try: host.call('wait', ms=1)\nexcept host.Denied as d: x += d.reason\nx"
    )
    done = lockgate("run", "--json", "--scope", "scope.toml", "program.py")
    found = document(done)
    assert (found["value"], found["stdout"], found["ok"]) == ("anot_available", "out\n", True)
    assert [call["verdict"] for call in found["calls"]] == ["allow", "deny"]
    assert [call["operation"] for call in found["denials"]] == ["wait"]
    assert done.stderr == b""


def test_run_without_a_configuration_needs_the_kernel_accepted(lockgate: Verb, tmp_path: Path):
    (tmp_path / "program.py").write_text("1 + 1")
    done = lockgate("run", "program.py", cwd=tmp_path)
    assert done.returncode == 3
    assert b"error: " in done.stderr
    assert b"next step: " in done.stderr
    assert b"--accept-shared-kernel" in done.stderr
    assert done.stdout == b""


def test_run_exports_to_a_directory(lockgate: Verb, home: Path, tmp_path: Path):
    done = lockgate("run", "--export-to", tmp_path / "out", "-", stdin=b"host.export('a.txt', b'x')")
    assert done.returncode == 0
    assert (tmp_path / "out" / "a.txt").read_bytes() == b"x"
    again = lockgate("run", "--json", "--export-to", tmp_path / "out", "-", stdin=b"host.export('a.txt', b'y')")
    assert again.returncode == 1
    assert document(again)["error"]["code"] == "export_refused"


@pytest.mark.parametrize(
    ("args", "code", "exit_code"),
    [
        (["run", "missing.py"], "config", 2),
        (["run", "-", "--rung", "contaner"], "unknown_rung", 2),
        (["run", "-", "--rung", "microvm"], "cannot_isolate", 3),
        (["run", "-", "--env", "never-built"], "unknown_env", 2),
        (["run", "-", "--bound", "memory=x"], "config", 2),
        (["run", "-", "--bound", "nope=1"], "config", 2),
        (["run", "-", "--timeout", "9999"], "config", 2),
        (["run", "-", "--bound", "memory=nan"], "config", 2),
        (["run", "-", "--bound", "memory=1.5"], "config", 2),
        (["run", "-", "--bound", "memory=" + "9" * 400], "config", 2),
        (["run", "-", "--timeout", "nan"], "config", 2),
        (["run", "-", "--scope", "missing.toml"], "config", 2),
        (["run", "pipe"], "config", 2),
        (["run", "-", "--scope", "pipe"], "config", 2),
        (["run", "-", "--config", "pipe"], "config", 2),
        (["run", "-", "--config", "x" * 5000], "config", 2),
        (["policy", "test", "pipe"], "config", 2),
        (["render", "pipe"], "config", 2),
        (["egress", "learn", "pipe"], "config", 2),
        (["run", "-", "--config", "missing.toml"], "config", 2),
        (["run", "-", "--no-such-option"], "usage", 2),
        (["run"], "usage", 2),
        (["no-such-verb"], "usage", 2),
        (["audit", "tail", "missing.db"], "config", 2),
        (["audit", "verify", "--expect", "x", "missing.db"], "config", 2),
        (["policy", "test", "missing.jsonl"], "config", 2),
        (["policy", "explain", "echo", "no-equals"], "config", 2),
        (["env", "build", "Bad Name", "-r", "missing.txt"], "config", 2),
        (["env", "build", "x", "-r", "missing.txt"], "env_build", 2),
    ],
)
def test_bad_input_is_a_typed_error_in_both_forms(
    lockgate: Verb, home: Path, args: list[str], code: str, exit_code: int
):
    if not (home / "pipe").exists():
        os.mkfifo(home / "pipe")  # nobody will ever write to it, and nobody waits for that
    as_json = lockgate(*args, "--json", stdin=b"1")
    assert as_json.returncode == exit_code, as_json
    error = document(as_json)["error"]
    assert error["code"] == code
    assert error["next_step"]
    assert b"Traceback" not in as_json.stderr
    text = lockgate(*args, stdin=b"1")
    assert text.returncode == exit_code
    assert text.stderr.count(b"error: ") == 1
    assert text.stderr.count(b"next step: ") == 1
    assert text.stdout == b""


@pytest.mark.parametrize("source", [b"\xff\xfe", b"a\0b", b"#" * 2_000_000])
def test_bad_scripts(lockgate: Verb, home: Path, source: bytes):
    done = lockgate("run", "--json", "-", stdin=source)
    assert done.returncode == 2
    assert document(done)["error"]["code"] == "bad_script"


def on_terminal(args: list[str], cwd: Path, env: dict[str, str]) -> bytes:
    """Run a verb with a terminal as stdout and stderr, and return what the terminal got."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "lockgate", *args],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
        env={"PATH": os.defpath, "TERM": "xterm", **env},
    )
    os.close(slave)
    got, deadline = b"", time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            if not select.select([master], [], [], 1)[0]:
                continue
            try:
                data = os.read(master, 65536)
            except OSError:  # EIO: the other end is closed
                break
            got += data
        assert process.wait(10) is not None
    finally:
        process.kill()
        process.wait()
        os.close(master)
    return got


def test_a_terminal_sees_no_escape_sequence_of_the_program(home: Path):
    r"""Hostile output: OSC 52 would write the clipboard. With --raw, which a person chose, it is as written."""
    (home / "hostile.py").write_text("print('\\x1b]52;c;aGk=\\x07\\u202e', 'ä')\n'\\x1b[2J'")
    shown = on_terminal(["run", "hostile.py"], home, {"NO_COLOR": "1"})
    assert b"\x1b]52" not in shown
    assert b"\\x1b]52;c;aGk=\\x07\\u202e \xc3\xa4" in shown
    assert b"\x1b[2J" not in shown
    raw = on_terminal(["run", "--raw", "hostile.py"], home, {"NO_COLOR": "1"})
    assert b"\x1b]52;c;aGk=\x07" in raw


def test_no_color_is_respected(home: Path):
    plain = on_terminal(["run", "missing.py"], home, {"NO_COLOR": "1"})
    assert b"\x1b[3" not in plain
    assert b"\x1b[" in on_terminal(["run", "missing.py"], home, {})  # the control: without it there is colour


# ---- the other verbs ------------------------------------------------------------------------------------------------
def test_ops_lists_the_registry(lockgate: Verb, home: Path):
    assert [one["name"] for one in document(lockgate("ops", "--json"))] == ["echo", "pay", "shout", "wait"]
    text = lockgate("ops").stdout
    assert b"pay" in text
    assert b"write" in text


def test_ops_needs_a_configuration(lockgate: Verb, tmp_path: Path):
    done = lockgate("ops", cwd=tmp_path)
    assert done.returncode == 2
    assert b"lockgate.toml" in done.stderr


def test_policy_explain_names_rule_value_and_line(lockgate: Verb, home: Path):
    found = document(lockgate("policy", "explain", "--json", "pay", "order=ord_1", "amount=9900"))
    assert (found["effect"], found["rule"], found["path"]) == ("deny", "pay.amount.at_most", "/amount")
    assert found["line"] == SCOPE.splitlines().index("at_most = 5000") + 1
    assert "9900" in found["reason"]
    text = lockgate("policy", "explain", "--args", '{"order": "ord_1", "amount": 1}', "pay")
    assert text.returncode == 0
    assert b"allow" in text.stdout


CASES = [
    {"scope": "scope.toml", "call": "pay", "args": {"order": "ord_1", "amount": 5000}, "expect": "allow"},
    {"call": "pay", "args": {"order": "ord_1", "amount": 5001}, "expect": "deny", "rule": "pay.amount.at_most"},
    {"call": "wait", "args": {"ms": 1}, "expect": "deny", "reason": "not_available", "name": "left out"},
]


def test_policy_test_holds_and_fails(lockgate: Verb, home: Path):
    cases = home / "cases.jsonl"
    cases.write_text("# a comment\n\n" + "\n".join(json.dumps(case) for case in CASES))
    done = lockgate("policy", "test", "--json", "cases.jsonl")
    assert done.returncode == 0, done
    assert (document(done)["cases"], document(done)["failed"]) == (3, 0)
    cases.write_text("\n".join(json.dumps({**case, "expect": "allow"}) for case in CASES))
    failed = lockgate("policy", "test", "--json", "cases.jsonl")
    assert failed.returncode == 1
    assert [one["ok"] for one in document(failed)["results"]] == [True, False, False]
    assert lockgate("policy", "test", "cases.jsonl").returncode == 1


def test_policy_test_reads_toml(lockgate: Verb, home: Path):
    (home / "cases.toml").write_text(
        '[[case]]\nscope = "scope.toml"\ncall = "pay"\nexpect = "deny"\n[case.args]\norder = "ord_1"\namount = 5001\n'
    )
    assert lockgate("policy", "test", "cases.toml").returncode == 0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"call": "pay"}', '{"call": "pay", "expect": "allow"}', '{"x": 1}'])
def test_a_malformed_file_of_cases_is_refused(lockgate: Verb, home: Path, text: str):
    (home / "bad.jsonl").write_text(text)
    done = lockgate("policy", "test", "--json", "bad.jsonl")
    assert done.returncode == 2
    assert document(done)["error"]["code"] in ("config", "scope")


def test_audit_tail_and_verify(lockgate: Verb, home: Path):
    lockgate("run", "-", stdin=b"1")
    rows = document(lockgate("audit", "tail", "--json", "-n", "3"))
    assert len(rows) == 3
    assert rows[-1]["phase"] == "run"
    assert rows[0]["seq"] + 2 == rows[2]["seq"]
    lines = lockgate("audit", "tail", "--jsonl", "-n", "2", "audit.db").stdout.splitlines()
    assert [json.loads(line)["seq"] for line in lines] == [row["seq"] for row in rows[1:]]
    assert b"atlas" in lockgate("audit", "tail").stdout or b"lockgate-cli" in lockgate("audit", "tail").stdout
    verified = lockgate("audit", "verify", "--json")
    assert verified.returncode == 0
    assert document(verified)["ok"] is True
    head = str(reader.verify(home / "audit.db").head)
    assert lockgate("audit", "verify", "--expect", head).returncode == 0
    wrong = lockgate("audit", "verify", "--json", "--expect", "1:" + "0" * 64)
    assert wrong.returncode == 1
    assert document(wrong)["findings"]


def test_env_list_of_an_empty_store(lockgate: Verb, home: Path, tmp_path: Path):
    done = lockgate("env", "list", "--json", "--store", tmp_path)
    assert (done.returncode, document(done)) == (0, [])


def test_doctor_reports_what_really_ran(lockgate: Verb, home: Path):
    done = lockgate("doctor", "--json")
    report = document(done)
    assert done.returncode == 0
    assert [one["rung"] for one in report["rungs"]] == list(RUNGS)
    assert next(one for one in report["rungs"] if one["rung"] == "container")["available"]
    assert all(one["missing"] and one["fix"] for one in report["rungs"] if not one["available"])
    assert {"wall", "output", "network"} <= {one["name"] for one in report["bounds"] if one["holds"]}


def test_doctor_exits_3_when_nothing_can_isolate(lockgate: Verb, home: Path, monkeypatch: pytest.MonkeyPatch):
    """X2: the report is that of a host on which no sandbox can be hardened."""
    monkeypatch.setattr(engine, "runtimes", lambda *_: {"container": ContainerRuntime(("--fail=landlock",))})
    report = doctor.report(Settings(pool=1, memory="rlimit"))
    monkeypatch.setattr(Gate, "doctor", lambda _self: report)
    done = lockgate("doctor", "--json")
    assert done.returncode == 3
    (container,) = [one for one in document(done)["rungs"] if one["rung"] == "container"]
    assert "landlock" in container["missing"]
    assert container["fix"]


def test_help_and_completion_are_there(lockgate: Verb, home: Path):
    shown = lockgate("--help").stdout.decode()
    for verb in ("run", "demo", "doctor", "ops", "policy", "env", "audit", "--install-completion"):
        assert verb in shown


@pytest.mark.parametrize("verb", ["ops", "no-such-verb"])
def test_a_reader_that_goes_away_is_no_error(home: Path, verb: str):
    process = subprocess.Popen(
        [sys.executable, "-m", "lockgate", verb, "--json"], cwd=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) in (1, 141)
    assert errors == b""
