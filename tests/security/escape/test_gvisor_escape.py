"""What can be reached from inside a box of the gvisor rung, and what the list reaches without its filter (X4, X8)."""

from __future__ import annotations

import msgspec
import pytest

import lockgate as lg
from gate_fixtures import gate_home, gate_scope
from gvisor_fixtures import PATIENCE, GvisorRun, needs_gvisor
from lockgate.contract.bounds import Bounds
from lockgate.runtimes import attack
from lockgate.runtimes.gvisor import GvisorRuntime
from lockgate.runtimes.protocol import TemplateSpec
from lockgate.runtimes.single import run_once

pytestmark = needs_gvisor


def answers(value: bytes | None) -> list[attack.Row]:
    return attack.rows(msgspec.json.decode(value or b"null"))


def test_no_probe_reaches_anything_in_a_box(gvisor_run: GvisorRun) -> None:
    """X4, X8: 299 probes; only what must leak answers, and each of those has a reason."""
    done = gvisor_run(attack.program(), wall=100.0)
    assert done.result is not None, done.failed
    found = answers(done.result.value)
    report = attack.judge("gvisor", found, attack.Controls(rows={}, missing={}))
    assert report.reached == ()
    assert report.total >= 290
    assert len(report.allowed_leaks) <= 3


def test_the_same_probes_reach_where_the_inner_filter_is_left_out() -> None:
    """Negative control: in a box whose worker may ask the sentry for anything, the list sees what it looks for."""
    template = GvisorRuntime(settings={"open": True}).start(TemplateSpec())
    try:
        done = run_once(template, attack.program().encode(), Bounds(wall=100.0), patience=PATIENCE)
    finally:
        template.close()
    assert done.result is not None, done.failed
    report = attack.judge("gvisor", answers(done.result.value), attack.Controls(rows={}, missing={}))
    reached = {row.id for row in report.reached}
    assert len(reached) >= 25, sorted(reached)
    assert {"memfd-create", "rwx-mapping", "socket-unix", "dlopen-copied-library", "inotify"} <= reached


def test_an_old_runsc_runs_nothing_until_that_is_accepted(tmp_path: object) -> None:
    """X3: a runsc that is older than the release relied on is refused by name; accepted, every row says so."""
    from pathlib import Path

    home = Path(str(tmp_path))
    config = gate_home(home, "gvisor")
    if not GvisorRuntime().runsc().old:
        pytest.skip("the runsc of this host is no old one")
    config.write_text(config.read_text().replace("allow_old = true", "allow_old = false"))
    with lg.sync.Gate(config) as gate, gate.run_scope(gate_scope(echo={})) as run:
        with pytest.raises(lg.CannotIsolate, match="old runtime"):
            run.code("1")
        done = run.code("host.call('echo', text='x')['text']", accept_weaker=("old runtime",))
        assert (done.value, done.weakness, done.rung) == ("x", "old runtime", "gvisor")
    rows = (home / "audit.db").read_bytes()
    assert b"old runtime" in rows
