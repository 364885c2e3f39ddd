"""Which requests a host may be sent whose TLS is opened at the gateway (section "interception" of the egress design).

Rule 1: the destination was decided by the CONNECT; here every request and every stream must name that same host again:
        `Host` or `:authority` equal the CONNECT host, which the SNI equals too.
Rule 2: a request fits one whole rule: method, path on a segment boundary, declared query names, declared fields of a
        JSON body. What a server could read in two ways is refused before any rule is asked.
Rule 3: a body that cannot be read is refused: a rule would judge, and a canary would be looked for, in something else.
Rule 4: what follows an upgrade is not looked into, so it is refused unless its path was declared for it.
Rule 5: pure; plain http to port 80 is judged by the same function.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, Literal

import msgspec

from lockgate.policy.egress import HTTP_PORT, EgressPolicy, EndpointRules, Verdict
from lockgate.policy.egress_reasons import EgressReason
from lockgate.policy.egress_spec import RuleSpec
from lockgate.policy.host import Endpoint, Host, Refusal
from lockgate.policy.model_rules import judge_model
from lockgate.policy.steering import steers
from lockgate.policy.url import canonical_path, under

Fields = tuple[tuple[bytes, bytes], ...]
MAX_BODY_DEPTH: Final = 64
_TARGET: Final = re.compile(rb"(/[^?#]*)(?:\?([^#]*))?\Z")
_PRINTABLE: Final = re.compile(rb"[\x21-\x7e]+\Z")
_ENCODED_NAME: Final = re.compile(r"[%+]")
_IDENTITY: Final = frozenset((b"", b"identity"))


class Intercepted(msgspec.Struct, frozen=True, kw_only=True):
    """One request inside a tunnel, or one plain http request.

    Attributes:
        connect: the destination that was decided.
        sni: the server name of the client's handshake; None when there was none (plain http).
        authority: the raw `Host` value, or `:authority`; b"" when there is none.
        method: as sent. target: the raw request target, or `:path`.
        fields: lower-case names and raw values, all of them.
        body: the whole body, or None when it has not been read; `needs_body` says whether it must be.
        http: the version that is spoken inside.
        files: ids of files that this run made at a model vendor.

    """

    connect: Endpoint
    sni: Host | None
    authority: bytes
    method: str
    target: bytes
    fields: Fields = ()
    body: bytes | None = None
    http: Literal["1.1", "2"] = "1.1"
    files: frozenset[str] = frozenset()


def needs_body(policy: EgressPolicy, endpoint: Endpoint) -> bool:
    """Whether `judge` must be given the body of requests to `endpoint`."""
    rules = policy.rules_for(endpoint)
    return rules is not None and (rules.model is not None or any(rule.fields is not None for rule in rules.rules))


def judge(policy: EgressPolicy, asked: Intercepted) -> Verdict:
    """Decide on one request. Pure and total.

    A host without rules (plain http) is decided by its authority, its upgrades and whether its body can be searched.
    """
    rules = policy.rules_for(asked.connect)
    entry = None if rules is None else f"{'model' if rules.model else 'endpoint'} {rules.entry}"
    refused = _form(asked)
    if refused is None:
        refused = _host(asked)
    if refused is None and rules is not None and rules.model is not None:
        return _model(rules, asked, entry)
    if refused is None:
        refused = _upgrade(rules, asked)
    if refused is None:
        refused = _head(asked, ruled=rules is not None)
    if refused is not None:
        return _deny(refused, entry)
    if rules is None:
        return Verdict(True, "ok", entry)
    return _fit(rules, asked, entry)


def _deny(refused: Refusal, rule: str | None) -> Verdict:
    reason: EgressReason = refused.reason  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    return Verdict(False, reason, rule, refused.detail)


def _form(asked: Intercepted) -> Refusal | None:
    if asked.method == "CONNECT":
        return Refusal("upgrade_denied", "a tunnel inside the tunnel is not declared")
    if asked.target.startswith(b"/") or (asked.target == b"*" and asked.method == "OPTIONS"):
        return None
    if b"://" in asked.target:
        return Refusal("absolute_form_in_tunnel", "a request in a tunnel names its path only")
    return Refusal("bad_request", "the target is no path")


def _host(asked: Intercepted) -> Refusal | None:
    """Rule 1; the default port is that of the scheme which is spoken."""
    named = [value for name, value in asked.fields if name == b"host"]
    if asked.http == "1.1" and (len(named) > 1 or (not named and not asked.authority)):
        return Refusal("duplicate_host", "there is not exactly one Host field")
    mismatch = Refusal("host_mismatch", "the Host names another destination than the CONNECT")
    for raw in dict.fromkeys((asked.authority, *named)):
        found = _authority(raw.strip(b" \t"), asked.connect.port)
        if found != asked.connect:
            return mismatch
    if asked.sni is not None and asked.sni != asked.connect.host:
        return Refusal("sni_mismatch", "the server name is another than the CONNECT")
    return None


def _authority(raw: bytes, connected: int) -> Endpoint | None:
    if re.search(rb":[0-9]*\Z", raw) and not raw.endswith(b"]"):
        found = Endpoint.parse(raw)
        return None if isinstance(found, Refusal) else found
    host = Host.parse(raw)
    return None if isinstance(host, Refusal) else Endpoint.of(host, 80 if connected == HTTP_PORT else 443)


def _upgrade(rules: EndpointRules | None, asked: Intercepted) -> Refusal | None:
    wanted = [value for name, value in asked.fields if name == b"upgrade"]
    others = [name for name, _ in asked.fields if name in {b"http2-settings", b":protocol"}]
    tokens = {
        token.strip().lower() for name, value in asked.fields if name == b"connection" for token in value.split(b",")
    }
    if not wanted and not others and tokens.isdisjoint((b"upgrade", b"http2-settings")):
        return None
    declared = rules is not None and any(
        rule.websocket and asked.method in rule.method and _path_fits(rule, asked) for rule in rules.rules
    )
    to = [value.strip().lower() for value in wanted]
    if declared and not others and b"http2-settings" not in tokens and to == [b"websocket"]:
        return None
    return Refusal("upgrade_denied", "the protocol may not be changed here")


def _head(asked: Intercepted, *, ruled: bool) -> Refusal | None:
    """Refuse what no rule lets through. `ruled`: paths are told apart here, so a path must have one reading."""
    if any(steers(name.replace(b"_", b"-")) for name, _ in asked.fields):
        return Refusal("forbidden_header", "a field would choose the method or the path")
    parts = _TARGET.match(asked.target)
    if asked.target != b"*" and (parts is None or not _PRINTABLE.match(asked.target)):
        return Refusal("path_not_canonical", "the target is not a plain path")
    if ruled and parts is not None and not canonical_path(parts[1].decode("ascii")):
        return Refusal("path_not_canonical", "the path can be read in two ways")
    if any(name == b"content-encoding" and value.strip().lower() not in _IDENTITY for name, value in asked.fields):
        return Refusal("opaque_body", "an encoded body cannot be judged")
    return None


def _path_fits(rule: RuleSpec, asked: Intercepted) -> bool:
    parts = _TARGET.match(asked.target)
    if parts is None:
        return False
    path = parts[1].decode("latin-1")
    return under(path, rule.path[:-1]) if rule.path.endswith("*") else path == rule.path


def _query_fits(rule: RuleSpec, asked: Intercepted) -> bool:
    parts = _TARGET.match(asked.target)
    if parts is None or parts[2] is None or rule.query == ("*",):
        return True
    names = [part.partition("=")[0] for part in re.split(r"[&;]", parts[2].decode("latin-1"))]
    return all(name in rule.query and not _ENCODED_NAME.search(name) for name in names)


def _fit(rules: EndpointRules, asked: Intercepted, entry: str | None) -> Verdict:
    near = Refusal("path_not_allowed", "no rule has this method and path")
    for number, rule in enumerate(rules.rules, 1):
        if asked.method not in rule.method or not _path_fits(rule, asked):
            continue
        if not _query_fits(rule, asked):
            near = Refusal("path_not_allowed", "a query name is not declared")
            continue
        refused = None if rule.fields is None else _body(rule.fields, asked.body)
        if refused is None:
            return Verdict(True, "ok", f"{entry} rule {number}")
        near = refused
    return _deny(near, entry)


def _body(declared: tuple[str, ...], body: bytes | None) -> Refusal | None:
    if body is None or not body:
        return None if body is not None else Refusal("opaque_body", "the body was not read")
    unreadable = Refusal("opaque_body", "the body is not one plain JSON object")
    if body.count(b"[") + body.count(b"{") > 10_000:
        return unreadable
    try:
        fields: Any = json.loads(body.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        return unreadable
    if not isinstance(fields, dict):
        return unreadable
    if not set(fields) <= set(declared):  # pyright: ignore[reportUnknownArgumentType]
        return Refusal("field_not_declared", "a field of the body is not declared")
    return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate keys")
    return found


def _model(rules: EndpointRules, asked: Intercepted, entry: str | None) -> Verdict:
    refused = _upgrade(None, asked)
    if refused is None and rules.model is not None:
        refused = judge_model(rules.model, asked.method, asked.target, asked.fields, asked.body, files=asked.files)
    return Verdict(True, "ok", entry) if refused is None else _deny(refused, entry)
