"""Cases about URLs that operations are given, redirects, and lists that are loaded.

Rule 1: an argument is judged where it is judged in a run: a registered operation, a compiled scope, `authorize()`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

import msgspec

from lockgate.contract.errors import ConfigError, RegistrationError
from lockgate.contract.run import Principal
from lockgate.corpus.case import Got, bytes_of, got, text_of, unrunnable
from lockgate.policy import Args, Call, Operations, Result, Scope, Url, authorize, request
from lockgate.policy.egress import EgressPolicy
from lockgate.policy.egress_entry import EgressConfigError
from lockgate.policy.host import Endpoint, Host, Refusal
from lockgate.policy.redirects import judge_redirect, judge_url
from lockgate.policy.url import Url as ParsedUrl
from lockgate.policy.url import UrlRule, first_refusal

_DECLARED: Final = re.compile(r"https?://[^\s,;)\"']+")
_QUERY: Final = re.compile(r"query(?: names?)?\s*[=:]?\s*((?:[\w-]+(?:\s*,\s*)?)+)")
WHO: Final = Principal(user="u", agent="a", tenant="t", run="r")


class Done(Result):
    """Nothing."""

    ok: bool = True


def url_argument(policy: EgressPolicy, given: dict[str, Any]) -> Got:
    """A URL that an operation is given, and where its argument may point."""
    del policy
    raw = given.get("url")
    declared: Any = given.get("declared", "")
    text = " ".join(map(str, declared)) if isinstance(declared, list) else str(declared)  # pyright: ignore[reportUnknownArgumentType]
    patterns = tuple(_DECLARED.findall(text))
    if not isinstance(raw, str) or not patterns:
        unrunnable("input.url is no text, or input.declared names no https:// place")
    found = _QUERY.search(_DECLARED.sub("", text))
    query = tuple(re.split(r"[\s,]+", found[1].strip())) if found is not None else ()
    verdict = _authorized(raw, patterns, query)
    plain = _plain_judgement(raw, patterns, query)
    if (verdict == "allow") != (plain is None):
        unrunnable("authorize() and the rule do not agree")
    return got(plain)


def _authorized(raw: str, patterns: tuple[str, ...], query: tuple[str, ...]) -> str:
    """Return the effect of `authorize()` for an operation that takes this URL."""
    operations = Operations()
    try:
        kind: Any = Annotated[str, Url(*patterns, query=query)]
        made: Any = msgspec.defstruct("Given", [("url", kind)], bases=(Args,), kw_only=True)
    except (ConfigError, RegistrationError):
        unrunnable("input.declared is no rule")

    def post(call: Call, args: Any) -> Done:
        return Done(ok=bool(call and args))

    post.__annotations__ = {"call": Call, "args": made, "return": Done}
    operations.operation(effect="read", max_result=100, labels=("sink",))(post)
    scope = Scope(user="u", agent="a", tenant="t", expires=60.0, allow={"post": {}}).compile(operations.seal(), 0.0)
    asked = request(scope, "post", msgspec.json.encode({"url": raw}), 1.0)
    return authorize(WHO, asked, scope).effect


def _plain_judgement(raw: str, patterns: tuple[str, ...], query: tuple[str, ...]) -> Refusal | None:
    rules = tuple(UrlRule.parse(one, query=query) for one in patterns)
    url = ParsedUrl.parse(raw.encode("utf-8", "surrogatepass"), tuple({rule.scheme for rule in rules}))
    return url if isinstance(url, Refusal) else first_refusal(url, rules)


def redirect_chain(policy: EgressPolicy, given: dict[str, Any]) -> Got:
    """A URL and the Locations that came after it."""
    chain: Any = given.get("chain")
    if not isinstance(chain, list) or not chain:
        unrunnable("input.chain is no list of URLs")
    links = [bytes_of(one, "input.chain") if one is not None else b"" for one in chain]  # pyright: ignore[reportUnknownVariableType]
    here = ParsedUrl.parse(links[0], ("https", "http"))
    if isinstance(here, Refusal):
        return got(here)
    refused = judge_url(policy, here)
    for hops, location in enumerate(links[1:]):
        if refused is not None:
            break
        following = judge_redirect(
            here, location, hops, lambda url: judge_url(policy, url), lambda h: _known(policy, h)
        )
        if isinstance(following, Refusal):
            refused = following
        else:
            here = following
    return got(refused, requests=len(links))


def _known(policy: EgressPolicy, host: Host) -> bool:
    return bool(policy.ports(host))


def policy_load(policy: EgressPolicy, given: dict[str, Any]) -> Got:
    """A list, as a table or as the text of a file, and what loading it says."""
    del policy
    text = given.get("text", given.get("toml"))
    try:
        if text is not None:
            loaded = EgressPolicy.load(text_of({"text": text}, "text"))
        else:
            loaded = EgressPolicy.from_data(given)
    except EgressConfigError as error:
        return Got("config_error", error.reason)
    if loaded.warnings:
        return Got("warn", loaded.warnings[0].reason)
    return (
        Got("allow", "ok")
        if loaded.rules and any(not one.startswith("deny ") for one in loaded.rules)
        else _nothing(loaded)
    )


def _nothing(policy: EgressPolicy) -> Got:
    """An empty list, and whether it lets nothing through."""
    from lockgate.policy.egress import Ask  # noqa: PLC0415 - beside its only use

    probes = (
        b"api.allowed.example:443",
        b"localhost:443",
        b"10.0.0.1:443",
        b"[2606:4700::1111]:443",
        b"a.b.c.example:80",
    )
    for raw in probes:
        endpoint = Endpoint.parse(raw)
        for how in ("connect", "http"):
            if isinstance(endpoint, Refusal) or policy.decide(Ask(endpoint, how)).allow:
                return Got("allow", "ok")
    return Got("deny_all", "deny_all")
