"""The guest's own library against the real broker: what honest code does is never taken for an attack."""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from alerts_receiver import until
from broker_client import Broker, broker
from lockgate.contract.bounds import Bounds

HOST = Path(__file__).parents[2] / "guest" / "host.py"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with broker(tmp_path_factory.mktemp("guest")) as one:
        yield one


def guest(live: Broker, ticket: str) -> ModuleType:
    """A fresh copy of the library, on a channel of its own."""
    spec = importlib.util.spec_from_file_location("guest_host_under_test", HOST)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fd = live.attach(ticket).sock.detach()
    os.set_blocking(fd, True)
    module._CHANNEL = fd
    module._start()
    return module


@pytest.mark.parametrize("bounds", [None, Bounds(calls_in_flight=1)])
def test_forty_threads_that_call_at_once(live: Broker, bounds: Bounds | None) -> None:
    run = live.open_run({"get_order": {}})
    ticket = live.ticket(run.run, bounds)
    host = guest(live, ticket)
    good: list[bool] = []

    def ask(number: int) -> None:
        good.extend(host.call("get_order", order_id=f"ord_{number}")["order_id"] == f"ord_{number}" for _ in range(10))

    threads = [threading.Thread(target=ask, args=[number]) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert good == [True] * 400
    closed = live.detach(ticket)
    assert len(closed.calls) == 400
    assert ticket not in live.killed
    os.close(host._CHANNEL)


def test_denials_are_typed(live: Broker) -> None:
    run = live.open_run({"write_badly": {}, "hang_write": {}})
    host = guest(live, run.ticket)
    with pytest.raises(host.Denied) as denied:
        host.call("refund", order_id="ord_1", amount=1)
    assert (denied.value.reason, denied.value.operation) == ("not_available", "refund")
    with pytest.raises(host.CallFailed):
        host.call("write_badly", text="refused")
    with pytest.raises(host.OutcomeUnknown):
        host.call("hang_write", order_id="ord_9", amount=1)
    assert {one["name"] for one in host.operations()} == {"write_badly", "hang_write"}
    host.export("big.bin", os.urandom(1_300_000))
    assert live.detach(run.ticket).exports[0].size == 1_300_000
    os.close(host._CHANNEL)


def test_a_run_that_ends_during_a_call_is_told_and_the_call_gets_its_row(live: Broker) -> None:
    """The agent is told within seconds; the write that was in flight is in the log when it ended."""
    operations = (
        (live.base / "operations.py").read_text().replace("timeout=0.3", "timeout=12").replace("sleep(2)", "sleep(8)")
    )
    base = live.base / "slow"
    base.mkdir()
    with broker(base, operations=operations) as one:
        run = one.open_run({"hang_write": {}})
        channel = one.attach(run.ticket)
        channel.send_raw(b'{"id":1,"op":"hang_write","args":{"order_id":"ord_1","amount":1}}')
        deadline = time.monotonic() + 10
        while "hang_write" not in one.ran() and time.monotonic() < deadline:
            time.sleep(0.01)
        began = time.monotonic()
        closed = one.detach(run.ticket, killed_by="wall")
        assert time.monotonic() - began > 2
        assert [(call.operation, call.status) for call in closed.calls] == [("hang_write", "running")]
        until(lambda: len(one.rows(operation="hang_write")) == 2, "the row of the write's end")
        assert [row.phase for row in one.rows(operation="hang_write")] == ["intent", "outcome"]
