"""The chooser (X2): a pure function whose tables can be read, and that never answers more hostility with less wall."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockgate.contract.errors import CannotIsolate, ConfigError
from lockgate.contract.run import Rung
from lockgate.policy.choose import (
    CODE,
    LIVES,
    NEEDS,
    REACHES,
    STRENGTH,
    ThreatModel,
    candidates,
    choose,
    level,
    threat_model,
)

MODELS = st.builds(
    ThreatModel,
    code=st.sampled_from(CODE),
    reaches=st.sampled_from(REACHES),
    lives=st.sampled_from(LIVES),
    needs=st.frozensets(st.sampled_from(NEEDS)),
    packages=st.frozensets(st.sampled_from(["pandas", "NumPy", "polars", "torch"])),
)
HOSTS = st.none() | st.dictionaries(
    st.sampled_from(sorted(STRENGTH)), st.none() | st.just("no binary; fix: install it")
)


Host = dict[Rung, str | None] | None


def strength(model: ThreatModel, host: Host) -> float:
    """The wall that code gets; without a rung it does not run at all, which is the strongest of all."""
    try:
        return STRENGTH[choose(model, host).rung]
    except CannotIsolate:
        return 9.0


@given(MODELS, MODELS, HOSTS)
def test_more_hostile_is_never_weaker(one: ThreatModel, other: ThreatModel, host: Host) -> None:
    """X2: whatever is raised, alone or together, on whatever host; a longer life and more needs too."""
    harder = ThreatModel(
        code=max(one.code, other.code, key=CODE.index),
        reaches=max(one.reaches, other.reaches, key=REACHES.index),
        lives=max(one.lives, other.lives, key=LIVES.index),
        needs=one.needs | other.needs,
        packages=one.packages | other.packages,
    )
    assert level(harder) >= level(one)
    assert strength(harder, host) >= strength(one, host)


@given(MODELS, MODELS)
def test_more_needs_never_add_a_rung(one: ThreatModel, other: ThreatModel) -> None:
    """X3: a need takes rungs away; it never lets in one that is below the level."""
    both = msgspec.structs.replace(one, needs=one.needs | other.needs, packages=one.packages | other.packages)
    assert set(candidates(both)) <= set(candidates(one))
    assert level(both) == level(one)


@given(MODELS, HOSTS)
def test_what_is_chosen_is_strong_enough_able_and_there(
    model: ThreatModel, host: dict[Rung, str | None] | None
) -> None:
    """X3: never below the level, never a rung that was not seen to run, and each other one has its reason."""
    try:
        choice = choose(model, host)
    except CannotIsolate:
        return  # what it says is tested below
    assert STRENGTH[choice.rung] >= choice.level == level(model)
    assert host is None or host.get(choice.rung, "absent") is None
    assert set(choice.refused) == set(STRENGTH) - {choice.rung}
    assert all(choice.refused.values())


@given(MODELS)
def test_longer_lives_never_ask_for_less(model: ThreatModel) -> None:
    levels = [level(ThreatModel(code=model.code, reaches=model.reaches, lives=lives)) for lives in LIVES]
    assert levels == sorted(levels)


@pytest.mark.parametrize(
    ("words", "rung"),
    [
        ({"code": "own", "reaches": "nothing"}, "container"),
        ({"code": "model", "reaches": "nothing", "lives": "expression"}, "container"),
        ({"code": "model"}, "wasm"),
        ({"code": "model", "lives": "session"}, "gvisor"),
        ({"code": "model", "needs": ["threads"]}, "gvisor"),
        ({"code": "model", "packages": ["pandas"]}, "wasm"),
        ({"code": "model", "packages": ["polars"]}, "gvisor"),
        ({"code": "model", "reaches": "control_plane"}, "microvm"),
        ({"code": "hostile", "reaches": "tenants"}, "microvm"),
        ({"code": "third_party", "reaches": "user", "lives": "session"}, "microvm"),
    ],
)
def test_the_table(words: dict[str, object], rung: str) -> None:
    assert choose(threat_model(**words)).rung == rung  # type: ignore[arg-type]


def test_a_host_without_a_strong_rung_is_told_the_fix() -> None:
    """X3: no downgrade, and the command that would help."""
    host: dict[Rung, str | None] = {"container": None, "wasm": "no guest; fix: lockgate wasm build"}
    with pytest.raises(CannotIsolate, match="strong enough") as caught:
        choose(ThreatModel(), host)
    assert caught.value.next_step == "lockgate wasm build"
    assert choose(ThreatModel(code="own"), host).rung == "container"


def test_needs_that_no_rung_gives_are_errors() -> None:
    """A GPU is a friction point: it says why, and what to do; it is not a reason for less wall."""
    with pytest.raises(CannotIsolate, match="nvproxy") as caught:
        choose(threat_model(code="own", reaches="nothing", needs=["gpu"]))
    assert "operation" in caught.value.next_step
    with pytest.raises(CannotIsolate, match="subprocess") as caught:
        choose(threat_model(code="own", reaches="nothing", needs=["subprocess"]))  # every rung refuses execve
    assert "operation" in caught.value.next_step


@pytest.mark.parametrize("words", [{"code": "mine"}, {"reaches": "all"}, {"lives": "long"}, {"needs": ["root"]}])
def test_unknown_words_name_the_valid_ones(words: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        threat_model(**words)  # type: ignore[arg-type]
    assert "use " in caught.value.next_step
