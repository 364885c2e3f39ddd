"""Names of header fields that some server or proxy takes for the place, the path or the method that is meant.

Rule 1: these are data; a request that has one is refused, for the request target alone says where it goes.
Rule 2: a prefix stands here where a family of such fields keeps growing.
"""

from __future__ import annotations

from typing import Final

_STEERING: Final = frozenset(
    b"x-unix-socket forwarded x-original-url x-original-uri x-original-host x-original-method x-rewrite-url "
    b"x-http-method-override x-http-method x-method-override x-host x-http-host-override x-backend x-backend-host "
    b"x-upstream x-upstream-host x-target x-target-url x-target-host x-proxy-url x-proxy-host x-real-host "
    b"x-http-destinationurl x-destination x-url x-uri x-forwarded x-forward x-socket x-socket-path x-server-name "
    b"x-ms-original-url x-waws-unencoded-url x-override-url x-override-host x-http-path-override x-path-override "
    b"proxy-host proxy-url base-url request-uri".split()
)
_STEERING_PREFIXES: Final = (b"x-forwarded-", b"x-lockgate-", b"x-envoy-", b"x-forward-", b"x-original-", b"x-rewrite-")


def steers(name: bytes) -> bool:
    """Whether a field would steer the request. `name`: in lower case, with hyphens for underscores."""
    return name in _STEERING or name.startswith(_STEERING_PREFIXES)
