"""What a guest must export and may import; another build of CPython that keeps to this can take its place.

Rule 1: names of the guest stand here and nowhere else.
Rule 2: a module whose contract differs by one name is refused: an import that is not listed is a door nobody watches.
Rule 3: exactly one memory that is not shared, one table that cannot grow, and at most one global that can change.
        Then the linear memory is the whole state between two calls, which is what an image saves.

Sources: WebAssembly core specification, chapter "Binary Format"; WASI preview 1 (witx of wasi_snapshot_preview1).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

MEMORY: Final = "memory"
TURN: Final = "turn"  # (pointer, length) -> 0, 1 after an uncaught exception, n after sys.exit(n)
ALLOC: Final = "host_alloc"  # (length) -> pointer, 0 when there is no room
EXPORTS: Final = frozenset({MEMORY, "run", TURN, "shutdown", ALLOC})

PAGE: Final = 65_536
WASI: Final = "wasi_snapshot_preview1"
DOOR: Final = ("host", "call")  # (pointer, length, where the reply's pointer goes, where its length goes) -> errno
DOOR_PARAMS: Final = "iiii"

# Parameters of each WASI function: i = i32, I = i64. All give one i32 (the errno), but proc_exit.
FUNCTIONS: Final[dict[str, str]] = {
    "args_get": "ii",
    "args_sizes_get": "ii",
    "clock_res_get": "ii",
    "clock_time_get": "iIi",
    "environ_get": "ii",
    "environ_sizes_get": "ii",
    "fd_advise": "iIIi",
    "fd_close": "i",
    "fd_datasync": "i",
    "fd_fdstat_get": "ii",
    "fd_fdstat_set_flags": "ii",
    "fd_filestat_get": "ii",
    "fd_filestat_set_size": "iI",
    "fd_filestat_set_times": "iIIi",
    "fd_pread": "iiiIi",
    "fd_prestat_dir_name": "iii",
    "fd_prestat_get": "ii",
    "fd_pwrite": "iiiIi",
    "fd_read": "iiii",
    "fd_readdir": "iiiIi",
    "fd_seek": "iIii",
    "fd_sync": "i",
    "fd_tell": "ii",
    "fd_write": "iiii",
    "path_create_directory": "iii",
    "path_filestat_get": "iiiii",
    "path_filestat_set_times": "iiiiIIi",
    "path_link": "iiiiiii",
    "path_open": "iiiiiIIii",
    "path_readlink": "iiiiii",
    "path_remove_directory": "iii",
    "path_rename": "iiiiii",
    "path_symlink": "iiiii",
    "path_unlink_file": "iii",
    "poll_oneoff": "iiii",
    "proc_exit": "i",
    "random_get": "ii",
    "sched_yield": "",
    "sock_accept": "iii",
    "sock_recv": "iiiiii",
    "sock_send": "iiiii",
    "sock_shutdown": "ii",
}
NO_RESULT: Final = frozenset({"proc_exit"})

_TYPES: Final = {0x7F: "i", 0x7E: "I", 0x7D: "f", 0x7C: "F"}
_IMPORTS_MAX: Final = 4096
_TYPE, _IMPORT, _TABLE, _MEMORY, _GLOBAL, _EXPORT = 1, 2, 4, 5, 6, 7
_KINDS: Final = {0: "function", 1: "table", 2: "memory", 3: "global", 4: "tag"}


class NotTheContract(ValueError):
    """The module is no guest of ours; the text says what differs."""


@dataclass(frozen=True)
class Shape:
    """What the sections of a module say of its state: pages at the start, and how many globals can change."""

    pages: int
    table: int
    mutable_globals: int


def _none() -> _Reader:
    """A section that is not there holds nothing."""
    return _Reader(memoryview(b"\0"))


class _Reader:
    """Reads the binary format's numbers; every read is checked against the end."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0

    def byte(self) -> int:
        if self.at >= len(self.data):
            raise NotTheContract("a section ends in the middle of a number")
        self.at += 1
        return self.data[self.at - 1]

    def u32(self) -> int:
        value = shift = 0
        while True:
            one = self.byte()
            value |= (one & 0x7F) << shift
            shift += 7
            if not one & 0x80:
                return value
            if shift > 63:
                raise NotTheContract("a number of the module has no end")

    def take(self, count: int) -> memoryview:
        if count > len(self.data) - self.at:
            raise NotTheContract("a section is longer than the module")
        self.at += count
        return self.data[self.at - count : self.at]

    def name(self) -> str:
        return bytes(self.take(self.u32())).decode("utf-8", "replace")

    def limits(self) -> tuple[int, int | None, int]:
        flags = self.byte()
        low = self.u32()
        return low, (self.u32() if flags & 1 else None), flags


def check(path: Path) -> Shape:
    """Hold a module file to the contract.

    Raises:
        NotTheContract: an import or export too many or too few, a shared or second memory, a table that can grow,
            more than one global that can change, or no module at all.

    """
    found = _sections(memoryview(path.read_bytes()))
    _check_imports(_imports(found.get(_IMPORT, _none()), _types(found.get(_TYPE, _none()))))
    exports = _exports(found.get(_EXPORT, _none()))
    if exports != EXPORTS:
        raise NotTheContract(f"exports differ: {sorted(exports ^ EXPORTS)}")
    table = _one(found.get(_TABLE, _none()), "table")
    table.byte()  # element type
    low, high, _ = table.limits()
    if high != low:
        raise NotTheContract("the table can grow, so memory is not the whole state")
    pages, _, flags = _one(found.get(_MEMORY, _none()), "memory").limits()
    if flags & ~1:
        raise NotTheContract("the memory is shared or has 64-bit addresses")
    mutable = _mutable_globals(found.get(_GLOBAL, _none()))
    if mutable > 1:
        raise NotTheContract(f"{mutable} globals can change; one, the stack pointer, may")
    return Shape(pages=pages, table=low, mutable_globals=mutable)


def _sections(data: memoryview) -> dict[int, _Reader]:
    if bytes(data[:8]) != b"\0asm\1\0\0\0":
        raise NotTheContract("no WebAssembly module of version 1")
    reader = _Reader(data)
    reader.at = 8
    found: dict[int, _Reader] = {}
    while reader.at < len(data):
        kind = reader.byte()
        body = reader.take(reader.u32())
        if kind != 0:  # custom sections may repeat and mean nothing here
            if kind in found:
                raise NotTheContract(f"section {kind} stands twice")
            found[kind] = _Reader(body)
    return found


def _types(section: _Reader) -> list[tuple[str, str]]:
    types: list[tuple[str, str]] = []
    for _ in range(section.u32()):
        if section.byte() != 0x60:
            raise NotTheContract("a type is no plain function type")
        params = "".join(_TYPES.get(one, "?") for one in bytes(section.take(section.u32())))
        results = "".join(_TYPES.get(one, "?") for one in bytes(section.take(section.u32())))
        types.append((params, results))
    return types


def _imports(section: _Reader, types: list[tuple[str, str]]) -> dict[tuple[str, str], tuple[str, str]]:
    found: dict[tuple[str, str], tuple[str, str]] = {}
    count = section.u32()
    if count > _IMPORTS_MAX:
        raise NotTheContract(f"{count} imports")
    for _ in range(count):
        key = section.name(), section.name()
        kind = section.byte()
        if kind != 0:
            raise NotTheContract(f"{'.'.join(key)} is an imported {_KINDS.get(kind, 'thing')}, not a function")
        index = section.u32()
        if index >= len(types):
            raise NotTheContract(f"{'.'.join(key)} has no type")
        if key in found:
            raise NotTheContract(f"{'.'.join(key)} is imported twice")
        found[key] = types[index]
    return found


def _check_imports(found: dict[tuple[str, str], tuple[str, str]]) -> None:
    want = {(WASI, name): (params, "" if name in NO_RESULT else "i") for name, params in FUNCTIONS.items()}
    want[DOOR] = (DOOR_PARAMS, "i")
    if differs := [".".join(key) for key in found if key not in want]:
        raise NotTheContract(f"imports what this rung does not give: {sorted(differs)}")
    if DOOR not in found:
        raise NotTheContract(f"does not import {'.'.join(DOOR)}, so it could call nothing")
    for key, signature in found.items():
        if signature != want[key]:
            raise NotTheContract(f"{'.'.join(key)} has the type {signature}, not {want[key]}")


def _exports(section: _Reader) -> frozenset[str]:
    names: set[str] = set()
    for _ in range(section.u32()):
        names.add(section.name())
        section.byte()
        section.u32()
    return frozenset(names)


def _one(section: _Reader, what: str) -> _Reader:
    count = section.u32()
    if count != 1:
        raise NotTheContract(f"{count} of {what}, not one")
    return section


def _mutable_globals(section: _Reader) -> int:
    mutable = 0
    for _ in range(section.u32()):
        section.byte()  # value type
        mutable += section.byte()
        opcode = section.byte()
        if opcode not in {0x41, 0x42}:  # i32.const, i64.const
            raise NotTheContract("a global does not begin as a constant")
        section.u32()
        if section.byte() != 0x0B:
            raise NotTheContract("a global does not begin as a constant")
    return mutable
