"""Which rows are denials, and what is said of one (E4)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lockgate.alerts.event import CRITICAL, Event, classify
from lockgate.audit import rows
from lockgate.audit.denials import RAW_BYTES, egress_row
from lockgate.audit.rows import Row, StoredRow

WHO: dict[str, Any] = {"user": "dana", "agent": "atlas", "run": "run-1"}


def stored(row: Row) -> StoredRow:
    return msgspec.structs.replace(rows.decode(rows.stamp(rows.encode(row), "aaaa-1", 1000.0, 1.0)), seq=7)


def event(phase: Any, **fields: Any) -> Event | None:
    return classify(stored(Row(phase=phase, **{**WHO, **fields})))


def of(found: Event | None) -> tuple[str, str, bool]:
    assert found is not None
    return found.kind, found.reason, found.critical


@pytest.mark.parametrize(
    ("phase", "fields"),
    [
        ("intent", {"verdict": "allow", "operation": "refund"}),
        ("outcome", {"verdict": "allow", "status": "ok"}),
        ("outcome", {"verdict": "allow", "status": "refused"}),
        ("run", {"status": "opened"}),
        ("run", {"status": "closed"}),
        ("run", {"status": "ended", "detail": {"exit_code": 1, "killed_by": None}}),
        ("run", {"status": "killed", "detail": {"killed_by": "protocol"}}),  # its denial row is the alert
        ("approval", {"status": "asked"}),
        ("egress", {"verdict": "allow", "reason": "not_allowed", "status": "reported"}),
        ("render", {"verdict": "allow", "reason": "x"}),
    ],
)
def test_what_is_no_denial_is_no_alert(phase: str, fields: dict[str, Any]) -> None:
    assert event(phase, **fields) is None


@pytest.mark.parametrize(
    ("phase", "fields", "expected"),
    [
        ("denied", {"verdict": "deny", "visible": "not_available"}, ("operation", "not_available", False)),
        ("denied", {"verdict": "needs_approval", "visible": "approval_required"},
         ("operation", "approval_required", False)),
        ("denied", {"verdict": "deny", "visible": "argument_not_allowed", "reason": "arg_host_not_allowed: no"},
         ("operation", "arg_host_not_allowed", False)),
        ("denied", {"verdict": "deny", "visible": "argument_not_allowed", "reason": "amount 9900 > 5000"},
         ("operation", "argument_not_allowed", False)),
        ("denied", {"verdict": "deny", "visible": "latched", "reason": "trifecta: private and untrusted"},
         ("finding", "trifecta", True)),
        ("denied", {"verdict": "deny", "visible": "expired", "reason": "canary: planted"}, ("finding", "canary", True)),
        ("denied", {"verdict": "deny", "rule": "protocol", "reason": "a frame announces 0 bytes"},
         ("finding", "protocol_violation", True)),
        ("denied", {"verdict": "deny", "operation": "host.export", "rule": "host.export", "reason": "is hidden",
                    "visible": "argument_not_allowed"}, ("export", "argument_not_allowed", False)),
        ("denied", {"verdict": "deny", "operation": "run.code", "rule": "rung.shared_kernel"},
         ("rung", "shared_kernel", False)),
        ("run", {"status": "killed", "detail": {"killed_by": "wall"}}, ("run", "killed_wall", False)),
        ("run", {"status": "killed", "detail": {"killed_by": "memory"}}, ("run", "killed_memory", False)),
        ("bound", {"verdict": "deny", "rule": "bound.calls"}, ("run", "calls", False)),
        ("render", {"verdict": "deny", "reason": "url_not_allowed", "detail": {"severity": "high"}},
         ("render", "url_not_allowed", False)),
        ("render", {"verdict": "deny", "reason": "self_check", "detail": {"severity": "critical"}},
         ("finding", "self_check", True)),
        ("gap", {"detail": {"numbers": "3-5"}}, ("audit", "audit_gap", True)),
    ],
)  # fmt: skip
def test_denials_of_every_path(phase: str, fields: dict[str, Any], expected: tuple[str, str, bool]) -> None:
    """E4: broker, latch, canary, protocol, export, rung, kill, bound, render, audit."""
    assert of(event(phase, **fields)) == expected


@pytest.mark.parametrize(
    ("kind", "reason", "more", "expected"),
    [
        ("connect", "not_allowed", {}, ("network", "not_allowed", False)),
        ("sni", "sni_mismatch", {}, ("network", "sni_mismatch", True)),
        ("resolve", "resolved_non_public", {}, ("network", "resolved_non_public", False)),
        ("resolve", "resolved_non_public", {"metadata": True}, ("network", "resolved_non_public", True)),
        ("intercept", "path_not_allowed", {}, ("http", "path_not_allowed", False)),
        ("intercept", "foreign_credential", {}, ("finding", "foreign_credential", True)),
        ("http", "smuggling", {}, ("http", "smuggling", False)),
        ("dns", "qtype_denied", {}, ("dns", "qtype_denied", False)),
        ("canary", "canary", {}, ("finding", "canary", True)),
        ("packet", "no_route", {}, ("network", "no_route", False)),
    ],
)
def test_denials_of_the_gateway(kind: Any, reason: str, more: Any, expected: tuple[str, str, bool]) -> None:
    row = egress_row(kind=kind, reason=reason, rule="r", destination="evil.test:443", raw=b"\0" * 1000, **WHO, **more)
    found = classify(stored(row))
    assert of(found) == expected
    assert found is not None
    assert (found.host, found.port) == ("evil.test", 443)
    assert len(str(row.detail["raw"])) == 2 * RAW_BYTES
    assert classify(stored(egress_row(kind=kind, reason=reason, rule="r", reported=True, **WHO))) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("evil.test:443", ("evil.test", 443)),
        ("evil.test", ("evil.test", 0)),
        ("evil[.]test[:]8443", ("evil.test", 8443)),
        ("[2001:db8::1]:443", ("[2001:db8::1]", 443)),
        ("[2001:db8::1]", ("[2001:db8::1]", 0)),
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("", ("", 0)),
    ],
)
def test_destinations_are_read_in_both_spellings(text: str, expected: tuple[str, int]) -> None:
    row = egress_row(kind="connect", reason="not_allowed", rule=None, destination=text, **WHO)
    found = classify(stored(row))
    assert found is not None
    assert (found.host, found.port) == expected


def test_a_reason_is_never_a_sentence_and_a_path_has_no_query() -> None:
    row = egress_row(kind="http", reason="x y SECRET", rule=None, path="/v1/x?s=SECRET", **WHO)
    found = classify(stored(row))
    assert found is not None
    assert "SECRET" not in repr(found)
    assert found.severity != CRITICAL
