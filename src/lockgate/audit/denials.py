"""The audit row of something that the egress half refused.

Rule 1: writing this row, durably, is how an alert is raised: the alerter follows the audit log, so no path can deny
        without alerting, and no client learns of a denial before the row is on the disk.
Rule 2: what the other side chose stands in a row in canonical form (a parsed host) or as hexadecimal, never as text.
"""

from __future__ import annotations

from typing import Final, Literal

from lockgate.audit.rows import Row, Value, clip

Kind = Literal[
    "connect",  # a CONNECT, or an absolute-form request, by its destination
    "http",  # the HTTP front refused the head
    "sni",  # the ClientHello
    "resolve",  # the answers of the resolver
    "dial",  # the dialled peer
    "intercept",  # a request inside a tunnel that is read
    "dns",  # a question to the synthetic resolver
    "packet",  # a datagram that has no route
    "caller",  # nobody known asked
    "canary",  # a planted value was about to leave
    "budget",  # a budget of the run is spent
]
RAW_BYTES: Final = 256


def egress_row(
    *,
    kind: Kind,
    reason: str,
    rule: str | None,
    user: str,
    agent: str,
    run: str,
    tenant: str = "",
    tool: str = "",
    destination: str | None = None,
    policy: str = "",
    peer: str = "",
    raw: bytes = b"",
    metadata: bool = False,
    reported: bool = False,
    **more: Value,
) -> Row:
    """Return the row of one denial of the gateway.

    Args:
        kind: which part refused.
        reason: of `policy.egress_reasons`.
        rule: the rule that decided; None = nothing allowed it.
        user: on whose behalf. agent: which agent. run: which run. tenant: whose data. tool: what runs behind it.
        destination: canonical host or host:port; None when it could not be parsed.
        policy: hash of the policy. peer: credentials of the caller's socket, as text.
        raw: the offending bytes; 256 of them are kept, in hexadecimal.
        metadata: the address is a metadata service, which makes the alert critical.
        reported: the policy is in report mode: it was let through, and no alert is raised.
        more: further facts, small and flat: method, path (without query), qtype, sni, count.

    """
    detail: dict[str, Value] = {"kind": kind}
    facts: dict[str, Value] = {"destination": destination, "tool": tool, "policy": policy, "peer": peer, **more}
    detail |= {name: clip(value) if isinstance(value, str) else value for name, value in facts.items() if value}
    if raw:
        detail["raw"] = raw[:RAW_BYTES].hex()
    if metadata:
        detail["severity"] = "critical"
    return Row(
        phase="egress",
        user=user or "nobody",
        agent=agent or "nobody",
        run=run or "none",
        tenant=tenant,
        operation=f"egress.{kind}",
        verdict="allow" if reported else "deny",
        rule=rule,
        reason=reason,
        visible="not_available",
        status="reported" if reported else "denied",
        detail=detail,
    )
