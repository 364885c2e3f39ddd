"""Code that abuses the door between guest and worker, through the Gate: killed, audited, no loss of others (X4)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import lockgate as lg
from gate_fixtures import gate_home, gate_scope
from lockgate.audit import reader
from lockgate.audit.rows import StoredRow
from wasm_rung_fixtures import WasmStart

DOOR = """import _host, json, time
def ask(number, text):
    body = {"id": number, "op": "echo", "args": {"text": text}}
    return _host.call(b"Q" + json.dumps(body, separators=(",", ":")).encode())
"""
# Each breaks the door's protocol by itself: a kind, a length, an order or a body that no honest guest sends.
BROKEN = {
    "a kind that is none": "_host.call(b'Z')",
    "no kind at all": "_host.call(b'')",
    "a request above the frame's cap": "_host.call(b'Q' + b'x' * (1 << 20) + b'x')",
    "64 MiB of request": "_host.call(b'Q' + bytes(64 << 20))",
    "an empty request": "_host.call(b'Q')",
    "the source once more": "_host.call(b'S')",
    "the word to go once more": "_host.call(b'G')",
    "a body where none belongs": "_host.call(b'G' + b'x')",
    "a result above its cap": "_host.call(b'R' + bytes(8 << 20))",
}
# These pass the door and are for others to judge: the broker, and the supervisor that reads the result.
JUDGED = {
    "a request that is no JSON": ("_host.call(b'Q{')\ntime.sleep(30)", {"protocol"}),
    "an id that goes back": ("for n in (5, 4): ask(n, 'a')\ntime.sleep(30)", {"protocol"}),
    "a forged result": (
        '_host.call(b\'R\' + b\'{"value":7,"text":"7","error":null,"exit_code":0,"truncated":{}}\')',
        {None},
    ),
    "a result that is no JSON": ("_host.call(b'R' + b'{' * 99)", {"protocol"}),
    "a result that lies about its bounds": (
        '_host.call(b\'R\' + b\'{"value":1,"text":"1","error":null,"exit_code":999,"truncated":{}}\')',
        {"protocol"},
    ),
    "a claim that its time is over": ("_host.call(b'R' + b'{\"stopped\":\"time\"}')", {"wall"}),
    "a claim that it broke the protocol": ("_host.call(b'R' + b'{\"stopped\":\"protocol\"}')", {"protocol"}),
}


class Site:
    """A Gate on this rung, a run of each of two tenants, and the audit file."""

    def __init__(self, hostile: lg.sync.Run, other: lg.sync.Run, path: Path) -> None:
        self.hostile, self.other, self.path = hostile, other, path

    def rows(self) -> list[StoredRow]:
        return list(reader.tail(self.path, 100_000, run=self.hostile.id))

    def attack(self, source: str) -> tuple[lg.RunResult, list[StoredRow]]:
        """Run it; then see that the other tenant is served, and wait for the attack's last row."""
        before = len(self.rows())
        result = self.hostile.code(DOOR + source, bounds={"wall": 5})
        assert self.other.code("host.call('echo', text='mine')").value == {"text": "mine"}
        deadline = time.monotonic() + 20
        while True:
            rows = self.rows()[before:]
            ends = [row for row in rows if row.operation == "run.code" and row.status in ("ended", "killed")]
            if ends:
                assert len(ends) == 1
                assert ends[0].detail["killed_by"] == result.killed_by
                return result, rows
            assert time.monotonic() < deadline, rows
            time.sleep(0.01)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, wasm_start: WasmStart) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("hostile")
    other = lg.Scope(user="eve", agent="atlas", tenant="other", expires=lg.minutes(5), allow={"echo": {}})
    with (
        lg.sync.Gate(gate_home(home, "wasm")) as gate,
        gate.run_scope(gate_scope(echo={})) as one,
        gate.run_scope(other) as two,
    ):
        yield Site(one, two, home / "audit.db")


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_door_is_a_kill_and_a_row(site: Site, name: str) -> None:
    """X4, X9: the length is held to the cap before a byte is read; no request of it reaches the broker."""
    result, rows = site.attack(BROKEN[name])
    assert (result.killed_by, result.exit_code) == ("protocol", 137), result
    assert {row.rung for row in rows if row.via == "code"} == {"wasm"}
    assert not any(row.operation == "echo" for row in rows)


@pytest.mark.parametrize("name", JUDGED)
def test_what_passes_the_door_is_judged_behind_it(site: Site, name: str) -> None:
    """X5: a claim can end the run that makes it, and nothing else."""
    source, ends = JUDGED[name]
    result, _ = site.attack(source)
    assert result.killed_by in ends, result


def test_the_door_works_for_who_keeps_to_it(site: Site) -> None:
    """Control for the tests above: the same door, one honest request."""
    result, rows = site.attack("json.loads(ask(1, 'a'))['ok']")
    assert result.value == {"text": "a"}
    assert any(row.operation == "echo" and row.verdict == "allow" for row in rows)


def test_no_state_of_a_run_is_in_the_next(site: Site) -> None:
    """X10: names planted in builtins, in modules and in the guest's own half of the door are gone."""
    plant = "import builtins, sys, random\nbuiltins.planted = host.planted = sys.planted = 1\nrandom.seed(1)\n"
    look = (
        "import builtins, sys, random\n[hasattr(one, 'planted') for one in (builtins, host, sys)] + [random.random()]"
    )
    seen = site.attack(plant + look)[0].value
    assert seen[:3] == [True] * 3
    first, second = (site.attack(look)[0].value for _ in range(2))
    assert first[:3] == second[:3] == [False] * 3
    assert len({seen[3], first[3], second[3]}) == 3
