"""Exfil: any exit beside the one channel (X4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from container_fixtures import ContainerAttack

# Each id is a probe of guest/probes that asks for one primitive; its control answers on any host that runs the rung.
PROBES = (
    "socket-inet",
    "socket-inet6",
    "socket-netlink",
    "socket-packet",
    "socket-vsock",
    "socket-xdp",
    "socket-unix",
    "abstract-unix-connect",
    "listen-loopback",
    "network-interfaces",
    "splice",
    "tee",
    "vmsplice",
    "sendfile",
    "copy-file-range",
    "resolver",
)


@pytest.mark.parametrize("ident", PROBES)
def test_there_is_no_other_exit(container_attack: ContainerAttack, ident: str) -> None:
    """X4: no socket of any family, no interface, no resolver, no pipe over the page cache.

    Control: the same question reaches its primitive in an open slot, under the marker filter or with no sandbox.
    """
    assert container_attack.reached_by(ident), "the probe is dead: it proves nothing"
    row = container_attack.slot[ident]
    assert not row.reached, row.detail
