"""The doctor's report is what was seen, and data (X2, X3)."""

from __future__ import annotations

import os

import pytest

from alerts_receiver import until
from lockgate.contract import wire
from lockgate.contract.rungs import BUILT
from lockgate.runtimes.container import ContainerRuntime
from lockgate.supervisor import doctor, engine
from lockgate.supervisor.settings import Settings

ROWS = {
    "userns", "landlock", "mdwe", "seccomp", "network", "proc cover", "environment", "wall", "memory", "whole-run OOM",
    "swap", "pids", "cpu seconds", "cpu share", "disk", "inodes", "output", "cgroup.kill",
}  # fmt: skip


def test_every_bound_has_a_row_with_what_was_seen(supervisor):
    report = supervisor.ask(wire.Doctor).data
    rows = {row["name"]: row for row in report["bounds"]}
    assert set(rows) == ROWS
    assert all(row["saw"] for row in rows.values())
    for name in ("wall", "seccomp", "network", "proc cover", "disk", "inodes", "output", "cpu seconds", "memory"):
        assert rows[name]["holds"], rows[name]
    for row in rows.values():
        assert row["holds"] or row["fix"], row
    (container,) = [rung for rung in report["rungs"] if rung["rung"] == "container"]
    assert container["available"]
    assert container["boundary"] == "shared kernel"
    assert report["memory_by"] == supervisor.ready.facts["memory_by"]
    timings = report["timings"]
    assert 0 < timings["warm_ms"] < timings["cold_ms"]
    assert timings["template_ms"] > 0


def test_a_rung_is_available_once_the_attack_suite_reached_nothing_in_it(supervisor):
    """X2: every probe ran inside the machine that the doctor booted; each missing rung says why and what to do."""
    rungs = {rung["rung"]: rung for rung in supervisor.ask(wire.Doctor).data["rungs"]}
    assert rungs["container"]["probes"] >= 150
    assert rungs["container"]["reached"] == []
    assert {name: rung["boundary"] for name, rung in rungs.items()} == {
        "container": "shared kernel", "gvisor": "user-space kernel", "microvm": "hardware", "wasm": "wasm",
    }  # fmt: skip
    for name, row in rungs.items():
        assert row["available"] == (not row["missing"]), row
        assert row["fix"] or row["available"], row
        assert row["probes"] >= 150 or not row["available"], row
        if name not in BUILT:
            assert row["missing"] == "not in this version"
            assert row["probes"] == 0


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [(("--open",), "primitives can be reached from inside"), (("--fail=seccomp",), "seccomp")],
)
def test_a_rung_that_leaks_or_does_not_harden_is_not_available(arguments, missing, monkeypatch):
    """Negative control: a slot without its hardening boots and answers, and is not called available for that."""
    monkeypatch.setattr(engine, "runtimes", lambda *_: {"container": ContainerRuntime(arguments)})
    report = doctor.report(Settings(pool=1, memory="rlimit"))
    row = next(rung for rung in report["rungs"] if rung["rung"] == "container")
    assert not row["available"]
    assert missing in row["missing"]
    assert row["fix"]


def test_the_doctor_leaves_nothing(own_supervisor):
    """X10: what it booted of other rungs is gone too, template and all; the pool is as it was."""
    client = own_supervisor(pool=2)
    before = client.quiet(warm=2)
    report = client.ask(wire.Doctor).data
    assert sum(rung["probes"] > 0 for rung in report["rungs"]) > 1 or os.geteuid() != 0, "no other rung was asked"
    names = ("templates", "warm", "groups", "runs", "fds")
    until(lambda: [client.quiet(warm=2)[name] for name in names] == [before[name] for name in names], names)


def test_the_report_without_a_supervisor_process(supervisor):
    """What the command line uses: no broker, no agent, everything cleaned up."""
    import subprocess
    import sys

    script = (
        "import json, os\nfrom lockgate.supervisor import doctor\nfrom lockgate.supervisor.settings import Settings\n"
        "r = doctor.report(Settings(pool=1, memory='rlimit'))\n"
        "print(json.dumps([r['rungs'][0]['available'], len(r['bounds']), len(os.listdir('/proc/self/fd'))]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    import json

    available, rows, fds = json.loads(done.stdout)
    assert available
    assert rows == len(ROWS)
    assert fds <= 5
