"""Sizes, bits and numbers of what goes to the kernel, against values read from its headers (X8)."""

from __future__ import annotations

import os
import struct

import pytest

from lockgate.kernel import caps_unsafe, landlock_unsafe, process_unsafe, seccomp, tables
from lockgate.kernel.arch import AARCH64, KNOWN, X86_64, current
from lockgate.kernel.syscalls_unsafe import call


@pytest.mark.parametrize(
    ("abi", "size", "mask"),
    [
        (1, 8, 0x1FFF),
        (2, 8, 0x3FFF),
        (3, 8, 0x7FFF),
        (4, 16, 0x7FFF),
        (5, 16, 0xFFFF),
        (6, 24, 0xFFFF),
        (7, 24, 0xFFFF),
    ],
)
def test_landlock_attribute_grows_with_the_abi(abi: int, size: int, mask: int) -> None:
    """A structure longer than the kernel knows is E2BIG, a shorter one leaves rights unhandled."""
    block = landlock_unsafe.attribute(abi)
    assert len(block) == size
    assert struct.unpack_from("=Q", block)[0] == mask == landlock_unsafe.handled(abi)
    assert all(word == 3 for (word,) in struct.iter_unpack("=Q", block[8:]))


def test_landlock_path_rule_is_packed() -> None:
    """struct landlock_path_beneath_attr has no padding: 12 bytes."""
    assert landlock_unsafe.path_rule(12, 7) == bytes([12, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0])


def test_no_rule_lets_code_execute_or_make_nodes() -> None:
    """X8: EXECUTE, device, socket and pipe nodes are in no granted set."""
    assert landlock_unsafe.NEVER == 0b1000_1110_0100_0001
    assert not landlock_unsafe.READ & landlock_unsafe.NEVER


def test_namespace_flags_are_the_seven() -> None:
    """The mask of the filter and the flags of the slot's own clone are the same set."""
    assert process_unsafe.ALL_NAMESPACES == seccomp.NAMESPACE_FLAGS
    assert process_unsafe.ALL_NAMESPACES.bit_count() == 7


def test_securebits_lock_everything() -> None:
    """NOROOT, NO_SETUID_FIXUP, NO_CAP_AMBIENT_RAISE set and locked, KEEP_CAPS clear and locked."""
    assert caps_unsafe.SECUREBITS == (1 | 2) | (4 | 8) | 32 | (64 | 128)


def test_tables_are_whole_and_free_of_doubles() -> None:
    """Two names with one number, or a number above NEWEST, would be a slip of the pen."""
    for arch in KNOWN:
        numbers = list(arch.calls.values())
        assert len(set(numbers)) == len(numbers)
        assert max(numbers) == tables.NEWEST
    assert len(X86_64.calls) > 360
    assert len(AARCH64.calls) > 300


@pytest.mark.parametrize(
    ("name", "x86", "arm"),
    [
        ("clone", 56, 220), ("mount", 165, 40), ("pivot_root", 155, 41), ("prctl", 157, 167), ("capset", 126, 91),
        ("seccomp", 317, 277), ("unshare", 272, 97), ("open_tree", 428, 428), ("move_mount", 429, 429),
        ("close_range", 436, 436), ("mount_setattr", 442, 442), ("landlock_create_ruleset", 444, 444),
        ("landlock_restrict_self", 446, 446), ("newfstatat", 262, 79), ("statmount", 457, 457), ("mseal", 462, 462),
    ],
)  # fmt: skip
def test_known_numbers(name: str, x86: int, arm: int) -> None:
    """Spot checks against the kernel's own lists."""
    assert X86_64.calls[name] == x86
    assert AARCH64.calls[name] == arm


def test_calls_go_where_the_table_says() -> None:
    """The table of this machine answers: the numbers are those of its kernel."""
    assert call("getpid") == os.getpid()
    assert call("getuid") == os.getuid()
    assert current().machine == os.uname().machine
    with pytest.raises(OSError) as caught:
        call("close", 1 << 20)
    assert caught.value.errno == 9
    assert caught.value.filename == "close"
