"""The values that cross a boundary hold their own rules (X9, C8)."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from lockgate.contract import errors, wire
from lockgate.contract.bounds import CEILINGS, TABLE, Bounds
from lockgate.contract.errors import ConfigError, LockgateError
from lockgate.contract.reasons import SENTENCES, Reason
from lockgate.contract.run import CallRecord, RunResult


def test_bounds_narrow_but_never_widen() -> None:
    bounds = Bounds().narrow(wall=1, memory=1024)
    assert (bounds.wall, bounds.memory) == (1, 1024)
    with pytest.raises(ConfigError, match="would widen"):
        bounds.narrow(wall=2)
    with pytest.raises(ConfigError, match="no bound 'wal'"):
        bounds.narrow(wal=1)


@pytest.mark.parametrize("name", Bounds.__struct_fields__)
def test_every_bound_has_a_ceiling_and_a_row(name: str) -> None:
    assert name in CEILINGS
    assert [row.ceiling for row in TABLE if row.name == name] == [CEILINGS[name]]
    with pytest.raises(ConfigError, match="above its ceiling"):
        Bounds(**{name: type(getattr(Bounds(), name))(CEILINGS[name] + 1)})


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_bound_that_is_no_bound_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="must be above zero"):
        Bounds(wall=value)


@pytest.mark.parametrize("value", ["1", None, True, [1], 1.5, 10**400, float("inf"), -(10**400)])
def test_a_bound_of_another_form_is_refused_with_a_type_and_a_name(value: object) -> None:
    """X9: also from Python, where nothing has converted it before."""
    for make in (lambda: Bounds(calls=value), lambda: Bounds().narrow(calls=value)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="bound calls"):
            make()
    with pytest.raises(ConfigError, match="a very large number"):
        Bounds(calls=10**5000)
    assert Bounds().narrow(calls=5.0, wall=1.5).calls == 5


def test_every_reason_has_one_sentence_and_a_next_step() -> None:
    assert set(SENTENCES) == set(get_args(Reason))
    assert all(sentence and step for sentence, step in SENTENCES.values())


def test_every_error_names_a_fault_and_the_next_step() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LockgateError)]
    codes = [kind.code for kind in kinds]
    assert len(codes) == len(set(codes))
    assert str(errors.HostFault("it broke.", next_step="look")) == "it broke. Next step: look"
    with pytest.raises(TypeError):
        errors.HostFault("no next step")  # type: ignore[call-arg]


def test_messages_are_closed_unions() -> None:
    decoder = msgspec.json.Decoder(wire.AgentToBroker)
    message = wire.NewTicket(id=1, run="r")
    assert decoder.decode(msgspec.json.encode(message)) == message
    for raw in (b'{"type":"Nope","id":1}', b'{"type":"CloseRun","id":1,"run":"r","more":1}', b'{"id":1,"run":"r"}'):
        with pytest.raises(msgspec.ValidationError):
            decoder.decode(raw)


def test_denials_are_the_refused_calls() -> None:
    yes = CallRecord("get_order", "allow", "get_order", None, "ok", "1")
    no = CallRecord("refund", "deny", "refund.amount.at_most", "argument_not_allowed", "denied", "2")
    result = RunResult(run_id="r", rung="container", calls=(yes, no))
    assert result.denials == (no,)
    assert result.ok
    assert not RunResult(run_id="r", rung="container", killed_by="wall", exit_code=124).ok
