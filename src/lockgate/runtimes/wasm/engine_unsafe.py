"""The engine: the only file that uses names of wasmtime which are not its public ones.

Rule 1: an engine is made after the fork of a worker, never before: it may start threads.
Rule 2: every number that comes from the guest is masked to its width, and every access to its memory is checked
        against the memory's present size before it is made. A pointer of the guest is a claim.
Rule 3: no exception leaves a host function: it is kept here and the guest is stopped by a trap. Text of the host
        never reaches the guest.
Rule 4: the engine's own WASI is not linked. What the guest imports is in wasi.py.

Private names: `wasmtime._ffi` for the async stack (it must exceed the wasm stack, or making the engine aborts the
process), unchecked calls and host functions (an array of 16-byte slots, read and written in place), and traps.
Sources: wasmtime.h and wasmtime/{config,func,linker,memory,store,trap}.h of the C API.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import wasmtime
from wasmtime import _ffi as _typed

from lockgate.runtimes.wasm import artifacts, guest_abi

ffi: Any = _typed
_pointer: Any = ctypes.POINTER


_I32: Final = 0xFFFFFFFF
_I64: Final = 0xFFFFFFFFFFFFFFFF
_RESERVED: Final = 1 << 32  # the addresses that the engine keeps for one memory of 32 bits
_FAR: Final = 1 << 30  # ticks; nobody gets there


class EngineError(Exception):
    """The engine refused: a module it cannot take, a memory that is too small, a call that cannot be made."""


class OutOfBounds(Exception):
    """The guest named memory that it does not have."""


class Trapped(Exception):
    """The guest was stopped. `reason`: "time" (epoch), "trap" (its own fault); `detail` is for operators only."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def new_engine() -> wasmtime.Engine:
    """Return an engine with this rung's settings."""
    config = wasmtime.Config()
    config.epoch_interruption = True
    ffi.wasmtime_config_async_stack_size_set(config.ptr(), artifacts.ASYNC_STACK)
    config.max_wasm_stack = artifacts.WASM_STACK
    return wasmtime.Engine(config)


def compile_module(engine: wasmtime.Engine, source: Path) -> bytes:
    """Compile a module file and return the machine code as one file's content: minutes and gigabytes.

    Raises:
        EngineError: the engine does not take it.

    """
    try:
        module: Any = wasmtime.Module
        return bytes(module.from_file(engine, str(source)).serialize())
    except wasmtime.WasmtimeError as error:
        raise EngineError(str(error)) from error


def load_module(engine: wasmtime.Engine, compiled: str) -> wasmtime.Module:
    """Map compiled code. The file is trusted as this process's own code is: check its digest and its owner before.

    Raises:
        EngineError: made by another engine, for another machine or with other settings, or no such file.

    """
    try:
        return wasmtime.Module.deserialize_file(engine, compiled)
    except wasmtime.WasmtimeError as error:
        raise EngineError(str(error)) from error


class Memory:
    """The guest's linear memory: checked reads and writes at addresses that the guest names.

    Attributes:
        base: address of byte 0 in this process; it does not move.

    """

    def __init__(self, store: wasmtime.Store, memory: wasmtime.Memory) -> None:
        self._context = store._context()  # noqa: SLF001 - see the module's docstring
        self._raw = ctypes.byref(memory._memory)  # noqa: SLF001 - the same
        self._keep = memory
        self.base: int = ctypes.addressof(memory.data_ptr(store).contents)
        self._view = memoryview((ctypes.c_ubyte * _RESERVED).from_address(self.base)).cast("B")
        self._size = self.size()

    def size(self) -> int:
        """Return the present size in bytes."""
        return int(ffi.wasmtime_memory_data_size(self._context, self._raw))

    def grow(self, size: int) -> None:
        """Grow to at least `size` bytes; the base must stay where it is.

        Raises:
            EngineError: above the store's limit, or the memory moved.

        """
        missing = size - self.size()
        if missing > 0:
            before = ctypes.c_uint64(0)
            error = ffi.wasmtime_memory_grow(
                self._context, self._raw, -(-missing // guest_abi.PAGE), ctypes.byref(before)
            )
            if error:
                ffi.wasmtime_error_delete(error)
                raise EngineError(f"the guest's memory cannot grow to {size} bytes")
        if (
            int(ctypes.cast(ffi.wasmtime_memory_data(self._context, self._raw), ctypes.c_void_p).value or 0)
            != self.base
        ):
            raise EngineError("the guest's memory moved")
        self._size = self.size()

    def check(self, at: int, count: int) -> None:
        """Raise OutOfBounds unless `count` bytes from `at` are the guest's."""
        if at + count > self._size:
            self._size = self.size()  # it may have grown since
            if at + count > self._size:
                raise OutOfBounds

    def read(self, at: int, count: int) -> bytes:
        """Return a copy."""
        self.check(at, count)
        return self._view[at : at + count].tobytes()

    def window(self, at: int, count: int) -> memoryview:
        """Return a view; valid until the guest runs again."""
        self.check(at, count)
        return self._view[at : at + count]

    def write(self, at: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data`."""
        self.check(at, len(data))
        self._view[at : at + len(data)] = data

    def pack(self, form: struct.Struct, at: int, *values: int) -> None:
        """Write numbers in a given layout."""
        self.check(at, form.size)
        form.pack_into(self._view, at, *values)

    def unpack(self, form: struct.Struct, at: int) -> tuple[Any, ...]:
        """Read numbers in a given layout."""
        self.check(at, form.size)
        return form.unpack_from(self._view, at)


Function = Callable[..., int]
_no_finalizer: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Guest:
    """One instance in one store.

    Args:
        engine: made in this process.
        module: compiled by the same engine.
        memory_limit: bytes; growth past it is refused inside (the guest sees MemoryError).

    Attributes:
        memory: set by `instantiate`.
        failure: what a host function raised to stop the guest; it is raised again by `call`.

    """

    memory: Memory

    def __init__(self, engine: wasmtime.Engine, module: wasmtime.Module, memory_limit: int) -> None:
        self.engine = engine
        self._module = module
        self._linker = wasmtime.Linker(engine)
        self._store = wasmtime.Store(engine)
        self.limit(memory_limit)
        self._store.set_epoch_deadline(_FAR)
        self._kept: list[object] = []  # callbacks must live as long as the linker
        self._functions: dict[str, Any] = {}
        self._types: dict[tuple[str, bool], Any] = {}
        self.failure: BaseException | None = None
        self._slots = (ffi.wasmtime_val_raw_t * 4)()

    def limit(self, memory: int) -> None:
        """Refuse growth past `memory` bytes from now on; below the present size it refuses all growth."""
        self._store.set_limits(memory_size=memory, instances=1, memories=1, tables=1)

    def define(self, module: str, name: str, params: str, function: Function, *, result: bool = True) -> None:
        """Give the guest a function: `params` is one letter a parameter, i = u32, I = u64; it returns a u32."""
        kind = self._type(params, result=result)
        callback = ffi.wasmtime_func_unchecked_callback_t(self._callback(params, function, result=result))
        self._kept.append(callback)
        label, where = name.encode(), module.encode()
        error = ffi.wasmtime_linker_define_func_unchecked(
            self._linker.ptr(),
            ctypes.create_string_buffer(where),
            len(where),
            ctypes.create_string_buffer(label),
            len(label),
            kind.ptr(),
            callback,
            None,
            _no_finalizer(),
        )
        if error:
            raise EngineError(str(wasmtime.WasmtimeError._from_ptr(error)))  # noqa: SLF001 - see the module's docstring

    def _type(self, params: str, *, result: bool) -> Any:
        """Return the type of a function; made once for each signature, since each takes a dozen calls."""
        found = self._types.get((params, result))
        if found is None:
            kinds = {"i": wasmtime.ValType.i32, "I": wasmtime.ValType.i64}
            results = [wasmtime.ValType.i32()] if result else []
            found = self._types[params, result] = wasmtime.FuncType([kinds[one]() for one in params], results)
        return found

    def _callback(self, params: str, function: Function, *, result: bool) -> Callable[..., int]:
        count = len(params)
        wide = [one == "I" for one in params]

        def run(_env: object, _caller: object, raw: Any, _count: int) -> int:
            try:
                if self.failure is not None:  # it was told to stop; nothing is done for it any more
                    return _new_trap()
                value = function(*[raw[n].i64 & _I64 if wide[n] else raw[n].i32 & _I32 for n in range(count)])
                if result:
                    raw[0].i32 = value
            except BaseException as error:  # noqa: BLE001 - kept, and raised by call()
                self.failure = error
                return _new_trap()
            return 0

        return run

    def instantiate(self) -> None:
        """Make the instance and look up what the contract names.

        Raises:
            EngineError: an import is missing, or the start function failed.

        """
        try:
            instance = self._linker.instantiate(self._store, self._module)
        except (wasmtime.WasmtimeError, wasmtime.Trap) as error:
            raise EngineError(str(error)) from error
        exports = instance.exports(self._store)
        memory = exports[guest_abi.MEMORY]
        if not isinstance(memory, wasmtime.Memory):
            raise EngineError("the guest exports no memory")
        self.memory = Memory(self._store, memory)
        for name in (guest_abi.TURN, guest_abi.ALLOC):
            function = exports[name]
            if not isinstance(function, wasmtime.Func):
                raise EngineError(f"the guest exports no function {name}")
            self._functions[name] = function

    def call(self, name: str, *args: int) -> int:
        """Call an exported function; returns its u32.

        Raises:
            Trapped: the guest was stopped by the clock or by its own fault.
            BaseException: whatever a host function raised.

        """
        slots = self._slots if name == guest_abi.TURN else (ffi.wasmtime_val_raw_t * 4)()  # alloc runs inside a turn
        for n, value in enumerate(args):
            slots[n].i64 = 0
            slots[n].i32 = ctypes.c_int32(value & _I32).value
        trap: Any = _pointer(ffi.wasm_trap_t)()
        error = ffi.wasmtime_func_call_unchecked(
            self._store._context(),  # noqa: SLF001 - see the module's docstring
            ctypes.byref(self._functions[name]._func),  # noqa: SLF001 - the same
            slots,
            len(slots),
            ctypes.byref(trap),
        )
        failure = self.failure
        if failure is not None:
            _forget(trap, error)
            raise failure
        if trap:
            raise _explain(trap)
        if error:
            text = str(wasmtime.WasmtimeError._from_ptr(error))  # noqa: SLF001 - the same
            raise Trapped("trap", text)
        return int(slots[0].i32) & _I32

    def allocate(self, count: int) -> int:
        """Ask the guest for `count` bytes. The answer is the guest's word: writes to it are checked like any other."""
        return self.call(guest_abi.ALLOC, count)

    def arm(self) -> None:
        """Make the next `strike` stop the guest."""
        self._store.set_epoch_deadline(1)

    def disarm(self) -> None:
        """Put the deadline out of reach of a `strike`."""
        self._store.set_epoch_deadline(_FAR)

    def strike(self) -> None:
        """Stop an armed guest at its next loop or function; from any thread."""
        self.engine.increment_epoch()


def _new_trap() -> int:
    trap = ffi.wasmtime_trap_new(ctypes.create_string_buffer(b"stopped"), 7)
    return int(ctypes.cast(trap, ctypes.c_void_p).value or 0)


def _forget(trap: Any, error: Any) -> None:
    if trap:
        ffi.wasm_trap_delete(trap)
    if error:
        ffi.wasmtime_error_delete(error)


def _explain(trap: Any) -> Trapped:
    made: Any = wasmtime.Trap._from_ptr(trap)  # noqa: SLF001 - see the module's docstring
    code = made.trap_code
    name = "" if code is None else code.name.lower().replace("_", " ")
    detail = name or str(made).rpartition("\n")[2].strip()
    return Trapped("time" if code == wasmtime.TrapCode.INTERRUPT else "trap", detail[:500])
