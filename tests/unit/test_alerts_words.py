"""The words and the formats of an alert, with hostile parts (E4, E5)."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import jsonschema
import ocsf_json_schema
import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from lockgate.alerts import formats, sign, words
from lockgate.alerts.dedupe import Alert, key_of
from lockgate.alerts.event import CRITICAL, Event
from lockgate.render.visible import find_live

HOSTILE = "\x1b[31m<@U1> https://evil.test/?s=SECRET [x](http://evil.test) \u202emoc.live @channel |cs1=x\n<!here>"


def alert(why: Any = "first", **fields: Any) -> Alert:
    made = {"audit_id": "a-1", "seq": 1, "at": 1000.5, "kind": "network", "reason": "not_allowed", "user": "dana",
            "agent": "atlas", "run": "run-1", "host": "www.evil.test", "port": 443, **fields}  # fmt: skip
    event = Event(**made)
    return Alert(uid="first-a-1", key=key_of(event), why=why, event=event, since=1000.0, at=1001.0)


def test_a_destination_is_its_host_alone_and_broken() -> None:
    assert words.line(alert()) == "lockgate denied not_allowed hxxps://www[.]evil[.]test by atlas"
    assert "evil[.]test[:]8443" in words.line(alert(port=8443, host="evil.test"))
    assert "hxxp://evil[.]test" in words.line(alert(port=80, host="evil.test"))


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=300), st.text(max_size=300), st.text(max_size=100))
def test_no_text_makes_a_line_live_long_or_more_than_one(operation: str, host: str, agent: str) -> None:
    found = alert(operation=operation, host=host, agent=agent)
    for text in [words.line(found), *(value for _, value in words.facts(found))]:
        assert len(text) <= words.CHARS
        assert re.fullmatch(r"[\x20-\x7e]*", text)
        assert words.inert(text)


def test_hostile_parts_are_inert_everywhere() -> None:
    found = alert(operation=HOSTILE, host=HOSTILE, agent=HOSTILE, user=HOSTILE, rule=HOSTILE, path=HOSTILE, run=HOSTILE)
    slack = words.slack(found)
    assert find_live(slack["text"]) is None
    assert slack["unfurl_links"] is slack["unfurl_media"] is slack["link_names"] is False
    text = json.dumps(slack)
    assert "<@" not in text
    assert "<!" not in text
    elements = [part for block in slack["blocks"][0]["elements"] for part in block["elements"]]
    assert {part["type"] for part in elements} == {"text"}
    page = formats.pagerduty(found, "k")["payload"]
    assert words.inert(page["summary"])
    line = formats.cef(found, "host")
    assert "\n" not in line
    assert "\x1b" not in line
    assert line.count("CEF:0|") == 1
    assert "|cs1\\=x" in line  # an equals sign of the attacker's makes no field


@pytest.mark.parametrize(
    ("kind", "fields", "uid", "type_uid"),
    [
        ("network", {}, 4001, 400105),
        ("http", {"method": "POST", "path": "/v1/files"}, 4002, 400206),
        ("http", {"method": "BREW"}, 4002, 400299),
        ("dns", {"qtype": "TXT"}, 4003, 400301),
        ("operation", {"operation": "refund", "effect": "write", "via": "code"}, 6003, 600303),
        ("operation", {"operation": "get", "effect": "read"}, 6003, 600302),
        ("export", {"operation": "host.export"}, 6003, 600399),
        ("finding", {"reason": "canary", "severity": CRITICAL}, 2004, 200401),
        ("run", {"reason": "killed_wall"}, 2004, 200401),
        ("audit", {"reason": "audit_gap"}, 2004, 200401),
    ],
)
def test_ocsf_classes(kind: Any, fields: dict[str, Any], uid: int, type_uid: int) -> None:
    """E4: OCSF 1.8: class, activity, profile and the fields that each class needs."""
    found = formats.ocsf(alert(kind=kind, **fields))
    assert (found["class_uid"], found["type_uid"]) == (uid, type_uid)
    assert found["type_uid"] == found["class_uid"] * 100 + found["activity_id"]
    assert found["category_uid"] == uid // 1000
    assert (found["action_id"], found["disposition_id"]) == (2, 2)
    assert found["severity_id"] in {3, 5}
    assert found["metadata"]["version"] == "1.8.0"
    assert "security_control" in found["metadata"]["profiles"]
    assert found["metadata"]["correlation_uid"] == "run-1"
    assert found["status_detail"] == fields.get("reason", "not_allowed")
    assert found["time"] == 1_000_500
    needed = {4001: "dst_endpoint", 4002: "http_request", 4003: "query", 6003: "api", 2004: "finding_info"}[uid]
    assert found[needed]
    json.dumps(found)
    assert problems(found) == []


@pytest.mark.parametrize("host", ["", "10.0.0.1", "[2001:db8::1]", "evil.test"])
@pytest.mark.parametrize("kind", ["network", "http", "dns", "operation", "export", "rung", "run", "finding", "render"])
def test_ocsf_events_are_those_of_its_schema(kind: Any, host: str) -> None:
    """E4: held against the schema that OCSF publishes for 1.8.0; the control: without a field it is refused."""
    found = formats.ocsf(alert(kind=kind, host=host, policy="abc", method="BREW", operation=HOSTILE, rule=HOSTILE))
    assert problems(found) == []
    del found["time"]
    assert problems(found)


def problems(event: dict[str, Any]) -> list[str]:
    """Return what the published schema says is wrong with an event."""
    name = {4001: "network_activity", 4002: "http_activity", 4003: "dns_activity", 6003: "api_activity",
            2004: "detection_finding"}[event["class_uid"]]  # fmt: skip
    return [error.message for error in validator(name, *event["metadata"]["profiles"]).iter_errors(event)]


@functools.cache
def schema() -> Any:
    return ocsf_json_schema.OcsfJsonSchemaEmbedded(ocsf_json_schema.get_ocsf_schema("1.8.0"))


@functools.cache
def validator(name: str, *profiles: str) -> Any:
    return jsonschema.Draft202012Validator(schema().get_class_schema(name, list(profiles)))


def test_otlp_is_the_json_encoding_of_the_protocol() -> None:
    found = formats.otlp(alert(severity=CRITICAL))["resourceLogs"][0]["scopeLogs"][0]["logRecords"][0]
    assert found["timeUnixNano"] == "1000500000000"
    assert (found["severityNumber"], found["severityText"]) == (21, "FATAL")
    attributes = {one["key"]: one["value"] for one in found["attributes"]}
    assert attributes["server.port"] == {"intValue": "443"}
    assert attributes["server.address"] == {"stringValue": "www.evil.test"}


def test_otlp_is_read_by_the_protocol_s_own_messages() -> None:
    """E4: parsed strictly by OpenTelemetry's generated types; the control: an unknown field is refused."""
    found = formats.otlp(alert(operation=HOSTILE, path=HOSTILE))
    request = json_format.Parse(json.dumps(found), ExportLogsServiceRequest())
    (record,) = request.resource_logs[0].scope_logs[0].log_records
    assert record.severity_number == 13
    assert record.body.string_value == words.line(alert(operation=HOSTILE, path=HOSTILE))
    found["resourceLogs"][0]["surprise"] = 1
    with pytest.raises(json_format.ParseError):
        json_format.Parse(json.dumps(found), ExportLogsServiceRequest())


def test_a_signature_holds_for_its_time_its_body_and_its_key() -> None:
    fields = sign.sign(b"key", b"body", 1000.0)
    assert sign.verify(b"key", fields, b"body", now=1100.0)
    assert sign.verify(b"key", {k.lower(): v for k, v in fields.items()}, b"body", now=1100.0)
    assert not sign.verify(b"key", fields, b"body", now=1400.0)
    assert not sign.verify(b"key", fields, b"bodY", now=1100.0)
    assert not sign.verify(b"kez", fields, b"body", now=1100.0)
    assert not sign.verify(b"key", {**fields, sign.TIMESTAMP: "1001"}, b"body", now=1100.0)
    assert not sign.verify(b"key", {**fields, sign.SIGNATURE: fields[sign.SIGNATURE][3:]}, b"body", now=1100.0)
    assert not sign.verify(b"key", {**fields, sign.SIGNATURE: "v1=\u00e9"}, b"body", now=1100.0)
    assert not sign.verify(b"key", {}, b"body", now=1100.0)
