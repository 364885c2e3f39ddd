"""The list of rungs, and what the supervisor knows of each (X3)."""

from __future__ import annotations

from typing import get_args

import pytest

from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import CannotIsolate, ConfigError
from lockgate.contract.run import Rung
from lockgate.contract.rungs import BOUNDARIES, BUILT, RUNGS, WEAKNESSES, Weakness
from lockgate.gate import checks
from lockgate.runtimes.protocol import Nature
from lockgate.supervisor.engine import runtimes
from lockgate.supervisor.line import Key
from lockgate.supervisor.refusals import not_accepted


def test_what_the_gate_lets_pass_is_what_the_supervisor_drives() -> None:
    found = runtimes()
    assert set(found) == set(BUILT)
    assert set(RUNGS) == set(get_args(Rung)) == set(BOUNDARIES)
    for name, runtime in found.items():
        assert runtime.rung == name
        assert runtime.boundary == BOUNDARIES[runtime.rung]
        assert set(runtime.nature.fixed) <= set(Bounds.__struct_fields__)


def test_only_a_shared_kernel_needs_to_be_accepted_before_anything_is_started() -> None:
    """X3: the one that is a packaging boundary, by name; what else a host may lack is refused by its supervisor."""
    for name in BUILT:
        if BOUNDARIES[name] == "shared kernel":
            with pytest.raises(CannotIsolate, match="shares the host's kernel"):
                checks.rung(name, accept_shared_kernel=False)
        else:
            assert checks.rung(name, accept_shared_kernel=False) == name
        assert checks.rung(name, accept_shared_kernel=True) == name


def test_weaknesses_have_names_and_a_sentence_each() -> None:
    assert set(WEAKNESSES) == set(get_args(Weakness))
    assert checks.weaknesses(["emulated", "no outer wall"]) == ("emulated", "no outer wall")
    with pytest.raises(ConfigError, match="no weakness"):
        checks.weaknesses(["emulatd"])
    for weakness, sentence in WEAKNESSES.items():
        error = not_accepted("wasm", weakness)
        assert sentence in error.message
        assert f'accept_weaker = ["{weakness}"]' in error.next_step


def test_a_rung_that_holds_memory_itself_needs_no_group_for_it() -> None:
    """X6: what holds memory is named; nothing that does not hold is called by a name that does."""
    plain, own = Key("container", None, False), Key("wasm", None, False, Nature(holds_memory="store limit"))
    assert plain.memory_by("cgroup v1") == own.memory_by("cgroup v1") == "cgroup v1"
    assert own.memory_by("none") == "store limit"
    assert Key("container", None, True).memory_by("none") == "rlimit"


def test_a_group_has_room_for_the_machine_itself() -> None:
    key = Key("wasm", None, False, Nature(overhead=1 << 20, overhead_tasks=9))
    limits = key.limits(Bounds(memory=1 << 26, processes=3))
    assert (limits.memory, limits.processes) == ((1 << 26) + (1 << 20), 12)
