"""The alerter process: a real audit writer, a real receiver, real kills (E4)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from alerts_receiver import HMAC_KEY, ROUTING_KEY, SLACK_TOKEN, Receiver, alerts_config, until, webhook_sink
from lockgate.alerts import sign
from lockgate.alerts.alerter import state_path
from lockgate.alerts.start import AlerterProcess, start_alerter
from lockgate.alerts.state import read
from lockgate.alerts.words import inert
from lockgate.audit.denials import egress_row
from lockgate.contract.errors import HostFault
from lockgate.render.visible import find_live

WHO: dict[str, Any] = {"user": "dana", "agent": "atlas", "run": "run-1", "tenant": "acme"}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def alerter() -> Iterator[Callable[..., AlerterProcess]]:
    started: list[AlerterProcess] = []

    def start(config: Path, audit: Path, **options: Any) -> AlerterProcess:
        process = start_alerter(config, audit, **options)
        started.append(process)
        process.wait_ready()
        return process

    yield start
    for process in started:
        process.close()


def denied(host: str = "evil.test", reason: str = "not_allowed", **more: Any) -> Any:
    return egress_row(kind="connect", reason=reason, rule=None, destination=f"{host}:443", **{**WHO, **more})


def kill(process: AlerterProcess) -> None:
    signal.pidfd_send_signal(process.pidfd, signal.SIGKILL)
    process._process.wait(30)


def test_the_first_is_told_at_once_then_counts_and_critical_ones_always(
    tmp_path: Path, audit_link: Any, alerter: Any, receiver: Receiver
) -> None:
    """E4: one alert for forty equal denials, its count when the window ends, and each critical one."""
    config = alerts_config(tmp_path, webhook_sink(receiver), window=2.0, escalate=1000)
    link = audit_link()
    link.client.ready()
    alerter(config, tmp_path / "audit.db")
    for _ in range(40):
        link.client.commit(denied())
    for _ in range(3):
        link.client.commit(denied(reason="sni_mismatch"))
    # The windows of a slow machine may end in between: what must hold is the sum, and that the first came alone.
    requests = receiver.wait(
        lambda found: (
            sum(one.json["count"] for one in found if one.json["event"]["reason"] == "not_allowed") == 40
            and len([one for one in found if one.json["why"] == "critical"]) == 3
        )
    )
    ordinary = [one.json for one in requests if one.json["event"]["reason"] == "not_allowed"]
    assert (ordinary[0]["why"], ordinary[0]["count"]) == ("first", 1)
    assert {one["why"] for one in ordinary[1:]} <= {"count", "first"}
    assert len(ordinary) < 40
    for one in requests:
        assert sign.verify(HMAC_KEY.encode(), one.fields, one.body, now=time.time(), tolerance=600)
        assert not sign.verify(b"another key", one.fields, one.body, now=time.time(), tolerance=600)
        assert one.fields["x-lockgate-uid"] == one.json["uid"]
        assert len(one.json["text"]) <= 80
        assert inert(one.json["text"])


def test_what_was_told_survives_kill_nine_of_the_alerter(
    tmp_path: Path, audit_link: Any, alerter: Any, receiver: Receiver
) -> None:
    """E4: at least once: killed again and again while it delivers, no critical denial is lost."""
    config = alerts_config(tmp_path, webhook_sink(receiver, every=True), escalate=10000)
    link = audit_link()
    link.client.ready()
    audit = tmp_path / "audit.db"
    receiver.answer = lambda _: (time.sleep(0.01), (200, b"ok", {}))[1]  # so that kills find it at work
    sent: set[str] = set()
    for round_ in range(6):
        process = alerter(config, audit)
        for number in range(20):
            sent.add(link.client.commit(denied(f"host{round_}-{number}.test", "sni_mismatch")))
        receiver.wait(lambda found, most=round_: len(found) > most * 5)
        kill(process)
    # Rows that were written while no alerter ran are told by the next one.
    sent.update(link.client.commit(denied(f"late{number}.test", "sni_mismatch")) for number in range(5))
    assert len(sent) == 125
    alerter(config, audit)
    told = receiver.wait(lambda found: {one.json["event"]["audit_id"] for one in found} >= sent)
    uids = [one.json["uid"] for one in told]
    assert len(set(uids)) == 125  # what is told twice has the same uid


def test_a_sink_that_is_down_holds_back_no_other_and_gets_all_later(
    tmp_path: Path, audit_link: Any, alerter: Any, receiver: Receiver
) -> None:
    down = Receiver()
    down.answer = lambda _: (503, b"", {})
    try:
        sinks = webhook_sink(receiver, "up") + webhook_sink(down, "down")
        config = alerts_config(tmp_path, sinks, escalate=1000, timeout=5)
        link = audit_link()
        link.client.ready()
        alerter(config, tmp_path / "audit.db")
        for number in range(5):
            link.client.commit(denied(f"host{number}.test"))
        receiver.wait(lambda found: len(found) == 5)
        down.wait(lambda found: len(found) >= 1)
        waiting = until(
            lambda: [
                one for one in read(state_path(tmp_path / "audit.db"), 10)[1] if one.name == "down" and one.failed
            ],
            "a failure that is told",
        )
        assert waiting[0].waiting == 5
        assert waiting[0].problem == "answered 503"
        down.answer = lambda _: (200, b"", {})
        down.wait(lambda found: len({one.json["uid"] for one in found}) == 5)
    finally:
        down.close()


def test_every_kind_of_sink_speaks_the_format_of_the_other_side(
    tmp_path: Path, audit_link: Any, alerter: Any, receiver: Receiver
) -> None:
    """E4: Slack, PagerDuty, OTLP, file and CEF; hostile destinations are inert in each text that a person sees."""
    url = receiver.url("")
    sinks = f"""
[alerts.sinks.chat]
kind = "slack"
url = "{url}/slack"
key = "secret slack"
channel = "C0123456789"
loopback_http = true

[alerts.sinks.pager]
kind = "pagerduty"
url = "{url}/v2/enqueue"
key = "secret routing"
loopback_http = true

[alerts.sinks.otel]
kind = "otlp"
url = "{url}/v1/logs"
loopback_http = true

[alerts.sinks.ocsf]
kind = "file"
path = "alerts.jsonl"

[alerts.sinks.cef]
kind = "file"
path = "alerts.cef"
format = "cef"
"""
    receiver.answer = lambda request: (202 if "enqueue" in request.path else 200, b'{"ok":true}', {})
    config = alerts_config(tmp_path, sinks)
    link = audit_link()
    link.client.ready()
    alerter(config, tmp_path / "audit.db")
    link.client.commit(denied("www.evil.com", "foreign_credential", method="POST", path="/v1/messages?secret=1"))
    by_path = {one.path: one for one in receiver.wait(lambda found: len(found) == 3)}

    slack = by_path["/slack"].json
    assert by_path["/slack"].fields["authorization"] == f"Bearer {SLACK_TOKEN}"
    assert slack["channel"] == "C0123456789"
    assert slack["unfurl_links"] is slack["unfurl_media"] is False
    assert '"link"' not in json.dumps(slack["blocks"])
    assert find_live(slack["text"]) is None
    assert "evil.com" not in by_path["/slack"].body.decode()

    page = by_path["/v2/enqueue"].json
    assert page["routing_key"] == ROUTING_KEY
    assert page["event_action"] == "trigger"
    assert page["payload"]["severity"] == "critical"
    assert page["dedup_key"]
    assert "evil[.]com" in page["payload"]["summary"]
    assert "evil.com" not in json.dumps(page["payload"])

    record = by_path["/v1/logs"].json["resourceLogs"][0]["scopeLogs"][0]["logRecords"][0]
    assert record["severityNumber"] == 21
    assert {"key": "lockgate.reason", "value": {"stringValue": "foreign_credential"}} in record["attributes"]

    line = until(lambda: (tmp_path / "alerts.jsonl").exists() and (tmp_path / "alerts.jsonl").read_text(), "OCSF")
    event = json.loads(line)
    assert event["class_uid"] == 2004
    assert event["type_uid"] == 200401
    assert event["metadata"]["correlation_uid"] == "run-1"
    assert "secret" not in line
    cef = until(lambda: (tmp_path / "alerts.cef").exists() and (tmp_path / "alerts.cef").read_text(), "CEF")
    assert "|lockgate|lockgate|" in cef
    assert "reason=foreign_credential" in cef
    assert (tmp_path / "alerts.jsonl").stat().st_mode & 0o777 == 0o600


def test_redirects_are_not_followed_and_a_refusal_is_final(
    tmp_path: Path, audit_link: Any, alerter: Any, receiver: Receiver
) -> None:
    other = Receiver()
    try:
        receiver.answer = lambda _: (307, b"", {"Location": other.url("/stolen")})
        config = alerts_config(tmp_path, webhook_sink(receiver), escalate=1000)
        link = audit_link()
        link.client.ready()
        alerter(config, tmp_path / "audit.db")
        link.client.commit(denied("a.test"))
        receiver.wait(lambda found: len(found) >= 2)  # tried again, at the same place
        assert other.requests == []
        receiver.answer = lambda _: (422, b"", {})
        state = state_path(tmp_path / "audit.db")
        until(lambda: [one for one in read(state, 5)[1] if one.rejected == 1 and not one.waiting], "a rejection")
    finally:
        other.close()


def test_a_log_that_was_replaced_is_said(tmp_path: Path, audit_link: Any, alerter: Any, receiver: Receiver) -> None:
    """C5, E4: somebody who moves the audit log away does not end the alerts, and is told of."""
    config = alerts_config(tmp_path, webhook_sink(receiver), escalate=1000)
    audit = tmp_path / "audit.db"
    link = audit_link()
    link.client.ready()
    alerter(config, audit)
    for number in range(3):
        link.client.commit(denied(f"first{number}.test"))
    receiver.wait(lambda found: len(found) == 3)
    link.kill()
    for name in ("", "-wal", "-shm"):
        (tmp_path / f"audit.db{name}").unlink(missing_ok=True)
    again = audit_link()
    again.client.ready()
    again.client.commit(denied("second.test"))
    found = receiver.wait(lambda found: any(one.json["event"]["reason"] == "audit_replaced" for one in found))
    receiver.wait(lambda found: any(one.json["event"].get("host") == "second.test" for one in found))
    assert next(one for one in found if one.json["event"]["reason"] == "audit_replaced").json["severity"] == "critical"


def test_history_is_not_told_and_one_state_has_one_alerter(
    tmp_path: Path, audit_link: Any, alerter: Any, receiver: Receiver
) -> None:
    config = alerts_config(tmp_path, webhook_sink(receiver), escalate=1000)
    audit = tmp_path / "audit.db"
    link = audit_link()
    link.client.ready()
    link.client.commit(denied("old.test"))
    alerter(config, audit)
    with pytest.raises(HostFault, match="another alerter"):
        alerter(config, audit)
    link.client.commit(denied("new.test"))
    found = receiver.wait(lambda found: len(found) >= 1)
    assert [one.json["event"]["host"] for one in found] == ["new.test"]


def test_the_process_has_no_environment_and_no_other_descriptor(
    tmp_path: Path, audit_link: Any, alerter: Any, receiver: Receiver
) -> None:
    """C6: started with nothing, not dumpable, and the keys are in no argument."""
    link = audit_link()
    link.client.ready()
    process = alerter(alerts_config(tmp_path, webhook_sink(receiver)), tmp_path / "audit.db")
    if os.geteuid() == 0:
        assert Path(f"/proc/{process.pid}/environ").read_bytes() == b""
    else:
        with pytest.raises(PermissionError):
            Path(f"/proc/{process.pid}/environ").read_bytes()
    assert HMAC_KEY.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()


def test_it_ends_with_whoever_started_it(tmp_path: Path) -> None:
    config = alerts_config(tmp_path, '[alerts.sinks.f]\nkind = "file"\npath = "a.jsonl"\n')
    process = start_alerter(config, tmp_path / "audit.db")
    process.wait_ready()
    process.close()
    assert process._process.returncode == 0
    assert isinstance(process._process, subprocess.Popen)
