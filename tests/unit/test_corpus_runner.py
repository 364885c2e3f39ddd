"""`lockgate corpus`: our own cases of each kind hold, and a wrong expectation never does (E1 to E7)."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from lockgate.cli.app import guarded
from lockgate.corpus import run_cases, run_lines
from lockgate.corpus.quiet import leaving
from lockgate.corpus.runner import RUNNERS

FILE = Path(__file__).parent.parent / "egress_cases.jsonl"
CASES: list[dict[str, Any]] = [json.loads(line) for line in FILE.read_text().splitlines()]


def test_every_case_holds() -> None:
    report = run_lines(FILE.read_text().splitlines())
    assert report.failures == ()
    assert report.total == len(CASES) > 500


def test_every_kind_has_allowed_and_denied_cases() -> None:
    for kind in (*RUNNERS, "content"):
        mine = [case for case in CASES if case["kind"] == kind]
        assert mine, kind
        assert {"deny", "config_error"} & {case["expected"] for case in mine} or kind == "resolve_wire", kind


def test_a_wrong_expectation_fails() -> None:
    """Negative control: no case passes with the other verdict, or with a reason that is not its own."""
    other = [{**case, "expected": "allow" if case["expected"] != "allow" else "deny"} for case in CASES]
    assert [one.id for one in run_cases(other) if one.passed] == []
    wrong = [{**case, "reason": "no_such_reason"} for case in CASES if case["expected"] != "deny_all"]
    assert [one.id for one in run_cases(wrong) if one.passed] == []


def test_what_must_hold_is_held_against_the_case() -> None:
    base = next(case for case in CASES if case["kind"] == "resolve" and case["expected"] == "allow")
    for must, passed in (
        ({"dns_queries": 1}, True),
        ({"dns_queries": 2}, False),
        ({"connect_ip": "10.0.0.1"}, False),
        ({"never_heard_of": True}, False),
        ({"no_bytes_upstream": True, "upstream_contacted": False}, True),
        ({"upstream_contacted": True}, False),
        ({"packets_that_leave": 0, "upstream_requests": 0}, True),
        ({"upstream_requests": 1}, False),
        ("x", False),
    ):
        assert run_cases([{**base, "must": must}])[0].passed is passed, must


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("not json", "no JSON object"),
        ("[1]", "no JSON object"),
        ("null", "no JSON object"),
        ("[" * 100_000, "no JSON object"),
        ("{}", "no runner"),
        ('{"kind": "unheard", "input": {}, "expected": "deny"}', "no runner"),
        ('{"kind": ["x"], "input": {}, "expected": "deny"}', "no runner"),
        ('{"kind": "connect", "input": [], "expected": "deny"}', "input is no object"),
        ('{"kind": "connect", "input": {}, "expected": "perhaps"}', "expected is none"),
        ('{"kind": "connect", "input": {}, "expected": "deny"}', "no host"),
        ('{"kind": "connect", "input": {"host_hex": "zz", "port": 1}, "expected": "deny"}', "cannot be decoded"),
        ('{"kind": "connect", "input": {"host": 5, "port": 1}, "expected": "deny"}', "no text"),
        ('{"kind": "env", "input": {}, "expected": "deny", "policy_text": "?"}', "not understood"),
        ('{"kind": "env", "input": {}, "expected": "deny", "policy_text": "allow=[*]"}', "not load"),
        ('{"kind": "env", "input": {}, "expected": "deny", "policy_text": "P9 + x"}', "no policy P9"),
        ('{"kind": "redirect_chain", "input": {"chain": []}, "expected": "deny"}', "no list"),
        ('{"kind": "url_argument", "input": {"url": "https://a.b/"}, "expected": "deny"}', "names no https"),
        ('{"kind": "url_argument", "input": {"declared": "https://a.example/*"}, "expected": "deny"}', "no url"),
        ('{"kind": "content", "input": {"headers": [["x"]]}, "expected": "deny"}', "no list of pairs"),
        ('{"kind": "content", "input": {"host_sequence": []}, "expected": "deny"}', "no list of names"),
        ('{"kind": "dns_query", "input": {"qtype": "A"}, "expected": "deny"}', "qname"),
        ('{"kind": "dns_query", "input": {"qname": "a.", "qtype": "?"}, "expected": "deny"}', "no type"),
        ('{"kind": "in_sandbox_relay", "input": {"flow": "x"}, "expected": "deny"}', "names no request"),
        ('{"kind": "intercepted_request", "input": {"host": "a.wild.example", "request": 7}, "expected": "deny"}',
         "no text"),
        ('{"kind": "connect_verify", "input": {"dialled": "x", "peer": "1.1.1.1"}, "expected": "deny"}', "are addr"),
        ('{"kind": "content", "input": {"requests": 7}, "expected": "deny"}', "no list"),
        ('{"sink": "markdown", "input": "x"}', "expected"),
    ],
)  # fmt: skip
def test_a_line_that_cannot_be_run_is_a_failure(line: str, says: str) -> None:
    report = run_lines([line])
    assert (report.total, report.passed) == (1, 0)
    assert says in report.failures[0].reason
    assert report.failures[0].id


def test_nothing_that_a_case_holds_crashes_the_run() -> None:
    odd: list[Any] = [None, True, -1, 2**70, 1.5, "", "\ud800", "a" * 5000, [], [[]], {}, {"x": [None]}]
    made = []
    for case in CASES[:: len(CASES) // 60]:
        for number, value in enumerate(odd):
            keys = list(case["input"]) or ["x"]
            made.append({**case, "input": {**case["input"], keys[number % len(keys)]: value}})
            made.append({**case, ["input", "policy_text", "expected", "must", "reason"][number % 5]: value})
    outcomes = run_cases(made)
    assert len(outcomes) == len(made)
    assert not any("RecursionError" in one.reason for one in outcomes)


def test_leaving_is_noticed() -> None:
    """Negative control: a case that would send something would be found out."""
    with leaving() as left, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("127.0.0.1", 9))
    assert left == ["socket.connect"]
    with leaving() as left:
        socket.getaddrinfo("127.0.0.1", 80, flags=socket.AI_NUMERICHOST)
    assert left == ["socket.getaddrinfo"]


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(["corpus", str(FILE), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == {"total": len(CASES), "passed": len(CASES), "failures": []}
    bad = {**CASES[0], "expected": "deny"}
    file = tmp_path / "cases.jsonl"
    file.write_text(json.dumps(bad) + "\n\nnope\n")
    assert guarded(["corpus", str(file)]) == 1
    shown = capsys.readouterr()
    assert shown.out == "0 of 2 cases hold\n"
    assert CASES[0]["id"] in shown.err
    assert guarded(["corpus", str(tmp_path / "missing"), "--json"]) == 2
