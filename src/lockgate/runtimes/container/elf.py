"""Which shared libraries a program and its extension modules need, read from the files themselves.

Rule 1: only headers are read; nothing is loaded or run, so a hostile package cannot act here.
Rule 2: a file that is no ELF of this architecture's word size is skipped; a needed library that nobody has is left
        out, and its import fails inside with the loader's own message.

Sources: elf(5), ld.so(8) (search order: RPATH/RUNPATH, the cache's directories, the default directories).
"""

from __future__ import annotations

import glob
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PT_LOAD: Final = 1
_PT_DYNAMIC: Final = 2
_PT_INTERP: Final = 3
_DT_NULL: Final = 0
_DT_NEEDED: Final = 1
_DT_STRTAB: Final = 5
_DT_RPATH: Final = 15
_DT_RUNPATH: Final = 29
_HEADER: Final = struct.Struct("<4sBBB9xHHIQQQIHHHHHH")
_SEGMENT: Final = struct.Struct("<IIQQQQQQ")
_DYNAMIC: Final = struct.Struct("<QQ")
_DEFAULT_DIRECTORIES: Final = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")


@dataclass(frozen=True)
class Elf:
    """What the loader would read of one file."""

    needed: tuple[str, ...]
    search: tuple[str, ...]
    interpreter: str | None


def read(path: str) -> Elf | None:
    """Return what `path` needs, or None when it is not a 64-bit little-endian ELF file."""
    with open(path, "rb") as file:  # noqa: PTH123 - hot: hundreds of files per template
        if os.fstat(file.fileno()).st_size < _HEADER.size:
            return None
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _parse(data, os.path.dirname(path))  # noqa: PTH120 - the same
            except (struct.error, ValueError):  # offsets that lead nowhere: the loader would refuse it too
                return None


def _text(data: mmap.mmap, at: int) -> str:
    end = data.find(b"\0", at)
    if end < 0:
        raise ValueError("a name without an end")
    return os.fsdecode(data[at:end])


def _parse(data: mmap.mmap, origin: str) -> Elf | None:
    magic, bits, order, *_, offset, _sections, _flags, _size, each, count, _1, _2, _3 = _HEADER.unpack_from(data)
    if (magic, bits, order) != (b"\x7fELF", 2, 1):
        return None
    loads: list[tuple[int, int, int]] = []
    dynamic: tuple[int, int] | None = None
    interpreter: str | None = None
    for index in range(count):
        kind, _, at, address, _, size, _, _ = _SEGMENT.unpack_from(data, offset + index * each)
        if kind == _PT_LOAD:
            loads.append((address, size, at))
        elif kind == _PT_DYNAMIC:
            dynamic = (at, size)
        elif kind == _PT_INTERP:
            interpreter = _text(data, at)
    if dynamic is None:
        return Elf((), (), interpreter)
    tags: list[tuple[int, int]] = []
    for at in range(dynamic[0], dynamic[0] + dynamic[1], _DYNAMIC.size):
        tag, value = _DYNAMIC.unpack_from(data, at)
        if tag == _DT_NULL:
            break
        tags.append((tag, value))
    table = next((value for tag, value in tags if tag == _DT_STRTAB), None)
    strings = next(
        (table - low + at for low, size, at in loads if table is not None and low <= table < low + size), None
    )
    if strings is None:
        return Elf((), (), interpreter)
    needed = tuple(_text(data, strings + value) for tag, value in tags if tag == _DT_NEEDED)
    paths = [_text(data, strings + value) for tag, value in tags if tag in {_DT_RPATH, _DT_RUNPATH}]
    search = tuple(
        entry.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for entry in ":".join(paths).split(":") if entry
    )
    return Elf(needed, search, interpreter)


def system_directories() -> tuple[str, ...]:
    """Return where the loader looks: the directories of /etc/ld.so.conf, the multiarch ones, the default ones."""
    found: list[str] = []
    _configured(Path("/etc/ld.so.conf"), found, depth=4)
    for root in ("/lib", "/usr/lib"):
        found += sorted(glob.glob(f"{root}/*-linux-gnu"))  # noqa: PTH207 - names, not paths to walk
    found += _DEFAULT_DIRECTORIES
    return tuple(dict.fromkeys(one for one in found if os.path.isdir(one)))  # noqa: PTH112


def _configured(file: Path, found: list[str], depth: int) -> None:
    try:
        lines = file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for raw in lines:
        words = raw.partition("#")[0].split()
        if not words:
            continue
        if words[0] != "include":
            found.append(words[0])
        elif depth:
            for pattern in words[1:]:
                for name in sorted(glob.glob(os.path.join(file.parent, pattern))):  # noqa: PTH118, PTH207
                    _configured(Path(name), found, depth - 1)


def closure(roots: list[str], inside: tuple[str, ...]) -> dict[str, str]:
    """Return {library name: path on this host} for everything that `roots` need and that is not below `inside`.

    Args:
        roots: programs and extension modules.
        inside: directories that the sandbox sees anyway; a library found there is followed, not listed.

    """
    directories = system_directories()
    libraries: dict[str, str] = {}
    queue = [path for root in roots for path in (os.path.realpath(root),)]
    seen: set[str] = set()
    while queue:
        path = queue.pop()
        if path in seen:
            continue
        seen.add(path)
        elf = read(path)
        if elf is None:
            continue
        for name in elf.needed:
            if name in libraries:
                continue
            found = _find(name, (*elf.search, *directories))
            if found is None:
                continue
            if not found.startswith(inside):
                libraries[name] = os.path.realpath(found)
            queue.append(os.path.realpath(found))
    return libraries


def _find(name: str, directories: tuple[str, ...]) -> str | None:
    if "/" in name:
        return name if os.path.exists(name) else None  # noqa: PTH110
    for directory in directories:
        path = f"{directory}/{name}"
        if os.path.exists(path):  # noqa: PTH110
            return os.path.normpath(path)
    return None
