"""`lockgate alerts`: the verbs, against real sinks (E4)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from alerts_receiver import HMAC_KEY, Receiver, alerts_config, until, webhook_sink
from lockgate.alerts.metrics import rules
from lockgate.alerts.start import start_alerter
from lockgate.audit.denials import egress_row
from lockgate.cli.app import guarded


class Done(NamedTuple):
    """What a verb said."""

    returncode: int
    stdout: str
    stderr: str


Verb = Callable[..., Done]
WHO: dict[str, Any] = {"user": "dana", "agent": "atlas", "run": "run-1", "tenant": "acme"}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def lockgate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verb:
    """Run a verb in this process, in the test's directory; what needs a key of a sink is a process all the same."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> Done:
        capsys.readouterr()
        code = guarded(list(args))
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    return run


def denied(host: str, reason: str = "not_allowed", **more: Any) -> Any:
    return egress_row(kind="connect", reason=reason, rule=None, destination=f"{host}:443", **{**WHO, **more})


def test_test_says_what_each_sink_answered(tmp_path: Path, receiver: Receiver, lockgate: Verb) -> None:
    sinks = webhook_sink(receiver) + '[alerts.sinks.log]\nkind = "file"\npath = "alerts.jsonl"\n'
    alerts_config(tmp_path, sinks)
    done = lockgate("alerts", "test", "--json")
    assert done.returncode == 0, done.stderr
    said = {one["sink"]: one["result"] for one in json.loads(done.stdout)}
    assert said == {"hook": "delivered", "log": "delivered"}
    assert receiver.requests[0].json["why"] == "test"
    assert json.loads((tmp_path / "alerts.jsonl").read_text())["metadata"]["version"] == "1.8.0"
    receiver.answer = lambda _: (401, b"synthetic words of the other side", {})
    done = lockgate("alerts", "test", "--sink", "hook")
    assert done.returncode == 1
    assert "answered 401" in done.stdout
    assert "synthetic words" not in done.stdout + done.stderr
    assert HMAC_KEY not in done.stdout + done.stderr


def test_test_names_an_unknown_sink_and_a_missing_one(tmp_path: Path, receiver: Receiver, lockgate: Verb) -> None:
    alerts_config(tmp_path, webhook_sink(receiver))
    done = lockgate("alerts", "test", "--sink", "hok")
    assert (done.returncode, "no sink 'hok'" in done.stderr) == (2, True)
    alerts_config(tmp_path, "")
    assert lockgate("alerts", "test").returncode == 2


def test_tail_and_replay(tmp_path: Path, receiver: Receiver, audit_link: Any, lockgate: Verb) -> None:
    """E4: what was told, how sinks do, and every denial of the log told again."""
    config = alerts_config(tmp_path, webhook_sink(receiver), escalate=1000)
    link = audit_link()
    link.client.ready()
    alerter = start_alerter(config, tmp_path / "audit.db")
    try:
        alerter.wait_ready()
        link.client.commit(denied("one.test"))
        link.client.commit(denied("one.test"))
        link.client.commit(denied("two.test", "canary"))
        receiver.wait(lambda found: len(found) == 2)
        told = until(
            lambda: (
                (found := json.loads(lockgate("alerts", "tail", "--json").stdout)) and len(found["told"]) == 2 and found
            ),
            "two alerts that are told",
        )
    finally:
        alerter.close()
    assert {one["why"] for one in told["told"]} == {"first", "critical"}
    assert told["sinks"][0]["delivered"] == 2
    assert "one[.]test" in lockgate("alerts", "tail").stdout

    shown = json.loads(lockgate("alerts", "replay", "--json").stdout)
    assert [one["event"]["host"] for one in shown] == ["one.test", "one.test", "two.test"]
    done = lockgate("alerts", "replay", "--send", "--run", "run-1", "--json")
    assert done.returncode == 0, done.stderr
    assert [one["result"] for one in json.loads(done.stdout)] == ["delivered"] * 3
    receiver.wait(lambda found: len([one for one in found if one.json["why"] == "replay"]) == 3)
    assert lockgate("alerts", "replay", "--run", "run-2", "--json").stdout.strip() == "[]"


def test_serve_follows_a_log_in_the_foreground(tmp_path: Path, receiver: Receiver, audit_link: Any) -> None:
    alerts_config(tmp_path, webhook_sink(receiver), textfile="lockgate.prom")
    link = audit_link()
    link.client.ready()
    process = subprocess.Popen(
        [sys.executable, "-m", "lockgate", "alerts", "serve"],
        cwd=tmp_path,
        env={"SECRET": "synthetic-ambient-secret"},
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: (tmp_path / "audit.db.alerts").exists() and (tmp_path / "lockgate.prom").exists(), "an alerter")
        link.client.commit(denied("one.test"))
        receiver.wait(lambda found: len(found) == 1)
        if os.geteuid() == 0:
            assert Path(f"/proc/{process.pid}/environ").read_bytes() == b""
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    text = (tmp_path / "lockgate.prom").read_text()
    assert 'lockgate_denied_total{reason="not_allowed",rule="",log="gate"} 1' in text
    assert "one.test" not in text


def test_the_rules_are_printed(lockgate: Verb) -> None:
    assert lockgate("alerts", "rules").stdout == rules()
