"""Show 100,000 generated and mutated payloads to every renderer: `python tests/render_campaign.py`, or `make campaign`.

Four renderers of Python, and where `scripts/browser-deps.sh` has been run three of Node as well, read what the guard
made of each payload; nothing may be live. The first thousand are shown raw too: had the renderers or the walk gone
blind, that count would be near zero, and the campaign fails.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import select
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from rich.progress import Progress

from lockgate.render import Guard
from render_payloads import PAYLOADS, POLICY, live, renderers

BROWSER = Path(__file__).parent / "browser"
SCRIPT = BROWSER / "page" / "lines.mjs"
JAVASCRIPT = ("markdown-it", "marked", "react-markdown")
CONTROL = 1000
SECONDS = 60.0


class Node:
    """Three JavaScript renderers in one process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(["node", str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __call__(self, text: str) -> dict[str, str | None]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(text).encode() + b"\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], SECONDS)[0]:
            self.process.kill()
            raise TimeoutError(text)
        return dict(zip(JAVASCRIPT, json.loads(self.process.stdout.readline()), strict=True))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


@dataclass
class Tally:
    """What one process saw. `found`: (renderer, payload, what it made, what lived)."""

    shown: int = 0
    raw: Counter[str] = field(default_factory=Counter[str])
    crashed: Counter[str] = field(default_factory=Counter[str])
    found: list[tuple[str, str, str, str]] = field(default_factory=list[tuple[str, str, str, str]])


def shown(render: Callable[[str], str], text: str) -> str | None:
    """Return the page, or None where the renderer itself broke: it draws nothing, and one of them panics on `[` and a
    backtick."""
    try:
        return render(text)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return None


def share(job: int, count: int, number: int, node: bool, done: multiprocessing.Queue[int]) -> Tally:
    """Show `count` payloads of seed (`number`, `job`)."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a panic of a renderer prints a page
    tally, script = Tally(), Node() if node else None

    def drawn(text: str) -> dict[str, str]:
        pages: dict[str, str | None] = {name: shown(render, text) for name, render in renderers().items()}
        if script is not None:
            pages |= script(text)
        tally.crashed.update(name for name, page in pages.items() if page is None)
        return {name: page for name, page in pages.items() if page is not None}

    @seed(number * 1000 + job)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(PAYLOADS)
    def one(payload: str) -> None:
        if any("\ud800" <= char <= "\udfff" for char in payload):
            return
        if tally.shown < CONTROL:
            tally.raw.update(name for name, page in drawn(payload).items() if live(page))
        made = Guard(POLICY).markdown(payload).text
        pages = drawn(made) | {"html sink": Guard(POLICY).html(payload).text}
        pages["html source"] = Guard(POLICY).html(payload, source="html").text
        for name, page in pages.items():
            if lived := live(page):
                tally.found.append((name, payload, made, repr(lived)))
        tally.shown += 1
        if tally.shown % 100 == 0:
            done.put(100)

    try:
        one()
    finally:
        if script is not None:
            script.close()
    return tally


def main() -> int:
    """Return 1 when anything lived or the control was blind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--payloads", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    node = shutil.which("node") is not None and (BROWSER / "node_modules" / "marked").exists()
    print(f"seed {options.seed}; Node renderers: {'yes' if node else 'no (run scripts/browser-deps.sh)'}", flush=True)
    with multiprocessing.Manager() as manager, multiprocessing.Pool(options.jobs) as pool, Progress() as progress:
        done = manager.Queue()
        each = -(-options.payloads // options.jobs)
        work = [pool.apply_async(share, (job, each, options.seed, node, done)) for job in range(options.jobs)]
        bar = progress.add_task("payloads", total=options.payloads)
        while not all(one.ready() for one in work):
            time.sleep(0.2)
            while not done.empty():
                progress.advance(bar, done.get())
        tallies = [one.get() for one in work]
    crashed = sum((tally.crashed for tally in tallies), Counter[str]())
    raw = sum((tally.raw for tally in tallies), Counter[str]())
    found = [one for tally in tallies for one in tally.found]
    for name, payload, made, lived in found[:20]:
        print(f"LIVE in {name}: {lived}\n  payload {payload!r}\n  made    {made!r}")
    shown = sum(tally.shown for tally in tallies)
    print(f"{shown} payloads, {len(found)} live sinks; crashes of renderers: {dict(crashed)}")
    print(f"live when unguarded, of the first {CONTROL * options.jobs}: {dict(raw)}")
    blind = [name for name in renderers() if raw[name] < min(shown, CONTROL) // 20]
    if blind:
        print(f"error: these saw next to nothing in unguarded payloads: {', '.join(blind)}")
    return 1 if found or blind else 0


if __name__ == "__main__":
    sys.exit(main())
