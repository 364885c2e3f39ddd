"""From one run into another: tickets, descriptors, channels of two tenants (C3; reports 11, 12, 16)."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker_client import WAIT, Broker, broker
from lockgate.contract import wire


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with broker(tmp_path_factory.mktemp("lateral")) as one:
        yield one


def attach(live: Broker, ticket: str) -> bool:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        return live.attach_with(ticket, [theirs.fileno()])


def test_a_ticket_is_worth_one_channel(live: Broker) -> None:
    run = live.open_run({})
    channel = live.attach(run.ticket)
    assert not attach(live, run.ticket)
    live.detach(run.ticket)
    assert not attach(live, run.ticket)
    channel.sock.close()


@pytest.mark.parametrize("ticket", ["", "x", "0" * 48, "run-0000", "\u0000"])
def test_a_forged_ticket_binds_nothing(live: Broker, ticket: str) -> None:
    assert not attach(live, ticket)


def test_a_ticket_ends_with_its_run(live: Broker) -> None:
    run = live.open_run({})
    more = live.ticket(run.run)
    live.ask(lambda i: wire.CloseRun(id=i, run=run.run))
    assert not attach(live, run.ticket)
    assert not attach(live, more)


def test_a_refused_channel_is_closed_and_answers_nothing(live: Broker) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        assert not live.attach_with("forged", [theirs.fileno()])
    ours.settimeout(WAIT)
    assert ours.recv(1) == b""
    ours.close()


@pytest.mark.parametrize("kind", ["none", "two", "pipe", "file", "datagram", "seqpacket", "tcp"])
def test_anything_but_one_stream_socket_is_refused(live: Broker, kind: str) -> None:
    run = live.open_run({})
    left, right = socket.socketpair()
    pipe = os.pipe()
    null = os.open("/dev/null", os.O_RDWR)
    tcp = socket.socket()
    others = [socket.socketpair(socket.AF_UNIX, one) for one in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET)]
    fds = {
        "none": [],
        "two": [left.fileno(), right.fileno()],
        "pipe": [pipe[0]],
        "file": [null],
        "datagram": [others[0][0].fileno()],
        "seqpacket": [others[1][0].fileno()],
        "tcp": [tcp.fileno()],
    }[kind]
    before = len(os.listdir(f"/proc/{live.process.pid}/fd")) if os.geteuid() == 0 else 0
    assert not live.attach_with(run.ticket, fds)
    if os.geteuid() == 0:
        assert len(os.listdir(f"/proc/{live.process.pid}/fd")) == before  # nothing is kept open
    channel = live.attach(run.ticket)  # the ticket was not used up by what came to nothing
    assert channel.call("host.operations")["ok"] == []
    live.detach(run.ticket)
    for one in (left, right, tcp, *(sock for pair in others for sock in pair)):
        one.close()
    for fd in (*pipe, null):
        os.close(fd)


def test_two_tenants_on_two_channels_never_see_each_other(live: Broker) -> None:
    """Report 16: 300 calls at once on each; every answer is of the channel's own tenant, with the channel's own ids."""
    runs = [live.open_run({"get_order": {}, "refund": {}}, tenant=f"t{n}") for n in (1, 2)]
    channels = [live.attach(run.ticket) for run in runs]
    seen: list[set[tuple[str, bool]]] = [set(), set()]

    def ask(number: int) -> None:
        for count in range(1, 301):
            reply = channels[number].call("get_order", order_id="ord_1")
            seen[number].add((reply["ok"]["tenant"], reply["id"] == count))

    threads = [threading.Thread(target=ask, args=[n]) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [{("t1", True)}, {("t2", True)}]
    for number, run in enumerate(runs):
        closed = live.detach(run.ticket)
        assert len(closed.calls) == 300
        rows = live.rows(run=run.run, operation="get_order")
        assert {row.tenant for row in rows} == {f"t{number + 1}"}
        assert {row.id for row in rows if row.phase == "outcome"} == {call.audit_id for call in closed.calls}


def test_tickets_swapped_by_the_supervisor_carry_their_own_run(live: Broker) -> None:
    """The channel takes the identity of its ticket, whatever slot it came from."""
    first, second = live.open_run({"get_order": {}}, tenant="t1"), live.open_run({"get_order": {}}, tenant="t2")
    a, b = live.attach(second.ticket), live.attach(first.ticket)
    assert a.call("get_order", order_id="ord_1")["ok"]["tenant"] == "t2"
    assert b.call("get_order", order_id="ord_1")["ok"]["tenant"] == "t1"
    live.detach(first.ticket)
    live.detach(second.ticket)


def test_no_message_names_a_run(live: Broker) -> None:
    mine, other = live.open_run({"get_order": {}}, tenant="t1"), live.open_run({"get_order": {}}, tenant="t2")
    for body in (
        f'{{"id":1,"op":"get_order","args":{{"order_id":"ord_1"}},"run":"{other.run}"}}',
        f'{{"id":1,"run":"{other.run}","op":"get_order","args":{{"order_id":"ord_1"}}}}',
        f'{{"id":1,"op":"get_order","args":{{"order_id":"ord_1"}},"ticket":"{other.ticket}"}}',
    ):
        ticket = live.ticket(mine.run)
        channel = live.attach(ticket)
        channel.send_raw(body.encode())
        assert live.wait_killed(ticket)
        assert channel.read() is None
        live.detach(ticket)
    assert not live.rows(run=other.run, operation="get_order")


def test_a_channel_dies_with_its_run(live: Broker) -> None:
    """Report 12: after the end nothing answers, and nothing can be replayed."""
    run = live.open_run({"get_order": {}})
    channel = live.attach(run.ticket)
    channel.call("get_order", order_id="ord_1")
    live.detach(run.ticket)
    try:
        channel.send_raw(b'{"id":2,"op":"get_order","args":{"order_id":"ord_1"}}')
        assert channel.read() is None
    except BrokenPipeError:
        pass
    assert len(live.rows(run=run.run, operation="get_order", phase="intent")) == 1


def test_closing_a_run_ends_its_code(live: Broker) -> None:
    run = live.open_run({"get_order": {}})
    channel = live.attach(run.ticket)
    live.ask(lambda i: wire.CloseRun(id=i, run=run.run))
    assert live.wait_killed(run.ticket)
    assert channel.read() is None
    live.detach(run.ticket)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may look into a process that is not dumpable")
def test_no_listener_exists_while_a_run_is_on(live: Broker) -> None:
    """Report 11: there is no path and no port; the broker's sockets are pairs it was given."""
    run = live.open_run({"get_order": {}})
    channel = live.attach(run.ticket)
    channel.call("get_order", order_id="ord_1")
    pid = live.process.pid
    inodes = {
        os.readlink(f"/proc/{pid}/fd/{fd}")[8:-1]
        for fd in os.listdir(f"/proc/{pid}/fd")
        if os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:")
    }
    listed = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    mine = [line for line in listed if line[6] in inodes]
    assert len(mine) == len(inodes) >= 4
    assert all(len(line) == 7 for line in mine)  # no path
    assert all(int(line[3], 16) & 0x10000 == 0 for line in mine)  # __SO_ACCEPTCON
    live.detach(run.ticket)


def test_a_packet_the_broker_cannot_read_ends_the_link_and_every_channel(tmp_path: Any) -> None:
    with broker(tmp_path) as one:
        run = one.open_run({"get_order": {}})
        channel = one.attach(run.ticket)
        one.supervisor.send(b"nonsense")
        assert channel.read() is None
        assert one.tool(run.run, "get_order", order_id="ord_1").reason is None  # tools need no supervisor


def test_a_detach_with_a_descriptor_ends_the_link(tmp_path: Any) -> None:
    with broker(tmp_path) as one:
        run = one.open_run({})
        channel = one.attach(run.ticket)
        detach = msgspec.json.encode(wire.Detach(ticket=run.ticket, exit_code=0))
        socket.send_fds(one.supervisor, [detach], [channel.sock.fileno()])
        assert channel.read() is None
