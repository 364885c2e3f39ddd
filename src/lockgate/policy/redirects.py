"""Whether a redirect may be followed, for the few operations that declare redirects at all.

Rule 1: the default is that nothing is followed. An operation that declares redirects gets at most three.
Rule 2: each Location is a new URL and passes the same rules as the first: no other scheme, no downgrade, no host that
        was not declared, no URL inside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from lockgate.policy.egress import Ask, EgressPolicy
from lockgate.policy.host import Host, Refusal
from lockgate.policy.url import Url, canonical_path, holds_url

MAX_HOPS: Final = 3
_LOCATION: Final = re.compile(rb"[ \t]*([\x21-\x7e]+)[ \t]*\Z")
_SCHEME: Final = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*:")

Allows = Callable[[Url], Refusal | None]


def judge_redirect(
    previous: Url, location: bytes, hops: int, allows: Allows, knows: Callable[[Host], bool]
) -> Url | Refusal:
    """Return where a redirect leads, or why it is not followed.

    Args:
        previous: the URL that was answered with a redirect.
        location: the raw value of the field.
        hops: how many redirects were followed before.
        allows: the rules that the first URL passed.
        knows: whether a host is declared, on whatever port.

    """
    if hops >= MAX_HOPS:
        return Refusal("redirect_not_allowed", f"more than {MAX_HOPS} redirects")
    found = _LOCATION.match(location)
    if found is None:
        return Refusal("bad_location", "the Location is empty or holds white space")
    url = Url.parse(_absolute(previous, found[1]), ("https", "http"))
    if isinstance(url, Refusal):
        return url
    if not knows(url.host):
        return Refusal("redirect_not_allowed", "it leads to a host that is not declared")
    if previous.scheme == "https" and url.scheme != "https":
        return Refusal("redirect_downgrade", "it leaves https")
    refused = allows(url)
    if refused is None:
        return url
    if refused.reason in {"not_allowed", "ip_literal_or_ambiguous", "arg_host_not_allowed", "arg_path_not_allowed"}:
        return Refusal("redirect_not_allowed", refused.detail)
    return refused


def judge_url(policy: EgressPolicy, url: Url) -> Refusal | None:
    """Say why `url` may not be asked for under a policy, or None; the first failure gives the reason."""
    verdict = policy.decide(Ask(url.endpoint, "http" if url.scheme == "http" else "connect"))
    if not verdict.allow or verdict.reported:
        return Refusal(verdict.reason, verdict.detail)
    if url.fragment is not None:
        return Refusal("fragment", "a fragment is not sent")
    if not canonical_path(url.path):
        return Refusal("path_not_canonical", "its path can be read in two ways")
    if holds_url(url.path) or (url.query is not None and holds_url(url.query)):
        return Refusal("nested_url", "another URL is inside it")
    return None


def _absolute(previous: Url, location: bytes) -> bytes:
    """Resolve the two relative forms that have one reading (RFC 3986 section 4.2); the rest is parsed as it stands."""
    if _SCHEME.match(location):
        return location
    if location.startswith(b"//"):
        return previous.scheme.encode() + b":" + location
    if location.startswith(b"/"):
        place = previous.host.text if previous.port == 443 else str(previous.endpoint)
        return f"{previous.scheme}://{place}".encode() + location
    return location
