"""Warm run through the public API, audit row included, against starting a bare interpreter."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import lockgate as lg
from common import BARE_PYTHON, bare_python, emit, row

COUNT = 300


async def main() -> None:
    """Sample `run.code("1+1")` and the reference in turn."""
    warm: list[float] = []
    bare: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "lockgate.toml"
        config.write_text(CONFIG)
        scope = lg.Scope(user="bench", agent="bench", tenant="bench", expires=lg.minutes(30), allow={})
        async with lg.Gate(config) as gate, gate.run_scope(scope) as run:
            await gate.prewarm(8)
            for turn in range(COUNT + 10):
                await gate.prewarm(4)  # a pool that keeps up is part of the design; refill is its own figure
                began = time.perf_counter()
                result = await run.code("1+1")
                took = time.perf_counter() - began
                if result.value != 2:
                    raise SystemExit(f"wrong answer: {result!r}")
                if turn >= 10:
                    warm.append(took)
                    bare.append(bare_python())
    emit(row("warm run through the public API", warm, unit="s", bar=0.10, reference=BARE_PYTHON, against=bare))


CONFIG = """
[execution]
rung = "container"
accept_shared_kernel = true
pool = 8
"""

if __name__ == "__main__":
    asyncio.run(main())
