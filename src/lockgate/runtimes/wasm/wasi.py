"""WASI preview 1 for one guest, all of it ours: the guest's only world is what stands here.

Rule 1: no function touches the host but through what the constructor was given: a tree in memory, two writers, a
        clock, randomness. There is no descriptor, path, name or address of the host to ask for.
Rule 2: counts that come from the guest are capped before a loop or a buffer is made from them; reads and writes of
        its memory are checked (`engine_unsafe.Memory`), and a pointer that is not its own gives EFAULT.
Rule 3: nothing here waits, except a sleep, which ends at the run's deadline.

Layouts (bytes): subscription 48, event 32, as in the witx. Descriptors are in wasi_files.py, paths in wasi_paths.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from lockgate.runtimes.wasm import guest_abi
from lockgate.runtimes.wasm.memfs import Tree
from lockgate.runtimes.wasm.wasi_errno import Errno, Refused
from lockgate.runtimes.wasm.wasi_files import IO_BYTES, U32, U64
from lockgate.runtimes.wasm.wasi_paths import Paths

_SUBSCRIPTION: Final = struct.Struct("<QBxxxxxxxIxxxxQQHxxxxxx")
_EVENT: Final = struct.Struct("<QHBxxxxxQHxxxxxx")
_EVENTS: Final = 64


class Exit(Exception):
    """The guest asked for its own end."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Wasi(Paths):
    """The world of one guest.

    Args:
        tree: the files it sees.
        environment: NAME -> value.
        output: takes the bytes that were written to descriptor 1 or 2.
        clock: clock id (0 real, 1 monotonic, 2 and 3 CPU) -> nanoseconds.
        entropy: n -> n random bytes.
        sleep: waits for so many nanoseconds, or raises when the run is over before.

    """

    def __init__(
        self,
        tree: Tree,
        environment: dict[str, str],
        *,
        output: Callable[[int, bytes], None],
        clock: Callable[[int], int],
        entropy: Callable[[int], bytes],
        sleep: Callable[[int], None],
    ) -> None:
        super().__init__(tree, output)
        self._environment = [f"{name}={value}".encode() + b"\0" for name, value in environment.items()]
        self._clock = clock
        self._entropy = entropy
        self._sleep = sleep

    def functions(self) -> dict[str, Callable[..., int]]:
        """Return every function of the contract, guarded: a refusal or a bad pointer becomes an errno."""
        from lockgate.runtimes.wasm.engine_unsafe import OutOfBounds  # noqa: PLC0415 - the tree is usable without an engine

        def guard(function: Callable[..., int]) -> Callable[..., int]:
            def call(*args: int) -> int:
                try:
                    return function(*args) or 0
                except Refused as refused:
                    return refused.errno.value
                except OutOfBounds:
                    return Errno.FAULT.value

            return call

        return {name: guard(getattr(self, name)) for name in guest_abi.FUNCTIONS}

    # ---- arguments, environment, clock, randomness -----------------------------------------------------------------
    def args_sizes_get(self, count: int, size: int) -> int:
        """One argument: the program's name."""
        self.memory.pack(U32, count, 1)
        self.memory.pack(U32, size, len(b"python\0"))
        return 0

    def args_get(self, pointers: int, buffer: int) -> int:
        """The same."""
        self.memory.write(buffer, b"python\0")
        self.memory.pack(U32, pointers, buffer)
        return 0

    def environ_sizes_get(self, count: int, size: int) -> int:
        """The run's environment, which is ours."""
        self.memory.pack(U32, count, len(self._environment))
        self.memory.pack(U32, size, sum(map(len, self._environment)))
        return 0

    def environ_get(self, pointers: int, buffer: int) -> int:
        """The same."""
        for n, one in enumerate(self._environment):
            self.memory.write(buffer, one)
            self.memory.pack(U32, pointers + 4 * n, buffer)
            buffer += len(one)
        return 0

    def clock_res_get(self, clock: int, result: int) -> int:
        """Resolution, ns."""
        if clock > 3:
            return Errno.INVAL
        self.memory.pack(U64, result, 1)
        return 0

    def clock_time_get(self, clock: int, _precision: int, result: int) -> int:
        """Time, ns."""
        if clock > 3:
            return Errno.INVAL
        self.memory.pack(U64, result, self._clock(clock))
        return 0

    def random_get(self, buffer: int, count: int) -> int:
        """Random bytes of the host."""
        window = self.memory.window(buffer, count)
        for start in range(0, count, IO_BYTES):
            part = window[start : start + IO_BYTES]
            part[:] = self._entropy(len(part))
        return 0

    def sched_yield(self) -> int:
        """There is nobody to yield to."""
        return 0

    def proc_exit(self, code: int) -> int:
        """End."""
        raise Exit(code)

    def poll_oneoff(self, subscriptions: int, events: int, count: int, stored: int) -> int:
        """Sleep until the first clock; descriptors are always ready, and there is nothing else to wait for."""
        if not 0 < count <= _EVENTS:
            return Errno.INVAL
        self.memory.check(events, count * _EVENT.size)
        ready: list[tuple[int, int]] = []
        clocks: list[tuple[int, int]] = []
        for n in range(count):
            user, kind, clock, timeout, _, flags = self.memory.unpack(
                _SUBSCRIPTION, subscriptions + n * _SUBSCRIPTION.size
            )
            if kind == 0:
                if clock > 3:
                    return Errno.INVAL
                clocks.append((max(timeout - self._clock(clock), 0) if flags & 1 else timeout, user))
            elif kind in {1, 2}:
                ready.append((user, kind))
            else:
                return Errno.INVAL
        if not ready:
            wait, user = min(clocks)
            self._sleep(wait)
            ready = [(user, 0)]
        for n, (user, kind) in enumerate(ready):
            self.memory.pack(_EVENT, events + n * _EVENT.size, user, 0, kind, 0, 0)
        self.memory.pack(U32, stored, len(ready))
        return 0
