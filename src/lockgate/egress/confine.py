"""What a confined command gets: the places that answer in its namespace, and its environment. Pure.

Rule 1: three places answer: the proxy, the responder for names, and the addresses that the responder gave for ports of
        the list. All else has no route, whatever the protocol.
Rule 2: the environment is made of names on a list, of what the operator declares for this command, and of ours; nothing
        is inherited because nobody thought of it.
Rule 3: the proxy variables are a convenience. What ignores them, or clears them, has no route either.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Final, Literal

from lockgate.contract.errors import ConfigError
from lockgate.egress.dns import POOL_4, POOL_4_BITS, POOL_6, POOL_6_BITS
from lockgate.egress.view import PRIVATE

Route = Literal["gateway", "dns", "no_route"]

PROXY_PORT: Final = 3128
DNS_PORT: Final = 53
LOOPBACK: Final = "127.0.0.1"
CA_FILE: Final = "ca.pem"

INHERITED: Final = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "TMPDIR", "TERM", "COLORTERM", "NO_COLOR", "FORCE_COLOR",
    "COLUMNS", "LINES", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LC_COLLATE", "LC_MESSAGES", "LC_MONETARY",
    "LC_NUMERIC", "LC_TIME", "TZ", "VIRTUAL_ENV", "NVM_BIN", "NODE_ENV", "PYTHONUNBUFFERED", "PYTHONIOENCODING",
)  # fmt: skip
_NO_PROXY: Final = "localhost,127.0.0.1,::1"
_CA_VARIABLES: Final = (
    "SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS",
    "npm_config_cafile", "AWS_CA_BUNDLE", "CARGO_HTTP_CAINFO",
)  # fmt: skip
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")
_VALUE_BYTES: Final = 65_536


def proxy_variables(port: int) -> dict[str, str]:
    """Return what makes ordinary clients use the proxy of the namespace."""
    url = f"http://{LOOPBACK}:{port}"
    names = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    # Node reads the others only when it is told to (nodejs.org, "Built-in proxy support").
    return {**dict.fromkeys(names, url), "NO_PROXY": _NO_PROXY, "no_proxy": _NO_PROXY, "NODE_USE_ENV_PROXY": "1"}


def ca_variables() -> dict[str, str]:
    """Return what makes ordinary clients trust the authority of this run beside the system's."""
    return dict.fromkeys(_CA_VARIABLES, f"{PRIVATE}/{CA_FILE}")


def child_env(
    ambient: Mapping[str, str], declared: Mapping[str, str], *, port: int = PROXY_PORT, ca: bool = False
) -> dict[str, str]:
    """Return the whole environment of the command.

    Args:
        ambient: values of names in `INHERITED`; others are dropped.
        declared: what the operator gave for this command, which wins over everything.
        port: of the proxy.
        ca: whether this run has an authority of its own.

    """
    kept = {name: value for name, value in ambient.items() if name in INHERITED and "\0" not in value}
    kept.setdefault("PATH", "/usr/local/bin:/usr/bin:/bin")
    return {**kept, **proxy_variables(port), **(ca_variables() if ca else {}), **declared}


def declared_variables(pairs: Iterable[str]) -> dict[str, str]:
    """Read NAME=VALUE.

    Raises:
        ConfigError: one is not that.

    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not _NAME.match(name) or "\0" in value or len(value) > _VALUE_BYTES:
            raise ConfigError(f"--env {name[:64]!r} is not NAME=VALUE", next_step="write --env LOG_LEVEL=debug")
        found[name] = value
    return found


def variable_name(name: str) -> str:
    """Return a name that may be passed on by `--pass`.

    Raises:
        ConfigError: it is none.

    """
    if not _NAME.match(name):
        raise ConfigError(f"--pass {name[:64]!r} is no variable", next_step="write --pass LOG_LEVEL")
    return name


def route(
    proto: str,
    dst: str,
    port: int | None,
    gateway_port: int = PROXY_PORT,
    routed: Iterable[tuple[bytes, int]] = (),
) -> Route:
    """Say what answers a packet of the command in the namespace that `egress run` builds.

    Args:
        proto: "tcp", "udp", or anything else.
        dst: an address, or whatever else the caller wrote; names are no addresses.
        port: None where the protocol has none.
        gateway_port: of the proxy.
        routed: (packed address, port) that lead to the gateway.

    """
    try:
        packed = ipaddress.ip_address(dst.strip("[]")).packed
    except ValueError:
        return "no_route"
    if dst == LOOPBACK and port == DNS_PORT and proto in ("tcp", "udp"):
        return "dns"
    if proto != "tcp":
        return "no_route"
    if dst == LOOPBACK and port == gateway_port:
        return "gateway"
    return "gateway" if _synthetic(packed) and (packed, port) in tuple(routed) else "no_route"


def _synthetic(packed: bytes) -> bool:
    value = int.from_bytes(packed)
    if len(packed) == 4:
        return value >> 32 - POOL_4_BITS == POOL_4 >> 32 - POOL_4_BITS
    return value >> 128 - POOL_6_BITS == POOL_6 >> 128 - POOL_6_BITS
