"""The files of a package set: checked against the wheels' own records, compiled, hashed, sealed.

Rule 1: nothing is followed: a link, a device or a name outside the tree is an error, not something to handle.
Rule 2: the digest covers what runs import from source; compiled files are derived from it, for fixed paths.
"""

from __future__ import annotations

import base64
import csv
import email
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from lockgate.contract.errors import EnvBuildFailed
from lockgate.runtimes.container import layout
from lockgate.runtimes.digests import sha256

_NEXT: Final = "do not use this package; tell its maintainers what was found"
_PLAIN: Final = re.compile(r"\A[A-Za-z0-9][A-Za-z0-9._+!-]*\Z")
_COMPILE_SECONDS: Final = 900.0


class Summary(NamedTuple):
    """What `digest` saw."""

    digest: str
    size: int
    files: int


def walk(tree: Path) -> list[tuple[str, os.stat_result]]:
    """Return (relative path, lstat) of every file, sorted.

    Raises:
        EnvBuildFailed: something in the tree is neither a file nor a directory.

    """
    found: list[tuple[str, os.stat_result]] = []
    todo = [""]
    while todo:
        here = todo.pop()
        with os.scandir(tree / here) as entries:
            for entry in entries:
                name = f"{here}/{entry.name}" if here else entry.name
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    todo.append(name)
                elif stat.S_ISREG(status.st_mode):
                    found.append((name, status))
                else:
                    raise EnvBuildFailed(f"{name!r} is neither a file nor a directory", next_step=_NEXT)
    return sorted(found)


def wheel_name(path: Path) -> tuple[str, str]:
    """Return (name, version) as a wheel's own METADATA has them (packaging.python.org, "Core metadata").

    Raises:
        EnvBuildFailed: the file is not a wheel with exactly one METADATA.

    """
    try:
        with zipfile.ZipFile(path) as archive:
            (metadata,) = [
                name for name in archive.namelist() if name.count("/") == 1 and name.endswith(".dist-info/METADATA")
            ]
            fields = email.message_from_bytes(archive.read(metadata))
        name, version = fields["Name"], fields["Version"]
    except (OSError, ValueError, zipfile.BadZipFile):
        name = version = None
    if not name or not version or not _PLAIN.match(name) or not _PLAIN.match(version):
        raise EnvBuildFailed(f"{path.name} is not a proper wheel", next_step=_NEXT)
    return name, version


def _compiled(name: str) -> bool:
    return name.endswith(".pyc") and "__pycache__" in name.split("/")


def digest(tree: Path, python: str) -> Summary:
    """Return the name of a tree's content: sha256 over "path, size, sha256" of each file and the Python version."""
    total = hashlib.sha256(f"lockgate package set 1, python {python}\n".encode())
    size = count = 0
    for name, status in walk(tree):
        if not _compiled(name):
            total.update(f"{name}\0{status.st_size}\0{sha256(tree / name)}\n".encode("utf-8", "surrogateescape"))
        size += status.st_size
        count += 1
    return Summary(total.hexdigest(), size, count)


def check_records(tree: Path) -> None:
    """Check that each file is in the RECORD of a wheel with the hash it has, and that none is missing.

    Raises:
        EnvBuildFailed: names the first file for which that is not so.

    Source: packaging.python.org, "Recording installed projects".
    """
    vouched: set[str] = set()
    for record in sorted(tree.glob("*.dist-info/RECORD")):
        own = record.relative_to(tree).as_posix()
        vouched.add(own)
        with record.open(newline="", encoding="utf-8") as lines:
            for row in csv.reader(lines):
                if row and row[0] != own:
                    vouched |= _check_row(tree, row)
    for name, _ in walk(tree):
        if name not in vouched and not _compiled(name):
            raise EnvBuildFailed(f"{name!r} is in no wheel's RECORD", next_step=_NEXT)


def _check_row(tree: Path, row: list[str]) -> set[str]:
    path = PurePosixPath(row[0])
    if path.is_absolute() or ".." in path.parts:
        # Programs and headers go beside the tree; pip's --target keeps none of them inside, and we show none.
        return set()
    name = path.as_posix()
    if path.parts[0] == "bin" or _compiled(name):
        return set()
    where = tree / name
    if not stat.S_ISREG(where.lstat().st_mode) if where.exists() else True:
        raise EnvBuildFailed(f"{name!r} is in a wheel's RECORD but not among its files", next_step=_NEXT)
    algorithm, _, expected = row[1].partition("=")
    if expected and algorithm == "sha256":
        actual = base64.urlsafe_b64encode(bytes.fromhex(sha256(where))).rstrip(b"=").decode()
        if actual != expected:
            raise EnvBuildFailed(f"{name!r} is not what its wheel's RECORD says", next_step=_NEXT)
    elif not name.endswith((".dist-info/RECORD", ".dist-info/INSTALLER", ".dist-info/REQUESTED")):
        raise EnvBuildFailed(f"{name!r} has no sha256 in its wheel's RECORD", next_step=_NEXT)
    return {name}


def compile_tree(tree: Path) -> None:
    """Compile all modules for the path they have in a sandbox, so that no run pays for it and no host path is in them.

    Files that do not compile (templates, other Pythons) are left to be found out at import; packages' own tests, half
    of some sets, are left out.
    """
    command = [
        sys.executable, "-I", "-S", "-m", "compileall", "-q", "-q", "-f", "-j", "0",
        "-x", "/tests?/", "-s", str(tree), "-p", layout.PACKAGES, "--invalidation-mode", "unchecked-hash", str(tree),
    ]  # fmt: skip
    try:
        subprocess.run(
            command,
            check=False,
            env={"PYTHONHASHSEED": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_COMPILE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise EnvBuildFailed("compiling did not end", next_step="build a smaller set") from None


def seal(tree: Path) -> None:
    """Take every write bit from a tree, and let everyone read it (a sandbox opens it under an id of its own)."""
    for name, _ in walk(tree):
        (tree / name).chmod(0o444)
    for here, directories, _ in os.walk(tree, topdown=False):
        for name in directories:
            Path(here, name).chmod(0o555)
    tree.chmod(0o555)


def remove(directory: Path) -> None:
    """Remove a directory that may hold a sealed tree."""
    for here, _, _ in os.walk(directory):
        Path(here).chmod(0o700)
    shutil.rmtree(directory, ignore_errors=True)
