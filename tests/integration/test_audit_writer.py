"""The audit writer and its client, as two real processes (C5)."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from audit_fixtures import AuditLink, audit_intent, audit_row
from lockgate.audit import reader, wire, writer_argv
from lockgate.audit.client import AuditClient, Existing
from lockgate.audit.rows import Row
from lockgate.contract.errors import AuditUnavailable, HostFault

Start = Callable[..., AuditLink]


def test_rows_come_out_as_they_went_in(audit_link: Start) -> None:
    gate = audit_link()
    ready = gate.client.ready()
    assert (ready.pid, ready.seq, ready.unknown, ready.gaps) == (gate.process.pid, 0, 0, 0)
    before = time.time()
    ids = [gate.client.append(audit_row(operation=f"op{n}", shared_kernel=True)) for n in range(50)]
    ids.append(gate.client.commit(audit_row("denied", verdict="deny", rule="none", reason="no such operation")))
    head = gate.client.flush()
    assert head.seq == 51
    assert gate.client.head == head
    stored = list(reader.tail(gate.path, 100))
    assert [row.id for row in stored] == ids
    assert [row.seq for row in stored] == list(range(1, 52))
    assert all((row.user, row.agent, row.run) == ("u1", "support", "run_1") for row in stored)
    assert all(before - 1 < row.at < time.time() + 1 for row in stored)
    assert [row.mono for row in stored] == sorted(row.mono for row in stored)
    assert (stored[0].shared_kernel, stored[-1].verdict) == (True, "deny")
    report = reader.verify(gate.path, head)
    assert (report.ok, report.rows, report.head) == (True, 51, head)
    assert gate.close() == 0


def test_a_chain_goes_on_over_restarts(audit_link: Start) -> None:
    heads = []
    for _ in range(3):
        gate = audit_link()
        gate.client.append(audit_row())
        heads.append(gate.client.flush())
        assert gate.close() == 0
    report = reader.verify(gate.path)
    assert (report.ok, report.rows, report.gaps) == (True, 3, ())
    assert all(reader.verify(gate.path, head).ok for head in heads)


def test_a_committed_row_is_on_the_disk_when_commit_returns(audit_link: Start) -> None:
    gate = audit_link()
    for number in range(5):
        audit_id = gate.client.commit(audit_row("denied"))
        assert [row.id for row in reader.tail(gate.path, 1)] == [audit_id]
        assert reader.verify(gate.path).rows == number + 1


def test_a_write_is_an_intent_then_an_outcome_and_a_repeat_gets_the_stored_result(audit_link: Start) -> None:
    gate = audit_link()
    client = gate.client
    assert client.lookup("key") is None
    intent = client.intent(audit_intent(), "key", "grant")
    assert isinstance(intent, str)
    assert client.lookup("key") == Existing("open", "key", intent, "run_1", "a" * 64, "", None)
    outcome = client.outcome(audit_row(effect="write", status="ok"), intent, b'{"paid":true}')
    repeat = client.intent(audit_intent(), "key")
    assert isinstance(repeat, Existing)
    assert (repeat.state, repeat.by, repeat.result, repeat.status) == ("done", "key", b'{"paid":true}', "ok")
    again = client.intent(audit_intent(), "other", "grant")
    assert isinstance(again, Existing)
    assert (again.state, again.by) == ("done", "grant")
    with pytest.raises(HostFault, match="not open"):
        client.outcome(audit_row(status="ok"), intent, b"twice")
    stored = list(reader.tail(gate.path))
    assert [(row.phase, row.ref, row.status) for row in stored] == [
        ("intent", None, ""),
        ("outcome", intent, "ok"),
        ("refused", intent, "key_done"),
        ("refused", intent, "grant_done"),
        ("refused", intent, "intent_done"),
    ]
    assert (stored[1].id, stored[2].id, stored[3].id) == (outcome, repeat.audit_id, again.audit_id)
    assert (stored[0].idempotency_key, stored[0].grant_id) == ("key", "grant")
    assert reader.verify(gate.path).ok


def test_a_write_that_surely_did_not_happen_gives_its_key_back(audit_link: Start) -> None:
    client = audit_link().client
    first = client.intent(audit_intent(), "key")
    assert isinstance(first, str)
    client.outcome(audit_row(status="failed"), first, release=True)
    assert client.lookup("key") is None
    assert isinstance(client.intent(audit_intent(), "key"), str)


def test_a_read_that_uses_a_grant_claims_it(audit_link: Start) -> None:
    gate = audit_link()
    first = gate.client.intent(audit_intent(effect="read"), None, "grant")
    assert isinstance(first, str)
    gate.client.outcome(audit_row(effect="read", status="ok"), first, b"1")
    assert isinstance(gate.client.intent(audit_intent(effect="read"), None, "grant"), Existing)
    assert reader.verify(gate.path).ok


def test_an_unknown_outcome_keeps_its_key_and_may_be_learnt_later(audit_link: Start) -> None:
    client = audit_link().client
    first = client.intent(audit_intent(), "key")
    assert isinstance(first, str)
    client.outcome(audit_row("unknown", status="timeout"), first)
    held = client.intent(audit_intent(), "key")
    assert isinstance(held, Existing)
    assert held.state == "unknown"
    client.outcome(audit_row(status="ok", detail={"asked_by": "operator"}), first, b"1")
    held = client.lookup("key")
    assert held is not None
    assert (held.state, held.result) == ("done", b"1")


def test_the_client_refuses_what_would_run_a_write_without_its_intent(audit_link: Start) -> None:
    client = audit_link().client
    for method in (client.append, client.commit):
        with pytest.raises(ValueError, match="intent"):
            method(audit_intent())
    with pytest.raises(ValueError, match="phase 'intent'"):
        client.intent(audit_row(), "key")
    with pytest.raises(ValueError, match="outcome"):
        client.outcome(audit_row("denied"), "x-1")
    with pytest.raises(ValueError, match="at most"):
        client.outcome(audit_row(), "x-1", b"x" * (wire.RESULT_BYTES + 1))


@pytest.mark.parametrize("by", ["key", "grant"])
def test_of_many_threads_one_gets_the_key_and_one_the_grant(audit_link: Start, by: str) -> None:
    gate = audit_link()

    def claim(number: int) -> str | Existing:
        key, grant = ("same", None) if by == "key" else (f"key-{number}", "same")
        return gate.client.intent(audit_intent(detail={"number": number}), key, grant)

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(claim, range(96)))
    winners = [answer for answer in answers if isinstance(answer, str)]
    losers = [answer for answer in answers if isinstance(answer, Existing)]
    assert len(winners) == 1
    assert len(losers) == 95
    assert {(loser.by, loser.intent_id) for loser in losers} == {(by, winners[0])}
    assert gate.close() == 0
    report = reader.verify(gate.path)
    assert (report.ok, report.unknown) == (True, 1)


def test_many_threads_lose_no_row_and_mix_no_answers(audit_link: Start) -> None:
    gate = audit_link()
    seen: dict[str, str] = {}

    def channel(number: int) -> None:
        for at in range(30):
            gate.client.append(audit_row(operation="get_order", effect="read"))
            intent = gate.client.intent(audit_intent(), f"{number}-{at}")
            assert isinstance(intent, str)
            gate.client.outcome(audit_row(status="ok"), intent, f"{number}-{at}".encode())
            held = gate.client.lookup(f"{number}-{at}")
            assert held is not None
            seen[f"{number}-{at}"] = (held.result or b"").decode()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(channel, range(16)))
    assert len(seen) == 480
    assert all(key == value for key, value in seen.items())
    assert gate.close() == 0
    report = reader.verify(gate.path)
    assert (report.ok, report.rows, report.open, report.unknown) == (True, 16 * 30 * 3, 0, 0)


def test_tail_and_verify_work_beside_a_busy_writer(audit_link: Start) -> None:
    gate = audit_link()
    total = 3000
    done = threading.Event()
    followed: list[int] = []

    def follow() -> None:
        rows = reader.tail(gate.path, total, follow=True, poll=0.01, stop=done.is_set)
        for row in rows:
            followed.append(row.seq)
            if row.seq == total:
                done.set()

    gate.client.ready()
    thread = threading.Thread(target=follow)
    thread.start()
    reports = []
    for number in range(total):
        gate.client.append(audit_row(operation="get_order", effect="read"))
        if number % 300 == 0:
            reports.append(reader.verify(gate.path))
    head = gate.client.flush()
    thread.join(20)
    assert done.is_set()
    assert followed == list(range(1, total + 1))
    assert all(report.ok for report in reports)
    assert reader.verify(gate.path, head).rows == total


def test_tail_of_one_run(audit_link: Start) -> None:
    gate = audit_link()
    for number in range(20):
        gate.client.append(audit_row(run=f"run_{number % 3}"))
    gate.client.flush()
    assert [row.number for row in reader.tail(gate.path, 4, run="run_1")] == [11, 14, 17, 20]
    assert [row.number for row in reader.tail(gate.path, 2)] == [19, 20]
    assert list(reader.tail(gate.path, 0)) == []
    assert [len(list(reader.tail(gate.path, 10**30, run=run))) for run in (None, "run_1")] == [20, 7]


def test_a_killed_writer_denies_everything_and_the_next_one_says_what_is_lost(audit_link: Start) -> None:
    gate = audit_link()
    intent = gate.client.intent(audit_intent(), "key")
    assert isinstance(intent, str)
    gate.kill()
    started = time.monotonic()
    for _ in range(2):
        for call in (
            lambda: gate.client.append(audit_row()),
            lambda: gate.client.commit(audit_row("denied")),
            lambda: gate.client.intent(audit_intent(), "other"),
            lambda: gate.client.outcome(audit_row(), intent),
            lambda: gate.client.lookup("key"),
            gate.client.flush,
        ):
            with pytest.raises(AuditUnavailable, match="gone"):
                call()
    assert not gate.client.available
    assert time.monotonic() - started < 20
    ready = audit_link().client.ready()
    assert (ready.unknown, ready.gaps) == (1, 1)
    unknown, gap = list(reader.tail(gate.path, 2))
    assert (unknown.phase, unknown.ref, unknown.user, unknown.operation) == ("unknown", intent, "u1", "refund")
    assert (gap.phase, gap.detail["source"], gap.detail["numbers"]) == ("gap", gate.client.source, "2-")
    report = reader.verify(gate.path)
    assert (report.ok, report.unknown, len(report.gaps)) == (True, 1, 1)


def test_threads_that_wait_learn_at_once_that_the_writer_died(audit_link: Start) -> None:
    gate = audit_link(timeout=60.0)
    gate.client.ready()
    gate.process.send_signal(signal.SIGSTOP)
    failures: list[BaseException] = []

    def wait(number: int) -> None:
        try:
            gate.client.intent(audit_intent(), f"key-{number}")
        except AuditUnavailable as error:
            failures.append(error)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    gate.kill()
    for thread in threads:
        thread.join(10)
    assert len(failures) == 8


def test_a_stuck_writer_is_a_typed_error_in_time_and_the_claim_is_given_up(audit_link: Start) -> None:
    gate = audit_link(timeout=0.3)
    gate.client.ready()
    gate.process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(AuditUnavailable, match="did not answer"):
        gate.client.intent(audit_intent(), "key")
    assert 0.2 < time.monotonic() - started < 10
    gate.process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + 10
    while True:  # the first answers may still be late on a busy machine
        try:
            gate.client.flush()
        except AuditUnavailable:
            assert time.monotonic() < deadline
        else:
            break
    assert [(row.phase, row.status) for row in reader.tail(gate.path)] == [("intent", ""), ("outcome", "abandoned")]
    assert gate.client.lookup("key") is None
    assert gate.close() == 0
    report = reader.verify(gate.path)
    assert (report.ok, report.unknown, report.open) == (True, 0, 0)


def test_a_flood_into_a_stuck_writer_costs_time_not_memory(audit_link: Start) -> None:
    gate = audit_link(timeout=0.3)
    gate.client.ready()
    gate.process.send_signal(signal.SIGSTOP)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sent = 0
    row = audit_row(reason="x" * 4000)
    with pytest.raises(AuditUnavailable, match="taken no row"):  # noqa: PT012 - which of them fails is the question
        for _ in range(100_000):
            gate.client.append(row)
            sent += 1
    assert sent < 5000, "the pipe takes a few hundred kilobytes"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024
    gate.process.send_signal(signal.SIGCONT)
    gate.client._timeout = 10.0
    gate.client.append(row)
    assert gate.client.flush().seq == sent + 1
    assert reader.verify(gate.path).ok


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_group_does_not_lose_rows(audit_link: Start, number: signal.Signals) -> None:
    gate = audit_link()
    gate.client.ready()
    gate.client.append(audit_row())
    gate.process.send_signal(number)
    assert gate.client.flush().seq == 1
    assert gate.close() == 0


def test_the_writer_is_small_and_closed(audit_link: Start) -> None:
    """It has no environment, leaves no core, gains no privilege, and its memory is closed to its own user (C6)."""
    gate = audit_link()
    gate.client.flush()
    pid = gate.process.pid
    proc = Path(f"/proc/{pid}")
    assert resource.prlimit(pid, resource.RLIMIT_CORE) == (0, 0)
    assert resource.prlimit(pid, resource.RLIMIT_NPROC) == (0, 0)
    assert "NoNewPrivs:\t1" in (proc / "status").read_text()
    assert (proc / "environ").stat().st_uid == 0, "not dumpable: /proc gives the files to root"
    if os.geteuid() != 0:
        with pytest.raises(PermissionError):
            (proc / "environ").read_bytes()
        return
    assert (proc / "environ").read_bytes() == b""
    kinds = {os.readlink(fd).split(":")[0] for fd in (proc / "fd").iterdir() if int(fd.name) > 2}
    names = {str(gate.path) + end for end in ("", "-wal", "-shm")}
    assert kinds - names <= {"socket", "anon_inode"}


FRAME = struct.Struct(">IBQQ")
NAME = b"0123456789ab"


def _greeting() -> bytes:
    return FRAME.pack(len(NAME), wire.HELLO, 0, 0) + NAME


def _row(n: int, **changes: object) -> bytes:
    row = {"id": f"{NAME.decode()}-{n}", "at": 1.0, "mono": 1.0, "phase": "run", "user": "u", "agent": "a", "run": "r"}
    return json.dumps({**row, **changes}).encode()


def _frame(body: bytes, kind: int = wire.APPEND, n: int = 2) -> bytes:
    return FRAME.pack(len(body), kind, 0, n) + body


@pytest.mark.parametrize(
    "junk",
    [
        b"\xff" * 64,
        FRAME.pack(2**32 - 1, wire.APPEND, 0, 2),
        _greeting(),
        _frame(b"{}"),
        _frame(b"no json"),
        _frame(_row(3)),
        _frame(_row(2, user="")),
        _frame(_row(2, phase="party")),
        _frame(_row(2), n=7),
        _frame(_row(2), kind=99),
        _frame(b"\xff\xff\xff\xff" + _row(2), kind=wire.INTENT),
        _frame(b"", kind=wire.OUTCOME),
    ],
    ids=[
        "noise", "huge", "greeted twice", "empty row", "no json", "wrong id", "nobody", "unknown phase", "wrong number",
        "unknown kind", "intent without head", "empty outcome",
    ],
)  # fmt: skip
def test_a_stream_of_somebody_else_ends_the_writer_and_keeps_what_came_before(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "audit.db"
    ours, theirs = socket.socketpair()
    writer = subprocess.Popen(writer_argv(theirs.fileno(), str(path)), pass_fds=[theirs.fileno()], env={})
    theirs.close()
    bell = os.eventfd(0)
    try:
        socket.send_fds(ours, [_greeting()], [bell])
        ours.sendall(_frame(_row(1), n=1) + junk)
        ours.settimeout(15)
        replies = wire.Replies()
        heard: list[wire.Reply] = []
        while data := ours.recv(65536):
            heard += replies.feed(data)
        assert writer.wait(15) == 1
    finally:
        writer.kill()
        writer.wait()
        os.close(bell)
        ours.close()
    assert [type(reply) for reply in heard] == [wire.Ready, wire.Failed]
    report = reader.verify(path)
    assert (report.ok, report.rows) == (True, 1)


def test_a_writer_without_a_client_ends(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        writer = subprocess.Popen(
            writer_argv(theirs.fileno(), str(tmp_path / "audit.db")), pass_fds=[theirs.fileno()], env={}
        )
    ours.close()
    assert writer.wait(15) == 0


def test_a_writer_that_cannot_start_says_why(tmp_path: Path, audit_link: Start) -> None:
    (tmp_path / "audit.db").touch(mode=0o644)
    gate = audit_link()
    with pytest.raises(AuditUnavailable, match=r"chmod 600"):
        gate.client.ready()
    with pytest.raises(AuditUnavailable):
        gate.client.append(audit_row())
    assert gate.process.wait(10) == 1


def test_two_gates_on_one_file(audit_link: Start) -> None:
    first = audit_link()
    first.client.ready()
    second = audit_link()
    with pytest.raises(AuditUnavailable, match="another gate"):
        second.client.ready(timeout=20)
    first.client.append(audit_row())
    assert first.client.flush().seq == 1


def test_a_closed_client_says_so(audit_link: Start) -> None:
    gate = audit_link()
    gate.client.append(audit_row())
    assert gate.close() == 0
    gate.client.close()
    with pytest.raises(AuditUnavailable, match="closed"):
        gate.client.append(audit_row())
    assert reader.verify(gate.path).rows == 1


def test_an_idle_writer_sleeps(audit_link: Start) -> None:
    """A writer that polls would cost every idle gate a share of a core."""
    gate = audit_link()
    gate.client.append(audit_row())
    gate.client.flush()
    time.sleep(1.2)  # the idle checkpoint
    stat = Path(f"/proc/{gate.process.pid}/stat")

    def ticks() -> int:
        return sum(map(int, stat.read_text().rpartition(")")[2].split()[11:13]))

    before = ticks()
    time.sleep(0.5)
    assert ticks() - before <= 2


def test_a_row_type_is_what_the_client_takes(audit_link: Start) -> None:
    """Hostile text in any field reaches the file clipped, under its id."""
    gate = audit_link()
    audit_id = gate.client.commit(Row(phase="denied", user="u", agent="a", run="r", operation="\x00" * 500_000))
    (row,) = reader.tail(gate.path)
    assert (row.id, row.detail["clipped"]) == (audit_id, True)
    assert select.select([gate.socket], [], [], 0)[0] == [], "no answer was left unread"
    assert isinstance(gate.client, AuditClient)
