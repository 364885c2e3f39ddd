"""Cases about URLs that operations are given, redirects, and lists that are loaded.

Rule 1: an argument is judged where it is judged in a run: a registered operation, a compiled scope, `authorize()`.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Final, cast

import msgspec

from lockgate.contract.errors import ConfigError, RegistrationError
from lockgate.contract.run import Principal
from lockgate.corpus.case import Got, bytes_of, got, listed, raw_of, text_of, unrunnable
from lockgate.policy import Args, Call, Operations, Result, Scope, Url, authorize, request
from lockgate.policy.egress import EgressPolicy
from lockgate.policy.egress_entry import EgressConfigError
from lockgate.policy.host import Endpoint, Host, Refusal
from lockgate.policy.redirects import judge_redirect, judge_url
from lockgate.policy.url import Url as ParsedUrl
from lockgate.policy.url import UrlRule, first_refusal

_DECLARED: Final = re.compile(r"https?://[^\s,;)\"']+")
_QUERY: Final = re.compile(r"query(?: names?)?\s*[=:]?\s*((?:[\w-]+(?:\s*,\s*)?)+)")
_HOST: Final = re.compile(r"(?<![\w./@-])(?:[\w-]+\.)+[a-z]{2,}(?::\d+)?(?:/[^\s,;)\"']*)?")
_NO_TEXT: Final = Refusal("bad_url", "a URL is a text")
WHO: Final = Principal(user="u", agent="a", tenant="t", run="r")


class Done(Result):
    """Nothing."""

    ok: bool = True


def url_argument(policy: EgressPolicy, given: dict[str, Any]) -> Got:
    """A URL that an operation is given, or several, and where its argument may point."""
    del policy
    patterns, query = _declared(given.get("declared", given.get("rule", given.get("pattern", ""))))
    if not patterns:
        unrunnable("input.declared names no https:// place")
    if not any(name.partition("_")[0] in {"url", "urls", "value"} for name in given):
        unrunnable("input has no url")
    values: list[Any] = listed(given["urls"]) if "urls" in given else [given.get("url", given.get("value"))]
    if "url" not in given and (raw := raw_of(given, "url", "value")) is not None:
        values = [raw.decode("latin-1")]
    answer = got(None)
    for value in values:
        verdict = _authorized(value, patterns, query)
        # What is no text is no URL, whatever is made of it.
        plain = _plain_judgement(value, patterns, query) if isinstance(value, str) else _NO_TEXT
        if (verdict == "allow") != (plain is None):
            unrunnable("authorize() and the rule do not agree")
        if plain is not None:
            return got(plain)
    return answer


def _declared(value: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the rules that a case declares, in whatever words, and the query names."""
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        place = next((table[name] for name in ("url", "pattern", "prefix", "match") if name in table), None)
        text = str(place or f"https://{table.get('host')}{table.get('path', '/*')}")
        return _declared(text)[0], tuple(map(str, listed(table.get("query", []))))
    text = " ".join(map(str, listed(value)))
    patterns = tuple(one.rstrip(".") for one in _DECLARED.findall(text) or _HOST.findall(text))
    found = _QUERY.search(_DECLARED.sub("", text))
    return patterns, tuple(re.split(r"[\s,]+", found[1].strip())) if found is not None else ()


def _authorized(raw: object, patterns: tuple[str, ...], query: tuple[str, ...]) -> str:
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
    asked = request(scope, "post", json.dumps({"url": raw}).encode(), 1.0)
    return authorize(WHO, asked, scope).effect


def _plain_judgement(raw: str, patterns: tuple[str, ...], query: tuple[str, ...]) -> Refusal | None:
    rules = tuple(UrlRule.parse(one, query=query) for one in patterns)
    url = ParsedUrl.parse(raw.encode("utf-8", "surrogatepass"), tuple({rule.scheme for rule in rules}))
    return url if isinstance(url, Refusal) else first_refusal(url, rules)


def redirect_chain(policy: EgressPolicy, given: dict[str, Any]) -> Got:
    """A URL and the Locations that came after it."""
    chain: Any = given.get("chain")
    if chain is None and "url" in given:
        chain = [given["url"], *listed(given.get("locations", given.get("location", [])))]
    if not isinstance(chain, list) or not chain:
        unrunnable("input.chain is no list of URLs")
    links = [_link(one) for one in chain]  # pyright: ignore[reportUnknownVariableType]
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


def _link(value: Any) -> bytes:
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        value = next((table[name] for name in ("location", "Location", "url", "to") if name in table), None)
    return b"" if value is None else bytes_of(value, "input.chain")


def _known(policy: EgressPolicy, host: Host) -> bool:
    return bool(policy.ports(host))


def policy_load(policy: EgressPolicy, given: dict[str, Any]) -> Got:
    """A list, as a table or as the text of a file, and what loading it says."""
    del policy
    text = next(
        (given[name] for name in ("text", "toml", "config", "policy") if isinstance(given.get(name), str)), None
    )
    table: Any = given["egress"] if list(given) == ["egress"] else given
    try:
        if text is not None:
            loaded = EgressPolicy.load(text_of({"text": text}, "text"))
        else:
            loaded = EgressPolicy.from_data(table)
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
