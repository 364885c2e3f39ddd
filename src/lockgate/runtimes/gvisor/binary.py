"""Which runsc this is, and whether it may be used at all.

Rule 1: the operator's own wins, then one on the usual paths, then the copy that `lockgate gvisor fetch` unpacked.
Rule 2: it runs as root outside every box: it must belong to root (or to us) and be writable by nobody else, like every
        directory on the way to it.
Rule 3: a version proves nothing by itself: the same sources built by another compiler crash. What is known to crash is
        refused by name, everything else has to pass the boots of `selftest`.

The version of the compiler is read from the file (debug/buildinfo of Go's standard library: 16-byte aligned magic,
flags at 15, from Go 1.18 on a varint length at 32 and the text): running it would not tell.
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Final

import msgspec

from lockgate.contract.errors import CannotIsolate
from lockgate.runtimes.digests import sha256

# Releases from here on limit the files of a tmpfs themselves (nr_inodes), among two years of fixes since Debian's.
MINIMUM: Final = 20260601
USUAL: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_RELEASE: Final = re.compile(r"runsc version \S*?(20\d{6})")
_GO: Final = re.compile(r"go(\d+)\.(\d+)")
_MAGIC: Final = b"\xff Go buildinf:"
_SECONDS: Final = 15.0
_VERBS: Final = {"restore": ("-image-path", "-bundle"), "checkpoint": ("-image-path", "-compression")}
_GET: Final = (
    "install a release of gVisor and name it with [execution.gvisor] runsc; or, to try the rung, "
    "`lockgate gvisor fetch` unpacks Debian's (older, so it needs allow_old = true)"
)


class Runsc(msgspec.Struct, frozen=True, kw_only=True):
    """A runsc that may be tried.

    Attributes:
        path: absolute. sha256: of the file.
        version: what it says of itself. release: its date as a number, 0 when it says none.
        go: the compiler, such as "go1.24.4", "" when the file does not say.
        old: whether it is older than `MINIMUM`.

    """

    path: str
    sha256: str
    version: str
    release: int
    go: str

    @property
    def old(self) -> bool:
        """Whether it is older than the release whose fixes this rung relies on."""
        return self.release < MINIMUM


def locate(explicit: str | None, unpacked: Path) -> Path:
    """Return where runsc is.

    Args:
        explicit: the operator's choice.
        unpacked: where `fetch` puts its copy.

    Raises:
        CannotIsolate: there is none, or the one that was named is not there.

    """
    if explicit is not None:
        if not Path(explicit).is_file():
            raise CannotIsolate(f"there is no runsc at {explicit}", next_step="correct [execution.gvisor] runsc")
        return Path(explicit).resolve()
    found = shutil.which("runsc", path=USUAL)
    if found is not None:
        return Path(found).resolve()
    if unpacked.is_file():
        return unpacked.resolve()
    raise CannotIsolate("the gvisor rung needs runsc, and there is none on this host", next_step=_GET)


def inspect(path: Path) -> Runsc:
    """Return what is known of a runsc.

    Raises:
        CannotIsolate: somebody else may write it, it does not run, it lacks a flag, or it is known to crash.

    """
    check_owner(path)
    digest = sha256(path)
    said = _ask(path, "--version")
    found = _RELEASE.search(said)
    version = said.splitlines()[0].removeprefix("runsc version ").strip()[:100] if said else ""
    runsc = Runsc(
        path=str(path),
        sha256=digest,
        version=version,
        release=int(found[1]) if found else 0,
        go=go_version(path),
    )
    refuse_known_bad(runsc)
    _check_flags(path)
    return runsc


def check_owner(path: Path) -> None:
    """Refuse a file that anybody but root or this user could have written or could replace.

    Raises:
        CannotIsolate: names the place.

    """
    trusted = {0, os.getuid()}
    for place in (path, *path.parents):
        status = place.stat()
        loose = status.st_mode & 0o022 and not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX)
        if status.st_uid not in trusted or loose:
            raise CannotIsolate(
                f"{place} could be changed by others, and runsc runs with our rights",
                next_step=f"let it be root's and writable by root alone: chown root {place}; chmod go-w {place}",
            )


def refuse_known_bad(runsc: Runsc) -> None:
    """Refuse builds that are known to crash.

    gVisor of July 2024 reads a field of the Go runtime's own structures at a fixed place that Go 1.26 moved: boots die
    now and then without a word, and none of an image comes up.

    Raises:
        CannotIsolate: it is one.

    """
    go = _GO.match(runsc.go)
    if go is not None and (int(go[1]), int(go[2])) >= (1, 26) and 0 < runsc.release <= 20240729:
        raise CannotIsolate(
            f"this build of runsc ({runsc.version} with {runsc.go}) crashes: it is older than its compiler",
            next_step=_GET,
        )


def _ask(path: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            [str(path), *arguments],
            check=False,
            env={"PATH": USUAL},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            cwd="/",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotIsolate(
            f"{path} cannot be run ({type(error).__name__})", next_step="check that it is a runsc for this machine"
        ) from None
    return (done.stdout + done.stderr).decode("utf-8", "replace")


def _check_flags(path: Path) -> None:
    from lockgate.runtimes.gvisor.bundle import FLAGS  # noqa: PLC0415 - the bundle needs more than this file

    known = _ask(path, "flags")
    for flag in FLAGS:
        name = flag.partition("=")[0][1:]
        if not re.search(rf"^\s*{re.escape(name)}\b", known, re.MULTILINE):
            raise CannotIsolate(f"this runsc has no flag -{name}, which the rung needs", next_step=_GET)
    for verb, flags in _VERBS.items():
        told = _ask(path, "help", verb)
        for flag in flags:
            if flag not in told:
                raise CannotIsolate(f"this runsc has no {verb} {flag}, which the rung needs", next_step=_GET)


def go_version(path: Path) -> str:
    """Return the compiler of a Go program as its file names it, "" when it does not."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        at = data.find(_MAGIC)
        while at >= 0 and at % 16:
            at = data.find(_MAGIC, at + 1)
        if at < 0 or at + 34 > len(data) or not data[at + 15] & 2:
            return ""
        length, shift, position = 0, 0, at + 32
        while position < at + 42:
            byte = data[position]
            length |= (byte & 0x7F) << shift
            position, shift = position + 1, shift + 7
            if not byte & 0x80:
                break
        return bytes(data[position : position + min(length, 100)]).decode("ascii", "replace")
