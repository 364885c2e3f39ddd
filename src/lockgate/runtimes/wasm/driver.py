"""One guest, one run: the instance, the door that its code speaks through, its end.

Rule 1: one instance serves one run. After `run`, and after anything that stopped it, it is good for nothing.
Rule 2: what comes through the door is hostile: its length is held to a cap before a byte is read, its kind must be
        one of four, in an order that makes sense. Anything else is `GuestBroke`.
Rule 3: the soft stop is a courtesy. The bound is the supervisor's SIGKILL.
Rule 4: nothing here knows which build of CPython it drives: names of the guest stand in guest_abi.py.

Door, guest to host: one kind byte and a body. "S": give the run's source; the reply is the value's cap (u32, big
endian) and the source. "G": wait until the run may begin. "Q": one request to the broker; the reply is its answer.
"R": the run's result; nothing of the guest runs after it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from lockgate.contract.bounds import FRAME_BYTES
from lockgate.runtimes.wasm import guest_abi, image_unsafe
from lockgate.runtimes.wasm.engine_unsafe import EngineError, Guest, OutOfBounds, Trapped, load_module, new_engine
from lockgate.runtimes.wasm.memfs import Tree
from lockgate.runtimes.wasm.nodes import Quota
from lockgate.runtimes.wasm.wasi import Exit, Wasi

RUN_DIR: Final = "/run"
STDLIB_PATH: Final = "/usr/local/lib/python315.zip"
ENVIRONMENT: Final = {"HOME": RUN_DIR, "TMPDIR": RUN_DIR}
MODULE: Final = "_lockgate"  # the name in the guest of guest/wasm/rung.py
_PREPARE: Final = f"__import__({MODULE!r}).prepare()".encode()
_SERVE: Final = f"__import__({MODULE!r}).serve()".encode()
_CAP: Final = struct.Struct(">I")
_U32: Final = struct.Struct("<I")
_OK, _REFUSED, _FAILED = 0, 0xFFFFFFFF, 0xFFFFFFFE  # -1: nobody there; -2: it failed
_RESULT_SLACK: Final = 256 * 1024  # error, names, punctuation; the supervisor holds each of them to its own cap
_ESCAPED: Final = 6  # a control character takes six bytes in JSON
# A buffered file of CPython 3.14 and later takes so much before it writes: what code believes to have written stays
# within the disk bound too.
_UNWRITTEN: Final = 128 * 1024
_REQUEST, _SOURCE, _GO, _RESULT = b"Q", b"S", b"G", b"R"
_NS: Final = 1_000_000_000

Stopped = Literal["time", "exit", "trap"]


class GuestBroke(Exception):
    """The guest broke the door's protocol: hostile until shown otherwise. The text is for operators."""


class Closed(Exception):
    """`relay` raises it when there is no broker any more; the guest sees a ConnectionError."""


class _Over(Exception):
    """The run gave its result."""


@dataclass(frozen=True)
class Limits:
    """Bounds that are held inside: linear memory in bytes (image included), bytes and inodes of the directory."""

    memory: int
    disk: int
    inodes: int


@dataclass(frozen=True)
class Finished:
    """How a run ended.

    Attributes:
        result: the body of the result frame, as the code claims it; None when it gave none.
        stopped: None, or what ended it before a result: "time" the soft stop, "exit" its own wish, "trap" its fault.
        exit_code: of "exit".
        detail: of "trap"; for operators, never for the run.

    """

    result: bytes | None
    stopped: Stopped | None = None
    exit_code: int = 0
    detail: str = ""


class Alarm:
    """A thread that strikes once, at a time given later; made before the filter that refuses threads."""

    def __init__(self, strike: Callable[[], None]) -> None:
        self._strike = strike
        self._changed = threading.Condition()
        self._at: float | None = None
        threading.Thread(target=self._wait, name="alarm", daemon=True).start()

    def set(self, at: float | None) -> None:
        """Strike at `at` (monotonic seconds), or not at all."""
        with self._changed:
            self._at = at
            self._changed.notify()

    def _wait(self) -> None:
        with self._changed:
            while True:
                left = None if self._at is None else self._at - time.monotonic()
                if left is not None and left <= 0:
                    self._at = None
                    self._strike()
                    continue
                self._changed.wait(left)


def _room(limits: Limits) -> tuple[int, int]:
    return limits.disk - min(_UNWRITTEN, limits.disk // 8), limits.inodes


class Core:
    """A guest with its world, before anything ran in it; `Instance` and the image's maker stand on it.

    Args:
        cwasm: path of the compiled module; checked by the caller.
        stdlib: descriptor of the standard library's archive; it is mapped, and may be closed after.
        limits: see `Limits`.
        output: takes bytes written to descriptor 1 or 2.
        clock: see wasi.py. entropy: the same.

    Raises:
        EngineError: the engine cannot load or start the guest.

    """

    def __init__(
        self,
        cwasm: str,
        stdlib: int,
        limits: Limits,
        *,
        output: Callable[[int, bytes], None],
        clock: Callable[[int], int],
        entropy: Callable[[int], bytes],
    ) -> None:
        self.deadline: float | None = None
        engine = new_engine()
        self.guest = Guest(engine, load_module(engine, cwasm), limits.memory)
        tree = Tree(lambda: clock(0))
        self._archive = mmap.mmap(stdlib, 0, access=mmap.ACCESS_READ)
        tree.place_file(STDLIB_PATH, memoryview(self._archive))
        self._quota = Quota(*_room(limits))
        tree.place(RUN_DIR, self._quota)
        self.wasi = Wasi(tree, ENVIRONMENT, output=output, clock=clock, entropy=entropy, sleep=self._sleep)
        for name, function in self.wasi.functions().items():
            result = name not in guest_abi.NO_RESULT
            self.guest.define(guest_abi.WASI, name, guest_abi.FUNCTIONS[name], function, result=result)
        self.guest.define(*guest_abi.DOOR, guest_abi.DOOR_PARAMS, self._door)
        self.guest.instantiate()
        self.wasi.memory = self.guest.memory

    def limit(self, limits: Limits) -> None:
        """Hold the guest to other limits from now on: a run's own are known when it comes."""
        self.guest.limit(limits.memory)
        self._quota.disk = limits.disk - min(_UNWRITTEN, limits.disk // 8)
        self._quota.inodes = limits.inodes

    def turn(self, code: bytes) -> int:
        """Let the guest execute `code` in its __main__; returns 0, 1 after an exception, n after sys.exit(n).

        Raises:
            Trapped, Exit: it was stopped.

        """
        at = self.guest.allocate(len(code))
        try:
            self.guest.memory.write(at, code)
        except OutOfBounds:
            raise EngineError("the guest has no room for its own code") from None
        return self.guest.call(guest_abi.TURN, at, len(code))

    def _sleep(self, nanoseconds: int) -> None:
        until = time.monotonic() + nanoseconds / _NS
        if self.deadline is not None and until >= self.deadline:
            time.sleep(max(self.deadline - time.monotonic(), 0))
            raise Trapped("time", "asleep")
        time.sleep(max(min(until - time.monotonic(), threading.TIMEOUT_MAX), 0))

    # ---- the door ----------------------------------------------------------------------------------------------------
    def _door(self, pointer: int, length: int, reply_pointer: int, reply_length: int) -> int:
        memory = self.guest.memory
        memory.check(reply_pointer, 4)
        memory.check(reply_length, 4)
        if length < 1:
            raise GuestBroke("a message without a kind")
        kind = memory.read(pointer, 1)
        cap = self.cap(kind)
        if length - 1 > cap:
            raise GuestBroke(f"a message of {length - 1} bytes of kind {kind!r}, above {cap}")
        try:
            reply = self.answer(kind, memory.read(pointer + 1, length - 1))
        except Closed:
            return _REFUSED
        at = self.guest.allocate(len(reply)) if reply else 0
        if reply and not at:
            return _FAILED  # no room in the guest
        memory.write(at, reply)
        memory.pack(_U32, reply_pointer, at)
        memory.pack(_U32, reply_length, len(reply))
        return _OK

    def cap(self, kind: bytes) -> int:
        """Return how long a body of this kind may be."""
        raise GuestBroke(f"a message of kind {kind!r} before there is a run")

    def answer(self, kind: bytes, body: bytes) -> bytes:
        """Return the reply."""
        raise GuestBroke(f"a message of kind {kind!r} and {len(body)} bytes before there is a run")


def _go_on() -> None:
    """Wait for nothing."""


def real_clock() -> Callable[[int], int]:
    """Return the host's clocks under their WASI numbers, in nanoseconds.

    CPU time is this process's; the monotonic clock begins now, since the host's begins with the host.
    """
    began = time.monotonic_ns()
    clocks = (time.time_ns, lambda: time.monotonic_ns() - began, time.process_time_ns, time.thread_time_ns)
    return lambda number: clocks[number]()


class Instance(Core):
    """A guest restored from an image, for one run.

    Args:
        cwasm, stdlib, limits, output: as in `Core`.
        image: a sealed memfd (image_unsafe.seal).
        relay: gives one request body to the broker and returns the body of its answer; raises `Closed` when there
            is no broker. Called in the thread of `run`.

    """

    def __init__(
        self,
        cwasm: str,
        stdlib: int,
        image: int,
        limits: Limits,
        *,
        output: Callable[[int, bytes], None],
        relay: Callable[[bytes], bytes],
    ) -> None:
        super().__init__(cwasm, stdlib, limits, output=output, clock=real_clock(), entropy=os.urandom)
        image_unsafe.restore(self.guest.memory, image)
        self._alarm: Alarm | None = None
        self._relay = relay
        self._state: Literal["new", "ready", "source", "staged", "running", "over"] = "new"
        self._source = b""
        self._value_cap = 0
        self._wait: Callable[[], None] = _go_on
        self._result: bytes | None = None

    def prepare(self) -> None:
        """Reseed, rehearse, make a fresh __main__: our own code, before any of the run's is known.

        Raises:
            EngineError: the guest failed at it.

        """
        self._alarm = Alarm(self.guest.strike)  # here, so that whoever gives up rights before has given up its too
        try:
            code = self.turn(_PREPARE)
        except (Trapped, Exit, GuestBroke, OutOfBounds) as error:
            raise EngineError(f"the guest could not be prepared: {error!r}") from error
        if code:
            raise EngineError(f"the guest could not be prepared (it said {code})")
        self._state = "ready"

    def run(self, source: bytes, cap: int, wait: Callable[[], None], seconds: float | None = None) -> Finished:
        """Compile `source`, wait for the word, run it.

        Args:
            source: UTF-8.
            cap: bytes of the value's JSON, and of its text.
            wait: returns when the run may begin; what it raises leaves this method.
            seconds: until the soft stop, from now; None = none.

        Raises:
            GuestBroke: the guest broke the door's protocol.

        """
        if self._state != "ready":
            raise ValueError(f"an instance runs once, after prepare(); this one is {self._state}")
        self._state = "source"
        self._source, self._value_cap, self._wait = source, cap, wait
        if seconds is not None:
            self.deadline = time.monotonic() + seconds
            self.guest.arm()
            if self._alarm is not None:
                self._alarm.set(self.deadline)
        try:
            code = self.turn(_SERVE)
        except _Over:
            return Finished(result=self._result)
        except Exit as error:
            return Finished(result=None, stopped="exit", exit_code=error.code & 0xFF)
        except Trapped as error:
            reason: Stopped = "time" if error.reason == "time" else "trap"
            return Finished(result=None, stopped=reason, detail=error.detail)
        except OutOfBounds:
            raise GuestBroke("a message lies outside the guest's memory") from None
        finally:
            self._state = "over"
            if self._alarm is not None:
                self._alarm.set(None)
        return Finished(result=None, stopped="exit", exit_code=code & 0xFF)

    def cap(self, kind: bytes) -> int:
        """Return how long a body of this kind may be."""
        if kind == _REQUEST:
            return FRAME_BYTES
        if kind == _RESULT:
            return self._value_cap * (1 + _ESCAPED) + _RESULT_SLACK
        return 0

    def answer(self, kind: bytes, body: bytes) -> bytes:
        """Return the reply; raises GuestBroke for a message out of order."""
        if kind == _SOURCE and self._state == "source":
            self._state = "staged"
            source, self._source = self._source, b""
            return _CAP.pack(self._value_cap) + source
        if kind == _GO and self._state == "staged":
            self._wait()
            self._state = "running"
            return b""
        if kind == _REQUEST and self._state == "running" and body:
            return self._relay(body)
        if kind == _RESULT and self._state == "running":
            self._result = body
            raise _Over
        raise GuestBroke(f"a message of kind {kind!r} while {self._state}")

    def close(self) -> None:
        """Forget the archive; the rest goes with the process."""
        with contextlib.suppress(BufferError):
            self._archive.close()
