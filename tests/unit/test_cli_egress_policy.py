"""`lockgate egress explain` and `lockgate egress learn` (E1)."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from lockgate.audit.denials import egress_row
from lockgate.audit.rows import encode, stamp
from lockgate.audit.store import Store
from lockgate.cli.app import guarded
from lockgate.policy.egress import EgressPolicy

CONFIG = """
[egress]
allow = [
  "api.partner.example:443",
  "*.pages.partner.example:443",
  "plain.partner.example:80",
]
deny = ["bad.pages.partner.example"]
endpoint = [{ host = "api.partner.example:443", rules = [{ method = ["GET"], path = "/v1/*" }] }]
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "lockgate.toml"
    path.write_text(CONFIG)
    return path


def explained(config: Path, destination: str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert guarded(["egress", "explain", destination, "--config", str(config), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("destination", "expected"),
    [
        ("api.partner.example:443", (True, "ok", "allow api.partner.example:443", 4)),
        ("API.Partner.example.:443", (True, "ok", "allow api.partner.example:443", 4)),
        ("https://api.partner.example/v1/x", (True, "ok", "allow api.partner.example:443", 4)),
        ("x.pages.partner.example:443", (True, "ok", "allow *.pages.partner.example:443", 5)),
        ("bad.pages.partner.example:443", (False, "not_allowed", "deny bad.pages.partner.example", 8)),
        ("http://plain.partner.example/x", (True, "ok", "allow plain.partner.example:80", 6)),
        ("evil.test:443", (False, "not_allowed", None, None)),
        ("127.0.0.1:443", (False, "ip_literal_or_ambiguous", None, None)),
        ("0x7f.1:443", (False, "ip_literal_or_ambiguous", None, None)),
        ("a b:443", (False, "bad_host", None, None)),
        ("api.partner.example:0443", (False, "bad_port", None, None)),
        ("https://u@api.partner.example/", (False, "userinfo", None, None)),
    ],
)
def test_explain_names_the_deciding_rule(
    config: Path, capsys: pytest.CaptureFixture[str], destination: str, expected: tuple[object, ...]
) -> None:
    found = explained(config, destination, capsys)
    assert (found["allow"], found["reason"], found["rule"], found["line"]) == expected
    assert found["policy"]


def test_explain_for_people(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(["egress", "explain", "api.partner.example:443", "--config", str(config)]) == 0
    shown = capsys.readouterr()
    assert "GET /v1/*" in shown.out + shown.err
    assert guarded(["egress", "explain", "evil.test:443", "--config", str(config)]) == 0
    shown = capsys.readouterr()
    assert "no entry names it" in shown.out + shown.err


def test_explain_repeats_the_warning_of_the_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lockgate.toml"
    path.write_text('[egress]\nallow = ["docs.google.com:443", "api.partner.example:443"]\n')
    (warning,) = explained(path, "docs.google.com:443", capsys)["warnings"]  # type: ignore[misc]
    assert "shared with strangers" in warning
    assert explained(path, "api.partner.example:443", capsys)["warnings"] == []


def test_a_destination_without_a_port_is_asked_back(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(["egress", "explain", "api.partner.example", "--config", str(config), "--json"]) == 2
    assert "api.partner.example:443" in json.loads(capsys.readouterr().out)["error"]["next_step"]


def reported(*destinations: str, status: bool = True) -> list[bytes]:
    return [
        encode(
            egress_row(
                kind="connect",
                reason="not_allowed",
                rule=None,
                user="u",
                agent="a",
                run="r",
                destination=one,
                reported=status,
            )
        )
        for one in destinations
    ]


def test_learn_proposes_what_report_mode_let_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "rows.jsonl"
    rows = reported("api.partner.example:443", "api.partner.example:443", "pypi.org:443", 'x":443')
    log.write_bytes(b"\n".join([*rows, *reported("denied.partner.example:443", status=False), b""]))
    assert guarded(["egress", "learn", str(log)]) == 0
    text = capsys.readouterr().out
    assert EgressPolicy.load(text).names == {"api.partner.example"}
    assert '# "pypi.org:443",  # 1 times: registry_at_runtime' in text
    assert "denied" not in text
    assert guarded(["egress", "learn", str(log), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["candidates"][0] == {"entry": "api.partner.example:443", "count": 2, "live": True, "why": None}
    assert found["skipped"] == 1


def test_learn_reads_an_audit_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "audit.db"
    store = Store(log)
    with store.transaction(durable=True):
        for number, raw in enumerate(reported("api.partner.example:443", "new.partner.example:443") * 700):
            store.add(stamp(raw, f"0123456789ab-{number + 1}", 1.0, 2.0))
    store.close()
    assert guarded(["egress", "learn", str(log), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["entry"], one["count"]) for one in found["candidates"]] == [
        ("api.partner.example:443", 700),
        ("new.partner.example:443", 700),
    ]


def test_learn_says_what_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(["egress", "learn", str(tmp_path / "missing"), "--json"]) == 2
    log = tmp_path / "rows.jsonl"
    log.write_text("{}\nnot a row\n")
    assert guarded(["egress", "learn", str(log), "--json"]) == 2
    assert "line 2" in capsys.readouterr().out
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE t (x)")
    assert guarded(["egress", "learn", str(other), "--json"]) == 2
    log.write_text("")
    assert guarded(["egress", "learn", str(log)]) == 0
