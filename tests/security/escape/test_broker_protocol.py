"""Bytes from a sandbox that break the protocol: refused, audited, and the run is killed (C8; reports 16, 17)."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from broker_client import Broker, Channel, broker
from lockgate.contract.bounds import Bounds

GOOD = b'{"id":1,"op":"get_order","args":{"order_id":"ord_1"}}'


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with broker(tmp_path_factory.mktemp("protocol")) as one:
        yield one


def killed_and_audited(live: Broker, run: str, ticket: str, channel: Channel) -> str:
    """Assert the three things that follow a violation; returns the reason of the row."""
    assert live.wait_killed(ticket), "no Kill"
    with contextlib.suppress(OSError):
        while channel.sock.recv(65536):
            pass
    rows = live.rows(run=run, rule="protocol")
    assert [(r.phase, r.verdict, r.status, r.via, r.rung) for r in rows] == [
        ("denied", "deny", "killed", "code", "container")
    ]
    closed = live.detach(ticket, killed_by="protocol")
    assert closed.calls[-1].rule == "protocol"
    return rows[0].reason or ""


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


VIOLATIONS: dict[str, bytes] = {
    "no JSON": framed(b"hello"),
    "empty object": framed(b"{}"),
    "not an object": framed(b'[1,"get_order",{}]'),
    "null": framed(b"null"),
    "duplicate argument": framed(b'{"id":1,"op":"get_order","args":{"order_id":"ord_1","order_id":"ord_2"}}'),
    "duplicate argument, escaped": framed(b'{"id":1,"op":"get_order","args":{"order_id":"a","order_i\\u0064":"b"}}'),
    "duplicate op": framed(b'{"id":1,"op":"get_order","op":"refund","args":{"order_id":"ord_1"}}'),
    "duplicate args": framed(b'{"id":1,"op":"get_order","args":{},"args":{"order_id":"ord_1"}}'),
    "duplicate key deep down": framed(b'{"id":1,"op":"get_order","args":{"order_id":{"a":[{"b":1,"b":2}]}}}'),
    "white space": framed(b'{"id": 1,"op":"get_order","args":{"order_id":"ord_1"}}'),
    "other order of keys": framed(b'{"op":"get_order","id":1,"args":{"order_id":"ord_1"}}'),
    "unknown key": framed(b'{"id":1,"op":"get_order","args":{},"run":"run-2"}'),
    "key in capitals": framed(b'{"id":1,"OP":"get_order","args":{"order_id":"ord_1"}}'),
    "key with U+017F": framed('{"id":1,"op":"get_order","arg\u017f":{"order_id":"ord_1"}}'.encode()),
    "key with U+212A": framed('{"id":1,"op":"get_order","args":{},"\u212aey":1}'.encode()),
    "NaN": framed(b'{"id":1,"op":"get_order","args":{"order_id":NaN}}'),
    "Infinity": framed(b'{"id":1,"op":"get_order","args":{"order_id":-Infinity}}'),
    "1e400": framed(b'{"id":1,"op":"get_order","args":{"order_id":1e400}}'),
    "lone surrogate": framed(b'{"id":1,"op":"get_order","args":{"order_id":"\\ud800"}}'),
    "raw surrogate": framed(b'{"id":1,"op":"get_order","args":{"order_id":"\xed\xa0\x80"}}'),
    "bad UTF-8": framed(b'{"id":1,"op":"get_order","args":{"order_id":"\xff"}}'),
    "BOM": framed(b"\xef\xbb\xbf" + GOOD),
    "UTF-16": framed(GOOD.decode().encode("utf-16")),
    "NUL byte": framed(b'{"id":1,"op":"get_order","args":{"order_id":"\x00"}}'),
    "NUL behind": framed(GOOD + b"\0"),
    "two documents": framed(GOOD + GOOD),
    "cut off": framed(GOOD[:-1]),
    "deep nesting": framed(b'{"id":1,"op":"get_order","args":{"order_id":' + b"[" * 80 + b"]" * 80 + b"}}"),
    "very deep nesting": framed(b'{"id":1,"op":"get_order","args":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}"),
    "id is text": framed(b'{"id":"1","op":"get_order","args":{}}'),
    "id is true": framed(b'{"id":true,"op":"get_order","args":{}}'),
    "id is a float": framed(b'{"id":1.0,"op":"get_order","args":{}}'),
    "id is zero": framed(b'{"id":0,"op":"get_order","args":{}}'),
    "id is negative": framed(b'{"id":-1,"op":"get_order","args":{}}'),
    "id is 2**64": framed(b'{"id":18446744073709551616,"op":"get_order","args":{}}'),
    "id reused": framed(GOOD) + framed(GOOD),
    "id falls": framed(GOOD.replace(b'"id":1', b'"id":7')) + framed(GOOD.replace(b'"id":1', b'"id":6')),
    "op is empty": framed(b'{"id":1,"op":"","args":{}}'),
    "op has a NUL": framed(b'{"id":1,"op":"get_order\\u0000","args":{}}'),
    "op is not ASCII": framed('{"id":1,"op":"get_ord\u0435r","args":{}}'.encode()),
    "op is long": framed(b'{"id":1,"op":"' + b"a" * 500 + b'","args":{}}'),
    "args are a list": framed(b'{"id":1,"op":"get_order","args":["ord_1"]}'),
    "reply": framed(b'{"id":1,"ok":{"order_id":"ord_1"}}'),
    "error reply": framed(b'{"id":1,"error":{"reason":"busy","operation":"x","message":"y"}}'),
    "empty frame": struct.pack(">I", 0),
    "2 GiB header": struct.pack(">I", 2**31),
    "4 GiB header": b"\xff\xff\xff\xff",
    "1 MiB and a byte": struct.pack(">I", 1024 * 1024 + 1) + b"{" * 1000,
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a piece too large": framed(
        b'{"id":1,"op":"host.export","args":{"name":"a","data":"' + b"A" * 800_000 + b'","last":true}}'
    ),
    "nine at once": b"".join(framed(GOOD.replace(b'"id":1', b'"id":%d' % n)) for n in range(1, 12)),
}  # fmt: skip


@pytest.mark.parametrize("kind", VIOLATIONS)
def test_a_violation_ends_the_run(live: Broker, kind: str) -> None:
    run = live.open_run({"get_order": {}, "refund": {}})
    channel = live.attach(run.ticket)
    with contextlib.suppress(OSError):  # shut while we still send
        channel.sock.sendall(VIOLATIONS[kind])
    reason = killed_and_audited(live, run.run, run.ticket, channel)
    assert reason
    assert "ord_1" not in reason
    assert not live.rows(run=run.run, phase="intent", operation="refund")


def test_what_follows_a_violation_is_never_read(live: Broker) -> None:
    run = live.open_run({"get_order": {}})
    channel = live.attach(run.ticket)
    channel.sock.sendall(framed(b"nonsense") + framed(GOOD))
    killed_and_audited(live, run.run, run.ticket, channel)
    assert not live.rows(run=run.run, operation="get_order")


WRONG: dict[str, tuple[str, bytes]] = {
    "float for int": ("refund", b'{"order_id":"ord_1","amount":5.0}'),
    "exponent for int": ("refund", b'{"order_id":"ord_1","amount":5e0}'),
    "text for int": ("refund", b'{"order_id":"ord_1","amount":"5"}'),
    "true for int": ("refund", b'{"order_id":"ord_1","amount":true}'),
    "2**64": ("refund", b'{"order_id":"ord_1","amount":18446744073709551616}'),
    "2**53 + 1": ("refund", b'{"order_id":"ord_1","amount":9007199254740993}'),
    "null": ("refund", b'{"order_id":null,"amount":5}'),
    "missing": ("refund", b'{"order_id":"ord_1"}'),
    "unknown": ("refund", b'{"order_id":"ord_1","amount":5,"Amount":5}'),
    "newline after an id": ("refund", b'{"order_id":"ord_1\\n","amount":5}'),
    "digits of another script": ("refund", '{"order_id":"ord_\u0661","amount":5}'.encode()),
    "NUL in text": ("tell", b'{"text":"a\\u0000b"}'),
    "U+202E in text": ("tell", '{"text":"a\u202eb"}'.encode()),
    "escape sequence in text": ("tell", b'{"text":"a\\u001b[2Jb"}'),
    "too long": ("tell", b'{"text":"' + b"a" * 301 + b'"}'),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_type_is_an_answer_and_not_a_violation(live: Broker, kind: str) -> None:
    run = live.open_run({"refund": {}, "tell": {}})
    channel = live.attach(run.ticket)
    op, args = WRONG[kind]
    channel.send_raw(b'{"id":1,"op":"%b","args":%b}' % (op.encode(), args))
    reply = channel.read()
    assert reply is not None
    assert reply["error"]["reason"] == "bad_request"
    [row] = live.rows(run=run.run, phase="denied")
    assert (row.operation, row.visible, row.verdict) == (op, "bad_request", "deny")
    assert row.args_hash
    assert channel.call  # the channel lives
    channel.send_raw(b'{"id":2,"op":"tell","args":{"text":"fine"}}')
    assert (channel.read() or {})["ok"] == {"text": "fine"}
    assert live.detach(run.ticket).calls[-1].status == "ok"
    assert run.ticket not in live.killed


def test_half_a_frame_and_silence(live: Broker) -> None:
    """One deadline for the whole frame, whatever drips in; other runs do not wait for it."""
    run = live.open_run({"get_order": {}})
    channel = live.attach(run.ticket)
    other = live.open_run({"get_order": {}})
    began = time.monotonic()
    channel.sock.sendall(framed(GOOD)[:10])
    dripped = 10
    while not live.wait_killed(run.ticket, 0.7) and time.monotonic() - began < 15:
        assert live.tool(other.run, "get_order", order_id="ord_1").reason is None
        with contextlib.suppress(OSError):
            channel.sock.sendall(framed(GOOD)[dripped : dripped + 1])
        dripped += 1
    assert 4.5 < time.monotonic() - began < 14
    assert "not complete" in killed_and_audited(live, run.run, run.ticket, channel)


def test_silence_between_frames_is_no_violation(live: Broker) -> None:
    run = live.open_run({"get_order": {}})
    channel = live.attach(run.ticket)
    channel.call("get_order", order_id="ord_1")
    assert not live.wait_killed(run.ticket, 6)
    channel.call("get_order", order_id="ord_1")
    live.detach(run.ticket)


def test_replies_that_are_never_read(live: Broker) -> None:
    """The broker neither waits nor keeps them: a reply has five seconds to be taken."""
    run = live.open_run({"tell": {}})
    channel = live.attach(run.ticket)
    channel.sock.setblocking(False)
    began = time.monotonic()
    ident = itertools.count(1)
    rest = b""
    while not live.wait_killed(run.ticket, 0.0) and time.monotonic() - began < 20:
        rest = rest or framed(b'{"id":%d,"op":"tell","args":{"text":"%b"}}' % (next(ident), b"y" * 300))
        try:
            rest = rest[channel.sock.send(rest) :]
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:
            break
        time.sleep(0.0005)
    channel.sock.setblocking(True)
    reason = killed_and_audited(live, run.run, run.ticket, channel)
    assert "not taken" in reason or "in flight" in reason


def test_more_calls_than_a_run_may_make(live: Broker) -> None:
    run = live.open_run({"get_order": {}})
    ticket = live.ticket(run.run, Bounds(calls=5))
    channel = live.attach(ticket)
    for _ in range(5):
        assert channel.reason("get_order", order_id="ord_1") == ""
    for _ in range(100):
        assert channel.reason("get_order", order_id="ord_1") == "budget_exhausted"
    channel.send_raw(b'{"id":106,"op":"get_order","args":{"order_id":"ord_1"}}')
    assert "goes on" in killed_and_audited(live, run.run, ticket, channel)
    assert len(live.rows(run=run.run, rule="bound.calls")) == 100


def test_eight_calls_at_once_are_served_in_order(live: Broker) -> None:
    """The negative control of "nine at once"."""
    run = live.open_run({"get_order": {}})
    channel = live.attach(run.ticket)
    channel.sock.sendall(b"".join(framed(GOOD.replace(b'"id":1', b'"id":%d' % n)) for n in range(1, 9)))
    assert [(channel.read() or {})["id"] for _ in range(8)] == list(range(1, 9))
    live.detach(run.ticket)


@pytest.mark.parametrize("pieces", [1, 3, 7])
def test_a_frame_in_pieces_is_a_frame(live: Broker, pieces: int) -> None:
    run = live.open_run({"get_order": {}})
    channel = live.attach(run.ticket)
    data = framed(GOOD) + framed(GOOD.replace(b'"id":1', b'"id":2'))
    for at in range(0, len(data), pieces):
        channel.sock.sendall(data[at : at + pieces])
        if at % 10 == 0:
            time.sleep(0.001)
    assert [(channel.read() or {})["id"] for _ in range(2)] == [1, 2]
    live.detach(run.ticket)


def test_random_damage_never_runs_a_write_and_never_stops_the_broker(live: Broker) -> None:
    """Bounded fuzz: flips, cuts and joins of good frames; afterwards every run is over and the broker answers."""
    chance = random.Random(20)
    good = framed(b'{"id":1,"op":"get_order","args":{"order_id":"ord_1"}}')
    began = time.monotonic()
    rounds = 0
    while rounds < 150 and time.monotonic() - began < 10:
        rounds += 1
        run = live.open_run({"get_order": {}})
        channel = live.attach(run.ticket)
        data = bytearray(good * chance.randint(1, 3))
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data))
            if chance.random() < 0.5:
                data[at] = chance.randrange(256)
            else:
                del data[at : at + chance.randint(1, 9)]
                data = data or bytearray(b"x")
        with contextlib.suppress(OSError):
            channel.sock.sendall(bytes(data))
            channel.sock.shutdown(socket.SHUT_WR)
            while channel.sock.recv(65536):
                pass
        channel.sock.close()
        closed = live.detach(run.ticket)
        assert {call.operation for call in closed.calls} <= {"get_order", ""} or all(
            call.verdict == "deny" for call in closed.calls if call.operation != "get_order"
        )
    assert rounds >= 50
    run = live.open_run({"get_order": {}})
    assert live.tool(run.run, "get_order", order_id="ord_1").reason is None
