"""What the sandbox sees of this host, computed without running anything of it (X8, X11)."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockgate.runtimes.container import elf, layout, plan


def test_the_plan_is_neutral_and_complete() -> None:
    """X8: every place inside is one of the fixed ones; the loader and libc are there; nothing is shown writable."""
    made = plan.build(None)
    inside = [target for _, target in (*made.binds, *made.copies)]
    assert all(one.startswith(("/usr/", "/lib", layout.BOOT)) for one in inside)
    names = {Path(one).name for one in inside}
    assert "libc.so.6" in names or any("musl" in one for one in names)
    assert (plan.interpreter(), layout.PYTHON) in made.binds
    assert not [source for source, _ in made.copies if source.startswith("/lib/") and os.path.islink(source)]
    assert {"runner.py", "host.py", "values.py", "slot.py", "template.py"} <= names
    assert not {"machine.py", "runtime.py", "handle.py", "plan.py"} & names


def test_the_closure_holds_what_this_interpreter_has_loaded() -> None:
    """X8: every library that is mapped here through the interpreter is in the closure (control: the kernel's list)."""
    import _ctypes
    import _hashlib
    import _sqlite3

    roots = [plan.interpreter(), *(one.__file__ for one in (_ctypes, _hashlib, _sqlite3) if one.__file__)]
    found = set(elf.closure(roots, ()).values())
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    wanted = {one for one in mapped if Path(one).name.startswith(("libc.so", "libffi", "libcrypto", "libsqlite3"))}
    assert wanted
    assert {os.path.realpath(one) for one in wanted} <= found


def test_a_package_tree_is_followed_and_not_listed(tmp_path: Path) -> None:
    """X11: a library that the tree brings along stays there; what it needs of the host is copied."""
    libc = next(source for name, source in elf.closure([plan.interpreter()], ()).items() if name.startswith("libc"))
    shutil.copy(libc, tmp_path / "module.cpython-311.so")
    made = plan.build(str(tmp_path))
    assert (str(tmp_path), layout.PACKAGES) in made.binds
    assert not [source for source, _ in made.copies if source.startswith(str(tmp_path))]


def test_what_is_no_elf_is_skipped(tmp_path: Path) -> None:
    """X11: scripts, empty files, 32-bit files and headers that lead nowhere are no error and no library."""
    good = Path(plan.interpreter()).read_bytes()[:64]
    for index, data in enumerate(
        (b"", b"#!/bin/sh\n", good[:40], good[:4] + b"\x01" + good[5:], good, b"\x7fELF" * 40)
    ):
        path = tmp_path / f"{index}.so"
        path.write_bytes(data)
        assert elf.read(str(path)) is None or elf.read(str(path)) == elf.Elf((), (), None)


@settings(deadline=None, max_examples=200)
@given(st.binary(min_size=0, max_size=600), st.integers(0, 4), st.integers(0, 2**64 - 1))
def test_hostile_headers_end(tmp_path_factory: pytest.TempPathFactory, body: bytes, count: int, offset: int) -> None:
    """X11: a package cannot crash or stall the planner with a made-up header."""
    head = struct.pack(
        "<4sBBB9xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 1, 3, 62, 1, 0, offset % 128, 0, 0, 64, 56, count, 0, 0, 0
    )
    path = tmp_path_factory.getbasetemp() / f"hostile-{os.getpid()}.so"
    path.write_bytes(head + body)
    found = elf.read(str(path))
    assert found is None or isinstance(found, elf.Elf)
