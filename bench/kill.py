"""From a kill to everything reaped, of one sandbox by itself, against a plain killpg of the same tree.

Ordinary code is one process that spins. The bomb is 64 processes that all spin.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time

from common import base_python, emit, p99, row
from lockgate.contract.bounds import Bounds
from lockgate.runtimes.container import ContainerRuntime, ContainerTemplate
from lockgate.runtimes.protocol import TemplateSpec
from lockgate.runtimes.single import run_once

SPIN = "while True: pass"
BOMB = """
import os
for _ in range(63):
    try:
        if os.fork() == 0:
            break
    except OSError:
        break
while True:
    pass
"""
WALL = 0.25
ORDINARY, BOMBS = 60, 25


def sandboxed(template: ContainerTemplate, code: str) -> float:
    """Seconds from the wall clock's kill until the kernel has reaped the whole run."""
    outcome = run_once(template, code.encode(), Bounds(wall=WALL, processes=64))
    if not outcome.killed:
        raise SystemExit(f"the code was not killed: {outcome!r}")
    return outcome.death_seconds


def plain(code: str) -> float:
    """Seconds of killpg on the same code in a process group of its own, until every member is gone."""
    reader, writer = os.pipe()  # every member holds the write end: its end is the end of the last of them
    child = subprocess.Popen(
        [base_python(), "-I", "-S", "-c", code], start_new_session=True, pass_fds=(writer,), env={}
    )
    os.close(writer)
    time.sleep(WALL)
    began = time.perf_counter()
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    with contextlib.suppress(BlockingIOError):
        if not select.select([reader], [], [], 10)[0]:
            raise SystemExit("a plain process group would not die")
    took = time.perf_counter() - began
    os.close(reader)
    return took


def main() -> None:
    """Sample both kinds of code and both kinds of kill in turn."""
    template = ContainerRuntime().start(TemplateSpec())
    try:
        for name, code, count, bar in (
            ("ordinary code", SPIN, ORDINARY, 0.025),
            ("64-process fork bomb", BOMB, BOMBS, 0.400),
        ):
            killed: list[float] = []
            reference: list[float] = []
            for turn in range(count + 2):
                pair = sandboxed(template, code), plain(code)
                if turn >= 2:
                    killed.append(pair[0])
                    reference.append(pair[1])
            emit(
                row(f"kill to reaped, p99, {name}", [p99(killed)], unit="s", bar=bar),
                row(
                    f"kill to reaped, {name}",
                    killed,
                    unit="s",
                    bar=10.0,
                    reference="killpg of the same tree",
                    against=reference,
                ),
            )
    finally:
        template.close()


if __name__ == "__main__":
    main()
