"""A read operation called from inside a run, authorized and audited, against a raw echo of the same bytes."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import tempfile
import time
from pathlib import Path

import lockgate as lg
from common import emit, row

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


def read(sock: socket.socket, count: int) -> bytes:
    """Read exactly `count` bytes."""
    got = b""
    while len(got) < count:
        part = sock.recv(count - len(got))
        if not part:
            raise SystemExit("the echo ended")
        got += part
    return got


def echo() -> list[float]:
    """Seconds of each of `CALLS` round trips of the same frames to a forked process that does nothing else."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        answer = struct.pack(">I", len(REPLY)) + REPLY
        try:
            while True:
                (size,) = struct.unpack(">I", read(theirs, 4))
                read(theirs, size)
                theirs.sendall(answer)
        finally:
            os._exit(0)
    theirs.close()
    frame = struct.pack(">I", len(REQUEST)) + REQUEST
    took = []
    for _ in range(CALLS):
        began = time.perf_counter()
        ours.sendall(frame)
        (size,) = struct.unpack(">I", read(ours, 4))
        read(ours, size)
        took.append(time.perf_counter() - began)
    ours.close()
    os.waitpid(child, 0)
    return took


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
            for turn in range(ROUNDS + 1):
                await gate.prewarm(4)
                result = await run.code(CODE)
                if result.value is None:
                    raise SystemExit(f"the run failed: {result.error or result!r}")
                once = await asyncio.to_thread(echo)
                if turn:
                    calls += result.value
                    raw += once
    emit(
        row("broker call from inside a run, read, audited", calls, unit="s", bar=2.5,
            reference="raw length-prefixed echo over a socketpair", against=raw)
    )  # fmt: skip


if __name__ == "__main__":
    asyncio.run(main())
