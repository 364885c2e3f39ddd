"""The image of one package set: a read-only EROFS file with the run's whole tree, which the sentry opens by itself.

Rule 1: the image is all that a guest can read: interpreter, standard library, the libraries they need, one package set.
        No directory of this host is in the box, and no process serves one.
Rule 2: an image is named by what it was made from and never changed; boxes and checkpoints refer to it by its path.
Rule 3: what is built is uncompressed and without inline data: sentries of 2024 read no other layout.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Final

from lockgate.contract.errors import CannotIsolate, HostFault
from lockgate.runtimes.container import plan
from lockgate.runtimes.container.layout import BOOT
from lockgate.runtimes.gvisor import layout
from lockgate.runtimes.protocol import Unavailable

FORMAT: Final = 3  # part of every name: raise it when what is built changes
_SECONDS: Final = 300.0
_UNUSED_SECONDS: Final = 30 * 86400.0
_TOOL_PATHS: Final = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin"
# Of the standard library: what no run can use (static libraries, screens) and tests, half of its size.
_LEFT_OUT: Final = frozenset(
    {"test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "__pycache__", "ensurepip"}
)
_NO_TOOL: Final = Unavailable(
    missing="mkfs.erofs, which packs a package set into an image", fix="apt-get install erofs-utils"
)


class Image:
    """An image that is there, kept there while this object is not closed: where, and its name."""

    __slots__ = ("_lock", "key", "path")

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self.key = key
        self._lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def close(self) -> None:
        """Let go of it; idempotent."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def find_or_build(store: Path, tree: str | None) -> Image:
    """Return the image of the package tree `tree` (None = the standard library alone), building it the first time.

    Args:
        store: directory for images; made when missing.

    Raises:
        CannotIsolate: mkfs.erofs or a piece of the interpreter is missing.
        HostFault: the image could not be written.

    """
    try:
        sources = plan.build(tree)
    except plan.PlanError as error:
        raise CannotIsolate(
            f"the gvisor rung cannot be had: {error.unavailable.missing}", next_step=error.unavailable.fix
        ) from error
    sources.copies[:] = [one for one in sources.copies if not one[1].startswith(BOOT)]
    key = _key(sources)
    final = store / f"{key}.erofs"
    try:
        store.mkdir(mode=0o755, parents=True, exist_ok=True)
        with locked(store / "lock"):
            if not final.is_file():
                _forget_unused(store)
                _build(sources, key, store, final)
            os.utime(final)
            return Image(final, key)
    except OSError as error:
        raise HostFault(
            f"the image of the gvisor rung cannot be written to {store} ({error.strerror})",
            next_step="free space there, or name another directory with [execution.gvisor] store",
        ) from error


@contextlib.contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold a lock of this host: it is the kernel's, so none is left behind by a holder that died."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _forget_unused(store: Path) -> None:
    """Remove images that no template of this host has open and none was started from for a month."""
    for path in store.glob("*.erofs"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(fd).st_mtime > _UNUSED_SECONDS:
                    path.unlink()
            finally:
                os.close(fd)


# ---- what is in it -----------------------------------------------------------------------------------------------
def _files(sources: plan.Plan) -> list[tuple[str, str]]:
    """Return (source, path in the run's tree) of every file, sorted; nothing below a cover, no link that leads out."""
    found: dict[str, str] = {}
    covers = set(sources.covers)
    for source, target in sources.binds:
        if not Path(source).is_dir():
            found[target] = source
            continue
        stdlib = target.startswith(layout.STDLIB + "/")
        for here, directories, names in os.walk(source):
            inside = target + here[len(source) :]
            directories[:] = [
                one
                for one in directories
                if f"{inside}/{one}" not in covers
                and not (stdlib and (one in _LEFT_OUT or one.startswith("config-")))
                and not Path(here, one).is_symlink()
            ]
            for name in names:
                path = Path(here, name)
                if path.is_file() and path.suffix != ".a":
                    found[f"{inside}/{name}"] = str(path)
    for source, target in sources.copies:
        found.setdefault(target, source)
    return sorted((source, target) for target, source in found.items())


def _key(sources: plan.Plan) -> str:
    """Return what names the image: a hash over place, size and time of change of every source."""
    total = hashlib.sha256(f"lockgate gvisor image {FORMAT}\n".encode())
    for source, target in _files(sources):
        status = Path(source).stat()
        total.update(f"{target}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    total.update(json.dumps(sorted(sources.links)).encode())
    return total.hexdigest()[:32]


def _build(sources: plan.Plan, key: str, store: Path, final: Path) -> None:
    tool = shutil.which("mkfs.erofs", path=_TOOL_PATHS)
    if tool is None:
        raise CannotIsolate(f"the gvisor rung needs {_NO_TOOL.missing}", next_step=_NO_TOOL.fix)
    work = Path(tempfile.mkdtemp(prefix=".build-", dir=store))
    try:
        root = work / "root"
        _lay_out(sources, root)
        _compile(root / layout.BOX[1:])
        _open_up(root)
        packed = work / "image"
        options = ["-T0", "--all-root", "--quiet", "-Enoinline_data", f"-U{uuid.uuid5(uuid.NAMESPACE_OID, key)}"]
        done = subprocess.run(
            [tool, *options, str(packed), str(root)], check=False, capture_output=True, timeout=_SECONDS, env={}
        )
        if done.returncode != 0:
            raise HostFault(
                f"mkfs.erofs failed: {done.stderr.decode('utf-8', 'replace').strip()[-300:]}",
                next_step="look at the space in the store; erofs-utils 1.5 or newer is needed",
            )
        packed.chmod(0o444)
        packed.rename(final)
    except subprocess.TimeoutExpired as error:
        raise HostFault("packing the image did not end", next_step="look at the disk of this machine") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _lay_out(sources: plan.Plan, root: Path) -> None:
    """Copy the tree: the run's below BOX, mount points and the way to the loader above it."""
    for name in layout.MOUNT_POINTS:
        (root / name).mkdir(parents=True)
    inner = root / layout.BOX[1:]
    for name in ("dev", "etc", "proc", layout.RUN_DIR[1:], "tmp", "usr/lib", "usr/bin", layout.PACKAGES[1:]):
        (inner / name).mkdir(parents=True)
    for source, target in _files(sources):
        path = inner / target[1:]
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)
        path.chmod(0o444 if path.suffix in {".py", ".pyc"} else 0o555)
    for target, name in sources.links:
        if not (inner / name[1:]).exists():
            (inner / name[1:]).symlink_to(target)
    for name, target in (("usr", "box/usr"), ("lib", "box/usr/lib"), ("lib64", "box/usr/lib")):
        (root / name).symlink_to(target)
    (inner / "etc" / "passwd").write_text(f"nobody:x:{layout.NOBODY}:{layout.NOBODY}::{layout.RUN_DIR}:/\n")


def _open_up(root: Path) -> None:
    """Let everybody walk and read: who builds may have a strict umask, and the worker is nobody."""
    for here, _, names in os.walk(root):
        Path(here).chmod(0o755)
        for name in names:
            path = Path(here, name)
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | 0o444)


def _compile(inner: Path) -> None:
    """Compile the standard library for its path inside; the root is read-only and has no times to compare."""
    command = [
        plan.interpreter(), "-I", "-S", "-m", "compileall", "-q", "-q", "-j", "2", "-s", str(inner), "-p", "/",
        "--invalidation-mode", "unchecked-hash", str(inner / layout.STDLIB[1:]),
    ]  # fmt: skip
    subprocess.run(
        command,
        check=False,  # files of the library that do not compile are found out at import
        env={"PYTHONHASHSEED": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_SECONDS,
    )
