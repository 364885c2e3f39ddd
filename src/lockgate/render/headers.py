"""Response headers for the program that shows the answer: the second lock behind the guard.

A policy of content does not stop DNS prefetch everywhere, nor a click; it limits what a fault of the first lock can do.
Sources: CSP Level 3, Referrer Policy, Fetch (nosniff), Cross-Origin-Opener-Policy (HTML).
"""

from __future__ import annotations

from lockgate.policy.url import DEFAULT_PORTS
from lockgate.render.policy import RenderPolicy


def headers(policy: RenderPolicy) -> dict[str, str]:
    """Return the headers to send with a page that shows rendered text; images only from the declared paths."""
    sources: list[str] = []
    for rule in policy.images:
        port = "" if rule.port == DEFAULT_PORTS["https"] else f":{rule.port}"
        sources.append(f"https://{rule.host}{port}{rule.prefix if rule.prefix.endswith('/') else rule.prefix + '/'}")
    images = " ".join(dict.fromkeys(sources)) or "'none'"
    csp = {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": images,
        "form-action": "'none'",
        "base-uri": "'none'",
        "object-src": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in csp.items()),
        "Referrer-Policy": "no-referrer",
        "X-DNS-Prefetch-Control": "off",
        "X-Content-Type-Options": "nosniff",
        "Cross-Origin-Opener-Policy": "same-origin",
    }
