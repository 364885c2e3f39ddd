"""Reads lines, finds out what each is, runs it, and counts.

Rule 1: each line that is not blank counts. What is no case, or of no known kind, is a failure that says so.
Rule 2: verdict and reason must both be right, and everything under `must`; nothing may leave this process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from lockgate.contract.errors import LockgateError
from lockgate.corpus import arguments, content, hello, inside, names, network, resolving
from lockgate.corpus.case import Got, Unrunnable
from lockgate.corpus.policies import Policies
from lockgate.corpus.quiet import leaving
from lockgate.policy.egress import EgressPolicy
from lockgate.render import corpus as render
from lockgate.render.corpus import Outcome

Runner = Callable[[EgressPolicy, dict[str, Any]], Got]

RUNNERS: Final[dict[str, Runner]] = {
    "connect": network.connect,
    "resolve": resolving.resolve,
    "resolve_wire": resolving.resolve_wire,
    "connect_verify": resolving.connect_verify,
    "raw_proxy_request": network.raw_proxy_request,
    "tls_client_hello": hello.tls_client_hello,
    "intercepted_request": inside.intercepted_request,
    "in_sandbox_relay": network.relayed,
    "dns_query": names.dns_query,
    "dns_packet": names.dns_query,
    "packet": names.packet,
    "env": names.env,
    "redirect_chain": arguments.redirect_chain,
    "url_argument": arguments.url_argument,
    "policy_load": arguments.policy_load,
}
_VERDICTS: Final = ("allow", "deny", "config_error", "deny_all", "warn")
# Facts that hold because nothing left, which is counted for every case.
_NOTHING_LEFT: Final = {"no_dns_query_leaves": True, "no_tcp_syn": True, "forwarded": False}


class Report(msgspec.Struct, frozen=True):
    """What became of a file."""

    total: int
    passed: int
    failures: tuple[Outcome, ...]


def run_lines(lines: Iterable[str]) -> Report:
    """Run each line of a file of cases."""
    outcomes: list[Outcome] = []
    cases: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            case: Any = json.loads(line)
        except (ValueError, RecursionError):
            case = None
        if isinstance(case, dict):
            case.setdefault("id", f"line {number}")  # pyright: ignore[reportUnknownMemberType]
            cases.append(case)  # pyright: ignore[reportUnknownArgumentType]
        else:
            outcomes.append(Outcome(f"line {number}", "", "error", "the line is no JSON object"))
    outcomes += run_cases(cases)
    failures = tuple(one for one in outcomes if not one.passed)
    return Report(len(outcomes), len(outcomes) - len(failures), failures)


def run_cases(cases: list[dict[str, Any]]) -> list[Outcome]:
    """Run cases of one file, in their order."""
    policies = Policies(cases)
    canaries = content.planted(json.dumps(case.get("input"), ensure_ascii=False) for case in cases)
    runners = {**RUNNERS, "content": content.Content(canaries).run}
    return [_one(case, policies, runners) for case in cases]


def _one(case: dict[str, Any], policies: Policies, runners: dict[str, Runner]) -> Outcome:
    name, expected = str(case.get("id")), str(case.get("expected", ""))
    runner = runners.get(str(case.get("kind", "")))
    try:
        if runner is None:
            if render.is_render_case(case):
                return render.check(case)
            return Outcome(name, expected, "error", f"there is no runner for cases of kind {case.get('kind')!r:.60}")
        return _egress(case, name, expected, runner, policies)
    except Unrunnable as error:
        return Outcome(name, expected, "error", str(error))
    except LockgateError as error:
        return Outcome(name, expected, "error", error.message)
    except Exception as error:  # noqa: BLE001 - whatever a file holds, the next case is run
        return Outcome(name, expected, "error", f"the case cannot be run ({type(error).__name__})")


def _egress(case: dict[str, Any], name: str, expected: str, runner: Runner, policies: Policies) -> Outcome:
    given = case.get("input")
    if not isinstance(given, dict) or expected not in _VERDICTS:
        return Outcome(name, expected, "error", "input is no object, or expected is none of " + ", ".join(_VERDICTS))
    policy = policies.of(case)
    with leaving() as left:
        answer = runner(policy, given)  # pyright: ignore[reportUnknownArgumentType]
    wanted = f"{expected} {case['reason']}" if "reason" in case else expected
    why = ""
    if left:
        why = f"something would have left: {left[0]}"
    elif answer.verdict != expected:
        why = f"the verdict is {answer.verdict}"
    elif expected != "deny_all" and case.get("reason") not in {None, answer.reason, *_same(answer)}:
        why = f"the reason is {answer.reason}"
    else:
        why = _must(case.get("must", {}), answer)
    return Outcome(name, wanted, str(answer), why)


def _same(answer: Got) -> tuple[str, ...]:
    """Return the other names of "allowed": what is let through because nothing can be recognised in it."""
    return ("ok", "residual") if answer.verdict == "allow" and answer.reason in {"ok", "residual"} else ()


def _left_nothing(fact: str, value: object) -> bool:
    """Whether a fact says, in whatever words, that nothing left: that was counted."""
    if value is True:
        return fact.startswith("no_")
    return (value is False or (type(value) is int and value == 0)) and re.search(
        r"forward|leav|left|upstream|sent|dial|contact|connected|resolv|packet|quer", fact
    ) is not None


def _must(must: Any, answer: Got) -> str:
    if not isinstance(must, dict):
        return "must is no object"
    facts = {**_NOTHING_LEFT, **answer.facts}
    for fact, value in must.items():  # pyright: ignore[reportUnknownVariableType]
        if fact not in facts and not _left_nothing(str(fact), value):  # pyright: ignore[reportUnknownArgumentType]
            return f"nothing is known about {fact!r:.60}"
        if fact in facts and facts[str(fact)] != value:  # pyright: ignore[reportUnknownArgumentType]
            return f"{fact} is {facts[str(fact)]!r}"  # pyright: ignore[reportUnknownArgumentType]
    return ""
