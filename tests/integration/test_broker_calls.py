"""Calls through a real broker and audit writer: one edge, budgets, keys, approvals, deadlines (C2, C3, C5, C8)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker_client import WAIT, Backend, Broker, Channel, Refused, broker, payments_config
from lockgate.contract import wire
from lockgate.contract.bounds import Bounds
from lockgate.verify import Verifier


@pytest.fixture(scope="module")
def payments() -> Iterator[Backend]:
    one = Backend()
    yield one
    one.close()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, payments: Backend) -> Iterator[Broker]:
    base = tmp_path_factory.mktemp("broker")
    with broker(
        base, config="[broker]\napproval_wait = 1.0\n" + payments_config(base, payments.url).replace("[broker]", "")
    ) as one:
        yield one


@pytest.fixture(autouse=True)
def behave(payments: Backend) -> None:
    payments.mode, payments.status, payments.body, payments.headers = "answer", 200, b"{}", {}
    payments.requests.clear()


def both(live: Broker, allow: dict[str, Any], **more: Any) -> tuple[str, Channel, str]:
    """A run, a channel of it, and the channel's ticket."""
    run = live.open_run(allow, **more)
    return run.run, live.attach(run.ticket), run.ticket


CASES: list[tuple[str, dict[str, Any]]] = [
    ("get_order", {"order_id": "ord_4417"}),
    ("get_order_async", {"order_id": "ord_4417"}),
    ("get_order", {"order_id": "ord_1"}),
    ("get_order", {"order_id": "4417"}),
    ("get_order", {"order_id": 4417}),
    ("get_order", {}),
    ("get_order", {"order_id": "ord_4417", "tenant": "t2"}),
    ("refund", {"order_id": "ord_4417", "amount": 1.5}),
    ("refund", {"order_id": "ord_4417", "amount": 2**64}),
    ("refund", {"order_id": "ord_4417", "amount": -1}),
    ("refund", {"order_id": "ord_4417", "amount": 9900}),
    ("refund_note", {"order_id": "ord_4417", "amount": 1}),
    ("no_such_operation", {"order_id": "ord_4417"}),
    ("tell", {"text": "a\0b"}),
    ("tell", {"text": "big"}),
    ("tell", {"text": "raise"}),
    ("tell", {"text": "raw"}),
]
SCOPE: dict[str, Any] = {
    "get_order": {"order_id": {"one_of": ["ord_4417"]}},
    "get_order_async": {},
    "refund": {"amount": {"at_most": 5000}},
    "tell": {},
}


@pytest.mark.parametrize(("op", "args"), CASES)
def test_the_edge_cannot_tell_a_tool_from_code(live: Broker, op: str, args: dict[str, Any]) -> None:
    """C2: the same answer, and the same rows but for `via` and what names the call (reports 1, 3, 5)."""
    run, channel, ticket = both(live, SCOPE)
    by_tool = live.tool(run, op, **args)
    by_code = channel.call(op, **args)
    live.detach(ticket)
    if by_tool.reason is None:
        assert by_code["ok"] == msgspec.json.decode(by_tool.ok)
    else:
        assert by_code["error"]["reason"] == by_tool.reason

    def told(via: str) -> list[dict[str, Any]]:
        rows = [msgspec.to_builtins(r) for r in live.rows(run=run, via=via) if r.operation == op]
        for row in rows:
            for name in ("id", "at", "mono", "seq", "ref", "duration", "lease_id", "via", "rung", "shared_kernel"):
                row.pop(name, None)
        return rows

    assert told("tool") == told("code")
    assert told("code")
    assert {(r.rung, r.shared_kernel) for r in live.rows(run=run, via="code")} == {("container", True)}


def test_identity_comes_from_the_run(live: Broker) -> None:
    """C3, report 9: tenant is no argument, and what a request claims changes nothing."""
    _, channel, ticket = both(live, {"get_order": {}}, tenant="t7")
    assert channel.call("get_order", order_id="ord_1")["ok"]["tenant"] == "t7"
    assert channel.reason("get_order", order_id="ord_1", tenant="t1") == "bad_request"
    live.detach(ticket)


def test_a_denial_is_stored_before_it_is_told(live: Broker) -> None:
    """C5, report 7: the row is in the database when the answer arrives."""
    from lockgate.audit import reader

    run, channel, ticket = both(live, {})
    for _ in range(20):
        assert channel.reason("get_order", order_id="ord_1") == "not_available"
    stored = [r for r in reader.tail(str(live.audit_path), 100_000) if r.run == run and r.phase == "denied"]
    assert len(stored) == 20
    assert {(r.verdict, r.visible, r.operation) for r in stored} == {("deny", "not_available", "get_order")}
    assert all(r.args_hash for r in stored)  # report 8: complete on each failure path
    live.detach(ticket)


def test_unknown_and_out_of_scope_are_one(live: Broker) -> None:
    """C8: the same text, and neither takes the arguments' types into account."""
    _, channel, ticket = both(live, {"get_order": {}})
    replies = [
        channel.call(op, **args)["error"]
        for op in ("refund", "nothing_of_ours")
        for args in ({"order_id": "ord_1", "amount": 5}, {"wrong": True})
    ]
    assert {(r["reason"], r["message"]) for r in replies} == {(replies[0]["reason"], replies[0]["message"])}
    live.detach(ticket)


def test_three_concurrent_refunds_against_one_budget(live: Broker) -> None:
    """C3: tool calls and two channels of one run at once; exactly one refund of 60 fits into 100."""
    run, first, ticket = both(live, {"refund_note": {"budget": {"total": {"amount": 100}}}})
    second_ticket = live.ticket(run)
    second = live.attach(second_ticket)
    barrier = threading.Barrier(3)
    reasons: list[str] = []

    def ask(by: Any) -> None:
        barrier.wait()
        reasons.append(by())

    threads = [
        threading.Thread(target=ask, args=[by])
        for by in (
            lambda: first.reason("refund_note", order_id="ord_21", amount=60),
            lambda: second.reason("refund_note", order_id="ord_22", amount=60),
            lambda: live.tool(run, "refund_note", order_id="ord_23", amount=60).reason or "",
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert sorted(reasons) == ["", "budget_exhausted", "budget_exhausted"]
    assert len([line for line in live.ran() if line.startswith("refund_note ord_2")]) == 1
    assert len(live.rows(run=run, phase="denied", visible="budget_exhausted")) == 2
    live.detach(ticket)
    live.detach(second_ticket)


def test_a_budget_is_given_back_only_when_surely_nothing_happened(live: Broker) -> None:
    run, _, ticket = both(live, {"write_badly": {"budget": {"calls": 1}}})
    assert live.tool(run, "write_badly", text="refused").reason == "backend_failed"
    assert live.tool(run, "write_badly", text="raise").reason == "outcome_unknown"  # the refusal gave the one call back
    assert live.tool(run, "write_badly", text="fine").reason == "budget_exhausted"  # the unknown one did not
    live.detach(ticket)


def test_a_child_run_only_narrows_and_spends_its_parents_budget(live: Broker) -> None:
    parent = live.open_run({"refund_note": {"budget": {"calls": 2}}, "get_order": {}})
    child = live.ask(
        lambda i: wire.NarrowRun(
            id=i, run=parent.run, scope={"allow": {"refund_note": {"amount": {"at_most": 10}}}, "expires": 60.0}
        )
    )
    assert child.operations == ["refund_note"]
    assert live.tool(child.run, "get_order", order_id="ord_1").reason == "not_available"
    assert live.tool(child.run, "refund_note", order_id="ord_31", amount=11).reason == "argument_not_allowed"
    assert live.tool(child.run, "refund_note", order_id="ord_31", amount=10).reason is None
    assert live.tool(parent.run, "refund_note", order_id="ord_32", amount=11).reason is None
    assert live.tool(child.run, "refund_note", order_id="ord_33", amount=10).reason == "budget_exhausted"
    for wider in (
        {"allow": {"refund": {}}},
        {"tenant": "t2"},
        {"expires": 6000.0},
        {"allow": {"refund_note": {"amount": 3}}},
    ):
        with pytest.raises(Refused) as caught:
            live.ask(lambda i, wider=wider: wire.NarrowRun(id=i, run=parent.run, scope=wider))
        assert caught.value.fault.code == "scope"
    live.ask(lambda i: wire.CloseRun(id=i, run=parent.run))
    with pytest.raises(Refused) as caught:
        live.tool(child.run, "refund_note", order_id="ord_34", amount=1)
    assert caught.value.fault.code == "unknown_run"


# ---- idempotency -------------------------------------------------------------------------------------------------
def test_a_repeated_write_is_answered_and_not_repeated(live: Broker) -> None:
    """Reports 40 and 41: the broker makes the key; another run of the tenant gets the stored result."""
    run, channel, ticket = both(live, {"refund": {"budget": {"calls": 1}}})
    first = channel.call("refund", order_id="ord_41", amount=7)
    assert channel.call("refund", order_id="ord_41", amount=7)["ok"] == first["ok"]  # and no budget is charged
    other = live.open_run({"refund": {}})
    assert msgspec.json.decode(live.tool(other.run, "refund", order_id="ord_41", amount=7).ok) == first["ok"]
    assert live.ran().count("refund t1 ord_41 7") == 1
    foreign = live.open_run({"refund": {}}, tenant="t2")
    fresh = msgspec.json.decode(live.tool(foreign.run, "refund", order_id="ord_41", amount=7).ok)
    assert fresh["key"] != first["ok"]["key"]
    assert live.ran().count("refund t2 ord_41 7") == 1
    replays = live.rows(run=run, status="replayed")
    assert [r.ref for r in replays] == [live.rows(run=run, phase="intent", operation="refund")[0].id]
    live.detach(ticket)


def test_the_same_key_with_other_arguments_is_a_conflict(live: Broker) -> None:
    run, channel, ticket = both(live, {"refund_note": {}})
    assert channel.reason("refund_note", order_id="ord_42", amount=7, note="one") == ""
    assert channel.reason("refund_note", order_id="ord_42", amount=7, note="two") == "conflict"
    assert live.ran().count("refund_note ord_42 7") == 1
    assert live.rows(run=run, status="conflict")[0].phase == "denied"
    live.detach(ticket)


def test_a_write_without_key_is_a_new_one_each_time(live: Broker) -> None:
    run = live.open_run({"add_note": {}})
    for _ in range(2):
        assert live.tool(run.run, "add_note", text="hello").reason is None
    assert live.ran().count("add_note") >= 2


def test_the_same_write_at_once_runs_once(live: Broker) -> None:
    run = live.open_run({"refund": {}})
    boxes = [
        live.start(lambda i: wire.ToolCall(id=i, run=run.run, op="refund", args=b'{"order_id":"ord_43","amount":7}'))
        for _ in range(6)
    ]
    reasons = [box.get(timeout=WAIT).reason for box in boxes]
    assert set(reasons) <= {None, "busy"}
    assert reasons.count(None) >= 1
    assert live.ran().count("refund t1 ord_43 7") == 1


def test_a_refused_try_keeps_its_key_and_may_be_made_again(live: Broker, payments: Backend) -> None:
    """Report 42: the key is equal across tries."""
    run = live.open_run({"pay": {}})
    payments.status = 402
    assert live.tool(run.run, "pay", order_id="ord_44", amount=7).reason == "backend_failed"
    payments.status = 200
    assert live.tool(run.run, "pay", order_id="ord_44", amount=7).reason is None
    keys = [line for one in payments.requests for line in one.split(b"\r\n") if line.startswith(b"Idempotency-Key: ")]
    assert len(keys) == 2
    assert len(set(keys)) == 1


@pytest.mark.parametrize("text", ["raise", "big"])
def test_a_write_that_happened_is_not_repeated_whatever_its_result(live: Broker, text: str) -> None:
    run = live.open_run({"write_badly": {}}, tenant=f"t-{text}")
    wanted = {"raise": "outcome_unknown", "big": "result_too_large"}[text]
    before = live.ran().count(f"write_badly {text}")
    for _ in range(3):
        assert live.tool(run.run, "write_badly", text=text).reason == wanted
    assert live.ran().count(f"write_badly {text}") == before + 1


def test_a_token_that_cannot_be_made_ends_the_call_before_it_began(live: Broker) -> None:
    run = live.open_run({"write_badly": {"budget": {"calls": 1}}})
    for _ in range(2):
        assert live.tool(run.run, "write_badly", text="no key").reason == "backend_failed"
    assert {r.status for r in live.rows(run=run.run, phase="outcome")} == {"not_sent"}


# ---- backends ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", ["pay", "pay_async"])
def test_a_token_names_exactly_this_call(live: Broker, payments: Backend, op: str) -> None:
    """C4: the backend checks operation, identifiers and scope, and the row names the token."""
    run = live.open_run({op: {}})
    assert live.tool(run.run, op, order_id="ord_51", amount=7).reason is None
    [request] = payments.requests
    token = next(line for line in request.decode().split("\r\n") if line.lower().startswith("authorization: "))[15:]
    service = Verifier(
        issuer="https://lockgate.example", audience="payments", key=(live.base / "public.pem").read_text()
    )
    claims = service.check_header(
        token, operation=op, scope="refund:create", identifiers={"order_id": "ord_51", "amount": 7}
    )
    assert (claims.sub, claims.tenant, claims.act.run) == ("u1", "t1", run.run)
    outcome = live.rows(run=run.run, phase="outcome")[0]
    assert outcome.lease_id == claims.jti
    assert claims.authorization_details[0].call == outcome.ref


@pytest.mark.parametrize(
    ("how", "write", "read"),
    [
        (("answer", 404), "backend_failed", "backend_failed"),
        (("answer", 302), "backend_failed", "backend_failed"),
        (("answer", 500), "outcome_unknown", "backend_failed"),
        (("answer", 408), "outcome_unknown", "backend_failed"),
        (("reset", 0), "outcome_unknown", "backend_failed"),
        (("garbage", 0), "outcome_unknown", "backend_failed"),
        (("hang", 0), "outcome_unknown", "backend_timeout"),
    ],
)
def test_what_a_backend_does_is_typed_and_never_tried_again(
    live: Broker, payments: Backend, how: tuple[str, int], write: str, read: str
) -> None:
    """Report 40: one request whatever happens; report 24: no redirect is followed."""
    mode, status = how
    payments.mode, payments.status = mode, status or 200
    payments.headers = {"Location": f"{payments.url}/elsewhere"} if status == 302 else {}
    run = live.open_run({"pay": {}, "fetch": {}}, tenant=f"t-{mode}-{status}")
    assert live.tool(run.run, "pay", order_id="ord_52", amount=7).reason == write
    assert live.tool(run.run, "fetch", order_id="ord_52").reason == read
    assert len(payments.requests) == 2
    assert live.rows(run=run.run, effect="write", phase="unknown" if write == "outcome_unknown" else "outcome")


def test_a_backend_that_is_not_there_changed_nothing(tmp_path: Path) -> None:
    with broker(tmp_path, config=payments_config(tmp_path, "http://127.0.0.1:1")) as one:
        run = one.open_run({"pay": {"budget": {"calls": 1}}})
        for _ in range(2):  # the budget came back
            assert one.tool(run.run, "pay", order_id="ord_1", amount=7).reason == "backend_failed"
        assert {r.status for r in one.rows(phase="outcome", operation="pay")} == {"not_sent"}


def test_a_body_without_end_is_capped(live: Broker, payments: Backend) -> None:
    payments.body = b"x" * (2 * 1024 * 1024)
    run = live.open_run({"fetch": {}})
    assert live.tool(run.run, "fetch", order_id="ord_1").reason == "result_too_large"


# ---- deadlines ---------------------------------------------------------------------------------------------------
def test_a_hung_write_runs_once_and_its_outcome_is_unknown(live: Broker) -> None:
    """Report 40: one execution; the channel goes on; the late return changes nothing."""
    run, channel, ticket = both(live, {"hang_write": {"budget": {"calls": 1}}, "get_order": {}})
    assert channel.reason("hang_write", order_id="ord_61", amount=7) == "outcome_unknown"
    assert channel.call("get_order", order_id="ord_1")["ok"]["total"] == 9900
    assert channel.reason("hang_write", order_id="ord_61", amount=7) == "outcome_unknown"  # known by its key
    assert channel.reason("hang_write", order_id="ord_62", amount=7) == "budget_exhausted"  # unknown stays spent
    closed = live.detach(ticket)
    assert [call.status for call in closed.calls] == ["unknown", "ok", "unknown", "denied"]
    deadline = time.monotonic() + 5
    while "hang_write came back" not in live.ran() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert live.ran().count("hang_write") == 1
    assert [r.phase for r in live.rows(run=run, operation="hang_write")] == ["intent", "unknown", "outcome", "denied"]


@pytest.mark.parametrize("op", ["hang_read", "hang_async"])
def test_a_hung_read_times_out(live: Broker, op: str) -> None:
    run, channel, ticket = both(live, {op: {}})
    assert channel.reason(op, order_id="ord_1") == "backend_timeout"
    assert live.tool(run, op, order_id="ord_1").reason == "backend_timeout"
    assert [r.status for r in live.rows(run=run, phase="outcome")] == ["timeout", "timeout"]
    live.detach(ticket)


def test_calls_in_flight_are_bounded_across_tools(tmp_path: Path) -> None:
    with broker(tmp_path, config="[execution.bounds]\ncalls_in_flight = 2\n") as one:
        run = one.open_run({"hang_read": {}})
        boxes = [
            one.start(lambda i: wire.ToolCall(id=i, run=run.run, op="hang_read", args=b'{"order_id":"ord_1"}'))
            for _ in range(5)
        ]
        reasons = [box.get(timeout=WAIT).reason for box in boxes]
        assert sorted(reasons) == ["backend_timeout"] * 2 + ["busy"] * 3


# ---- approvals ---------------------------------------------------------------------------------------------------
APPROVE: dict[str, Any] = {"refund": {"approve": {"amount": {"more_than": 20}}}}


def decide_with(live: Broker, *, grant: bool) -> None:
    live.on_asked = lambda asked: live.decide(asked.request, grant=grant)


def test_code_and_tool_calls_wait_for_a_person(live: Broker) -> None:
    """Report 6: approvals work from `host.call`; the approver is in the row."""
    run, channel, ticket = both(live, APPROVE)
    decide_with(live, grant=True)
    assert channel.reason("refund", order_id="ord_71", amount=20) == ""  # below the line nobody is asked
    assert channel.reason("refund", order_id="ord_71", amount=21) == ""
    assert live.tool(run, "refund", order_id="ord_71", amount=22).reason is None
    live.on_asked = None
    rows = live.rows(run=run, phase="approval")
    assert [r.status for r in rows] == ["asked", "granted", "asked", "granted"]
    intents = [r for r in live.rows(run=run, phase="intent") if r.grant_id]
    assert [(r.approver, r.via) for r in intents] == [("person-1", "code"), ("person-1", "tool")]
    assert len({r.grant_id for r in intents}) == 2
    live.detach(ticket)


def test_a_person_who_declines_is_obeyed(live: Broker) -> None:
    _, channel, ticket = both(live, APPROVE)
    decide_with(live, grant=False)
    assert channel.reason("refund", order_id="ord_72", amount=21) == "approval_denied"
    live.on_asked = None
    live.detach(ticket)
    assert not [line for line in live.ran() if "ord_72" in line]


def test_without_an_answer_the_wait_ends_and_a_late_yes_is_good_once_for_that_call(live: Broker) -> None:
    """One approval never covers a second call, nor an edited one (report 2)."""
    _, channel, ticket = both(live, {"refund_note": {"approve": {"amount": {"at_least": 1}}}})
    live.asked.clear()
    began = time.monotonic()
    assert channel.reason("refund_note", order_id="ord_73", amount=5, note="a") == "approval_required"
    assert 0.9 < time.monotonic() - began < 20
    [asked] = live.asked
    assert msgspec.json.decode(asked.arguments) == {"order_id": "ord_73", "amount": 5, "note": "a"}
    live.decide(asked.request, grant=True)
    assert channel.reason("refund_note", order_id="ord_73", amount=5, note="edited") == "approval_required"
    assert channel.reason("refund_note", order_id="ord_73", amount=5, note="a") == ""
    with pytest.raises(Refused):
        live.decide(asked.request, grant=True)  # used
    assert channel.reason("refund_note", order_id="ord_74", amount=5, note="a") == "approval_required"
    live.detach(ticket)


def test_the_end_of_a_run_voids_its_requests(live: Broker) -> None:
    run, channel, _ = both(live, APPROVE)
    live.asked.clear()
    channel.send_raw(b'{"id":1,"op":"refund","args":{"order_id":"ord_75","amount":21}}')
    deadline = time.monotonic() + WAIT
    while not live.asked and time.monotonic() < deadline:
        time.sleep(0.01)
    live.ask(lambda i: wire.CloseRun(id=i, run=run))
    with pytest.raises(Refused, match="no such open request"):
        live.decide(live.asked[0].request, grant=True)
    assert not [line for line in live.ran() if "ord_75" in line]


def test_an_answer_without_approver_is_none(live: Broker) -> None:
    _, channel, ticket = both(live, APPROVE)
    live.asked.clear()
    assert channel.reason("refund", order_id="ord_76", amount=21) == "approval_required"
    with pytest.raises(Refused):
        live.decide(live.asked[0].request, grant=True, approver="")
    live.detach(ticket)


# ---- the rest of the agent's link --------------------------------------------------------------------------------
def test_reserved_operations_and_what_the_agent_is_told(live: Broker) -> None:
    run, channel, ticket = both(live, {"get_order": {}})
    listed = channel.call("host.operations")["ok"]
    assert [one["name"] for one in listed] == ["get_order"]
    assert channel.reason("host.operations", extra=1) == "bad_request"
    assert channel.call("host.export", name="a.txt", data="aGVsbG8=", last=True) == {"id": 3, "ok": None}
    assert channel.reason("host.export", name="../a", data="", last=True) == "argument_not_allowed"
    channel.call("get_order", order_id="ord_1")
    closed = live.detach(ticket, duration=0.5)
    assert [(c.operation, c.verdict, c.status) for c in closed.calls] == [
        ("host.operations", "allow", "ok"),
        ("host.operations", "deny", "denied"),
        ("host.export", "allow", "ok"),
        ("host.export", "deny", "denied"),
        ("get_order", "allow", "ok"),
    ]
    stored = {r.id for r in live.rows(run=run)}
    assert {c.audit_id for c in closed.calls} | {closed.audit_id} <= stored
    [info] = closed.exports
    assert (info.name, info.size) == ("a.txt", 5)
    chunk = live.ask(lambda i: wire.FetchExport(id=i, ticket=ticket, name="a.txt", offset=0))
    assert (chunk.data, chunk.last) == (b"hello", True)
    with pytest.raises(Refused):
        live.ask(lambda i: wire.FetchExport(id=i, ticket=ticket, name="a.txt", offset=0))
    ended = [r for r in live.rows(run=run, phase="run", operation="run.code") if r.status == "ended"]
    assert [(r.id, r.duration, r.detail["calls"]) for r in ended] == [(closed.audit_id, 0.5, 5)]


def test_an_export_larger_than_one_chunk(live: Broker) -> None:
    import base64

    _, channel, ticket = both(live, {})
    piece = bytes(range(256)) * 2048
    for number in range(10):
        assert channel.call("host.export", name="big.bin", data=base64.b64encode(piece).decode(), last=number == 9)
    closed = live.detach(ticket)
    got = b""
    last = False
    while not last:
        at = len(got)
        chunk = live.ask(lambda i, at=at: wire.FetchExport(id=i, ticket=ticket, name="big.bin", offset=at))
        got, last = got + chunk.data, chunk.last
    assert got == piece * 10
    assert closed.exports[0].size == len(got)


def test_exports_are_bounded_per_run(live: Broker) -> None:
    run = live.open_run({})
    ticket = live.ticket(run.run, Bounds(export=10, exports=2))
    channel = live.attach(ticket)
    assert channel.reason("host.export", name="a", data="aGVsbG8=", last=True) == ""
    assert channel.reason("host.export", name="b", data="aGVsbG9v", last=True) == "result_too_large"
    assert channel.reason("host.export", name="c", data="", last=True) == ""
    assert channel.reason("host.export", name="d", data="", last=True) == "result_too_large"
    live.detach(ticket)


def test_explaining_executes_nothing(live: Broker) -> None:
    scope = {"user": "u", "agent": "a", "tenant": "t", "expires": 60.0, "allow": SCOPE}
    before = live.ran()
    for args, effect, rule in (
        (b'{"order_id":"ord_1","amount":50}', "allow", "refund"),
        (b'{"order_id":"ord_1","amount":9900}', "deny", "refund.amount.at_most"),
        (b'{"order_id":"ord_1","amount":1,"amount":9900}', "deny", "refund.arguments"),
    ):
        told = live.ask(lambda i, args=args: wire.ExplainCall(id=i, scope=scope, op="refund", args=args)).data
        assert (told["effect"], told["rule"]) == (effect, rule)
    assert live.ran() == before


def test_the_registry_is_listed(live: Broker) -> None:
    everything = live.ask(lambda i: wire.ListOperations(id=i)).data
    assert {"get_order", "refund"} <= {one["name"] for one in everything}
    run = live.open_run({"refund": {}})
    assert [one["name"] for one in live.ask(lambda i: wire.ListOperations(id=i, run=run.run)).data] == ["refund"]


@pytest.mark.parametrize(
    "message",
    [
        lambda i: wire.OpenRun(id=i, scope={}),
        lambda i: wire.OpenRun(id=i, scope={"user": "u", "agent": "a", "tenant": "t", "expires": -1, "allow": {}}),
        lambda i: wire.OpenRun(
            id=i, scope={"user": "u", "agent": "a", "tenant": "t", "expires": 9, "allow": {"nope": {}}}
        ),
        lambda i: wire.NewTicket(id=i, run="run-unknown"),
        lambda i: wire.ToolCall(id=i, run="run-unknown", op="refund", args=b"{}"),
        lambda i: wire.CloseRun(id=i, run="run-unknown"),
        lambda i: wire.NarrowRun(id=i, run="run-unknown", scope={}),
        lambda i: wire.ListOperations(id=i, run="run-unknown"),
        lambda i: wire.Decide(id=i, request="ask-unknown", grant=True, approver="x"),
        lambda i: wire.FetchExport(id=i, ticket="x", name="x", offset=0),
        lambda i: wire.ExplainCall(id=i, scope={}, op="x", args=b"{}"),
        lambda i: wire.Start(id=i, spec=None),  # type: ignore[arg-type]  # a message for the supervisor
    ],
)
def test_every_bad_request_gets_a_typed_answer(live: Broker, message: Any) -> None:
    with pytest.raises(Refused) as caught:
        live.ask(message)
    assert caught.value.fault.next_step
    assert live.open_run({}).run  # and the broker goes on
