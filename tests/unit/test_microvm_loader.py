"""One machine in the loader, with sockets in the place of the guest and the VMM: order, frames, deadlines, ends."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockgate.contract.bounds import Bounds
from lockgate.runtimes import dialog
from lockgate.runtimes.ids import number_of
from lockgate.runtimes.microvm import layout
from lockgate.runtimes.microvm.machine import MicrovmMachine
from lockgate.runtimes.microvm.machines import Vm
from lockgate.runtimes.microvm.poll import Poll
from lockgate.runtimes.protocol import (
    MachineEnded,
    MachineEvent,
    MachineFailed,
    MachineReady,
    MachineResult,
    MachineStopped,
)

ACK_LINE = b'R{"filter":1}\n'
RESULT = b'{"value":42,"text":"42","error":null,"exit_code":0,"truncated":{}}'


def frame(kind: str, payload: bytes) -> bytes:
    return layout.FRAME.pack(ord(kind), len(payload)) + payload


def seen(status: int | None = None, **more: object) -> bytes:
    return json.dumps({"status": status, "oom": 0, "refused": 0, "full": False, **more}).encode()


def alive(world: World) -> bool:
    """Whether the VMM is there: the loader reaps it, so its pid is nobody's once it is gone."""
    return os.path.exists(f"/proc/{world.process.pid}")


class FakeMonitor:
    """A VMM that is loaded at its first word."""

    loaded = saved = False

    def feed(self, data: bytes) -> bytes:
        self.loaded = data == b"loaded"
        return b""

    def resume(self) -> bytes:
        return b"cont"


class World:
    """A `Vm`, the machine as the supervisor sees it, the guest's end of its port and the VMM's of its monitor."""

    def __init__(self, lease_seconds: float = 30.0) -> None:
        self.process = subprocess.Popen(["sleep", "600"])
        self.poll = Poll()
        self.machine = MicrovmMachine(Bounds())
        _channel, control, out, err = self.machine.slot_descriptors()
        guest, self.guest = socket.socketpair()
        wire, self.wire = socket.socketpair()
        words, self.words = os.pipe()
        self.gone: list[Vm] = []
        self.vm = Vm(
            self.poll, pid=self.process.pid, pidfd=os.pidfd_open(self.process.pid), number=0, monitor=FakeMonitor(),
            wire=wire, guest=guest, words=words, control=socket.socket(fileno=os.dup(control)), out=os.dup(out),
            err=os.dup(err), lease_seconds=lease_seconds, facts={}, gone=self.gone.append,
        )  # fmt: skip
        self.machine.forget_slot_descriptors()
        self.machine.spawned(os.pidfd_open(self.process.pid))
        self.guest.setblocking(False)
        self.events: list[MachineEvent] = []
        self.output = b""

    def until(self, condition: Callable[[], object], seconds: float = 20.0) -> None:
        """Turn the loader and read as a supervisor does, until `condition` holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (self.vm.state, self.events)
            self.poll.turn(0.01)
            self.events += self.machine.on_control()
            with contextlib.suppress(BlockingIOError):
                self.output += os.read(self.machine.stdout, 1 << 20)

    def of(self, kind: type) -> list[MachineEvent]:
        return [one for one in self.events if isinstance(one, kind)]

    def load(self) -> World:
        self.wire.send(b"loaded")
        self.until(lambda: self.of(MachineReady))
        return self

    def lease(self, code: bytes = b"1") -> bytes:
        """Stage code; return what the guest got."""
        self.machine.stage_code(code, Bounds())
        self.until(lambda: self.vm.state == "leasing")
        return self.guest.recv(1 << 16)

    def run(self) -> World:
        """Loaded, leased, acknowledged, code sent."""
        self.load().lease()
        self.guest.send(frame("c", ACK_LINE))
        self.until(lambda: self.vm.state == "running")
        self.machine.go()
        return self

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.machine.close()
        if self.vm.state != "closed":
            self.vm._dead = True
            self.vm.close()
        for one in (self.guest, self.wire):
            one.close()
        os.close(self.words)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_no_code_goes_to_a_guest_before_its_handshake(world: World) -> None:
    """X10: the lease brings entropy, the clock and the bounds; the code waits for the answer."""
    got = world.load().lease(b"print(1)")
    magic, now, length, entropy = layout.LEASE.unpack_from(got)
    assert magic == layout.LEASE_MAGIC
    assert abs(now / 1e9 - time.time()) < 60
    assert len(entropy) == 64
    assert len(set(entropy)) > 20
    bounds = json.loads(got[layout.LEASE.size :])
    assert len(got) == layout.LEASE.size + length
    assert bounds["memory"] == Bounds().memory
    assert world.wire.recv(100) == b"cont"
    world.machine.go()
    world.until(lambda: True)
    for _ in range(20):
        world.poll.turn(0.001)
    with pytest.raises(BlockingIOError):
        world.guest.recv(1)
    world.guest.send(frame("c", ACK_LINE))
    world.until(lambda: world.vm.state == "running")
    header = dialog.CODE_HEADER.pack(dialog.CODE_MAGIC, 8, Bounds().value)
    assert world.guest.recv(1 << 16) == header + b"print(1)" + dialog.GO


def test_a_result_does_not_overtake_the_output_before_it(world: World) -> None:
    """X9: however full the pipe is, and however slow its reader."""
    world.run()
    flood = b"x" * 60_000
    sent = frame("o", flood) * 8 + frame("s", seen()) + frame("c", struct.pack(">I", len(RESULT)) + RESULT)
    total = len(sent)
    world.guest.setblocking(False)
    while sent:
        with contextlib.suppress(BlockingIOError):
            sent = sent[world.guest.send(sent[:30_000]) :]
        for _ in range(4):
            world.poll.turn(0.0)
        if len(world.output) < 4 * len(flood):  # the pipe has been full since long: nothing came past it
            assert not world.machine.on_control()
        if len(sent) < total - 200_000 or not sent:
            world.output += os.read(world.machine.stdout, 1 << 14)
    world.until(lambda: world.of(MachineResult))
    world.until(lambda: len(world.output) == 8 * len(flood))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (frame("s", seen(9)), MachineEnded(status=9)),
        (frame("s", seen(9, oom=1)), MachineStopped(by="memory")),
        (frame("s", seen(0x137F)), "protocol"),  # stopped: no end
        (frame("s", b"{}"), "protocol"),
        (frame("s", b'{"status": null}\n{"status": 9}'), "protocol"),
        (frame("s", seen() + b"x"), "protocol"),
        (frame("c", struct.pack(">I", 1 << 29)), "protocol"),
    ],
)
def test_what_the_agent_saw_becomes_an_end(world: World, said: bytes, expected: object) -> None:
    world.run().guest.send(said)
    world.until(lambda: len(world.events) > 1)
    event = world.events[-1]
    assert event == expected or (isinstance(event, MachineFailed) and event.step == expected)


def test_a_bound_that_pressed_comes_with_the_result(world: World) -> None:
    world.run()
    world.guest.send(frame("s", seen(full=True, refused=3)) + frame("c", struct.pack(">I", len(RESULT)) + RESULT))
    world.until(lambda: world.of(MachineResult))
    (result,) = world.of(MachineResult)
    assert isinstance(result, MachineResult)
    assert result.pressed == ("processes", "disk")


@pytest.mark.parametrize(
    "said",
    [
        b"\xff" * 64,
        b"q" + struct.pack(">I", 4) + b"xxxx",
        b"o" + struct.pack(">I", 0),
        b"o" + struct.pack(">I", layout.FRAME_BYTES + 1),
        b"F" + b"x" * 100,  # what only a guest without a lease may say
        frame("c", b"A{}\n"),  # what only the loader may say
        frame("c", b'S{"status":null}\n'),
    ],
)
def test_a_guest_that_breaks_the_frames_is_killed(world: World, said: bytes) -> None:
    """X9: length and kind are checked before a payload is kept."""
    world.run().guest.send(said)
    world.until(lambda: world.gone, 30)
    assert not alive(world)
    assert len(world.vm._from_guest) <= 64 * 1024 + 200
    assert world.of(MachineFailed)
    assert not world.of(MachineResult)


@pytest.mark.parametrize(
    ("said", "step"),
    [
        (b'F{"step":"clock","errno":1,"detail":"no"}\n', "lease"),
        (frame("c", b'F{"step":"worker","errno":1,"detail":"no"}\n'), "lease"),
        (frame("c", b"hello\n"), "lease"),
        (frame("c", ACK_LINE + b"more"), "lease"),
        (frame("o", b"x"), "lease"),
        (frame("c", b"R" + b"x" * 5000), "lease"),
    ],
)
def test_a_handshake_that_fails_is_no_run(world: World, said: bytes, step: str) -> None:
    """X3, X10: typed, and nothing of the code was sent."""
    world.load().lease()
    world.guest.send(said)
    world.until(lambda: world.of(MachineFailed))
    (failed,) = world.of(MachineFailed)
    assert isinstance(failed, MachineFailed)
    assert failed.step == step
    with contextlib.suppress(BlockingIOError, ConnectionResetError):
        assert world.guest.recv(1) == b""


def test_a_guest_that_does_not_answer_is_killed() -> None:
    """X5, X10: the deadline is armed before the machine is resumed."""
    world = World(lease_seconds=0.05)
    try:
        world.load().lease()
        assert world.vm.deadline is not None
        time.sleep(0.06)
        assert world.vm.deadline < time.monotonic()
        world.vm.late()
        world.until(lambda: world.gone)
        (failed,) = world.of(MachineFailed)
        assert isinstance(failed, MachineFailed)
        assert "handshake" in failed.detail
    finally:
        world.close()


def test_a_guest_that_speaks_before_its_lease_is_killed(world: World) -> None:
    world.load().guest.send(b"o")
    world.until(lambda: world.gone)
    assert not alive(world)


def test_a_vmm_that_dies_gives_its_last_words(world: World) -> None:
    os.write(world.words, b"first\nqemu: out of luck\n")
    world.process.kill()
    world.until(lambda: world.of(MachineFailed))
    (failed,) = world.of(MachineFailed)
    assert isinstance(failed, MachineFailed)
    assert failed.step == "vmm"
    assert failed.detail.endswith("qemu: out of luck")


def test_a_result_before_the_end_still_counts(world: World) -> None:
    """The VMM's death and the guest's last frames may be seen in either order."""
    world.run().guest.send(frame("s", seen()) + frame("c", struct.pack(">I", len(RESULT)) + RESULT))
    world.process.kill()
    world.until(lambda: world.of(MachineResult))
    world.until(lambda: world.gone)


def test_a_machine_that_nobody_wants_is_killed(world: World) -> None:
    """X10: closed by the supervisor, whatever state it is in; every descriptor goes."""
    before = len(os.listdir("/proc/self/fd"))
    one = World()
    one.load()
    one.machine.close()
    deadline = time.monotonic() + 20
    while not one.gone:
        assert time.monotonic() < deadline
        one.poll.turn(0.01)
    one.close()
    one.poll._epoll.close()
    assert len(os.listdir("/proc/self/fd")) <= before


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=6))
def test_any_bytes_of_a_guest_end_in_an_answer_or_wait_for_more(pieces: list[bytes]) -> None:
    """Hostile bytes after the handshake never raise in the loader and never become a result that no runner sent."""
    world = World()
    try:
        world.run()
        for piece in pieces:
            try:
                world.guest.send(piece)
            except (BrokenPipeError, ConnectionResetError):
                break
            for _ in range(3):
                world.poll.turn(0.0)
                world.events += world.machine.on_control()
        assert not world.of(MachineResult)
    finally:
        world.close()
        world.poll._epoll.close()


def test_ids_are_not_given_twice() -> None:
    assert number_of(set(), -1, 3) == 0
    assert number_of({1, 2}, 0, 3) == 0
    assert number_of({0, 1}, 1, 3) == 2
    with pytest.raises(OSError, match="every id"):
        number_of({0, 1, 2}, 0, 3)
