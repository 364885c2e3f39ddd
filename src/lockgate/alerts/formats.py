"""Alerts in the formats of others: OCSF 1.8, CEF, OpenTelemetry logs, PagerDuty Events v2, and our own webhook.

Rule 1: machines get canonical hosts, people get broken ones: `message`, `summary` and `body` are `words.line`.
Rule 2: no field of a format is made of text that was not cleaned, and each is bounded.

Sources: schema.ocsf.io 1.8.0 (classes 2004, 4001, 4002, 4003, 6003, profile security_control), ArcSight CEF
implementation standard rev. 25, RFC 5424, OTLP 1.x JSON encoding, developer.pagerduty.com Events API v2.
"""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from importlib import metadata
from typing import Any, Final

import msgspec

from lockgate.alerts.dedupe import Alert
from lockgate.alerts.event import Event
from lockgate.alerts.words import facts, line

_VERSION: Final = metadata.version("lockgate")
_SEVERITY: Final = {3: "Medium", 5: "Critical"}
_HTTP_ACTIVITY: Final = {
    "CONNECT": 1, "DELETE": 2, "GET": 3, "HEAD": 4, "OPTIONS": 5, "POST": 6, "PUT": 7, "TRACE": 8, "PATCH": 9,
}  # fmt: skip
_API_ACTIVITY: Final = {"read": 2, "write": 3}
_CLASS: Final = {
    "network": (4001, "Network Activity", 4, "Network Activity"),
    "http": (4002, "HTTP Activity", 4, "Network Activity"),
    "dns": (4003, "DNS Activity", 4, "Network Activity"),
    "finding": (2004, "Detection Finding", 2, "Findings"),
    "api": (6003, "API Activity", 6, "Application Activity"),
}
_CLASS_OF: Final = {
    "network": "network",
    "http": "http",
    "dns": "dns",
    "operation": "api",
    "export": "api",
    "rung": "api",
}
_CHARS: Final = 256
_CONTROL: Final = re.compile(r"[^\x20-\x7e]")
encode: Final = msgspec.json.Encoder().encode


def ocsf(alert: Alert) -> dict[str, Any]:
    """Return one OCSF event."""
    event = alert.event
    kind = "finding" if alert.why in {"escalation", "overflow"} else _CLASS_OF.get(event.kind, "finding")
    class_uid, class_name, category, category_name = _CLASS[kind]
    activity, more = _activity(kind, alert)
    found: dict[str, Any] = {
        "class_uid": class_uid,
        "class_name": class_name,
        "category_uid": category,
        "category_name": category_name,
        "activity_id": activity,
        "type_uid": class_uid * 100 + activity,
        "time": _ms(event.at),
        "start_time": _ms(alert.since or event.at),
        "end_time": _ms(event.at),
        "count": alert.count,
        "severity_id": event.severity,
        "severity": _SEVERITY[event.severity],
        "message": line(alert),
        "status_id": 2,
        "status": "Failure",
        "status_detail": event.reason,
        "action_id": 2,
        "action": "Denied",
        "disposition_id": 2,
        "disposition": "Blocked",
        "firewall_rule": {"name": _text(event.rule or "default deny")},
        "actor": {
            "user": {"uid": _text(event.user), "org": {"uid": _text(event.tenant)}},
            "app_name": _text(event.agent),
        },
        "metadata": {
            "version": "1.8.0",
            "uid": alert.uid,
            "correlation_uid": _text(event.run),
            "sequence": event.seq,
            "log_name": "lockgate",
            "original_event_uid": event.audit_id,
            # `actor` stands in the class of API calls itself, and comes with the profile `host` in the others.
            "profiles": ["security_control"] if kind == "api" else ["security_control", "host"],
            "product": {"name": "lockgate", "vendor_name": "lockgate", "version": _VERSION},
        },
        "unmapped": {"why": alert.why, "via": event.via, "rung": event.rung, "tool": _text(event.tool)},
        **more,
    }
    if event.policy:
        found["policy"] = {"uid": _text(event.policy)}
    return found


def _activity(kind: str, alert: Alert) -> tuple[int, dict[str, Any]]:
    event = alert.event
    if kind == "network":
        return 5, {"dst_endpoint": _endpoint(event)}
    if kind == "http":
        url: dict[str, Any] = {"path": _text(event.path)}
        if event.host:
            url["hostname"] = _text(event.host)
        request: dict[str, Any] = {"url": url}
        if event.method in _HTTP_ACTIVITY:
            request["http_method"] = event.method
        return _HTTP_ACTIVITY.get(event.method, 99), {"dst_endpoint": _endpoint(event), "http_request": request}
    if kind == "dns":
        query = {"hostname": _text(event.host or "unparsed"), "type": _text(event.qtype or "unknown")}
        return 1, {"query": query, "src_endpoint": {"name": _text(event.tool or "agent"), "uid": _text(event.run)}}
    if kind == "api":
        called = {"uid": event.audit_id}
        source = {"name": event.via or "agent", "uid": _text(event.run)}
        api = {"operation": _text(event.operation), "request": called, "service": {"name": "lockgate"}}
        return _API_ACTIVITY.get(event.effect, 99), {"api": api, "src_endpoint": source}
    finding: dict[str, Any] = {
        "uid": alert.key,
        "title": _text(event.reason),
        "types": [_text(event.kind)],
        "first_seen_time": _ms(alert.since or event.at),
        "last_seen_time": _ms(event.at),
    }
    evidence: dict[str, Any] = {"data": {"audit_id": event.audit_id, "operation": _text(event.operation)}}
    if event.host:
        evidence["dst_endpoint"] = _endpoint(event)
    return 1, {"finding_info": finding, "evidences": [evidence], "is_alert": True}


def _endpoint(event: Event) -> dict[str, Any]:
    if not event.host:
        return {"name": "unparsed"}
    address = event.host.strip("[]")
    named = not (event.host.startswith("[") or address.replace(".", "").isdigit())
    found: dict[str, Any] = {"hostname": _text(event.host)} if named else {"ip": _text(address)}
    return {**found, "port": event.port} if event.port else found


def cef(alert: Alert, host: str) -> str:
    """Return a CEF event in an RFC 5424 message. `host`: this machine's name."""
    event = alert.event
    level = 10 if event.critical else 5
    fields = {
        "rt": str(_ms(event.at)),
        "act": "denied",
        "outcome": "failure",
        "reason": event.reason,
        "dhost": event.host,
        "dpt": str(event.port) if event.port else "",
        "requestMethod": event.method,
        "request": event.path,
        "suser": event.user,
        "sproc": event.agent,
        "cnt": str(alert.count),
        "externalId": event.audit_id,
        "cs1Label": "rule",
        "cs1": event.rule,
        "cs2Label": "run",
        "cs2": event.run,
        "cs3Label": "operation",
        "cs3": event.operation,
        "msg": line(alert),
    }
    extension = " ".join(f"{name}={_cef_value(value)}" for name, value in fields.items() if value)
    head = "|".join(
        ("CEF:0", "lockgate", "lockgate", _VERSION, _cef_head(event.reason), _cef_head(line(alert)), str(level))
    )
    # Facility 10 (security), severity critical or warning.
    priority = 10 * 8 + (2 if event.critical else 4)
    at = datetime.fromtimestamp(event.at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return f"<{priority}>1 {at} {_CONTROL.sub('', host)[:255] or '-'} lockgate - {event.kind} - {head}|{extension}"


def _cef_head(text: str) -> str:
    return _text(text).replace("\\", "\\\\").replace("|", "\\|")


def _cef_value(text: str) -> str:
    return _text(text).replace("\\", "\\\\").replace("=", "\\=")


def otlp(alert: Alert) -> dict[str, Any]:
    """Return an ExportLogsServiceRequest with one record."""
    event = alert.event
    attributes = {
        "event.name": "lockgate.denied",
        "lockgate.uid": alert.uid,
        "lockgate.key": alert.key,
        "lockgate.why": alert.why,
        "lockgate.kind": event.kind,
        "lockgate.reason": event.reason,
        "lockgate.rule": event.rule,
        "lockgate.run": event.run,
        "lockgate.agent": event.agent,
        "lockgate.operation": event.operation,
        "lockgate.audit_id": event.audit_id,
        "enduser.id": event.user,
        "server.address": event.host,
        "http.request.method": event.method,
        "url.path": event.path,
    }
    found: list[dict[str, Any]] = [
        {"key": name, "value": {"stringValue": _text(value)}} for name, value in attributes.items() if value
    ]
    found.append({"key": "lockgate.count", "value": {"intValue": str(alert.count)}})
    if event.port:
        found.append({"key": "server.port", "value": {"intValue": str(event.port)}})
    record = {
        "timeUnixNano": str(int(event.at * 1e9)),
        "observedTimeUnixNano": str(int(alert.at * 1e9)),
        "severityNumber": 21 if event.critical else 13,
        "severityText": "FATAL" if event.critical else "WARN",
        "body": {"stringValue": line(alert)},
        "attributes": found,
    }
    resource = [
        {"key": "service.name", "value": {"stringValue": "lockgate"}},
        {"key": "service.version", "value": {"stringValue": _VERSION}},
    ]
    scope = {"name": "lockgate.alerts", "version": _VERSION}
    return {
        "resourceLogs": [
            {"resource": {"attributes": resource}, "scopeLogs": [{"scope": scope, "logRecords": [record]}]}
        ]
    }


def pagerduty(alert: Alert, routing_key: str) -> dict[str, Any]:
    """Return an event of PagerDuty's Events API v2. The key of the alert joins denials of one kind to one incident."""
    event = alert.event
    return {
        "routing_key": routing_key,
        "event_action": "trigger",
        "dedup_key": alert.key,
        "client": "lockgate",
        "payload": {
            "summary": line(alert),
            "source": _text(event.agent) or "lockgate",
            "severity": "critical" if event.critical else "warning",
            "timestamp": datetime.fromtimestamp(event.at, UTC).isoformat(),
            "component": event.kind,
            "group": _text(event.tenant),
            "class": _text(event.reason),
            "custom_details": dict(facts(alert)),
        },
    }


def webhook(alert: Alert) -> dict[str, Any]:
    """Return the body of our own webhook: the alert, its words, and the OCSF event."""
    return {
        "version": 1,
        "uid": alert.uid,
        "key": alert.key,
        "why": alert.why,
        "severity": "critical" if alert.critical else "medium",
        "text": line(alert),
        "count": alert.count,
        "since": alert.since,
        "event": msgspec.to_builtins(alert.event),
        "ocsf": ocsf(alert),
    }


def sample(why: str = "test") -> Alert:
    """Return the alert that `lockgate alerts test` sends; its destination is a reserved name (RFC 2606)."""
    now = time.time()
    event = Event(
        audit_id="test-0",
        seq=0,
        at=now,
        kind="network",
        reason="not_allowed",
        user="operator",
        agent="lockgate-test",
        run="run-test",
        host="alerts-test.example",
        port=443,
    )
    return Alert(uid=f"{why}-{now:.6f}", key="0" * 32, why="test", event=event, since=now, at=now)


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def _text(value: str) -> str:
    """Visible ASCII of at most 256 characters: a reader of logs is a terminal, too."""
    return _CONTROL.sub("?", value[:_CHARS])
