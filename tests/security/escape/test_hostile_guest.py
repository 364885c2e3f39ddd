"""Code that rewrites its guest and abuses its channel, through the Gate: audited, killed or answered (C3, X4, X7).

After each attack another tenant's run on the same pool is served, and learns nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import lockgate as lg
from gate_fixtures import gate_home, gate_scope
from lockgate.audit import reader
from lockgate.audit.rows import StoredRow

FRAMES = """
import json, os, struct, time
def frame(number, op, **args):
    body = json.dumps({"id": number, "op": op, "args": args}, separators=(",", ":")).encode()
    return struct.pack(">I", len(body)) + body
"""
# Each: what the code does, and every way in which the run may end. None = it ended by itself.
ATTACKS: dict[str, tuple[str, set[str | None]]] = {
    "the module is replaced": (
        (
            "import sys, types\nsys.modules['host'] = types.ModuleType('host')\nhost._CHANNEL = 1\n"
            "host.call = lambda *a, **k: {'text': 'forged'}\nhost.call('echo', text='never asked')"
        ),
        {None},
    ),
    "the library lies about its ids": (
        (
            "import sys\nfor one in list(vars(host).values()):\n    if hasattr(one, 'last_id'): one.last_id = -5\n"
            "[host.call('echo', text='a') for _ in range(3)]"
        ),
        {None, "protocol", "wall"},
    ),
    "an id goes back": (
        "os.write(3, frame(5, 'echo', text='a')); os.write(3, frame(4, 'echo', text='b'))\ntime.sleep(30)",
        {"protocol"},
    ),
    "a run is named": (
        (
            "os.write(3, frame(1, 'echo', text='a', run='run-000000000000000000000000'))\ntime.sleep(0.3)\n"
            "os.read(3, 65536).decode()"
        ),
        {None, "protocol"},
    ),
    "half a frame and silence": ("os.write(3, frame(1, 'echo', text='a')[:9])\ntime.sleep(30)", {"wall", "protocol"}),
    "replies never read": (
        (
            "b = b''.join(frame(n, 'echo', text='x' * 60) for n in range(1, 10_001))\n"
            "while b: b = b[os.write(3, b):]\ntime.sleep(30)"
        ),
        {"wall", "protocol", "cpu"},
    ),
    "the channel is closed": ("os.close(3)\ntry: host.call('echo', text='a')\nexcept Exception: pass\n7", {None}),
    "the channel is closed in the middle of a frame": (
        "os.write(3, frame(1, 'echo')[:6]); os.close(3)\n7",
        {None, "protocol"},
    ),
    "the channel is shut": (
        "import socket\nsocket.socket(fileno=3).shutdown(2)\ntime.sleep(0.1)\n7",
        {None, "protocol"},
    ),
}
FORKING: dict[str, tuple[str, set[str | None]]] = {
    "a child forges frames beside its parent": (
        (
            "if os.fork() == 0:\n    for n in range(1, 99): os.write(3, frame(n, 'echo', text='k'))\n    os._exit(0)\n"
            "for n in range(1, 200): os.write(3, frame(n, 'echo', text='parent'))\ntime.sleep(30)"
        ),
        {"protocol", "wall"},
    ),
    "the channel is left to a child": (
        (
            "if os.fork() == 0:\n    os.setsid(); time.sleep(0.2)\n    os.write(3, frame(1, 'echo', text='late'))\n"
            "    time.sleep(30)\nos.close(3)\n7"
        ),
        {None},
    ),
}
FORKS = os.geteuid() == 0  # without a memory cgroup the run is one process


class Site(NamedTuple):
    """A Gate, a run of each of two tenants, and the audit file."""

    hostile: lg.sync.Run
    other: lg.sync.Run
    path: Path

    def rows(self, run: lg.sync.Run) -> list[StoredRow]:
        """The run's rows, oldest first."""
        return list(reader.tail(self.path, 100_000, run=run.id))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("hostile")
    other = lg.Scope(user="eve", agent="atlas", tenant="other", expires=lg.minutes(5), allow={"echo": {}})
    with (
        lg.sync.Gate(gate_home(home)) as gate,
        gate.run_scope(gate_scope(echo={})) as one,
        gate.run_scope(other) as two,
    ):
        yield Site(one, two, home / "audit.db")


def settled(site: Site) -> int:
    """How many rows there are of the hostile run so far: a denial is durable, and so is what was sent before it."""
    assert site.hostile.try_call("not_there").reason == "not_available"
    return len(site.rows(site.hostile))


def attack(
    site: Site, source: str, ends: set[str | None], *, wall: float = 1.5
) -> tuple[lg.RunResult, list[StoredRow]]:
    """Run the attack; check its end and its rows; then that the other tenant is served as if nothing happened."""
    before = settled(site)
    began = time.monotonic()
    result = site.hostile.code(source, bounds={"wall": wall})
    assert time.monotonic() - began < wall + 10
    assert result.killed_by in ends, result
    neighbour = site.other.code("host.call('echo', text='mine')")
    assert neighbour.value == {"text": "mine"}
    assert [call.operation for call in neighbour.calls] == ["echo"]
    rows = site.rows(site.hostile)[before:]
    while not rows or rows[-1].status not in ("ended", "killed") or rows[-1].operation != "run.code":
        assert time.monotonic() - began < wall + 10, rows
        time.sleep(0.01)  # nobody waits for the last row of a run: it is durable within moments
        rows = site.rows(site.hostile)[before:]
    last = [row for row in rows if row.operation == "run.code" and row.status in ("ended", "killed")]
    assert len(last) == 1, rows
    assert last[0].detail["killed_by"] == result.killed_by
    assert {row.tenant for row in rows} == {"acme"}
    if result.killed_by == "protocol":
        assert [row.rule for row in rows if row.phase == "denied" and row.status == "killed"] == ["protocol"]
    return result, rows


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_on_the_channel_is_audited_killed_or_answered(site: Site, name: str) -> None:
    """C3, X4: whatever the guest does to its own library and channel, the run has one end and its rows."""
    body, ends = ATTACKS[name]
    attack(site, FRAMES + body, ends)


@pytest.mark.skipif(not FORKS, reason="a run has one process where there is no memory cgroup")
@pytest.mark.parametrize("name", FORKING)
def test_a_child_with_the_channel_gains_nothing(site: Site, name: str) -> None:
    """C3, X4: two writers break the order and the run with it; a child that stays does not outlive the run."""
    body, ends = FORKING[name]
    _, rows = attack(site, FRAMES + body, ends)
    assert not any(row.phase == "outcome" and row.at > rows[-1].at for row in site.rows(site.hostile))


def test_a_forged_answer_is_only_a_claim(site: Site) -> None:
    """X10: what the code says of its calls is not what the records say."""
    source, ends = ATTACKS["the module is replaced"]
    result, rows = attack(site, source, ends)
    assert result.value == {"text": "forged"}
    assert result.calls == ()
    assert not any(row.operation == "echo" for row in rows)


NAMES = ("a\nb", "a\0b", "..", "../up", "a/b", "a\u202etxt.exe", "\ud800", "a\ufe0fb", ".hidden", "-rf", "x" * 300)


def test_names_that_walk_or_deceive_leave_nothing_but_rows(site: Site, tmp_path: Path) -> None:
    """X7: each refused name is a denial in the audit log; the one plain file arrives."""
    before = settled(site)
    source = (
        f"seen = []\nfor name in {NAMES!r}:\n    try: host.export(name, b'x'); seen.append(name)\n"
        "    except (host.HostError, ValueError, UnicodeError): pass\nhost.export('plain.txt', b'ok')\nrepr(seen)"
    )
    result = site.hostile.code(source, export_to=tmp_path / "out")
    assert result.value == "[]", result
    assert [one.name for one in result.exports] == ["plain.txt"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["plain.txt"]
    denied = [
        row for row in site.rows(site.hostile)[before:] if row.operation == "host.export" and row.verdict == "deny"
    ]
    assert len(denied) >= len(NAMES) - 2  # the library refuses some before it asks


def test_a_hundred_thousand_exports_are_bounded(site: Site, tmp_path: Path) -> None:
    """X7: the count is held by the broker, the rest are refusals or the end of the run, and the row says so."""
    source = (
        "n = 0\ntry:\n    for i in range(100_000):\n        host.export(f'f{i}', b''); n += 1\n"
        "except host.HostError: pass\nn"
    )
    result = site.hostile.code(source, bounds={"wall": 10.0}, export_to=tmp_path / "many")
    assert len(result.exports) <= lg.Bounds().exports
    assert len(list((tmp_path / "many").iterdir())) == len(result.exports)
    assert any(row.operation == "host.export" and row.verdict == "deny" for row in site.rows(site.hostile)[-5000:])


RESULTS = {
    "repr is huge": "class A:\n    def __repr__(self): return 'x' * (1 << 24)\nA()",
    "repr never ends": "class A:\n    def __repr__(self):\n        while True: pass\nA()",
    "repr raises": "class A:\n    def __repr__(self): raise SystemExit(3)\nA()",
    "str of the exception raises": "class E(Exception):\n    def __str__(self): raise self\nraise E()",
    "str of the exception never ends": "class E(Exception):\n  def __str__(self):\n    while True: pass\nraise E()",
    "a number of a million digits": "10 ** 1_000_000",
    "a list that holds itself": "a = []\na.append(a)\na",
    "lone surrogates": "'\\ud800' * 10",
}


@pytest.mark.parametrize("name", RESULTS)
def test_hostile_results_are_data(site: Site, name: str) -> None:
    """X9: a value or an exception that fights back ends as a result within its caps, and has its row."""
    result, _ = attack(site, RESULTS[name], {None, "wall", "output", "protocol", "memory"})
    assert len(result.text) < 2 << 20
    if "never ends" in name:
        assert result.killed_by == "wall"
    result.text.encode("utf-8", "strict")


def test_the_audit_file_verifies_after_all_of_it(site: Site) -> None:
    """C6: none of the rows above broke the chain."""
    assert reader.verify(site.path).ok
