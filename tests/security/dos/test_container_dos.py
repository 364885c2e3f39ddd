"""HostDoS: change or exhaust the host (X5 to X7)."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from lockgate.runtimes.single import Outcome

if TYPE_CHECKING:
    from container_fixtures import ContainerAttack

# Each id is a probe of guest/probes that asks for one primitive; its control answers on any host that runs the rung.
PROBES = (
    "init-module",
    "finit-module",
    "kexec-load",
    "reboot",
    "swapon",
    "iopl",
    "ioperm",
    "acct",
    "settimeofday",
    "adjtimex",
    "sethostname",
    "bpf",
    "userfaultfd",
    "userfaultfd-user-only",
    "io-uring-setup",
    "io-setup",
    "mbind",
    "set-mempolicy",
    "remap-file-pages",
    "memfd-secret",
    "map-shadow-stack",
    "nfsservctl",
    "sync",
    "mlock",
)


@pytest.mark.parametrize("ident", PROBES)
def test_the_host_cannot_be_changed(container_attack: ContainerAttack, ident: str) -> None:
    """X5, X8: no call that acts on the host or opens a subsystem that a run has no need of.

    Control: the same question reaches its primitive in an open slot, under the marker filter or with no sandbox.
    """
    assert container_attack.reached_by(ident), "the probe is dead: it proves nothing"
    row = container_attack.slot[ident]
    assert not row.reached, row.detail


def test_a_flood_of_output_does_not_grow_us(container_run: Callable[..., Outcome]) -> None:
    """X9: 200 MB on both streams are drained and counted; what is kept is the cap; our memory stays flat."""
    container_run("1")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = container_run(
        "import os\nb = b'x' * 65536\nfor _ in range(1600):\n    os.write(1, b)\n    os.write(2, b)", keep=65536
    )
    assert outcome.result is not None
    assert (len(outcome.stdout), len(outcome.stderr)) == (65536, 65536)
    assert outcome.dropped == 2 * 65536 * 1599
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 * 1024


def test_a_peer_that_never_reads_its_channel_is_held_back(container_run: Callable[..., Outcome]) -> None:
    """X9: a flood on the channel blocks the run, not us: the wall clock ends it."""
    outcome = container_run("import os\nwhile True:\n    os.write(3, b'y' * 65536)", wall=0.5)
    assert outcome.killed


def test_a_fork_bomb_is_gone_in_time(container_run: Callable[..., Outcome]) -> None:
    """X5: at the process limit, with every child spinning, one kill reaps all of them."""
    outcome = container_run(
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass", wall=0.5, processes=64
    )
    assert outcome.killed
    assert outcome.death_seconds < 5


def test_deep_and_hostile_file_trees_end_with_the_run(container_run: Callable[..., Outcome]) -> None:
    """X7: a thousand levels, a sparse petabyte, hard links, a device and a socket: errors inside, nothing outside."""
    outcome = container_run(
        "import os, socket, stat\n"
        "def why(f, *a):\n    try:\n        f(*a)\n        return 0\n    except OSError as e:\n        return e.errno\n"
        "for _ in range(1000):\n    os.mkdir('d')\n    os.chdir('d')\n"
        "os.chdir('/run')\n"
        "f = os.open('s', os.O_CREAT | os.O_RDWR)\n"
        "[why(os.ftruncate, f, 1 << 50), why(os.mknod, 'n', stat.S_IFBLK | 0o600, 0x800), why(os.mkfifo, 'p'),\n"
        " why(os.link, '/usr/bin/python3', 'l'), why(os.symlink, '/etc/shadow', 'y'), why(open, 'y')]"
    )
    assert outcome.result is not None
    assert outcome.result.value == b"[27,1,1,18,0,2]"
