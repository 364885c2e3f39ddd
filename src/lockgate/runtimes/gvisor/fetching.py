"""`lockgate gvisor fetch`: Debian's runsc, unpacked beside lockgate's own files, for development and tests.

Rule 1: nothing of the host's package state is touched: apt works on private lists and caches, and nothing is installed.
Rule 2: the package is the one that was measured, or it is refused: its SHA-256 stands here. apt has checked the
        archive's signature before that.
Rule 3: an explicit command alone starts this; no run and no probe ever fetches anything.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lockgate.contract.errors import CannotIsolate, ConfigError
from lockgate.runtimes.digests import sha256

PACKAGE: Final = "runsc"
SUITE: Final = "trixie"
DEB_SHA256: Final = "3c25a5130dfac2f71237d5baad56ac86a255de87a0400f11b36a555156dc325a"
KEYRING: Final = "/usr/share/keyrings/debian-archive-keyring.gpg"
_SECONDS: Final = 300.0
_PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"
_MIRROR: Final = re.compile(r"(?:^URIs:\s*|^deb\s+(?:\[[^\]]*\]\s+)?)(https?://\S+)", re.MULTILINE)
Progress = Callable[[str], object]


def fetch(target: Path, *, progress: Progress = lambda _text: None, expected: str = DEB_SHA256) -> Path:
    """Download, check and unpack runsc; return where it is now.

    Args:
        target: the file to make; what is there already is replaced in one step.
        expected: SHA-256 of the package.

    Raises:
        CannotIsolate: this is no Debian with apt, the archive cannot be reached, or the package is another one.

    """
    if shutil.which("apt-get", path=_PATH) is None or shutil.which("dpkg-deb", path=_PATH) is None:
        raise CannotIsolate(
            "Debian's runsc is unpacked with apt-get and dpkg-deb, which are not here",
            next_step="install a release of gVisor and name it with [execution.gvisor] runsc",
        )
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as work:
        place = Path(work)
        progress(f"asking Debian {SUITE} for its package lists, in a place of our own")
        deb = _download(place, mirror())
        check_digest(deb, expected)
        progress(f"unpacking {deb.name}")
        _run(["dpkg-deb", "-x", str(deb), str(place / "x")], place)
        binary = place / "x" / "usr" / "bin" / "runsc"
        binary.chmod(0o755)
        binary.replace(target)
    return target


def check_digest(deb: Path, expected: str = DEB_SHA256) -> None:
    """Compare a package with the one that was tested.

    Raises:
        CannotIsolate: it is another one.

    """
    digest = sha256(deb)
    if digest != expected:
        raise CannotIsolate(
            f"Debian's package is not the one that was tested: {deb.name} has SHA-256 {digest}, not {expected}",
            next_step="Debian rebuilt it: take a lockgate that names the new one, or install a release of gVisor",
        )


def mirror(sources: Path = Path("/etc/apt")) -> str:
    """Return the address of the Debian archive that this host uses.

    Raises:
        ConfigError: its sources name none.

    """
    files = [sources / "sources.list", *sorted((sources / "sources.list.d").glob("*"))]
    for file in files:
        if file.suffix in {".list", ".sources"} and file.is_file():
            for line in _MIRROR.finditer(file.read_text(encoding="utf-8", errors="replace")):
                address = line[1].rstrip("/")
                if address.endswith("/debian"):
                    return address
    raise ConfigError(
        "the package sources of this host name no Debian archive",
        next_step="install a release of gVisor and name it with [execution.gvisor] runsc",
    )


def _download(place: Path, address: str) -> Path:
    for name in ("lists/partial", "cache/archives/partial"):
        (place / name).mkdir(parents=True)
    (place / "sources.list").write_text(f"deb [signed-by={KEYRING}] {address} {SUITE} main\n")
    options = [
        f"Dir::Etc::sourcelist={place}/sources.list",
        "Dir::Etc::sourceparts=-",
        f"Dir::State::lists={place}/lists",
        f"Dir::Cache={place}/cache",
        "APT::Sandbox::User=",
        "Acquire::Languages=none",
    ]
    apt = ["apt-get", *(part for one in options for part in ("-o", one)), "-qq"]
    _run([*apt, "update"], place)
    _run([*apt, "download", f"{PACKAGE}/{SUITE}"], place)
    found = sorted(place.glob(f"{PACKAGE}_*.deb"))
    if len(found) != 1:
        raise CannotIsolate(f"apt brought {len(found)} packages", next_step="run `apt-get download runsc` by hand")
    return found[0]


def _run(argv: list[str], place: Path) -> None:
    try:
        done = subprocess.run(
            argv,
            check=False,
            cwd=place,
            env={"PATH": _PATH, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise CannotIsolate(f"{argv[0]} did not end", next_step="look at the network of this machine") from None
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        text = re.sub(r"\b[a-z]+://\S+", "<address>", "; ".join(lines[-3:]))[:400]
        raise CannotIsolate(f"{argv[0]} failed: {text or 'without a word'}", next_step="mend what it names; try again")
