"""The door and the checked memory, against a guest of a few instructions that lies with every number (X4)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

wasmtime = pytest.importorskip("wasmtime", reason="the wasm extra is not installed")

from lockgate.runtimes.wasm import driver, engine_unsafe  # noqa: E402

Make = Callable[..., Any]
KiB = 1024


class Echo(driver.Core):
    """A core whose door answers with what it was told."""

    heard: list[tuple[bytes, bytes]]

    def cap(self, kind: bytes) -> int:
        return 64 * KiB

    def answer(self, kind: bytes, body: bytes) -> bytes:
        self.heard = [*getattr(self, "heard", []), (kind, body)]
        return body


def door(pointer: int, length: int, reply: int = 16, reply_length: int = 20) -> str:
    numbers = " ".join(
        f"(i32.const {one - (1 << 32) if one >= 1 << 31 else one})" for one in (pointer, length, reply, reply_length)
    )
    return f"(call $door {numbers})"


def test_a_message_comes_through_and_its_answer_goes_where_the_guest_said(wasm_tiny: Make) -> None:
    core = wasm_tiny(
        f"(i32.store8 (i32.const 512) (i32.const 81)) (i32.store8 (i32.const 513) (i32.const 7)) {door(512, 2)}",
        kind=Echo,
    )
    assert core.turn(b"") == 0
    assert core.heard == [(b"Q", b"\x07")]
    assert core.guest.memory.read(16, 8) == struct.pack("<II", 1024, 1)
    assert core.guest.memory.read(1024, 1) == b"\x07"


@pytest.mark.parametrize(
    ("pointer", "length"),
    [
        (0x8000_0000, 2),
        (0xFFFF_FFFF, 1),
        (0xFFFF_FFF0, 32),
        (2 * 65_536, 1),
        (2 * 65_536 - 1, 2),
        (0, 0x20001),
    ],
)
def test_a_message_outside_of_the_memory_is_never_read(wasm_tiny: Make, pointer: int, length: int) -> None:
    """Pointers at and above 2**31, which arrive negative, and lengths that run over the end."""
    core = wasm_tiny(door(pointer, length), kind=Echo)
    core.cap = lambda _kind: 1 << 33
    with pytest.raises(engine_unsafe.OutOfBounds):
        core.turn(b"")
    assert not hasattr(core, "heard")


@pytest.mark.parametrize("length", [0xFFFF_FFFF, 0x8000_0000, 64 * KiB + 2])
def test_a_length_above_the_cap_is_refused_before_a_byte_is_read(wasm_tiny: Make, length: int) -> None:
    core = wasm_tiny(door(0, length), kind=Echo)
    read: list[tuple[int, int]] = []
    plain = core.guest.memory.read
    core.guest.memory.read = lambda at, count: read.append((at, count)) or plain(at, count)
    with pytest.raises(driver.GuestBroke):
        core.turn(b"")
    assert read == [(0, 1)]  # the kind, which decides the cap


def test_a_message_without_a_kind_is_refused(wasm_tiny: Make) -> None:
    with pytest.raises(driver.GuestBroke):
        wasm_tiny(door(0, 0), kind=Echo).turn(b"")


@pytest.mark.parametrize(
    ("reply", "reply_length"), [(0xFFFF_FFFE, 20), (16, 0x8000_0000), (2 * 65_536 - 3, 20), (16, 2 * 65_536)]
)
def test_an_answer_is_not_written_outside_of_the_memory(wasm_tiny: Make, reply: int, reply_length: int) -> None:
    core = wasm_tiny(door(0, 2, reply, reply_length), kind=Echo)
    with pytest.raises(engine_unsafe.OutOfBounds):
        core.turn(b"")
    assert not hasattr(core, "heard")  # refused before anything was done for it


@pytest.mark.parametrize(
    "alloc", ["(i32.const -1)", "(i32.const 131072)", "(i32.const 131071)", "(i32.const 0x7fffffff)"]
)
def test_the_guests_allocator_is_not_believed(wasm_tiny: Make, alloc: str) -> None:
    core = wasm_tiny(door(0, 3), alloc=alloc, kind=Echo)
    with pytest.raises(engine_unsafe.OutOfBounds):
        core.guest.call("turn", 0, 0)


def test_an_allocator_that_has_no_room_is_an_error_of_the_call(wasm_tiny: Make) -> None:
    assert wasm_tiny(door(0, 3), alloc="(i32.const 0)", kind=Echo).guest.call("turn", 0, 0) == 0xFFFF_FFFE


def test_an_allocator_that_calls_the_door_again_does_not_confuse_the_answer(wasm_tiny: Make) -> None:
    """Reentry: host_alloc is guest code and may knock while its own request is being answered."""
    core = wasm_tiny(door(0, 3), alloc=f"(drop {door(0, 1)}) (i32.const 2048)", kind=Echo)
    assert core.guest.call("turn", 0, 0) == 0
    assert [len(body) for _, body in core.heard] == [2, 0]


def test_what_a_host_function_raises_stops_the_guest_and_stays_outside(wasm_tiny: Make) -> None:
    class Broken(Echo):
        def answer(self, kind: bytes, body: bytes) -> bytes:
            raise RuntimeError("sk-synthetic-host-detail")

    core = wasm_tiny(f"(drop {door(0, 2)}) (i32.store (i32.const 4) (i32.const 7)) (i32.const 0)", kind=Broken)
    with pytest.raises(RuntimeError):
        core.guest.call("turn", 0, 0)
    memory = core.guest.memory.read(0, core.guest.memory.size())
    assert b"sk-synthetic" not in memory
    assert memory[4] == 0  # not one instruction more
    with pytest.raises(RuntimeError):
        core.guest.call("turn", 0, 0)  # and never again


def test_a_loop_is_struck(wasm_tiny: Make) -> None:
    core = wasm_tiny("(loop $l (br $l)) (i32.const 0)", kind=Echo)
    core.guest.arm()
    core.guest.strike()
    with pytest.raises(engine_unsafe.Trapped) as stopped:
        core.guest.call("turn", 0, 0)
    assert stopped.value.reason == "time"


def test_a_fault_of_the_guest_is_told_from_its_time(wasm_tiny: Make) -> None:
    with pytest.raises(engine_unsafe.Trapped) as stopped:
        wasm_tiny("unreachable", kind=Echo).guest.call("turn", 0, 0)
    assert stopped.value.reason == "trap"


@pytest.mark.parametrize(
    "call",
    [
        "(call $write (i32.const 1) (i32.const -8) (i32.const 1) (i32.const 8))",
        "(call $write (i32.const 1) (i32.const 131068) (i32.const 1) (i32.const 8))",
        "(call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const -1))",
        "(call $random (i32.const 131000) (i32.const 1000))",
        "(call $random (i32.const 0) (i32.const -1))",
        "(call $random (i32.const -1) (i32.const 1))",
        "(call $poll (i32.const 131072) (i32.const 0) (i32.const 1) (i32.const 8))",
        "(call $poll (i32.const 0) (i32.const 131072) (i32.const 1) (i32.const 8))",
    ],
)
def test_a_bad_pointer_is_an_errno(wasm_tiny: Make, call: str) -> None:
    assert wasm_tiny(call, kind=Echo).guest.call("turn", 0, 0) == 21  # EFAULT


@pytest.mark.parametrize(
    "call",
    [
        "(call $write (i32.const 1) (i32.const 0) (i32.const 1025) (i32.const 8))",
        "(call $write (i32.const 1) (i32.const 0) (i32.const -1) (i32.const 8))",
        "(call $poll (i32.const 0) (i32.const 4096) (i32.const 65) (i32.const 8))",
        "(call $poll (i32.const 0) (i32.const 4096) (i32.const 0) (i32.const 8))",
        "(call $poll (i32.const 0) (i32.const 4096) (i32.const -1) (i32.const 8))",
    ],
)
def test_a_count_is_capped_before_it_makes_a_loop(wasm_tiny: Make, call: str) -> None:
    assert wasm_tiny(call, kind=Echo).guest.call("turn", 0, 0) == 28  # EINVAL


def test_one_write_carries_so_much_and_no_more(wasm_tiny: Make) -> None:
    """The same page named a thousand times is a write of 64 MiB from two pages of memory (X9)."""
    got: list[int] = []
    fill = "".join(
        f"(i32.store (i32.const {8 * n}) (i32.const 0)) (i32.store (i32.const {8 * n + 4}) (i32.const 65536))"
        for n in range(1024)
    )
    core = wasm_tiny(
        f"{fill} (call $write (i32.const 1) (i32.const 0) (i32.const 1024) (i32.const 100000))",
        kind=Echo,
        output=lambda _fd, data: got.append(len(data)),
    )
    assert core.guest.call("turn", 0, 0) == 0
    assert got == [16 << 20]
    assert core.guest.memory.read(100000, 4) == struct.pack("<I", 16 << 20)  # a short write, as POSIX has it


def test_growth_past_the_limit_is_refused_and_the_base_stays(wasm_tiny: Make) -> None:
    core = wasm_tiny("(memory.grow (i32.const 8))", kind=Echo)
    base = core.guest.memory.base
    core.guest.limit(6 * 65_536)
    assert core.guest.call("turn", 0, 0) == 0xFFFF_FFFF
    core.guest.limit(16 * 65_536)
    assert core.guest.call("turn", 0, 0) == 2
    assert core.guest.memory.base == base
    assert core.guest.memory.read(9 * 65_536, 4) == bytes(4)  # the new size is seen without being told


def test_a_module_with_an_import_that_nobody_gives_is_not_started(wasm_tiny: Make, tmp_path: Any) -> None:
    with pytest.raises(engine_unsafe.EngineError):
        engine_unsafe.load_module(engine_unsafe.new_engine(), str(tmp_path / "not-there"))
