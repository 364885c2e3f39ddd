"""A small deployment for Gate tests: operations with no backend, and a Gate over the real processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lockgate as lg
import microvm_fixtures
from lockgate.supervisor import cgroups
from lockgate.supervisor.engine import runtimes
from lockgate.supervisor.settings import Settings

NOT_EVERYWHERE: tuple[str, ...] = ()  # rungs that a root's host may lack: what they need cannot be installed

OPERATIONS = '''
import os
import time

import lockgate as lg

ops = lg.Operations()


class Echo(lg.Args):
    text: lg.Text[64]


class Said(lg.Result):
    text: str


class Wait(lg.Args):
    ms: lg.Int[0, 20000]


class Waited(lg.Result):
    pid: int


class Pay(lg.Args):
    order: lg.Id["ord"]
    amount: lg.Cents


class Paid(lg.Result):
    amount: int


@ops.operation(effect="read", timeout=5, max_result=1024)
def echo(call: lg.Call, args: Echo) -> Said:
    """Say it back."""
    return Said(text=args.text)


@ops.operation(effect="read", timeout=5, max_result=1024)
def shout(call: lg.Call, args: Echo) -> Said:
    """Say too much."""
    return Said(text=args.text * 1000)


@ops.operation(effect="write", idempotency=("ms",), timeout=20, max_result=1024)
def wait(call: lg.Call, args: Wait) -> Waited:
    """Take a while."""
    time.sleep(args.ms / 1000)
    return Waited(pid=os.getpid())


@ops.operation(effect="write", idempotency=("order", "amount"), timeout=5, max_result=1024)
def pay(call: lg.Call, args: Pay) -> Paid:
    """Pay."""
    return Paid(amount=args.amount)
'''

CONFIG = """
operations = "gate_test_operations:ops"

[audit]
path = "audit.db"

[broker]
approval_wait = 5

[execution]
rung = "container"
accept_shared_kernel = true
memory = "rlimit"
pool = 2

[execution.bounds]
wall = 20.0
"""


def gate_home(home: Path, rung: str = "container") -> Path:
    """Write a deployment into `home` and return its configuration."""
    (home / "gate_test_operations.py").write_text(OPERATIONS)
    path = home / "lockgate.toml"
    text = CONFIG.replace('rung = "container"', f'rung = "{rung}"')
    of_rung = {"gvisor": "\n[execution.gvisor]\nallow_old = true\n", "microvm": microvm_fixtures.toml()}
    path.write_text(text + of_rung.get(rung, ""))
    return path


def gate_scope(**allow: object) -> lg.Scope:
    """A scope that allows what the tests use."""
    rules = {
        "echo": {},
        "shout": {},
        "wait": {},
        "pay": lg.where(amount=lg.at_most(100_00), approve=lg.when(amount=lg.more_than(20_00))),
    }
    return lg.Scope(user="dana", agent="atlas", tenant="acme", expires=lg.minutes(5), allow=allow or rules)


@pytest.fixture(scope="session")
def rung_or_skip() -> Callable[[str], None]:
    """Skip the test, with the reason, where this host cannot have the rung. As root nothing is skipped: CI is root."""
    seen: dict[str, object] = {}

    def check(rung: str) -> None:
        found = runtimes(Settings(microvm=microvm_fixtures.choices()))
        if rung == "gvisor" and os.geteuid() != 0 and cgroups.find().memory_by == "none":
            pytest.skip("the gvisor rung of a plain user needs a delegated control group with memory")
        missing = seen[rung] if rung in seen else seen.setdefault(rung, found[rung].probe())
        if missing is None:
            return
        if os.geteuid() == 0 and rung not in NOT_EVERYWHERE:
            pytest.fail(f"the {rung} rung does not work here: {missing}")
        pytest.skip(f"the {rung} rung: {missing}")

    return check


@pytest.fixture
def gate_config(tmp_path: Path) -> Path:
    """The configuration of a fresh deployment."""
    return gate_home(tmp_path)


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lg.sync.Gate]:
    """A Gate over the real processes, blocking, shared by a module."""
    with lg.sync.Gate(gate_home(tmp_path_factory.mktemp("gate"))) as opened:
        yield opened


@pytest.fixture
def gate_run(gate: lg.sync.Gate) -> Iterator[lg.sync.Run]:
    """A run that may use every operation of the deployment."""
    with gate.run_scope(gate_scope()) as run:
        yield run
