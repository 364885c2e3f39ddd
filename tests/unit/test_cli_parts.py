"""The command line's parts alone: output on its way, arguments, cases, the example that is not there."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockgate.cli import demo
from lockgate.cli.app import guarded
from lockgate.cli.common import arguments, load_config
from lockgate.cli.output import plain
from lockgate.cli.run import _Show
from lockgate.contract.errors import ConfigError
from lockgate.gate.escape import escape


def test_arguments_are_json_or_text():
    assert arguments(["a=1", "b=x y", "c=null", 'd=["x"]', "e="], None) == {
        "a": 1, "b": "x y", "c": None, "d": ["x"], "e": "",
    }  # fmt: skip
    assert arguments(["a=2"], '{"a": 1, "b": 3}') == {"a": 2, "b": 3}
    for pairs, raw in ((["a"], None), (["=1"], None), ([], "[1]"), ([], "{")):
        with pytest.raises(ConfigError):
            arguments(pairs, raw)


@given(st.lists(st.binary(max_size=6), max_size=6))
def test_what_a_terminal_gets_does_not_depend_on_the_chunks(chunks: list[bytes]):
    show = _Show(raw=False)
    show._decoders = {1: codecs.getincrementaldecoder("utf-8")("replace")}
    taken: list[bytes] = []
    show._write = lambda _fd, data: taken.append(data)
    for chunk in chunks:
        show.take("stdout", chunk)
    show.end()
    whole = b"".join(chunks).decode("utf-8", "replace")
    assert b"".join(taken).decode() == escape(whole, keep_lines=True)


def test_cells_cannot_act():
    assert plain("\x1b[31m\n") == "\\x1b[31m\\x0a"
    assert plain({"a": "\x1b"}) == '{"a":"\\u001b"}'
    assert (plain(None), plain(True), plain(3)) == ("", "yes", "3")


def test_the_example_is_found_in_a_checkout_and_its_absence_has_a_next_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    assert demo.find().name == "demo.py"
    monkeypatch.setattr(demo, "_DEMO", Path("no", "such", "demo.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        demo.find()
    assert "make demo" in caught.value.next_step


def test_the_demo_gets_its_options_and_passes_its_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    program = tmp_path / "demo.py"
    program.write_text("import sys; sys.exit(40 + len(sys.argv[1:]))")
    monkeypatch.setattr(demo, "find", lambda: program)
    assert guarded(["demo", "--keep", "--json"]) == 42


def test_a_verb_that_needs_a_configuration_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(None, required=True)
    assert "lockgate.toml" in str(caught.value)


def test_an_error_of_ours_names_kind_and_place_and_no_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def broken(*_args: object) -> None:
        raise ValueError("sk-synthetic-in-an-error")

    monkeypatch.setattr("lockgate.cli.common.configuration.find", broken)
    assert guarded(["ops"]) == 1
    shown = capsys.readouterr().err
    assert "ValueError at test_cli_parts.py" in shown
    assert "sk-synthetic" not in shown


@pytest.mark.parametrize("argv", [[], ["egress"], ["audit"]])
def test_nothing_asked_for_shows_the_help_and_no_empty_error(argv: list[str], capsys: pytest.CaptureFixture[str]):
    assert guarded(argv) == 2
    shown = capsys.readouterr()
    assert "--help" in shown.out + shown.err
    assert "error:" not in shown.out + shown.err


def test_a_line_that_is_no_case_is_told_without_an_expectation(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "cases.jsonl"
    file.write_text("no case\n")
    assert guarded(["corpus", str(file)]) == 1
    assert capsys.readouterr().err == "line 1: error: the line is no JSON object\n"
