"""The egress policy's decision, from the bytes of a destination to the verdict, and what looking for canaries costs.

The list has 200 entries. The reference of a decision is the shape of matcher that the field uses: fnmatch over every
pattern, and `ipaddress.is_global` for each resolved address; it refuses less. The reference of a scan is one pass of
base64 over the same bytes.
"""

from __future__ import annotations

import base64
import fnmatch
import ipaddress
import os
import time
from collections.abc import Callable

from common import emit, interleave, row
from lockgate.policy import addresses
from lockgate.policy.canary import Needles, mint
from lockgate.policy.egress import Ask, EgressPolicy
from lockgate.policy.host import Endpoint, Refusal

COUNT = 300
LOOPS = 10  # short samples: a busy machine interrupts fewer of them
ALLOW = [f"api{n}.partner{n % 20}.example:443" for n in range(180)] + [
    f"*.pages{n}.partner.example:443" for n in range(20)
]
POLICY = EgressPolicy.from_data({"allow": ALLOW, "deny": ["blocked.partner.example"]})
ASKED = (b"api17.partner17.example:443", b"Shop-9.pages7.partner.example:443", b"evil.attacker.example:443")
PAIR = (ipaddress.ip_address("93.184.216.34"), ipaddress.ip_address("2606:2800:220:1::1"))
PACKED = tuple(one.packed for one in PAIR)
PATTERNS = [one.rpartition(":")[0] for one in ALLOW]
BODY = base64.b64encode(os.urandom(12 * 1024))
NEEDLES = Needles.of([mint(os.urandom(16))])


def ours() -> None:
    for raw in ASKED:
        endpoint = Endpoint.parse(raw)
        if not isinstance(endpoint, Refusal):
            POLICY.decide(Ask(endpoint))


def ours_with_addresses() -> None:
    ours()
    for _ in ASKED:
        for packed in PACKED:
            addresses.refused(packed)


def field() -> None:
    for raw in ASKED:
        host = raw.decode().rpartition(":")[0].lower()
        any(fnmatch.fnmatchcase(host, pattern) for pattern in PATTERNS)
        for address in PAIR:
            _ = address.is_global


def seconds(work: Callable[[], object], loops: int = LOOPS, per: int = len(ASKED)) -> Callable[[], float]:
    def sample() -> float:
        began = time.perf_counter()
        for _ in range(loops):
            work()
        return (time.perf_counter() - began) / loops / per

    return sample


def main() -> None:
    plain, full, reference = interleave(COUNT, seconds(ours), seconds(ours_with_addresses), seconds(field, 1))
    emit(
        row("egress decision, bytes to verdict", plain, unit="s", bar=15e-6),
        row("egress decision with two addresses", full, unit="s", bar=1.5, reference="without them", against=plain),
        row(
            "egress decision against the field",
            full,
            unit="s",
            bar=0.5,
            reference="fnmatch, is_global",
            against=reference,
        ),
    )
    scan, encode = interleave(
        100, seconds(lambda: NEEDLES.hit(BODY), 1, 1), seconds(lambda: base64.b64encode(BODY), 4, 1)
    )
    emit(row("canary scan of 16 KiB", scan, unit="s", bar=60.0, reference="base64 of the same", against=encode))


if __name__ == "__main__":
    main()
