"""The decision (C2, C8).

Rule 1: pure and total: no clock, no I/O, no knowledge of who asked by which door; whatever happens inside, a verdict
        comes out, and an exception is a denial.
Rule 2: precedence is explicit deny, explicit allow, else deny with rule None.
Rule 3: an unknown operation and one outside the scope get the very same verdict object by the same steps.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from lockgate.contract.run import Principal
from lockgate.policy.compile import Check, CompiledScope, Rule
from lockgate.policy.registry import Operation
from lockgate.policy.types import BadArguments
from lockgate.policy.verdict import Obligations, Verdict

NOT_AVAILABLE: Final = Verdict("deny", None, None, "not in the scope", "not_available")
EXPIRED: Final = Verdict("deny", "expires", None, "the scope has expired", "expired")
OTHER_RUN: Final = Verdict("deny", "principal", None, "the scope belongs to another principal", "not_available")


class CallRequest(msgspec.Struct, frozen=True, gc=False):
    """One call, as it is decided on.

    Attributes:
        operation: what the scope has under `name` (`CompiledScope.operations`), or None.
        name: what was asked for.
        args: the typed arguments, the `BadArguments` their decoding raised, or None without an operation.
        at: seconds on the monotonic clock.

    """

    operation: Operation | None
    name: str
    args: object
    at: float


def request(scope: CompiledScope, name: str, raw: bytes, at: float) -> CallRequest:
    """Resolve a name and decode its arguments as every front must: through the scope, errors as a value."""
    operation = scope.operations.get(name)
    if operation is None:
        return CallRequest(None, name, None, at)
    try:
        return CallRequest(operation, name, operation.decode_args(raw), at)
    except BadArguments as bad:
        return CallRequest(operation, name, bad, at)


def authorize(who: Principal, call: CallRequest, scope: CompiledScope) -> Verdict:
    """Decide whether `who` may make `call`.

    Precedence: explicit deny, explicit allow, else deny with rule None. Pure: time enters as `call.at`. Total: it
    never raises. Callers: the broker's edge, for tool calls and for sandbox calls; it cannot tell them apart. Budgets
    are not looked at here: the verdict says what the edge must reserve.
    """
    try:
        if who.tenant != scope.tenant or who.user != scope.user or who.agent != scope.agent:
            return OTHER_RUN
        if not call.at < scope.expires_at:  # NaN too
            return EXPIRED
        rule = scope.rules.get(call.name)
        if rule is None or call.operation is not rule.operation:
            return scope.denied.get(call.name, NOT_AVAILABLE)
        return _decide(rule, call.args)
    except Exception as error:  # noqa: BLE001 - total: what cannot be decided is denied
        return Verdict("deny", "internal", None, f"authorize failed: {type(error).__name__}", "unavailable")


def _decide(rule: Rule, args: Any) -> Verdict:
    name = rule.operation.name
    if type(args) is not rule.operation.args_type:
        if isinstance(args, BadArguments):
            return Verdict("deny", f"{name}.arguments", args.path, args.detail, "bad_request")
        return Verdict("deny", "internal", None, "arguments of another type", "unavailable")
    for condition in rule.denials:
        hit = _holds(condition.checks, args)
        if hit is not None:
            return Verdict("deny", hit.rule, hit.path, _explain(hit, args, "denied: "), "argument_not_allowed")
    for check in rule.checks:
        try:
            if check.test(getattr(args, check.name)):
                continue
            why = check.explain(getattr(args, check.name))
        except Exception as error:  # noqa: BLE001 - a constraint that raises denies
            why = f"{check.name} cannot be compared: {type(error).__name__}"
        return Verdict("deny", check.rule, check.path, why, "argument_not_allowed")
    if rule.typed:
        found = rule.typed_failure(args)
        if found is not None:
            bad, why = found
            dotted = bad.path[1:].replace("/", ".")
            return Verdict("deny", f"{name}.{dotted}.{bad.check.kind}", bad.path, why, "argument_not_allowed")
    for condition in rule.approve:
        if not condition.checks:
            return _ask(rule, args, condition.rule, None, "every call of it needs approval")
        hit = _holds(condition.checks, args)
        if hit is not None:
            return _ask(rule, args, condition.rule, hit.path, _explain(hit, args, "needs approval: "))
    if not rule.caps:
        return rule.allowed
    return Verdict("allow", name, None, "", None, rule.obligations(args, approval=False))


def _ask(rule: Rule, args: Any, name: str, path: str | None, why: str) -> Verdict:
    obligations: Obligations = rule.obligations(args, approval=True)
    return Verdict("needs_approval", name, path, why, "approval_required", obligations)


def _holds(checks: tuple[Check, ...], args: Any) -> Check | None:
    """Return the last check when all hold, else None. One that raises decides at once: it denies or asks."""
    last: Check | None = None
    for last in checks:
        try:
            if not last.test(getattr(args, last.name)):
                return None
        except Exception:  # noqa: BLE001 - what cannot be compared is taken for the case that restricts
            return last
    return last


def _explain(check: Check, args: Any, prefix: str) -> str:
    return f"{prefix}{check.name} {getattr(args, check.name, None)!r:.80} {check.constraint.kind}"
