"""Package sets: resolved, pinned by hash and installed ahead of time into a read-only tree (X11).

Rule 1: only wheels are installed, each with the sha256 of the file that was resolved; nothing of them is run.
Rule 2: a set's directory is named for its content and never changed; a name is a link, replaced in one step.
Rule 3: a tree holds regular files and directories only, each of them vouched for by a wheel's RECORD.
Rule 4: pip is started by the operator's build command alone. At run time there is no pip, and no network to use it on.

Layout of a store: `sets/<digest>/{tree/,lock.txt,set.json}`, `names/<name> -> ../sets/<digest>`, `tmp/`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Final

import msgspec

from lockgate.contract.errors import ConfigError, EnvBuildFailed, UnknownEnv
from lockgate.runtimes import stores
from lockgate.runtimes.digests import sha256
from lockgate.supervisor import envtree

Progress = Callable[[str], object]

_NAME: Final = re.compile(r"\A[a-z0-9][a-z0-9._-]{0,63}\Z")
_MODULE: Final = re.compile(r"\A[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*\Z")
_PRELOADED: Final = ("numpy", "pandas")
_PIP_SECONDS: Final = 1800.0
_URL: Final = re.compile(r"\b[a-z][a-z0-9+.-]*://\S+")


class EnvInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A built package set.

    Attributes:
        name: what runs ask for.
        digest: sha256 over every file, its place and the interpreter's version; names the directory.
        tree: absolute path of the packages, read-only.
        packages: (name, version) pairs, sorted.
        preload: modules imported in the template, before any run.
        python: "3.11": the interpreter it is good for.
        size: bytes. files: how many.
        created: seconds since the epoch.

    """

    name: str
    digest: str
    tree: str
    packages: tuple[tuple[str, str], ...]
    preload: tuple[str, ...]
    python: str
    size: int
    files: int
    created: float


def python_version() -> str:
    """Return the version that a set must be built for."""
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def default_store() -> Path:
    """Return this user's store, found without reading the environment."""
    store = stores.of_this_user("envs")
    if store is None:
        raise ConfigError(
            f"user {os.getuid()} has no entry in the password database, so no home for package sets",
            next_step="name a directory with [execution] env_store or --store",
        )
    return store


def check_name(name: str) -> str:
    """Return `name` if a package set may be called that.

    Raises:
        ConfigError: it is empty, too long, or holds something else than a-z, 0-9, dot, dash, underscore.

    """
    if not _NAME.match(name):
        raise ConfigError(
            f"{name!r} cannot name a package set", next_step="use 1 to 64 of a-z, 0-9, '.', '_', '-', a letter first"
        )
    return name


# ---- looking up --------------------------------------------------------------------------------------------------
def find(name: str, store: Path | None = None) -> EnvInfo:
    """Return the set called `name`.

    Raises:
        UnknownEnv: there is none, or it was built for another Python.

    """
    root = store if store is not None else default_store()
    info = _load(root, name) if _NAME.match(name) else None
    if info is None:
        known = ", ".join(env.name for env in list_envs(root)) or "none yet"
        raise UnknownEnv(
            f"no package set {name!r} was built for this user (there is: {known})",
            next_step=f"build it with `lockgate env build {name} -r requirements.txt`",
        )
    if info.python != python_version():
        raise UnknownEnv(
            f"package set {name!r} was built for Python {info.python}, this is {python_version()}",
            next_step=f"build it again with `lockgate env build {name} -r requirements.txt`",
        )
    return info


def list_envs(store: Path | None = None) -> list[EnvInfo]:
    """Return every named set of the store, by name."""
    root = store if store is not None else default_store()
    try:
        names = sorted(entry.name for entry in (root / "names").iterdir())
    except OSError:
        return []
    return [info for info in (_load(root, name) for name in names if _NAME.match(name)) if info is not None]


def _load(root: Path, name: str) -> EnvInfo | None:
    try:
        target = (root / "names" / name).readlink()
        where = (root / "names" / target).resolve(strict=True)
        if where.parent != (root / "sets").resolve():
            return None
        data = json.loads((where / "set.json").read_bytes())
        return msgspec.convert({**data, "name": name, "tree": str(where / "tree")}, EnvInfo)
    except (OSError, ValueError, TypeError, msgspec.ValidationError):
        return None


def verify(info: EnvInfo) -> None:
    """Check a set against its name.

    Raises:
        EnvBuildFailed: a file was altered, added or removed since it was built.

    """
    digest = envtree.digest(Path(info.tree), info.python).digest
    if digest != info.digest:
        raise EnvBuildFailed(
            f"package set {info.name!r} is not what was built: its files hash to {digest[:12]}, not {info.digest[:12]}",
            next_step="find out who wrote to the store; then build the set again",
        )


# ---- building ----------------------------------------------------------------------------------------------------
def build(
    name: str,
    requirements: Path,
    *,
    store: Path | None = None,
    progress: Progress = lambda _text: None,
    preload: tuple[str, ...] | None = None,
) -> EnvInfo:
    """Resolve, pin, install and seal a package set, and give it its name.

    Args:
        requirements: a pip requirements file.
        store: where; None = the store of this user.
        progress: called with a sentence as each step begins.
        preload: modules to import in the template; None = numpy and pandas when they are in the set.

    Raises:
        ConfigError: the name or a module name is not one.
        EnvBuildFailed: a requirement cannot be met by wheels, the index cannot be reached, the disk is full.

    """
    check_name(name)
    for module in preload or ():
        if not _MODULE.match(module):
            raise ConfigError(f"{module!r} is not a module name", next_step="give --preload names like numpy.linalg")
    if not requirements.is_file():
        raise EnvBuildFailed(
            f"there is no requirements file {str(requirements)!r}", next_step="name an existing file with -r"
        )
    root = store if store is not None else default_store()
    try:
        for part in ("sets", "names", "tmp"):
            (root / part).mkdir(mode=0o755, parents=True, exist_ok=True)
        with _workplace(root / "tmp") as work:
            return _build(name, requirements, root, work, progress=progress, preload=preload)
    except OSError as err:
        raise EnvBuildFailed(
            f"the package store cannot be written ({err.strerror})",
            next_step="free space there or name another store with --store",
        ) from None


def _build(
    name: str, requirements: Path, root: Path, work: Path, *, progress: Progress, preload: tuple[str, ...] | None
) -> EnvInfo:
    progress(f"resolving {requirements.name}")
    wheels = work / "wheels"
    wheels.mkdir()
    packages, lock = _resolve(requirements, wheels)
    (work / "lock.txt").write_text(lock)
    progress(f"installing {len(packages)} packages by hash")
    tree = work / "set" / "tree"
    tree.mkdir(parents=True)
    _pip(
        "install", "--no-index", "--find-links", str(wheels), "--require-hashes", "--no-deps", "--no-compile",
        "--only-binary", ":all:", "--target", str(tree), "-r", str(work / "lock.txt"),
    )  # fmt: skip
    progress("checking every file against its wheel")
    # Programs have no use in a sandbox that cannot execute; with them go the only paths that lead out of the tree.
    shutil.rmtree(tree / "bin", ignore_errors=True)
    envtree.check_records(tree)
    progress("compiling")
    envtree.compile_tree(tree)
    summary = envtree.digest(tree, python_version())
    if preload is None:
        preload = tuple(module for module in _PRELOADED if (tree / module).is_dir())
    info = EnvInfo(
        name=name,
        digest=summary.digest,
        tree=str(root / "sets" / summary.digest / "tree"),
        packages=tuple(packages),
        preload=preload,
        python=python_version(),
        size=summary.size,
        files=summary.files,
        created=time.time(),
    )
    progress("sealing")
    data = msgspec.to_builtins(info)
    del data["name"], data["tree"]
    shutil.move(work / "lock.txt", work / "set" / "lock.txt")
    (work / "set" / "set.json").write_bytes(msgspec.json.format(msgspec.json.encode(data), indent=1))
    envtree.seal(tree)
    (work / "set").chmod(0o755)
    os.sync()
    _publish(work / "set", root / "sets" / summary.digest, replace_facts=True)
    _point(root / "names" / name, summary.digest)
    return find(name, root)


def _publish(made: Path, final: Path, *, replace_facts: bool) -> None:
    """Give a finished set its place; who comes second finds the same content there and keeps it."""
    try:
        made.rename(final)
    except OSError:
        if not (final / "set.json").is_file():
            raise
        if replace_facts:  # the same files may be built with another preload list
            os.replace(made / "set.json", final / "set.json")  # noqa: PTH105
    fd = os.open(final.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _point(link: Path, digest: str) -> None:
    temporary = link.parent.parent / "tmp" / f"link-{digest[:16]}-{os.getpid()}-{time.monotonic_ns()}"
    temporary.symlink_to(f"../sets/{digest}")
    temporary.replace(link)


@contextlib.contextmanager
def _workplace(tmp: Path) -> Generator[Path]:
    """Yield a directory that is locked while we use it; remove those whose builder is gone."""
    for old in tmp.iterdir():
        with contextlib.suppress(OSError), _locked(old):
            if old.is_dir() and not old.is_symlink():
                envtree.remove(old)
    work = Path(tempfile.mkdtemp(prefix="build-", dir=tmp))
    try:
        with _locked(work):
            yield work
    finally:
        envtree.remove(work)


@contextlib.contextmanager
def _locked(directory: Path) -> Generator[None]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


# ---- pip ---------------------------------------------------------------------------------------------------------
def _resolve(requirements: Path, wheels: Path) -> tuple[list[tuple[str, str]], str]:
    """Fetch every wheel needed into `wheels`; return (name, version) of each, and the lock file's text.

    Indexes, credentials and options of the requirements file are pip's business here and needed nowhere after.
    """
    _pip("download", "--only-binary", ":all:", "--dest", str(wheels), "-r", str(requirements.resolve()))
    packages: list[tuple[str, str]] = []
    lines: list[str] = []
    for path in sorted(wheels.iterdir()):
        if path.suffix != ".whl":
            raise EnvBuildFailed(
                f"{path.name} is no wheel, so it cannot be pinned by hash",
                next_step="build a wheel of it first and put that in a directory that pip's find-links names",
            )
        name, version = envtree.wheel_name(path)
        packages.append((name, version))
        lines.append(f"{name}=={version} --hash=sha256:{sha256(path)}\n")
    if not packages:
        raise EnvBuildFailed(
            f"{requirements.name} asks for no package", next_step="name at least one; runs without a set need no build"
        )
    return sorted(packages), "".join(sorted(lines))


def _pip(*arguments: str) -> None:
    """Run the interpreter's own pip. It inherits the environment of the operator who builds: proxies, certificates
    and indexes are theirs to set; no run ever comes here."""  # noqa: D205, D209
    command = [sys.executable, "-I", "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]
    try:
        done = subprocess.run(
            command, check=False, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PIP_SECONDS, text=True
        )
    except subprocess.TimeoutExpired:
        raise EnvBuildFailed(
            f"pip did not end within {_PIP_SECONDS:g} s", next_step="look at the package index; then build again"
        ) from None
    if done.returncode != 0:
        raise _pip_error(done.stdout + done.stderr)


_OFFLINE: Final = ("NewConnectionError", "Name or service not known", "Temporary failure in name resolution",
                   "Network is unreachable", "ConnectTimeoutError", "Connection refused", "ProxyError")  # fmt: skip


def _pip_error(output: str) -> EnvBuildFailed:
    """Return pip's failure in one sentence, without the addresses it was given (they may hold a password)."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")] or lines[-1:]
    text = _URL.sub("<address>", "; ".join(errors[:3]))[:600] or "pip gave no reason"
    if "No module named pip" in output:
        return EnvBuildFailed("this Python has no pip", next_step="run `python -m ensurepip` in it, then build again")
    if any(sign in output for sign in _OFFLINE):
        return EnvBuildFailed(
            f"the package index cannot be reached ({text})",
            next_step="connect this machine, or point pip.conf at an index or a wheel directory it can reach",
        )
    if "No matching distribution" in text or "Could not find a version" in text:
        return EnvBuildFailed(
            f"a requirement cannot be met by wheels for Python {python_version()} ({text})",
            next_step="check the name and version; a package without wheels must be built into one first",
        )
    return EnvBuildFailed(f"pip failed ({text})", next_step="mend what it names, then build again")
