"""The attack suite as a person runs it: nothing reached in the rung, every probe seen alive somewhere (X4, X8)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gate_fixtures import gate_home
from lockgate.cli.app import guarded
from lockgate.contract.bounds import Bounds
from lockgate.runtimes import attack, controls
from lockgate.runtimes.container import ContainerRuntime
from lockgate.runtimes.container.plan import guest_directory
from lockgate.runtimes.protocol import TemplateSpec
from lockgate.runtimes.single import run_once

GOALS = {"Escape", "HostLeak", "Exfil", "Lateral", "HostDoS", "PeerDoS"}
BROKEN = """
@probe("looks-at-nothing", "Escape")
def _():
    return readable("/no-such-directory/no-such-file")
"""


class Attacked:
    """One `lockgate attack --json`, ended."""

    def __init__(self, home: Path, capfd: pytest.CaptureFixture[str], *options: str) -> None:
        gate_home(home)
        capfd.readouterr()
        since = time.monotonic()
        self.code = guarded(["attack", "--json", "--config", str(home / "lockgate.toml"), *options])
        self.seconds = time.monotonic() - since
        out, self.notes = capfd.readouterr()
        self.document: dict[str, Any] = json.loads(out)


@pytest.fixture
def broken_probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list with one probe more, which can never see anything."""
    guest = tmp_path / "guest"
    shutil.copytree(guest_directory() / "probes", guest / "probes")
    with (guest / "probes" / "dos.py").open("a") as file:
        file.write(BROKEN)
    monkeypatch.setattr(controls, "guest_directory", lambda: guest)


@pytest.mark.timeout(120)
def test_the_suite_passes_and_proves_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """X4, X8: zero reached beside the allowed leaks; the controls reach; no probe is dead; in time (30 s when idle)."""
    done = Attacked(tmp_path, capfd)
    found = done.document
    assert done.code == 0, (done.notes, found["reached"])
    assert set(found) == {"rung", "total", "reached", "allowed_leaks", "controls"}
    assert (found["rung"], found["reached"]) == ("container", [])
    assert found["total"] >= 150
    assert {leak["id"] for leak in found["allowed_leaks"]} <= {leak.id for leak in attack.ALLOWED["container"]}
    assert all(set(leak) == {"id", "reason", "document"} for leak in found["allowed_leaks"])
    assert found["controls"]["none"]["reached"] >= 60
    assert {"none", "open", "marker"} <= set(found["controls"])
    assert all(set(control) == {"reached"} and control["reached"] >= 60 for control in found["controls"].values())
    assert "dead" not in done.notes
    assert done.seconds < 100


@pytest.mark.timeout(120)
def test_a_probe_that_cannot_see_fails_the_suite(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], broken_probes: None
) -> None:
    """Negative control: the suite names the one probe that no control saw reach, and exits 1."""
    done = Attacked(tmp_path, capfd)
    assert done.code == 1
    assert done.document["reached"] == []
    assert "1 probes are dead, no control saw them reach: looks-at-nothing" in done.notes


def test_enough_probes_are_alive_on_this_host() -> None:
    """At least 150 probes are seen to reach their primitive in a control; the others are accounted for by name."""
    seen = controls.run_controls()
    every = seen.rows["none"]
    report = attack.judge("container", every, seen)
    live = {row.id for rows in seen.rows.values() for row in rows if row.reached}
    assert len(live) >= 150
    assert report.dead == ()
    assert len({row.id for row in every}) == len(every)
    assert {row.goal for row in every} == GOALS
    assert set(report.absent) <= set(attack.MAY_LACK)
    assert len(report.reached) >= 60, "without a sandbox the same list reaches: the judge can say so"


def test_a_control_that_cannot_be_had_is_named_and_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain user has no control as root; the probes that need it are unproven, and not called dead."""
    monkeypatch.setattr(controls, "_full_root", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    seen = controls.run_controls(["create-in-usr", "socket-inet", "see-run-secrets", "modify-ldt"])
    assert set(seen.missing) == {"root", "bwrap", "bwrap-root"}
    assert "apt-get install bubblewrap" in seen.missing["bwrap"]
    report = attack.judge("container", seen.rows["marker"], seen)
    assert report.dead == ()
    assert set(report.unproven) <= {"create-in-usr"}


def test_what_a_host_lacks_is_decided_by_looking_outside() -> None:
    """A primitive counts as absent only when the answer outside says so; refused outside is dead, not absent."""

    def row(ident: str, detail: str) -> controls.Row:
        return controls.Row(ident, "HostLeak", reached=False, detail=detail)

    found = [row("device-kvm", "FileNotFoundError"), row("device-mem", "x"), row("socket-unix", "FileNotFoundError")]
    seen = controls.Controls(
        rows={"none": [row("device-kvm", "FileNotFoundError"), row("device-mem", "PermissionError"), found[2]]},
        missing={},
    )
    report = attack.judge("container", found, seen)
    assert report.absent == ("device-kvm",)
    assert report.dead == ("device-mem", "socket-unix")
    assert not report.passed


@pytest.mark.skipif(os.geteuid() != 0, reason="the control as root needs root")
def test_what_is_asked_as_root_changes_nothing_of_the_host() -> None:
    """The control as root asks only probes that open and close, or change the process that asks."""
    before = Path("/proc/self/mountinfo").read_text(), Path("/proc/sys/kernel/core_pattern").read_text(), os.uname()
    asked = {row.id for row in controls.control_root()}
    after = Path("/proc/self/mountinfo").read_text(), Path("/proc/sys/kernel/core_pattern").read_text(), os.uname()
    assert before == after
    assert all(ident.startswith(controls.AS_ROOT) for ident in asked)
    assert not asked & {"mount-tmpfs", "reboot", "sethostname", "kexec-load", "init-module"}


def test_the_list_holds_where_a_run_has_one_process() -> None:
    """X3: without a memory cgroup the run cannot fork; the probes run in it, and what would end it is asked alone."""
    template = ContainerRuntime().start(TemplateSpec(memory_by_rlimit=True))
    try:
        outcome = run_once(template, attack.program().encode(), Bounds(wall=60))
        alone = {ident: run_once(template, attack.program([ident]).encode(), Bounds()) for ident in attack.FATAL}
    finally:
        template.close()
    assert outcome.result is not None
    assert outcome.result.value is not None, outcome.result.error
    found = attack.rows(msgspec.json.decode(outcome.result.value))
    assert not attack.FATAL.keys() & {row.id for row in found}
    assert len(found) >= 150
    report = attack.judge("container", found, controls.Controls(rows={}, missing={}))
    assert report.reached == ()
    assert all(one.result is None for one in alone.values())


def test_probes_that_trace_each_other_never_share_a_child(tmp_path: Path) -> None:
    """X8: where a fork is dear the probes share one; two that trace each other stop at the first signal, for good."""
    two = ("ptrace-traceme", "ptrace-seize-parent")
    signalled = "PROBES.append(('signalled', 'Lateral', lambda: (os.kill(os.getpid(), signal.SIGCHLD), ''), False))\n"
    head, _, last = attack.program([*two, "signalled"]).rpartition("\n")
    assert "SLOW_FORK = 0.008" in head
    script = tmp_path / "attack.py"
    script.write_text(f"{head.replace('SLOW_FORK = 0.008', 'SLOW_FORK = 0.0')}\n{signalled}print(json.dumps({last}))\n")
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(script)], capture_output=True, timeout=60, check=True, cwd=tmp_path
    )
    assert {row["id"] for row in json.loads(done.stdout)} == {*two, "signalled"}
