"""Parse, duplicate-key check, validation and decision, against Cedar's decision alone.

The reference is cedarpy with policies and entities parsed beforehand and asked the same question: may this agent make
this refund, given the order, the amount and the time. It gets typed values and parses no request; ours begins with the
bytes from the channel.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Annotated

import cedarpy

import lockgate.policy as lg
from common import emit, interleave, row
from lockgate.contract.strictjson import decode_request

COUNT = 400
BATCH = 50
BODY = b'{"id":12,"op":"refund","args":{"order_id":"ord_4417","amount":1500}}'
POLICIES = """
permit(principal == Agent::"support", action == Action::"refund", resource)
when { resource.tenant == principal.tenant && ["ord_4417"].contains(context.order_id)
       && context.amount > 0 && context.amount <= 5000 && context.now < 600 };
permit(principal == Agent::"support", action == Action::"get_order", resource)
when { resource.tenant == principal.tenant && context.now < 600 };
forbid(principal, action, resource) when { context.now >= 600 };
"""
ENTITIES = """[
 {"uid": {"type": "Agent", "id": "support"}, "attrs": {"tenant": "t1"}, "parents": []},
 {"uid": {"type": "Order", "id": "ord_4417"}, "attrs": {"tenant": "t1"}, "parents": []}
]"""

ops = lg.Operations()


class OrderRef(lg.Args):
    order_id: Annotated[str, lg.Id("ord")]


class RefundArgs(lg.Args):
    order_id: Annotated[str, lg.Id("ord")]
    amount: lg.Cents


class Done(lg.Result):
    ok: bool


@ops.operation(effect="read", max_result=256)
def get_order(call: lg.Call, args: OrderRef) -> Done:
    return Done(ok=bool(call and args))


@ops.operation(effect="write", idempotency=("order_id", "amount"), max_result=256)
def refund(call: lg.Call, args: RefundArgs) -> Done:
    return Done(ok=bool(call and args))


def main() -> None:
    """Measure both in turns."""
    scope = lg.Scope(
        user="u1",
        agent="support",
        tenant="t1",
        expires=lg.minutes(10),
        allow={
            "get_order": {},
            "refund": lg.where(
                order_id=lg.one_of("ord_4417"),
                amount=lg.at_most(50_00),
                budget=lg.budget(calls=3, total={"amount": 100_00}),
                approve=lg.when(amount=lg.more_than(20_00)),
            ),
        },
    )
    compiled = scope.compile(ops.seal(), 0.0)
    who = scope.principal("run-1")
    policies = cedarpy.PolicySet.from_str(POLICIES)
    entities = cedarpy.Entities.from_json_str(ENTITIES)
    asked = {
        "principal": {"type": "Agent", "id": "support"},
        "action": {"type": "Action", "id": "refund"},
        "resource": {"type": "Order", "id": "ord_4417"},
        "context": {"order_id": "ord_4417", "amount": 1500, "now": 1},
    }

    def ours() -> lg.Verdict:
        _, name, raw = decode_request(BODY)
        return lg.authorize(who, lg.request(compiled, name, raw, 1.0), compiled)

    def theirs() -> cedarpy.AuthzResult:
        return cedarpy.is_authorized(asked, policies, entities)

    if ours().effect != "allow" or not theirs().allowed:
        raise SystemExit("the two do not agree on the call that is measured")
    if cedarpy.is_authorized(
        asked | {"context": {"order_id": "ord_4417", "amount": 9900, "now": 1}}, policies, entities
    ).allowed:
        raise SystemExit("the reference does not decide")

    def timed(work: object, times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            work()  # type: ignore[operator]
        return (time.perf_counter() - began) / times

    gc.collect()
    gc.disable()
    mine, cedar = interleave(COUNT, lambda: timed(ours, BATCH), lambda: timed(theirs, 5))
    gc.enable()
    one = row(
        "parse, check, authorize",
        mine,
        unit="s",
        bar=1 / 20,
        reference="cedarpy, parsed beforehand",
        against=cedar,
    )
    emit(one | {"reference_median": statistics.median(cedar)})


if __name__ == "__main__":
    main()
