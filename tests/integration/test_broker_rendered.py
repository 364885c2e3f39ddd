"""What the broker takes from the agent as a refusal of the render guard, and what it writes (E5, C5)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from broker_client import Broker, Refused, broker
from lockgate.broker.rendered import defanged
from lockgate.contract import wire


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with broker(tmp_path_factory.mktemp("broker")) as one:
        yield one


def denial(**more: Any) -> wire.RenderDenial:
    return wire.RenderDenial(**{"reason": "url_not_allowed", "kind": "image", **more})


def told(live: Broker, run: str, *denials: wire.RenderDenial, **more: Any) -> Any:
    return live.ask(lambda id_: wire.RenderDenied(id=id_, run=run, sink="html", denials=denials, **more))


def test_the_answer_comes_after_the_rows_and_who_is_taken_from_the_run(live: Broker) -> None:
    run = live.open_run({}).run
    answer = told(
        live, run, denial(destination="evil.example"), denial(kind="link", destination="b[.]example"), left_out=3
    )
    rows = live.rows(run=run, phase="render")
    assert isinstance(answer, wire.Done)
    assert [row.detail.get("destination") for row in rows] == ["evil[.]example", "b[.]example", None]
    assert {(row.user, row.agent, row.tenant, row.verdict) for row in rows} == {("u1", "support", "t1", "deny")}
    assert [row.rule for row in rows] == ["render.url_not_allowed"] * 2 + ["render.left_out"]
    assert rows[-1].detail["count"] == 3


def test_a_run_that_is_not_open_has_no_rows(live: Broker) -> None:
    with pytest.raises(Refused):
        told(live, "run-0000", denial())
    run = live.open_run({}).run
    live.ask(lambda id_: wire.CloseRun(id=id_, run=run))
    with pytest.raises(Refused):
        told(live, run, denial())
    assert live.rows(run=run, phase="render") == []


@pytest.mark.parametrize(
    "bad",
    [
        {"reason": "x" * 97},
        {"reason": ""},
        {"destination": "a" * 301},
        {"kind": "other"},
        {"severity": "low"},
        {"count": 0},
        {"user": "root"},
    ],
)
def test_what_is_out_of_bounds_is_refused_and_the_broker_goes_on(live: Broker, bad: dict[str, Any]) -> None:
    run = live.open_run({}).run
    whole = msgspec.to_builtins(denial()) | bad

    class RenderDenied(msgspec.Struct, tag="RenderDenied"):
        id: int
        run: str
        sink: str
        denials: list[Any]

    with pytest.raises(Refused):
        live.ask(lambda id_: RenderDenied(id_, run, "html", [whole]))  # type: ignore[arg-type, return-value]
    with pytest.raises(Refused):
        told(live, run, *[denial()] * (wire.MAX_RENDER_ROWS + 1))
    assert live.rows(run=run, phase="render") == []
    assert isinstance(told(live, run, denial()), wire.Done)  # the control: within the bounds it is taken


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("a.b.example", "a[.]b[.]example"),
        ("a[.]b.example", "a[.]b[.]example"),
        ("2001:db8::1", "2001[:]db8[:][:]1"),
        ("https://evil.example/x", "https[:]//evil[.]example/x"),
        ("localhost", "localhost"),
    ],
)
def test_nothing_in_a_row_is_a_live_host(host: str, shown: str) -> None:
    assert defanged(host) == shown
    assert defanged(shown) == shown
