"""The two ends of a result: what the guest makes of any value, and what we make of any bytes (X9)."""

from __future__ import annotations

import json
import math
import os
import types
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockgate.contract.bounds import Bounds
from lockgate.runtimes import dialog
from lockgate.runtimes.container import ContainerMachine, plan
from lockgate.runtimes.protocol import MachineFailed, MachineReady, MachineResult

CAP = 4096


def _guest(name: str) -> types.ModuleType:
    """Load a guest file as the template does: as data, never as an import."""
    module = types.ModuleType(name)
    source = (plan.guest_directory() / f"{name}.py").read_text()
    exec(compile(source, f"<{name}>", "exec"), module.__dict__)
    return module


values = _guest("values")

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=20,
)
odd = st.recursive(
    st.just(math.nan) | st.just(-math.inf) | st.binary(max_size=3) | st.just("\ud800") | st.just({1: 2}) | st.just({1}),
    lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(st.text(max_size=3), inner, min_size=1),
    max_leaves=5,
)


@given(plain)
def test_json_of_a_plain_value_is_that_value(value: Any) -> None:
    """X1: what JSON can hold comes back as it was, read by the same strict decoder that the agent uses."""
    data, dropped = values.as_json(value, 1 << 20)
    assert dropped == 0
    assert msgspec.json.decode(data) == value


@given(odd)
def test_what_json_cannot_hold_has_no_value(value: Any) -> None:
    """X9: NaN, bytes, sets, number keys and lone surrogates never become something else."""
    assert values.as_json(value, 1 << 20) == (None, 0)


@given(st.text(), st.integers(0, 40))
def test_cut_counts_every_byte(text: str, cap: int) -> None:
    """X9: kept + dropped is the whole, and what is kept is whole characters."""
    kept, dropped = values.cut(text, cap)
    assert len(kept.encode()) <= cap
    assert len(kept.encode()) + dropped == len(text.encode("utf-8", "backslashreplace"))


def test_depth_and_integers_have_limits() -> None:
    """X9: the edge of both, on both sides."""
    inside: Any = 1
    for _ in range(values.DEPTH - 1):
        inside = [inside]
    assert values.as_json(inside, CAP)[0] is not None
    assert values.as_json([[inside]], CAP) == (None, 0)
    assert values.as_json(2**values.INT_BITS - 1, CAP)[0] is not None
    assert values.as_json(2**values.INT_BITS, CAP) == (None, 0)


def test_a_lying_class_is_named_by_its_real_name() -> None:
    """X9: a metaclass cannot break the report of an error."""

    class Meta(type):
        @property
        def __name__(cls) -> str:
            raise RuntimeError("no name")

    class Liar(Exception, metaclass=Meta):
        def __str__(self) -> str:
            raise SystemExit(3)

    got = values.as_error(Liar())
    assert got["name"] == "Liar"
    assert "failed" in got["message"]


# ---- our end ---------------------------------------------------------------------------------------------------
def _hear(data: bytes, *, after_code: bool) -> list[Any]:
    """Let a machine hear `data` from its slot; returns its events."""
    machine = ContainerMachine(Bounds(value=CAP))
    try:
        _, control, *_ = machine.slot_descriptors()
        if after_code:
            os.write(control, b"R{}\n")
            assert isinstance(machine.on_control()[0], MachineReady)
            machine.send_code(b"1", Bounds(value=CAP))
        os.write(control, data)
        return list(machine.on_control())
    finally:
        machine.close()


def _frame(body: bytes) -> bytes:
    return dialog.RESULT_HEADER.pack(len(body)) + body


claims = st.fixed_dictionaries(
    {
        "value": plain,
        "text": st.text(max_size=50),
        "error": st.none() | st.fixed_dictionaries({n: st.text(max_size=9) for n in ("name", "message", "traceback")}),
        "exit_code": st.integers(-2, 300),
        "truncated": st.dictionaries(st.sampled_from(["value", "text", "stdout"]), st.integers(-1, 5)),
    }
)


@settings(deadline=None)
@given(claims)
def test_any_claim_is_a_result_within_bounds_or_a_failure(claim: dict[str, Any]) -> None:
    """X9: every well-formed claim is either typed, within its bounds, or a protocol failure."""
    (event,) = _hear(_frame(json.dumps(claim).encode()), after_code=True)
    if isinstance(event, MachineFailed):
        assert event.step == "protocol"
        return
    assert isinstance(event, MachineResult)
    assert 0 <= event.exit_code <= 255
    assert event.value is None or len(event.value) <= CAP
    assert "stdout" not in event.truncated
    assert all(count > 0 for count in event.truncated.values())


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=200), st.booleans())
def test_any_bytes_are_an_event_or_nothing(data: bytes, after_code: bool) -> None:
    """X9: no bytes of a slot raise here; whatever is complete and odd is one failure."""
    events = _hear(data, after_code=after_code)
    assert len(events) <= 1
    assert all(isinstance(one, MachineFailed | MachineResult | MachineReady) for one in events)


@pytest.mark.parametrize("first", [b"X{}\n", b"R\n", b"R[]\n", b"F{}\n", b"R{}\nmore", b"R" + b" " * 5000, b"\n"])
def test_a_first_word_that_is_none(first: bytes) -> None:
    """X3: before code only one line may come, R or F with JSON."""
    (event,) = _hear(first, after_code=False)
    assert isinstance(event, MachineFailed)
    assert event.step == "protocol"
