"""Addresses that nothing of ours may reach, as sorted integer ranges searched by bisection.

Rule 1: `ipaddress.is_global` is not asked: it calls NAT64, 6to4, mapped and multicast addresses global.
Rule 2: everything outside 2000::/3 is refused, so an IPv6 range that is assigned tomorrow is refused until it is known.
Rule 3: an embedded IPv4 address is never judged in place of the address that holds it, except under a NAT64 prefix that
        the operator declared.
Sources: IANA IPv4 and IPv6 special-purpose address registries, RFC 6052 (NAT64), RFC 7534/7535 (AS112), RFC 7450
(AMT), the documentation of each cloud's metadata service.
"""

from __future__ import annotations

import ipaddress
from bisect import bisect_right
from typing import Final, NamedTuple


class Refused(NamedTuple):
    """Why an address is refused; a metadata service raises the severity of the alert to critical."""

    why: str
    metadata: bool


_V4: Final = (
    ("0.0.0.0/8", "this network"),
    ("10.0.0.0/8", "private"),
    ("100.64.0.0/10", "carrier-grade NAT"),
    ("127.0.0.0/8", "loopback"),
    ("168.63.129.16/32", "wire server of a cloud"),
    ("169.254.0.0/16", "link-local"),
    ("172.16.0.0/12", "private"),
    ("192.0.0.0/24", "protocol assignments"),
    ("192.0.2.0/24", "documentation"),
    ("192.31.196.0/24", "AS112"),
    ("192.52.193.0/24", "AMT"),
    ("192.88.99.0/24", "6to4 relay"),
    ("192.168.0.0/16", "private"),
    ("192.175.48.0/24", "AS112"),
    ("198.18.0.0/15", "benchmarking"),
    ("198.51.100.0/24", "documentation"),
    ("203.0.113.0/24", "documentation"),
    ("224.0.0.0/4", "multicast"),
    ("240.0.0.0/4", "reserved"),
)
_V6: Final = (
    ("::/3", "outside the global range (loopback, mapped, compatible, NAT64)"),
    ("2001::/23", "protocol assignments (Teredo, ORCHID)"),
    ("2001:db8::/32", "documentation"),
    ("2002::/16", "6to4"),
    ("2620:4f:8000::/48", "AS112"),
    ("3fff::/20", "documentation"),
    ("4000::/2", "outside the global range"),
    ("8000::/1", "outside the global range (unique-local, link-local, site-local, multicast)"),
)
# Metadata and credential endpoints of the large clouds. All are inside a refused range; named for their severity.
METADATA: Final = frozenset(
    ipaddress.ip_address(text).packed
    for text in (
        "169.254.169.254",
        "169.254.170.2",
        "169.254.170.23",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "fd00:ec2::254",
        "fd00:ec2::23",
        "fd20:ce::254",
    )
)

# Names by which clients of those clouds ask for the same, whatever they lead to.
METADATA_NAMES: Final = frozenset(
    ("metadata.google.internal", "metadata.goog", "instance-data.ec2.internal", "instance-data", "metadata")
)


def _table(rows: tuple[tuple[str, str], ...]) -> tuple[list[int], list[int], list[str]]:
    nets = [(ipaddress.ip_network(net), why) for net, why in rows]
    starts = [int(net.network_address) for net, _ in nets]
    ends = [int(net.broadcast_address) for net, _ in nets]
    if starts != sorted(starts) or any(end >= start for end, start in zip(ends, starts[1:], strict=False)):
        raise ValueError("the address table must be sorted and free of overlaps")
    return starts, ends, [why for _, why in nets]


_STARTS4, _ENDS4, _WHY4 = _table(_V4)
_STARTS6, _ENDS6, _WHY6 = _table(_V6)


def refused(packed: bytes) -> Refused | None:
    """Say why the address may not be reached, or None when it may.

    Args:
        packed: 4 or 16 bytes in network order.

    Raises:
        ValueError: any other length.

    """
    if len(packed) == 4:
        starts, ends, why = _STARTS4, _ENDS4, _WHY4
    elif len(packed) == 16:
        starts, ends, why = _STARTS6, _ENDS6, _WHY6
    else:
        raise ValueError("an address is 4 or 16 bytes")
    value = int.from_bytes(packed)
    at = bisect_right(starts, value) - 1
    if at >= 0 and value <= ends[at]:
        return Refused(why[at], is_metadata(packed))
    return None


def nat64_embedded(packed: bytes, prefix: bytes, length: int) -> bytes | None:
    """Return the IPv4 address inside `packed` when it lies under an operator's NAT64 prefix (RFC 6052 section 2.2).

    Args:
        packed: 16 bytes.
        prefix: 16 bytes of the network address.
        length: 32, 40, 48, 56, 64 or 96 bits.

    """
    if len(packed) != 16 or length not in {32, 40, 48, 56, 64, 96}:
        return None
    octets = length // 8
    if packed[:octets] != prefix[:octets] or (length != 96 and packed[8]):
        return None
    # Octet 8 is reserved and skipped.
    rest = packed[octets:] if octets > 8 else packed[octets:8] + packed[9:]
    return rest[:4]


def is_metadata(packed: bytes) -> bool:
    """Whether an address is that of a metadata service, or holds one (mapped, compatible, NAT64, 6to4)."""
    parts = (packed,) if len(packed) == 4 else (packed, packed[12:], packed[2:6])
    return any(part in METADATA for part in parts)
