"""A read operation called from inside a run, authorized and audited, against a raw echo of the same bytes.

The echo runs between the same two kinds of process: code in a hardened slot, and a plain Python process outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import tempfile
from pathlib import Path

import lockgate as lg
from common import emit, row
from lockgate.runtimes.container import ContainerRuntime
from lockgate.runtimes.protocol import MachineEvent, MachineResult, Template, TemplateSpec
from slots import BOUNDS, end, make, wait_for

ROUNDS = 12
CALLS = 200
OPERATIONS = '''
from typing import Annotated
import lockgate as lg

ops = lg.Operations()

class Ask(lg.Args):
    order_id: Annotated[str, lg.Id("ord")]

class Order(lg.Result):
    order_id: str
    amount: int

@ops.operation(effect="read", max_result=4096)
def get_order(call: lg.Call, args: Ask) -> Order:
    """Look an order up."""
    return Order(order_id=args.order_id, amount=4200)
'''
CONFIG = """
operations = "bench_operations:ops"
[execution]
rung = "container"
accept_shared_kernel = true
pool = 4
"""
CODE = f"""
import time
took = []
for _ in range({CALLS}):
    began = time.perf_counter()
    host.call("get_order", order_id="ord_4417")
    took.append(time.perf_counter() - began)
took
"""
REQUEST = b'{"id":100,"op":"get_order","args":{"order_id":"ord_4417"}}'
REPLY = b'{"id":100,"ok":{"order_id":"ord_4417","amount":4200}}'


ECHO = f"""
import os, struct, time
frame = struct.pack(">I", {len(REQUEST)}) + {REQUEST!r}
def read(count):
    got = b""
    while len(got) < count:
        part = os.read(3, count - len(got))
        if not part:
            raise SystemExit("the echo ended")
        got += part
    return got
took = []
for _ in range({CALLS}):
    began = time.perf_counter()
    os.write(3, frame)
    (size,) = struct.unpack(">I", read(4))
    read(size)
    took.append(time.perf_counter() - began)
took
"""


def read(sock: socket.socket, count: int) -> bytes:
    """Read exactly `count` bytes; b"" at the end."""
    got = b""
    while len(got) < count:
        part = sock.recv(count - len(got))
        if not part:
            return b""
        got += part
    return got


def serve(sock: socket.socket) -> None:
    """Answer each frame with the reply of the operation, without looking at it."""
    answer = struct.pack(">I", len(REPLY)) + REPLY
    while head := read(sock, 4):
        if not read(sock, struct.unpack(">I", head)[0]):
            return
        sock.sendall(answer)


def echo(template: Template) -> list[float]:
    """Seconds of each of `CALLS` round trips of the same frames from a slot to a plain process outside."""
    machine = make(template, cold=False)
    channel = machine.take_channel()
    channel.setblocking(True)
    child = os.fork()
    if child == 0:
        machine.close()  # the parent holds its own
        with contextlib.suppress(OSError):
            serve(channel)
        os._exit(0)
    channel.close()
    machine.send_code(ECHO.encode(), BOUNDS)
    events: list[MachineEvent] = []
    while not events:
        wait_for(machine.control)
        events = machine.on_control()
    end(machine)
    os.waitpid(child, 0)
    if not isinstance(events[0], MachineResult) or events[0].value is None:
        raise SystemExit(f"the echo failed: {events[0]}")
    return json.loads(events[0].value)


async def main() -> None:
    """Alternate runs and echoes."""
    calls: list[float] = []
    raw: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "bench_operations.py").write_text(OPERATIONS)
        config = Path(folder) / "lockgate.toml"
        config.write_text(CONFIG)
        scope = lg.Scope(user="b", agent="b", tenant="b", expires=lg.minutes(30), allow={"get_order": {}})
        async with lg.Gate(config) as gate, gate.run_scope(scope) as run:
            template = ContainerRuntime().start(TemplateSpec())
            for turn in range(ROUNDS + 1):
                await gate.prewarm(4)
                await asyncio.sleep(0.1)  # the pool has refilled: nothing else runs while we look
                result = await run.code(CODE)
                if result.value is None:
                    raise SystemExit(f"the run failed: {result.error or result!r}")
                once = echo(template)
                if turn:
                    calls += result.value
                    raw += once
            template.close()
    emit(
        row("broker call from inside a run, read, audited", calls, unit="s", bar=2.5,
            reference="raw length-prefixed echo, slot to plain process", against=raw)
    )  # fmt: skip


if __name__ == "__main__":
    asyncio.run(main())
