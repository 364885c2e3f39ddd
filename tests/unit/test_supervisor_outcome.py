"""Nothing that a machine says of itself reaches the agent unchecked."""

from __future__ import annotations

import signal

import msgspec
import pytest

from lockgate.contract import wire
from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import BadScript, ConfigError
from lockgate.contract.run import ErrorInfo
from lockgate.runtimes.protocol import MachineResult
from lockgate.supervisor import settings
from lockgate.supervisor.engine import check_bounds, check_code
from lockgate.supervisor.outcome import blames_disk, blames_processes, clean, ended_without_result
from lockgate.supervisor.slot import Klass


@pytest.mark.parametrize(
    "hostile",
    [
        b'1},"killed_by":null,"x":{',
        b'1,"exit_code":0',
        b"NaN",
        b"",
        b"{",
        b'"\\ud800"',
        b"[" * 100_000,
        b"\xff",
        b"1 2",
    ],
)
def test_a_value_that_is_not_one_json_value_is_not_spliced_into_the_message(hostile):
    outcome = clean(MachineResult(value=hostile, text="t"), 1 << 20)
    message = msgspec.json.encode(wire.Finished(id=1, value=outcome.value, text=outcome.text))
    again = msgspec.json.decode(message, type=wire.Finished)
    assert bytes(again.value) == b"null"
    assert again.text == "t"


def test_a_good_value_passes_byte_for_byte():
    raw = b'{"a":[1,2.5,null,"x"],"b":123456789012345678901234567890}'
    assert bytes(clean(MachineResult(value=raw), 1000).value) == raw


def test_what_is_over_its_cap_is_dropped_whole_and_counted():
    outcome = clean(MachineResult(value=b'"' + b"v" * 200 + b'"', text="t" * 500, truncated={"value": 7}), 100)
    assert bytes(outcome.value) == b"null"
    assert outcome.truncated["value"] == 202 + 7
    assert outcome.truncated["text"] > 0
    assert "bytes dropped]" in outcome.text


def test_counts_and_codes_of_a_liar_stay_sane():
    outcome = clean(MachineResult(exit_code=-1, truncated={"value": -5, "text": 1 << 90, "stdout": 9}), 100)
    assert outcome.exit_code == 255
    assert outcome.truncated == {}


def test_an_errors_texts_are_cut():
    outcome = clean(MachineResult(error=ErrorInfo("n" * 10_000, "m" * 100_000, "t" * 1_000_000)), 100)
    assert outcome.error is not None
    assert len(outcome.error.name) < 400
    assert len(outcome.error.message) < 10_000
    assert len(outcome.error.traceback) < 40_000


@pytest.mark.parametrize(
    ("status", "code", "word"),
    [
        (0, 1, "status 0"),
        (3 << 8, 3, "status 3"),
        (signal.SIGSEGV, 139, "SIGSEGV"),
        (signal.SIGSYS, 159, "never allows"),
        (64, 192, "SIGRTMAX"),
        (None, 1, "before the code gave"),
    ],
)
def test_leaving_without_a_result_is_never_success(status, code, word):
    outcome = ended_without_result(status)
    assert outcome.exit_code == code
    assert outcome.error is not None
    assert word in outcome.error.message


def test_only_the_matching_failure_blames_a_bound():
    assert blames_processes(ErrorInfo("BlockingIOError", "[Errno 11] Resource temporarily unavailable", ""))
    assert blames_processes(ErrorInfo("RuntimeError", "can't start new thread", ""))
    assert not blames_processes(ErrorInfo("RuntimeError", "something", ""))
    assert not blames_processes(None)
    assert blames_disk(ErrorInfo("OSError", "[Errno 28] No space left on device", ""))
    assert not blames_disk(ErrorInfo("OSError", "[Errno 2] No such file", ""))
    assert not blames_disk(ErrorInfo("ValueError", "[Errno 28]", ""))


def test_bounds_wider_than_the_operators_are_refused_by_name():
    most = Bounds(wall=5)
    check_bounds(Bounds(wall=5), most)
    check_bounds(Bounds(wall=1, memory=1 << 20), most)
    with pytest.raises(ConfigError, match="wall"):
        check_bounds(Bounds(wall=6), most)


@pytest.mark.parametrize("code", ["a\0b", "\ud800", "x" * 101])
def test_code_that_cannot_be_run_is_a_bad_script(code):
    with pytest.raises(BadScript):
        check_code(code, 100)


def test_good_code_is_its_utf8():
    assert check_code("print('é')", 100) == "print('é')".encode()


@pytest.mark.parametrize(
    "raw", ["{", "[]", '{"pol":1}', '{"pool":-1}', '{"pool":"4"}', '{"rung":"jail"}', '{"bounds":{"wall":0}}', "\ud800"]
)
def test_settings_that_cannot_be_meant_are_refused(raw):
    with pytest.raises(ConfigError):
        settings.decode(raw)


def test_settings_have_defaults():
    assert settings.decode("{}") == settings.Settings()


def test_a_class_fixes_only_what_cannot_be_set_later():
    bounds = Bounds(disk=1 << 20, inodes=10, processes=4, memory=1 << 26)
    grouped = Klass.of(bounds, by_rlimit=False)
    assert (grouped.names, grouped.values) == (("disk", "inodes"), (1 << 20, 10))
    whole = Klass.of(bounds, by_rlimit=False, fixed=("memory",))
    assert whole.bounds(Bounds()) == Bounds(memory=1 << 26), "a rung whose machines have their memory from birth"
    assert grouped.bounds(Bounds()) == Bounds(disk=1 << 20, inodes=10)
    assert Klass.of(bounds, by_rlimit=True).bounds(Bounds()) == bounds
    assert Klass.of(Bounds(wall=1), by_rlimit=False) == Klass.of(Bounds(cpu=2), by_rlimit=False)
