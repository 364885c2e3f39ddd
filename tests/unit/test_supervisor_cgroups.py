"""Where groups are made, and in which order limits are written."""

from __future__ import annotations

import os

import pytest

from lockgate.contract.bounds import Bounds
from lockgate.supervisor import cgroups
from lockgate.supervisor.cgroups import Layout, Limits, Mount
from lockgate.supervisor.group import limit_writes, quota_us

MOUNTS = r"""
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:7 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/uni\040fied rw,relatime - cgroup2 cgroup2 rw,nsdelegate
"""


def test_mounts_are_read_with_their_roots_and_escapes():
    found = cgroups.parse_mounts(MOUNTS)
    assert [(m.point, m.root, m.version) for m in found] == [
        ("/sys/fs/cgroup/cpu,cpuacct", "/", 1),
        ("/sys/fs/cgroup/memory", "/docker/abc", 1),
        ("/sys/fs/cgroup/uni fied", "/", 2),
    ]
    assert {"cpu", "cpuacct"} <= found[0].controllers


def test_own_paths():
    own = cgroups.parse_own("9:name=systemd:/a\n4:memory:/m/x\n1:cpu,cpuacct:/c:odd\n0::/u\n")
    assert own == {"name=systemd": "/a", "memory": "/m/x", "cpu": "/c:odd", "cpuacct": "/c:odd", "": "/u"}


@pytest.mark.parametrize(
    ("root", "path", "expected"),
    [
        ("/", "/", "/sys/x"),
        ("/", "/a/b", "/sys/x/a/b"),
        ("/docker/abc", "/docker/abc", "/sys/x"),
        ("/docker/abc", "/docker/abc/in", "/sys/x/in"),
        ("/docker/abc", "/docker/abcd", None),
        ("/docker/abc", "/elsewhere", None),
    ],
)
def test_a_path_outside_the_mounted_part_is_not_found(root, path, expected):
    assert cgroups.locate(Mount("/sys/x", root, frozenset(), 1), path) == expected


V1 = Layout(version=1, memory="/m", pids="/p", cpu="/c", cpuacct="/a", unified="/u", swap="memsw")
V2 = Layout(version=2, memory="/g", pids="/g", cpu="/g", unified="/g", swap="swap.max")


def names(writes):
    return [(path.rpartition("/")[2], text) for path, text in writes]


def test_v1_sets_memsw_after_memory_and_first_when_widening():
    """cgroup-v1/memory.rst: memsw may never be the lower one, or the kernel refuses the write."""
    new = names(limit_writes(V1, "s1", Limits(100, 8, 1.0)))
    assert new[:3] == [
        ("memory.limit_in_bytes", "100"), ("memory.memsw.limit_in_bytes", "100"), ("memory.swappiness", "0"),
    ]  # fmt: skip
    assert ("pids.max", "8") in new
    assert ("cpu.cfs_quota_us", "100000") in new
    tighter = names(limit_writes(V1, "s1", Limits(50, 8, 1.0), Limits(100, 8, 1.0)))
    assert tighter == [("memory.limit_in_bytes", "50"), ("memory.memsw.limit_in_bytes", "50")]
    wider = names(limit_writes(V1, "s1", Limits(200, 8, 1.0), Limits(100, 8, 1.0)))
    assert wider == [("memory.memsw.limit_in_bytes", "200"), ("memory.limit_in_bytes", "200")]


def test_v2_forbids_swap_and_ends_the_group_as_a_whole():
    new = dict(names(limit_writes(V2, "s1", Limits(100, 8, 0.5))))
    assert new == {
        "memory.max": "100", "memory.swap.max": "0", "memory.oom.group": "1",
        "pids.max": "8", "cpu.max": "50000 100000",
    }  # fmt: skip


def test_unchanged_limits_write_nothing():
    assert limit_writes(V1, "s", Limits(1, 1, 1.0), Limits(1, 1, 1.0)) == []


def test_a_quota_is_never_below_what_the_kernel_takes():
    assert quota_us(0.001) == 1000
    assert quota_us(2.5) == 250_000


def test_memory_without_a_hold_on_swap_is_no_memory_bound():
    """X6: a cap that swap gets around is no cap."""
    assert Layout(version=1, memory="/m", swap="").memory_by == "none"
    assert V1.memory_by == "cgroup v1"
    assert V2.memory_by == "cgroup v2"
    assert Layout().memory_by == "none"
    assert V1.bases == ("/m", "/p", "/c", "/a", "/u")
    assert V2.bases == ("/g",)


def test_limits_come_from_the_bounds():
    assert Limits.of(Bounds(memory=1 << 20, processes=3, cpu_share=0.5)) == Limits(1 << 20, 3, 0.5)


def test_a_dead_supervisors_directories_are_swept_and_a_living_ones_kept(tmp_path):
    dead = tmp_path / "lockgate-999999999-1"
    mine = tmp_path / cgroups.owner_name()
    other = tmp_path / "user.slice"
    for directory in (dead, mine, other):
        (directory / "s1").mkdir(parents=True)
    cgroups._sweep(str(tmp_path))
    assert not dead.exists()
    assert (mine / "s1").exists()
    assert (other / "s1").exists()


def test_only_marked_directories_count_as_delegated(tmp_path):
    """A directory that systemd manages itself is not ours to put controllers in."""
    own = tmp_path / "service" / "supervisor"
    own.mkdir(parents=True)
    assert cgroups.delegated(str(own), None) == []
    try:
        os.setxattr(own.parent, "user.delegate", b"1")
    except OSError:
        pytest.skip("this file system keeps no user attributes")
    assert cgroups.delegated(str(own), None) == [str(own.parent)]
    os.setxattr(own.parent, "user.delegate", b"0")
    assert cgroups.delegated(str(own), None) == []


def test_the_top_is_for_root_or_for_who_lives_in_a_namespace_of_its_own(tmp_path, monkeypatch):
    top, own = str(tmp_path), str(tmp_path / "user.slice")
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert cgroups.delegated(own, top) == [top]
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert cgroups.delegated(own, top) == []
    (tmp_path / "cgroup.type").write_text("domain\n")  # not the root of all: the top of a namespace
    assert cgroups.delegated(top, top) == [top]
    assert cgroups.delegated(own, top) == []
