"""From the bytes of a request to the verdict, against Cedar's decision alone.

Both hold the same scope: a support agent with a dozen operations, bounds on their arguments, an end in time, and one
tenant. Ours begins with the bytes from the channel: parse, duplicate keys, types, decision, what to charge. The
reference is cedarpy with policies and entities parsed beforehand, asked as its documentation shows, with a context of
Python values: it parses and validates no request. (Asked with names as tables instead of text it is a third faster, and
the ratio about 1/20.)
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Annotated

import cedarpy

import lockgate.policy as lg
from common import emit, interleave, row
from lockgate.contract.strictjson import decode_request

COUNT = 300
READS = ("get_order", "list_orders", "get_customer", "get_invoice", "search_articles", "get_shipment")
WRITES = ("refund", "apply_credit", "add_note", "cancel_order", "change_address", "send_reply")
BODY = b'{"id":12,"op":"refund","args":{"order_id":"ord_4417","amount":1500}}'

SAME_TENANT = "resource.tenant == principal.tenant"
POLICIES = "\n".join(
    [
        *(
            f'permit(principal == Agent::"support", action == Action::"{name}", resource) when {{ {SAME_TENANT} && '
            f'["ord_4417", "ord_4418"].contains(context.order_id) }};'
            for name in READS
        ),
        *(
            f'permit(principal == Agent::"support", action == Action::"{name}", resource) when {{ {SAME_TENANT} && '
            f'["ord_4417"].contains(context.order_id) && context.amount > 0 && context.amount <= 5000 }};'
            for name in WRITES
        ),
        "forbid(principal, action, resource) when { context.now >= 600 };",
        f"forbid(principal, action, resource) unless {{ {SAME_TENANT} }};",
    ]
)
ENTITIES = """[
 {"uid": {"type": "Tenant", "id": "t1"}, "attrs": {}, "parents": []},
 {"uid": {"type": "User", "id": "u1"}, "attrs": {"tenant": "t1"}, "parents": [{"type": "Tenant", "id": "t1"}]},
 {"uid": {"type": "Agent", "id": "support"}, "attrs": {"tenant": "t1"}, "parents": [{"type": "User", "id": "u1"}]},
 {"uid": {"type": "Order", "id": "ord_4417"}, "attrs": {"tenant": "t1"}, "parents": [{"type": "Tenant", "id": "t1"}]}
]"""


class OrderRef(lg.Args):
    order_id: Annotated[str, lg.Id("ord")]


class OrderAmount(lg.Args):
    order_id: Annotated[str, lg.Id("ord")]
    amount: lg.Cents


class Done(lg.Result):
    ok: bool


def registry() -> lg.Operations:
    """A dozen operations."""
    ops = lg.Operations()
    for name in READS:

        def read(call: lg.Call, args: OrderRef) -> Done:
            return Done(ok=bool(call and args))

        read.__name__ = name
        ops.operation(effect="read", max_result=256)(read)
    for name in WRITES:

        def write(call: lg.Call, args: OrderAmount) -> Done:
            return Done(ok=bool(call and args))

        write.__name__ = name
        ops.operation(effect="write", idempotency=("order_id", "amount"), max_result=256)(write)
    return ops.seal()


def main() -> None:
    """Measure both in turns."""
    reading = lg.where(order_id=lg.one_of("ord_4417", "ord_4418"))
    writing = lg.where(
        order_id=lg.one_of("ord_4417"),
        amount=lg.at_most(50_00),
        budget=lg.budget(calls=3, total={"amount": 100_00}),
    )
    scope = lg.Scope(
        user="u1",
        agent="support",
        tenant="t1",
        expires=lg.minutes(10),
        allow=dict.fromkeys(READS, reading) | dict.fromkeys(WRITES, writing),
    )
    compiled = scope.compile(registry(), 0.0)
    who = scope.principal("run-1")
    policies = cedarpy.PolicySet.from_str(POLICIES)
    entities = cedarpy.Entities.from_json_str(ENTITIES)

    def ours(body: bytes = BODY) -> lg.Verdict:
        _, name, raw = decode_request(body)
        return lg.authorize(who, lg.request(compiled, name, raw, 1.0), compiled)

    def asked(amount: int) -> dict[str, object]:
        return {
            "principal": 'Agent::"support"',
            "action": 'Action::"refund"',
            "resource": 'Order::"ord_4417"',
            "context": {"order_id": "ord_4417", "amount": amount, "now": 1},
        }

    good = asked(1500)

    def theirs() -> cedarpy.AuthzResult:
        return cedarpy.is_authorized(good, policies, entities)

    if ours().effect != "allow" or not theirs().allowed:
        raise SystemExit("the two do not allow the call that is measured")
    if (
        ours(BODY.replace(b"1500", b"9900")).effect == "allow"
        or cedarpy.is_authorized(asked(9900), policies, entities).allowed
    ):
        raise SystemExit("one of the two does not decide")

    def timed(work: Callable[[], object], times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            work()
        return (time.perf_counter() - began) / times

    gc.disable()
    mine, cedar = interleave(COUNT, lambda: timed(ours, 100), lambda: timed(theirs, 10))
    reference = "cedarpy, policies and entities parsed beforehand"
    emit(row("parse, check, validate, authorize", mine, unit="s", bar=1 / 20, reference=reference, against=cedar))


if __name__ == "__main__":
    main()
