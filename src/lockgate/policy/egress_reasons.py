"""The closed list of reasons of the egress half (E1 to E4, E6, E7).

Rule 1: each refusal of the network, DNS, HTTP, TLS, URL and load paths has one of these reasons, and each reason one
        fixed sentence and one next step; nothing of the request stands in either.
Rule 2: what must never be suppressed is `CRITICAL`; a metadata address raises any reason to critical.
"""

from __future__ import annotations

from typing import Final, Literal

EgressReason = Literal[
    # verdicts that let through
    "ok",
    "synthetic_answer",
    "residual",
    # destination
    "not_allowed",
    "bad_host",
    "bad_port",
    "bad_target",
    "ip_literal_or_ambiguous",
    "no_route",
    "caller_unauthenticated",
    # resolve and dial
    "resolve_failed",
    "resolved_non_public",
    "dial_failed",
    "peer_mismatch",
    # HTTP front
    "bad_request",
    "head_too_large",
    "head_timeout",
    "idle_timeout",
    "not_absolute_form",
    "https_needs_connect",
    "bad_scheme",
    "duplicate_host",
    "host_mismatch",
    "smuggling",
    "forbidden_header",
    # ClientHello
    "not_tls",
    "hello_too_large",
    "sni_timeout",
    "sni_missing",
    "sni_mismatch",
    "bad_sni",
    "ech_present",
    "tls_failed",
    # interception
    "absolute_form_in_tunnel",
    "path_not_canonical",
    "path_not_allowed",
    "field_not_declared",
    "opaque_body",
    "upgrade_denied",
    # model endpoint
    "foreign_credential",
    "server_side_tool",
    "server_side_fetch",
    "foreign_file_id",
    "callback_denied",
    # DNS
    "bad_query",
    "qtype_denied",
    "wildcard_dns_budget",
    # URL arguments and redirects
    "bad_url",
    "userinfo",
    "fragment",
    "arg_host_not_allowed",
    "arg_path_not_allowed",
    "arg_query_not_declared",
    "nested_url",
    "parser_disagreement",
    "redirect_not_allowed",
    "redirect_downgrade",
    "bad_location",
    # content, latch, budgets
    "canary",
    "trifecta",
    "tainted_arg",
    "byte_budget",
    "label_budget",
    "name_budget",
    "request_budget",
    "connection_budget",
    # the gateway itself
    "gateway_failed",
]

LoadReason = Literal[
    "bad_config",
    "empty_entry",
    "too_broad",
    "not_host_port",
    "port_required",
    "wildcard_position",
    "bad_host",
    "bad_port",
    "ip_literal_or_ambiguous",
    "multi_tenant_suffix",
    "multi_tenant_host",
    "registry_at_runtime",
    "registry_get_only",
    "private_needs_flag",
    "never_listable",
    "idn_needs_extra",
    "endpoint_without_entry",
    "bad_endpoint_rule",
]

SENTENCES: Final[dict[EgressReason, tuple[str, str]]] = {
    "ok": ("Allowed", "nothing to do"),
    "synthetic_answer": ("Answered with an address of our own pool", "connect through the gateway"),
    "residual": ("Nothing in it can be recognised; only budgets bound it", "keep the budgets narrow"),
    "not_allowed": ("This destination is not available in this run", "use the hosts that the task was given"),
    "bad_host": ("The host is not a canonical name", "send the plain lower-case ASCII name"),
    "bad_port": ("The port is not 1 to 65535 in plain digits", "send the port as decimal digits"),
    "bad_target": ("The target is not host:port", "send CONNECT host:port"),
    "ip_literal_or_ambiguous": ("An address is not a destination here", "use the name that was allowed"),
    "no_route": ("There is no route but the gateway", "use the proxy of this namespace"),
    "caller_unauthenticated": ("The caller did not prove which run it is", "use the proxy of this namespace"),
    "resolve_failed": ("The name has no address", "report the failure"),
    "resolved_non_public": ("The name leads to an address that is not public", "report this to the operator"),
    "dial_failed": ("The destination could not be reached", "try again later, or report the failure"),
    "peer_mismatch": ("The connection ended at another address than the one dialled", "report this to the operator"),
    "bad_request": ("The request is not well-formed HTTP/1.1", "send CRLF line ends and plain fields"),
    "head_too_large": ("The request head is too large", "send fewer and shorter fields"),
    "head_timeout": ("The request head did not arrive in time", "send the request at once"),
    "idle_timeout": ("The connection was idle for too long", "open a new one"),
    "not_absolute_form": ("A proxy request names its whole URL", "send GET http://host/path"),
    "https_needs_connect": ("The gateway originates no TLS", "send CONNECT host:port and begin TLS yourself"),
    "bad_scheme": ("The scheme is not allowed", "use https, or http where it was allowed"),
    "duplicate_host": ("There is not exactly one Host field", "send one Host field"),
    "host_mismatch": ("The Host field names another destination", "send the Host of the target"),
    "smuggling": ("The length of the body is ambiguous", "send one Content-Length, or chunked, never both"),
    "forbidden_header": ("A field would choose the destination or the method", "leave that field out"),
    "not_tls": ("The tunnel does not begin with a TLS handshake", "speak TLS inside the tunnel"),
    "hello_too_large": ("The ClientHello is too large", "offer fewer extensions"),
    "sni_timeout": ("The ClientHello did not arrive in time", "begin the handshake at once"),
    "sni_missing": ("The ClientHello names no server", "send SNI"),
    "sni_mismatch": ("The ClientHello names another server", "use the host of the CONNECT"),
    "bad_sni": ("The server name is malformed", "send one plain host name"),
    "ech_present": ("An encrypted ClientHello cannot be checked", "turn ECH off, or use interception"),
    "tls_failed": ("The TLS handshake failed", "check the certificate authority of this run"),
    "absolute_form_in_tunnel": ("A request in a tunnel names its path only", "send GET /path"),
    "path_not_canonical": ("The path can be read in two ways", "send the plain path"),
    "path_not_allowed": ("This method, path or query is not available in this run", "use what the task was given"),
    "field_not_declared": ("A field of the body is not declared", "leave it out"),
    "opaque_body": ("The body cannot be read", "send plain JSON without Content-Encoding"),
    "upgrade_denied": ("The protocol may not be changed", "use plain requests"),
    "foreign_credential": ("The request carries a credential of its own", "send none; ours is added outside"),
    "server_side_tool": ("The tool would act from the vendor's side", "use client-side tools"),
    "server_side_fetch": ("The vendor would fetch a URL", "send the content itself"),
    "foreign_file_id": ("The file was not made by this run", "send the content itself"),
    "callback_denied": ("The vendor would call a URL back", "leave the callback out"),
    "bad_query": ("The message is not one plain question", "ask one question of class IN"),
    "qtype_denied": ("Only addresses are answered", "ask for A or AAAA"),
    "wildcard_dns_budget": ("Names under a wildcard are not answered here", "connect through the proxy"),
    "bad_url": ("The URL is malformed", "send a plain absolute URL"),
    "userinfo": ("A URL holds no user name", "leave it out"),
    "fragment": ("A fragment is not declared", "leave it out"),
    "arg_host_not_allowed": ("The URL's host is not declared for this argument", "use the declared host"),
    "arg_path_not_allowed": ("The URL's path is not declared for this argument", "use the declared path"),
    "arg_query_not_declared": ("A query name is not declared for this argument", "leave it out"),
    "nested_url": ("Another URL is inside it", "send it without"),
    "parser_disagreement": ("Two parsers read different destinations from it", "send a plain URL"),
    "redirect_not_allowed": ("The redirect leads elsewhere", "use the final URL"),
    "redirect_downgrade": ("The redirect leaves https", "use https"),
    "bad_location": ("The redirect names no URL", "report the failure"),
    "canary": ("A planted value would have left; the run was ended", "report this to the operator"),
    "trifecta": ("The run has read private and untrusted data", "report the result instead of sending it"),
    "tainted_arg": ("The run has read private data; strangers could read this", "ask in a child run that has not"),
    "byte_budget": ("The run has sent as much as it may", "send less, or report the result"),
    "label_budget": ("The run has used as many names under this wildcard as it may", "use the names it has"),
    "name_budget": ("The run has used as many names as it may", "use the names it has"),
    "request_budget": ("The run has made as many requests as it may", "report the result"),
    "connection_budget": ("The run has as many connections as it may", "close some, then try again"),
    "gateway_failed": ("The gateway cannot take requests now; nothing was sent", "report that it is unavailable"),
}

# Never suppressed, and severity 5 (OCSF: critical). The rest of the denials is 3 (medium).
CRITICAL: Final[frozenset[str]] = frozenset({"canary", "foreign_credential", "sni_mismatch", "trifecta"})


def severity(reason: str, *, metadata: bool = False) -> Literal[3, 5]:
    """Return the OCSF severity of a denial; `metadata`: the destination was a cloud's metadata service."""
    return 5 if metadata or reason in CRITICAL else 3
