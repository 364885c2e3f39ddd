"""The Gate's parts alone: checks, exports, escaping, links, pumps, errors."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import threading
import time
import unicodedata
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockgate.config import Config
from lockgate.contract import errors, wire
from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import (
    BadScript,
    CallFailed,
    CannotIsolate,
    ConfigError,
    Denied,
    ExportRefused,
    HostFault,
    LockgateError,
    OutcomeUnknown,
    ProcessDied,
    ResultWithheld,
    UnknownRung,
)
from lockgate.contract.reasons import SENTENCES
from lockgate.contract.run import ExportInfo
from lockgate.contract.rungs import BUILT
from lockgate.gate import checks, pump_async, pump_sync, start
from lockgate.gate.core import Core
from lockgate.gate.escape import escape
from lockgate.gate.exports import Target, plain_name
from lockgate.gate.faults import died, from_fault, from_reason, sentence
from lockgate.gate.link import Link

LIMITS = Bounds()


# ---- scripts, rungs, bounds -----------------------------------------------------------------------------------------
def test_scripts_are_measured_and_never_compiled():
    assert checks.script("1 +", 10) == "1 +"
    assert checks.script(b"\xef\xbb\xbfx", 10) == "x"
    assert checks.script("é" * 5, 10) == "é" * 5


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (b"ab\xff", "byte 2"),
        ("ab\udc80", "character 2"),
        ("a\0", "NUL"),
        ("é" * 6, "cap of 10 bytes"),
        (b"x" * 11, "cap of 10 bytes"),
    ],
)
def test_bad_scripts_name_the_place(source: str | bytes, words: str):
    with pytest.raises(BadScript, match=words):
        checks.script(source, 10)


def test_rungs():
    assert checks.rung("container", accept_shared_kernel=True) == "container"
    with pytest.raises(CannotIsolate):
        checks.rung("container", accept_shared_kernel=False)
    for name in BUILT:
        assert checks.rung(name, accept_shared_kernel=True) == name
    with pytest.raises(UnknownRung):
        checks.rung("docker", accept_shared_kernel=True)


def test_bounds_narrow_and_never_widen():
    assert checks.bounds(LIMITS, None, None) is LIMITS
    narrow = checks.bounds(LIMITS, {"memory": 1024, "calls": 3.0}, 5)
    assert (narrow.memory, narrow.calls, narrow.wall) == (1024, 3, 5.0)
    assert isinstance(narrow.calls, int)
    assert checks.bounds(narrow, Bounds(disk=1024), None).memory == 1024
    assert checks.bounds(LIMITS, {"wall": 3}, 5).wall == 3.0
    for asked, timeout in (
        ({"memory": LIMITS.memory + 1}, None),
        ({}, 31),
        ({"nope": 1}, None),
        ({"calls": 1.5}, None),
    ):
        with pytest.raises(ConfigError):
            checks.bounds(LIMITS, asked, timeout)
    for value in (True, "5", None, float("nan"), -1, 0):
        with pytest.raises(ConfigError):
            checks.bounds(LIMITS, {"wall": value}, None)


def test_only_bounds_of_the_broker_need_a_ticket_of_their_own():
    assert checks.broker_bounds(LIMITS, checks.bounds(LIMITS, {"memory": 1024}, 1)) is None
    assert checks.broker_bounds(LIMITS, checks.bounds(LIMITS, {"exports": 1}, None)) is not None


# ---- errors ---------------------------------------------------------------------------------------------------------
def test_every_error_code_comes_back_as_its_type():
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, LockgateError) and not issubclass(kind, Denied | CallFailed):
            found = from_fault(wire.Fault(code=kind.code, message="m", next_step="n"))
            assert type(found) is kind
            assert (found.message, found.next_step) == ("m", "n")
    assert type(from_fault(wire.Fault(code="of a later version", message="m", next_step="n"))) is HostFault


def test_every_reason_has_a_type_and_the_fixed_sentence():
    kinds = {reason: type(from_reason("op", reason, "a-1")) for reason in SENTENCES}
    assert kinds["not_available"] is Denied
    assert kinds["outcome_unknown"] is OutcomeUnknown
    assert kinds["result_blocked"] is kinds["result_too_large"] is ResultWithheld
    assert kinds["backend_failed"] is kinds["busy"] is kinds["unavailable"] is CallFailed
    error = from_reason("op", "expired", None)
    assert SENTENCES["expired"][0] in error.message
    assert sentence("nobody's word")[0] == "unavailable"


# ---- escaping -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "hostile",
    [
        "\x1b[2J",
        "\x1b]0;t\x07",
        "\x9b31m",
        "\r",
        "\b",
        "\u202e",
        "\u2066",
        "\u200b",
        "\ufeff",
        "\u2028",
        "\ud800",
        "\x00",
    ],
)
def test_what_acts_on_a_terminal_becomes_visible(hostile: str):
    shown = escape(f"a{hostile}b", keep_lines=True)
    assert shown.isprintable()
    assert shown.startswith("a\\")
    assert shown.endswith("b")


def test_plain_text_of_any_script_stays():
    for text in ("plain", "äöü Ω 漢字 עברית हिन्दी", "tab\tand\nline"):
        assert escape(text, keep_lines=True) == text
    assert escape("a\nb") == "a\\x0ab"


@given(st.text())
def test_escaped_text_is_printable_and_escaping_again_changes_nothing(text: str):
    once = escape(text)
    assert all(char.isprintable() or unicodedata.category(char) == "Zs" for char in once)
    assert escape(once) == once
    assert "\x1b" not in escape(text, keep_lines=True)


# ---- exports --------------------------------------------------------------------------------------------------------
def info(name: str, data: bytes) -> ExportInfo:
    return ExportInfo(name, len(data), hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".x", "a/b", "/a", "../a", "-x", "a\nb", "a\x1b", "a\u202eb", "x" * 256, "é" * 128]
)
def test_names_that_walk_or_hide_are_refused(tmp_path: Path, name: str):
    assert not plain_name(name)
    target = Target(tmp_path)
    try:
        with pytest.raises(ExportRefused):
            target.create(info(name, b""))
    finally:
        target.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("planted", ["file", "symlink", "dangling", "directory", "fifo", "hard link"])
def test_nothing_that_is_there_is_followed_or_changed(tmp_path: Path, planted: str):
    """X7: no waiting on a planted FIFO either."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    out = tmp_path / "out"
    out.mkdir()
    place = out / "a"
    if planted == "file":
        place.write_text("mine")
    elif planted == "symlink":
        place.symlink_to(victim)
    elif planted == "dangling":
        place.symlink_to(tmp_path / "created")
    elif planted == "directory":
        place.mkdir()
    elif planted == "fifo":
        os.mkfifo(place)
    else:
        place.hardlink_to(victim)
    before = os.lstat(place)
    target = Target(out)
    with pytest.raises(ExportRefused):
        target.create(info("a", b"x"))
    target.close()
    after = os.lstat(place)
    assert (after.st_ino, after.st_size, after.st_mode) == (before.st_ino, before.st_size, before.st_mode)
    assert victim.read_text() == "mine"
    assert not (tmp_path / "created").exists()


def test_a_directory_swapped_after_opening_changes_nothing(tmp_path: Path):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.mkdir()
    target = Target(out)
    out.rename(tmp_path / "moved")
    out.symlink_to(elsewhere)
    with target.create(info("a", b"x")) as file:
        file.write(b"x")
        file.finish()
    target.close()
    assert os.listdir(elsewhere) == []
    assert (tmp_path / "moved" / "a").read_bytes() == b"x"


@pytest.mark.parametrize("chunks", [[b"abc", b"d"], [b"ab"], [b"xyz"]])
def test_a_file_that_is_not_what_the_row_says_is_removed(tmp_path: Path, chunks: list[bytes]):
    target = Target(tmp_path)

    def write() -> None:
        with target.create(info("a", b"abc")) as file:
            for chunk in chunks:
                file.write(chunk)
            file.finish()

    with pytest.raises(ExportRefused):
        write()
    target.close()
    assert os.listdir(tmp_path) == []


# ---- link, core, pumps ----------------------------------------------------------------------------------------------
def test_a_message_larger_than_the_socket_s_buffer_arrives_whole_and_sending_never_waits():
    left, right = socket.socketpair()
    link = Link(left)
    wanted: list[bool] = []
    link.want_write = wanted.append
    body = b'"' + b"x" * 3_000_000 + b'"'
    began = time.monotonic()
    assert link.send(body)
    assert link.send(b'"next"')
    assert time.monotonic() - began < 10
    assert wanted == [True]
    got = bytearray()
    right.settimeout(5)
    while len(got) < len(body) + 4 + 10:
        got += right.recv(1 << 20)
        link.flush()
    assert bytes(got[4 : 4 + len(body)]) == body
    assert bytes(got[-6:]) == b'"next"'
    assert wanted[-1] is False
    link.close()
    assert not link.send(b"1")
    right.close()


def core_with_peers() -> tuple[Core, socket.socket, socket.socket]:
    broker, broker_end = socket.socketpair()
    supervisor, supervisor_end = socket.socketpair()
    core = Core(Link(broker), Link(supervisor), lambda _ask: None)
    return core, broker_end, supervisor_end


def send(sock: socket.socket, message: wire.Message) -> None:
    body = msgspec.json.encode(message)
    sock.sendall(len(body).to_bytes(4, "big") + body)


def test_answers_go_to_who_asked_and_late_ones_nowhere():
    core, broker, supervisor = core_with_peers()
    first, second = pump_sync.Waiter(), pump_sync.Waiter()
    core.broker.ask(wire.CloseRun(id=1, run="r"), 1, first)
    core.broker.ask(wire.CloseRun(id=2, run="r"), 2, second)
    send(broker, wire.Done(id=2, data="two"))
    send(broker, wire.Done(id=99))
    send(broker, wire.Refused(id=1, fault=wire.Fault(code="scope", message="m", next_step="n")))
    assert core.receive(core.broker)
    assert second.result().data == "two"
    assert isinstance(first.result(), errors.ScopeError)
    for sock in (broker, supervisor):
        sock.close()


@pytest.mark.parametrize(
    "noise", [b"\x00\x00\x00\x02{}", b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x00\x00\x00\x03abc"]
)
def test_a_child_that_does_not_speak_our_protocol_is_as_good_as_gone(noise: bytes):
    core, broker, supervisor = core_with_peers()
    broker.sendall(noise)
    assert not core.receive(core.broker)
    for sock in (broker, supervisor):
        sock.close()


def test_a_lost_broker_resolves_everything_that_needs_it_with_errors_of_their_own():
    core, broker, supervisor = core_with_peers()
    waiters = [pump_sync.Waiter() for _ in range(3)]
    core.broker.ask(wire.CloseRun(id=1, run="r"), 1, waiters[0])
    core.supervisor.ask(wire.Stats(id=2), 2, waiters[1])
    core.closings["ticket"] = waiters[2]
    core.lose(core.broker, died("broker"))
    assert all(isinstance(waiter.result(), ProcessDied) for waiter in waiters)
    assert len({id(waiter.result()) for waiter in waiters}) == 3
    with pytest.raises(ProcessDied):
        core.broker.ask(wire.CloseRun(id=3, run="r"), 3, pump_sync.Waiter())
    for sock in (broker, supervisor):
        sock.close()


def test_both_pumps_end_a_wait_at_its_deadline():
    async def waits() -> None:
        pump = pump_async.Pump()
        assert await pump.wait(pump.waiter(), 0.05) is None

    began = time.monotonic()
    asyncio.run(waits())
    pump = pump_sync.Pump()
    assert pump.wait(pump.waiter(), 0.05) is None
    assert pump.wait(pump.waiter(), -1) is None
    assert 0.1 <= time.monotonic() - began < 10
    pump.close()


def test_a_following_thread_has_its_own_deadline():
    """A leader that waits long, or sits in a callback, does not hold up the others."""
    pump = pump_sync.Pump()
    leader = threading.Thread(target=lambda: pump.wait(pump.waiter(), 3.0))
    leader.start()
    time.sleep(0.05)
    began = time.monotonic()
    assert pump.wait(pump.waiter(), 0.1) is None
    assert time.monotonic() - began < 2.5
    leader.join()
    pump.close()


# ---- places ---------------------------------------------------------------------------------------------------------
def test_the_default_audit_directory_is_made_at_start_and_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(start, "state_directory", lambda: tmp_path / "state" / "lockgate")
    path = start.default_audit_path()
    assert not (tmp_path / "state").exists()
    start.make_default_directory(str(tmp_path / "elsewhere" / "audit.db"))
    assert os.listdir(tmp_path) == []
    start.make_default_directory(path)
    assert Path(path).parent.stat().st_mode & 0o777 == 0o700


def test_a_user_without_a_home_needs_a_configured_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(start.os, "getuid", lambda: 2**31 - 7)
    with pytest.raises(ConfigError) as caught:
        start.default_audit_path()
    assert "[audit] path" in caught.value.next_step
    start.make_default_directory(str(tmp_path / "audit.db"))


def test_the_configuration_is_handed_over_sealed():
    fd = start.config_file(Config())
    try:
        assert os.pread(fd, 10_000, 0) == Config().to_json()
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)
