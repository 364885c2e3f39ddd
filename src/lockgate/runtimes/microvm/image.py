"""The root image: interpreter, standard library, the libraries they need, our agent; one EROFS file for all machines.

Rule 1: what it is made of is what the container rung shows (`container.plan`), so the same code runs on both.
Rule 2: read-only by its format. The same sources give the same bytes: fixed times, owners, order and identity.
Rule 3: nothing of this host is in it but those files: no host name, no user, no path beside the interpreter's own.
"""

from __future__ import annotations

import importlib.util
import json
import marshal
import os
import py_compile
import shutil
import stat
import struct
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Final

from lockgate.contract.errors import CannotIsolate, HostFault
from lockgate.runtimes.container import layout as container
from lockgate.runtimes.container import plan as container_plan
from lockgate.runtimes.microvm import layout
from lockgate.runtimes.microvm.store import digest_of

MKFS_SECONDS: Final = 300.0
# Never of use to a run, and half of the standard library's size.
_DROPPED: Final = ("test", "tests", "idlelib", "tkinter", "lib2to3", "ensurepip", "turtledemo", "__pycache__")
_KERNEL_MODULES: Final = ("__init__", "arch", "bpf", "tables", "seccomp", "caps_unsafe", "landlock_unsafe",
                          "mounts_unsafe", "process_unsafe", "seccomp_unsafe", "syscalls_unsafe")  # fmt: skip
_AGENT: Final = "/tmp"  # noqa: S108 - in the image, which is read-only
_UUID: Final = "6c6f636b-6761-7465-0000-000000000000"
_UNCHECKED_HASH: Final = 1
_FIX: Final = "apt-get install erofs-utils, or put mkfs.erofs (1.4 or newer) on the PATH"


def mkfs() -> str:
    """Return mkfs.erofs.

    Raises:
        CannotIsolate: it is not installed.

    """
    found = shutil.which("mkfs.erofs", path=layout.PATH)
    if found is None:
        raise CannotIsolate("mkfs.erofs is missing: no root image can be made", next_step=_FIX)
    return found


def pack(tree: Path, image: Path) -> None:
    """Pack a directory into an EROFS image.

    Raises:
        CannotIsolate: mkfs.erofs is missing. HostFault: it failed, or did not end in time.

    """
    argv = [mkfs(), "-T0", f"-U{_UUID}", "--all-root", "-x-1", str(image), str(tree)]
    try:
        done = subprocess.run(
            argv, env={}, stdin=subprocess.DEVNULL, capture_output=True, timeout=MKFS_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise HostFault(
            f"mkfs.erofs did not end within {MKFS_SECONDS:g} s", next_step="look at the disk; then build again"
        ) from None
    if done.returncode != 0:
        words = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise HostFault(
            f"mkfs.erofs failed: {words[-1][:300] if words else done.returncode}",
            next_step="free space in the store; mkfs.erofs must be 1.4 or newer",
        )


class Recipe:
    """Everything that goes into a root image.

    Args:
        settings: what the agent reads at its start: preload, and what tests leave out.
        packages: the package tree whose libraries are looked for; its own files go into a second image.

    Attributes:
        key: names the recipe: the sources by place, size and time, our own files by content.

    Raises:
        CannotIsolate: this interpreter cannot be used for it.

    """

    def __init__(self, settings: dict[str, object], packages: str | None) -> None:
        try:
            self._plan = container_plan.build(packages)
        except container_plan.PlanError as error:
            raise CannotIsolate(
                f"no root image can be made: {error.unavailable.missing}", next_step=error.unavailable.fix
            ) from error
        self._files = _agent(settings)
        self._covers = {Path(one).name for one in self._plan.covers}
        self._sources = [
            (source, target)
            for source, target in (*self._plan.binds, *self._plan.copies)
            if target != container.PACKAGES and not target.startswith(container.BOOT + "/")
        ]
        self.key = digest_of(
            sys.implementation.cache_tag or "", *(part for one in sorted(self._files.items()) for part in one),
            *(line for source, target in self._sources for line in (target, *_identity(Path(source), self._covers))),
        )[:32]  # fmt: skip

    def lay_out(self, work: Path) -> None:
        """Lay the root file system out below `work`, an empty directory."""
        for directory in ("dev", "etc", "packages", "proc", "run", "tmp", "usr/bin", "usr/lib"):
            (work / directory).mkdir(parents=True)
        for target, name in self._plan.links:
            (work / name[1:]).symlink_to(target)
        for source, target in self._sources:
            _copy(Path(source), work / target[1:], self._covers)
        for name, content in self._files.items():
            _write(work / "tmp", name, content)
        line = f"nobody:x:{container.NOBODY}:{container.NOBODY}::{container.RUN_DIR}:/\n"
        (work / "etc/passwd").write_text(line, encoding="ascii")


def _identity(source: Path, covers: set[str]) -> Generator[str]:
    """Yield what tells one state of a source from another, without reading its files."""
    info = source.stat()
    yield f"{source} {info.st_size} {info.st_mtime_ns} {info.st_mode}"
    if source.is_dir():
        for entry in sorted(os.scandir(source), key=lambda one: one.name):
            if not _left_out(entry.name, covers) and (entry.is_dir() or entry.is_file()):
                yield from _identity(Path(entry.path), covers)


def _left_out(name: str, covers: set[str]) -> bool:
    return name in _DROPPED or name in covers or name.startswith("config-3")


def _agent(settings: dict[str, object]) -> dict[str, bytes]:
    """Return our own files by their place below /tmp, which the agent covers before any run."""
    guest = container_plan.guest_directory()
    package = Path(__file__).resolve().parents[2]
    files = {f"{name}.py": guest / "microvm" / f"{name}.py" for name in ("agent", "control", "pump")}
    files["lockgate/__init__.py"] = package / "kernel" / "__init__.py"
    files |= {f"guest/{name}.py": guest / f"{name}.py" for name in ("values", "host", "runner")}
    files |= {f"lockgate/kernel/{name}.py": package / "kernel" / f"{name}.py" for name in _KERNEL_MODULES}
    content = {name: path.read_bytes() for name, path in files.items()}
    return {**content, "settings.json": json.dumps(settings, sort_keys=True).encode()}


def _write(place: Path, name: str, content: bytes) -> None:
    path = place / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    if name.endswith(".py"):
        cache = Path(importlib.util.cache_from_source(str(path)))
        cache.parent.mkdir(exist_ok=True)
        code = compile(content, f"{_AGENT}/{name}", "exec", dont_inherit=True)
        cache.write_bytes(_header(content) + marshal.dumps(code))


def _header(source: bytes) -> bytes:
    return importlib.util.MAGIC_NUMBER + struct.pack("<I", _UNCHECKED_HASH) + importlib.util.source_hash(source)


def _copy(source: Path, target: Path, covers: set[str]) -> None:
    """Copy a file or a tree; links inside are followed, anything else is left out."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not source.is_dir():
        if not target.exists():
            shutil.copyfile(source, target)
            target.chmod(0o755 if os.access(source, os.X_OK) or ".so" in target.name else 0o644)
        return
    target.mkdir(exist_ok=True)
    for entry in sorted(os.scandir(source), key=lambda one: one.name):
        if _left_out(entry.name, covers):
            continue
        path = Path(entry.path)
        if entry.is_dir():
            _copy(path, target / entry.name, covers)
        elif entry.is_file():
            shutil.copyfile(path, target / entry.name)
            mode = 0o755 if stat.S_IMODE(entry.stat().st_mode) & 0o100 else 0o644
            (target / entry.name).chmod(mode)
            if entry.name.endswith(".py"):
                _compiled(path, target / entry.name)


def _compiled(source: Path, target: Path) -> None:
    """Give a module its bytecode, valid whatever times the image has.

    What the host compiled is taken when it belongs to this very source (PEP 552: mtime and size in its header);
    otherwise it is compiled here. A file that does not compile has no bytecode, as in any installation.
    """
    text = target.read_bytes()
    cache = Path(importlib.util.cache_from_source(str(target)))
    cache.parent.mkdir(exist_ok=True)
    known = Path(importlib.util.cache_from_source(str(source)))
    try:
        data = known.read_bytes()
        flags, mtime, size = struct.unpack_from("<III", data, 4)
        info = source.stat()
        if data[:4] == importlib.util.MAGIC_NUMBER and (flags, mtime, size) == (
            0, int(info.st_mtime) & 0xFFFFFFFF, info.st_size & 0xFFFFFFFF,
        ):  # fmt: skip
            cache.write_bytes(_header(text) + data[16:])
            return
    except (OSError, struct.error):
        pass
    try:
        py_compile.compile(
            str(source), str(cache), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
        )
    except (py_compile.PyCompileError, OSError):
        return
