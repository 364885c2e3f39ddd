"""A world for the egress tests of one worker, and commands that run confined in it."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from egress_world import ADDRESS, ADDRESS_6, World
from lockgate.audit import reader
from lockgate.audit.rows import StoredRow

DRIVER = Path(__file__).parent / "egress_driver.py"
ALLOWED = ("api.allowed.example:443", "plain.allowed.example:80", "git.allowed.example:443", "pip.allowed.example:443",
           "npm.allowed.example:443", "*.wild.example:443")  # fmt: skip
SECONDS = 250


@pytest.fixture(scope="session")
def egress_world() -> Iterator[World]:
    """One small internet for the egress tests of this worker."""
    place = Path(tempfile.mkdtemp(prefix="egress-world-"))
    try:
        with World(place / "world") as world:
            hosts = [one.partition(":")[0] for one in ALLOWED if one[0] != "*"]
            names = [*hosts, "a.wild.example", "evil.test", "x.evil.test"]
            world.zone({name: [ADDRESS, ADDRESS_6] for name in names})
            world.page("api.allowed.example", "hello", "hello from api\n")
            world.page("plain.allowed.example", "hello", "hello from plain\n")
            world.page("evil.test", "hello", "hello from evil\n")
            yield world
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _path() -> str:
    own = os.environ["PATH"]  # noqa: TID251 - where this machine keeps node and npm
    return os.defpath if shutil.which("npm", path=os.defpath) or not shutil.which("npm", path=own) else own


ENV = {"PATH": _path(), "HOME": "/nonexistent"}


class Confined:
    """A running `lockgate egress run` in a world; `finish` waits for it."""

    def __init__(
        self, world: World, argv: list[str], *options: str, allow: tuple[str, ...] = ALLOWED, **popen: Any
    ) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="egress-run-"))
        self.audit = self.place / "rows.db"
        self.report = self.place / "report"
        with self.report.open("wb") as stderr:
            listed = [word for one in allow for word in ("--allow", one)]
            self.process = subprocess.Popen(
                [*world.enter, sys.executable, "-m", "lockgate", "egress", "run", "--json", "--audit", str(self.audit),
                 "--nameserver", world.nameserver, "--ca-file", str(world.ca), *listed, *options, "--", *argv],
                **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr, "env": ENV, **popen},
            )  # fmt: skip

    def ready(self) -> None:
        """Wait until the command has said so."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], SECONDS)[0], self.report.read_text()
        assert self.process.stdout.readline() == b"ready\n", self.report.read_text()

    def finish(self, stdin: bytes | None = None) -> str:
        """Wait for the end; what the command wrote."""
        try:
            out, _ = self.process.communicate(stdin, timeout=SECONDS)
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        return out.decode(errors="replace") if out else ""

    @property
    def said(self) -> dict[str, Any]:
        """The report of the verb: the last line on its stderr."""
        return json.loads(self.report.read_text().splitlines()[-1])  # type: ignore[no-any-return]

    def rows(self) -> list[StoredRow]:
        """The rows of the run."""
        return list(reader.tail(self.audit, 10_000))

    def denied(self) -> list[tuple[str, str, str | None]]:
        """(kind, reason, destination) of each denial."""
        return [
            (str(one.detail["kind"]), str(one.reason), one.detail.get("destination"))
            for one in self.rows()
            if one.verdict == "deny"
        ]

    def remove(self) -> None:
        """Take its files away."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.place, ignore_errors=True)

    def members(self) -> list[int]:
        """Host pids of this run's processes, the command last."""
        found = [self.process.pid]
        for pid in found:
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                found += [int(one) for one in task.read_text().split()]
        return found


def drive(
    world: World, commands: Mapping[str, Mapping[str, Any]], *options: str, **more: Any
) -> tuple[dict[str, Any], Confined]:
    """Run commands in one confined run; returns their results and the run."""
    run = Confined(world, [sys.executable, "-I", str(DRIVER)], *options, **more)
    run.ready()
    out = run.finish(json.dumps(commands).encode() + b"\n")
    return json.loads(out.splitlines()[-1]), run
