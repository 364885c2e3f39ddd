"""Escape: build or change a view, undo the hardening, run code from outside the package set (X4, X8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from container_fixtures import ContainerAttack

# Each id is a probe of guest/probes that asks for one primitive; its control answers on any host that runs the rung.
PROBES = (
    "clone-newuser",
    "clone3-newuser",
    "setns",
    "mount-tmpfs",
    "mount-proc",
    "mount-cgroup",
    "mount-bad-fs",
    "fsopen",
    "fsconfig",
    "fsmount",
    "fspick",
    "open-tree",
    "open-tree-clone",
    "move-mount",
    "mount-setattr",
    "setuid-call",
    "capset",
    "prctl-ambient",
    "prctl-mdwe",
    "landlock-create",
    "chown",
    "execveat",
    "memfd-create",
    "modify-ldt",
    "rwx-mapping",
    "rwx-mprotect",
    "open-by-handle-at",
    "name-to-handle-at",
    "mknod-char",
    "mknod-fifo",
    "unshare-newuser",
    "unshare-newns",
    "unshare-newnet",
    "unshare-newpid",
    "unshare-newipc",
    "unshare-newuts",
    "unshare-newcgroup",
    "unshare-newtime",
    "umount-proc",
    "remount-root-rw",
    "pivot-root",
    "chroot",
    "prctl-dumpable",
    "prctl-pdeathsig",
    "seccomp-install",
    "personality-rwx",
    "exec-interpreter",
    "exec-copied-interpreter",
    "exec-script",
    "subprocess-shell",
)


@pytest.mark.parametrize("ident", PROBES)
def test_the_primitive_is_out_of_reach(container_attack: ContainerAttack, ident: str) -> None:
    """X8: a slot cannot build namespaces or mounts, undo a step of its hardening or execute what it wrote.

    Control: the same question reaches its primitive in an open slot, under the marker filter or with no sandbox.
    """
    assert container_attack.reached_by(ident), "the probe is dead: it proves nothing"
    row = container_attack.slot[ident]
    assert not row.reached, row.detail
