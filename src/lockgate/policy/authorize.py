"""The one decision about a call (C2).

Rule 1: pure and total. No clock, no I/O, no exception leaves; time enters as `call.at`.
Rule 2: it does not know whether a tool dispatcher or generated code asks: there is no field that could tell it.
Rule 3: precedence is explicit deny, explicit allow, else deny with rule None. What raises, denies.
"""

from __future__ import annotations

from typing import NamedTuple

from lockgate.contract.run import Principal
from lockgate.policy.checks import run_checks
from lockgate.policy.compile import CompiledScope, Predicate
from lockgate.policy.registry import Operation
from lockgate.policy.types import BadArguments
from lockgate.policy.verdict import NONE, Charge, Obligations, Verdict

_ONE = 1


class CallRequest(NamedTuple):
    """A call to decide about.

    Attributes:
        operation: the registered operation, None when there is none of that name or the scope has none.
        name: as asked for.
        args: the typed arguments, or the `BadArguments` that typing them gave.
        at: monotonic seconds.

    """

    operation: Operation | None
    name: str
    args: object
    at: float


def authorize(who: Principal, call: CallRequest, scope: CompiledScope) -> Verdict:
    """Decide whether `who` may make `call` under `scope`.

    Callers: the broker's edge, for tool calls and for sandbox calls alike. Never raises: an error inside is a denial
    with rule "internal".
    """
    try:
        return _decide(who, call, scope)
    except Exception as error:  # noqa: BLE001 - total by contract: what raises, denies
        return Verdict("deny", "internal", None, f"authorize raised {type(error).__name__}", "not_available")


def _decide(who: Principal, call: CallRequest, scope: CompiledScope) -> Verdict:
    name = call.name
    given = scope.scope
    if who.tenant != given.tenant or who.user != given.user or who.agent != given.agent:
        return Verdict("deny", "internal", None, "the principal is not the scope's", "not_available")
    if not call.at < scope.expires_at:
        return Verdict("deny", "scope.expires", None, "the scope has expired", "expired")
    if name in scope.denied:
        return Verdict("deny", f"deny.{name}", None, "explicitly denied", "not_available")
    rule = scope.operations.get(name)
    operation = call.operation
    if rule is None or operation is None:
        return Verdict("deny", None, None, "no rule allows it", "not_available")
    args = call.args
    if type(args) is not operation.args_type:
        if isinstance(args, BadArguments):
            return Verdict("deny", f"{name}.arguments", args.path, args.detail, "bad_request")
        return Verdict("deny", "internal", None, "arguments of another type", "bad_request")
    if operation.authorize_checks:
        found = run_checks(args, operation.authorize_checks, "authorize")
        if found is not None:
            one, why = found
            field = one.path.strip("/").replace("/", ".")
            return Verdict("deny", f"{name}.{field}.{one.check.kind}", one.path, why, "argument_not_allowed")
    for predicate in rule.predicates:
        value = predicate.get(args)
        if not _holds(predicate, value):
            reason = f"{predicate.path[1:]} {value!r} against {predicate.shown}"
            return Verdict("deny", predicate.rule, predicate.path, reason[:500], "argument_not_allowed")
    if not rule.sums and not rule.approvals:
        return Verdict("allow", name, None, "", None, NONE)
    charges = tuple(Charge(s.key, _ONE if s.get is None else s.get(args), s.limit) for s in rule.sums)
    asked = any(all(_holds(one, one.get(args)) for one in condition) for condition in rule.approvals)
    obligations = Obligations(charges, asked)
    if asked:
        return Verdict(
            "needs_approval", f"{name}.approve", None, "a person must agree", "approval_required", obligations
        )
    return Verdict("allow", name, None, "", None, obligations)


def _holds(predicate: Predicate, value: object) -> bool:
    # Only a plain True passes: a test that returned something else would be a mistake of ours.
    return predicate.test(value) is True
