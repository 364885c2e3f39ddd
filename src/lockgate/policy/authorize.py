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
from lockgate.policy.checks import run_checks
from lockgate.policy.compile import Check, CompiledScope, Condition, Rule
from lockgate.policy.constraints import Constraint
from lockgate.policy.latch import CLEAN, latched
from lockgate.policy.registry import Operation
from lockgate.policy.types import BadArguments
from lockgate.policy.verdict import Charge, Obligations, Verdict

NOT_AVAILABLE: Final = Verdict("deny", None, None, "not in the scope", "not_available")
EXPIRED: Final = Verdict("deny", "expires", None, "the scope has expired", "expired")
ALWAYS: Final = Check("", bool, Constraint("one_of", ()), "", "")  # stands for a condition without constraints
OTHER_RUN: Final = Verdict("deny", "principal", None, "the scope belongs to another principal", "not_available")


class CallRequest(msgspec.Struct, frozen=True, gc=False):
    """One call, as it is decided on.

    Attributes:
        operation: what the scope has under `name` (`CompiledScope.operations`), or None.
        name: what was asked for.
        args: the typed arguments, the `BadArguments` their decoding raised, or None without an operation.
        at: seconds on the monotonic clock.
        seen: what the run has read so far ("private", "untrusted"), for the latch (E7).

    """

    operation: Operation | None
    name: str
    args: object
    at: float
    seen: frozenset[str] = CLEAN


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
        args: Any = call.args
        if type(args) is not rule.args_type:
            if isinstance(args, BadArguments):
                return Verdict("deny", f"{call.name}.arguments", args.path, args.detail, "bad_request")
            return Verdict("deny", "internal", None, "arguments of another type", "unavailable")
        if rule.denials and (verdict := _denied(rule, args)) is not None:
            return verdict
        for get, test, check in rule.ready:
            try:
                if test(get(args)):
                    continue
                why = check.explain(get(args))
            except Exception as error:  # noqa: BLE001 - a constraint that raises denies
                why = f"{check.name} cannot be compared: {type(error).__name__}"
            return Verdict("deny", check.rule, check.path, why, "argument_not_allowed")
        if rule.further and (verdict := _typed(rule, args) or _sink(rule, call.seen, args) or _asked(rule, args)):
            return verdict
        if not rule.caps:
            return rule.allowed
        charges = rule.counts
        for get, key, limit in rule.sums:
            charges += (Charge(key, get(args), limit),)
        return Verdict("allow", rule.name, None, "", None, Obligations(charges, False, rule.labels))
    except Exception as error:  # noqa: BLE001 - total: what cannot be decided is denied
        return Verdict("deny", "internal", None, f"authorize failed: {type(error).__name__}", "unavailable")


def _denied(rule: Rule, args: Any) -> Verdict | None:
    """Return the verdict of the first explicit denial that holds."""
    for condition in rule.denials:
        found = _holds(condition, args)
        if found is not None:
            why = _explain(found, args, "denied: ")
            return Verdict("deny", found.rule, found.path, why, "argument_not_allowed")
    return None


def _typed(rule: Rule, args: Any) -> Verdict | None:
    """Return the verdict of the arguments' own types: where a URL may point (E6)."""
    refused = run_checks(args, rule.typed)
    if refused is None:
        return None
    bad, why = refused
    dotted = bad.path[1:].replace("/", ".")
    return Verdict("deny", f"{rule.name}.{dotted}.{bad.check.kind}", bad.path, why, "argument_not_allowed")


def _sink(rule: Rule, seen: frozenset[str], args: Any) -> Verdict | None:
    """Return the verdict of a sink that the run has lost (E7); a person may still agree to these exact arguments."""
    held = latched(rule.sink, seen)
    if held is None:
        return None
    if not held.approvable:
        return Verdict("deny", f"{rule.name}.{held.reason}", None, f"{held.reason}: {held.why}", "latched")
    sums = tuple(Charge(key, get(args), limit) for get, key, limit in rule.sums)
    obligations = Obligations(rule.counts + sums, approval=True, labels=rule.labels)
    name = f"{rule.name}.{held.reason}"
    return Verdict("needs_approval", name, None, f"{held.reason}: {held.why}", "latched", obligations)


def _asked(rule: Rule, args: Any) -> Verdict | None:
    """Return the verdict of the first condition under which a person must agree."""
    for condition in rule.approve:
        found = _holds(condition, args) if condition.ready else ALWAYS
        if found is not None:
            sums = tuple(Charge(key, get(args), limit) for get, key, limit in rule.sums)
            obligations = Obligations(rule.counts + sums, approval=True, labels=rule.labels)
            path, why = (found.path or None, _explain(found, args, "needs approval: "))
            return Verdict("needs_approval", condition.rule, path, why, "approval_required", obligations)
    return None


def _holds(condition: Condition, args: Any) -> Check | None:
    """Return the last check when every one holds, else None; one that raises decides at once: it denies or asks."""
    check: Check | None = None
    for get, test, check in condition.ready:
        try:
            if not test(get(args)):
                return None
        except Exception:  # noqa: BLE001 - what cannot be compared is taken for the case that restricts
            return check
    return check


def _explain(check: Check, args: Any, prefix: str) -> str:
    return f"{prefix}{check.name} {getattr(args, check.name, None)!r:.80} {check.constraint.kind}"
