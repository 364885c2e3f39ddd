"""The shipped rules, as Prometheus' own tool reads and runs them (E4)."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from alerts_receiver import alerts_config, until
from lockgate.alerts.metrics import rules
from lockgate.alerts.start import AlerterProcess, start_alerter
from lockgate.audit.denials import egress_row
from lockgate.contract.errors import HostFault

PROMTOOL = shutil.which("promtool", path=f"{Path(sys.executable).parent}:{os.defpath}")
# scripts/setup.sh gets it where it may; there its absence is a failure.
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None and os.geteuid() != 0, reason="promtool is missing (Debian: prometheus)"
)

CASES = Path(__file__).parent.parent / "alerts_rules_cases.yml"


def promtool(*args: str, text: str = "") -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run(
        [PROMTOOL, *args], input=text, capture_output=True, text=True, timeout=120, check=False, env={}
    )


@needs_promtool
def test_prometheus_takes_the_rules_and_they_fire(tmp_path: Path) -> None:
    (tmp_path / "lockgate.rules.yml").write_text(rules())
    checked = promtool("check", "rules", str(tmp_path / "lockgate.rules.yml"))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    (tmp_path / "cases.yml").write_text(CASES.read_text())
    ran = promtool("test", "rules", str(tmp_path / "cases.yml"))
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_counters_are_served_and_written(tmp_path: Path, audit_link: Any) -> None:
    """E4: the endpoint and the textfile say the same, with no destination in a label; promtool takes the text."""
    link = audit_link()
    link.client.ready()
    alerter, port = started(tmp_path)
    try:
        link.client.commit(
            egress_row(
                kind="connect", reason="not_allowed", rule="deny", destination="evil.test:443",
                user="u", agent="a", run="r",
            )
        )  # fmt: skip

        def served() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                return str(answer.read().decode())

        wanted = 'lockgate_denied_total{reason="not_allowed",rule="deny",log="gate"} 1'
        text = until(lambda: (found := served()) and wanted in found and found, "a counter")
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/other", timeout=30)
    finally:
        alerter.close()
    written = (tmp_path / "lockgate.prom").read_text()
    assert wanted in written
    assert "evil" not in text + written
    assert oct((tmp_path / "lockgate.prom").stat().st_mode & 0o777) == "0o644"
    if PROMTOOL is not None:
        checked = promtool("check", "metrics", text=text)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def started(home: Path) -> tuple[AlerterProcess, int]:
    """Start an alerter with a port that was free a moment ago; another one when somebody took it meanwhile."""
    for attempt in range(5):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = int(sock.getsockname()[1])
        config = alerts_config(home, "", textfile="lockgate.prom", metrics=f"127.0.0.1:{port}")
        alerter = start_alerter(config, home / "audit.db")
        try:
            alerter.wait_ready()
        except HostFault as error:
            alerter.close()
            if "cannot listen" not in error.message or attempt == 4:
                raise
        else:
            return alerter, port
    raise AssertionError("unreachable")
