"""The attack suite: which primitives can be reached from inside a rung, and what the same list reaches without one.

Rule 1: a probe asks and never uses (guest/probes). What runs here as a control runs without privileges.
Rule 2: a probe that no control can see reached is dead, and a dead probe proves nothing: it is reported.
Rule 3: what a rung is allowed to leak is a short list with a reason and a document each; all else must be zero.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal

import msgspec

from lockgate.contract.errors import HostFault
from lockgate.runtimes.container.plan import guest_directory

Goal = Literal["Escape", "HostLeak", "Exfil", "Lateral", "HostDoS", "PeerDoS"]
FILES: Final = ("prelude", "escape", "hostleak", "exfil", "lateral", "dos")
NOBODY: Final = 65534
DEADLINE: Final = 60.0  # seconds for one control


class Row(msgspec.Struct, frozen=True):
    """The answer of one probe."""

    id: str
    goal: Goal
    reached: bool
    detail: str


class Leak(msgspec.Struct, frozen=True):
    """A primitive that a rung is allowed to leave reachable, and why."""

    id: str
    reason: str
    document: str


class Report(msgspec.Struct, frozen=True):
    """What the suite found in one rung: `reached` holds only what is not an allowed leak."""

    rung: str
    total: int
    reached: tuple[Row, ...]
    allowed_leaks: tuple[Leak, ...]
    controls: dict[str, dict[str, int]]
    dead: tuple[str, ...]


_LIMITS = "docs/security/limits.md"
ALLOWED: Final[dict[str, tuple[Leak, ...]]] = {
    "container": (
        Leak("uname-release", "the kernel is shared, and uname needs no privilege to say which", _LIMITS),
        Leak("clock-boottime", "a time namespace would hide it and costs each slot a clone more", _LIMITS),
        Leak("statfs-of-the-interpreter", "read-only binds show the size of the disk behind them", _LIMITS),
        Leak("cpu-count", "the affinity mask is that of the host; the share is a quota", _LIMITS),
    ),
}


def program(only: Iterable[str] | None = None) -> str:
    """Return the joined probes as one program whose last expression is the list of rows."""
    folder = guest_directory() / "probes"
    parts = [(folder / f"{name}.py").read_text() for name in FILES]
    chosen = "None" if only is None else repr(sorted(only))
    return "\n".join([*parts, f"run_all({chosen})"])


def rows(value: object) -> list[Row]:
    """Type what a run returned (hostile until it fits).

    Raises:
        HostFault: the run did not return a list of rows.

    """
    try:
        return msgspec.convert(value, list[Row])
    except msgspec.ValidationError:
        raise HostFault(
            "the attack program did not return its rows",
            next_step="run `lockgate attack --json` again; if it repeats, the rung ends the program early",
        ) from None


def judge(rung: str, found: list[Row], controls: dict[str, list[Row]]) -> Report:
    """Split what was reached into allowed leaks and the rest, and name probes that no control saw reached."""
    allowed = {leak.id: leak for leak in ALLOWED.get(rung, ())}
    hit = [row for row in found if row.reached]
    live = {row.id for control in controls.values() for row in control if row.reached}
    return Report(
        rung=rung,
        total=len(found),
        reached=tuple(row for row in hit if row.id not in allowed),
        allowed_leaks=tuple(allowed[row.id] for row in hit if row.id in allowed),
        controls={name: {"reached": sum(row.reached for row in control)} for name, control in controls.items()},
        dead=tuple(row.id for row in found if controls and row.id not in live),
    )


def control_none() -> list[Row]:
    """Run the list without any sandbox, in a throwaway directory, as an unprivileged user."""
    with tempfile.TemporaryDirectory() as folder:
        script = _script(folder)
        return _run([_python(), "-I", "-S", script], folder, drop=True)


def control_bwrap(*, as_root: bool) -> list[Row] | None:
    """Run the list under plain bubblewrap; None when it is not installed or (not root) root was asked for."""
    bwrap = shutil.which("bwrap")
    if bwrap is None or (as_root and os.geteuid() != 0):
        return None
    with tempfile.TemporaryDirectory() as folder:
        script = _script(folder)
        argv = [bwrap, "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
        # As root the host's uid 0 stays mapped: capabilities are dropped so that no probe can act.
        argv += ["--cap-drop", "ALL", "--bind", folder, folder, "--chdir", folder, _python(), "-I", "-S", script]
        return _run(argv, folder, drop=not as_root)


def _python() -> str:
    """An interpreter that an unprivileged user can start."""
    system = Path("/usr/bin/python3")
    return str(system if system.exists() else Path(sys.executable).resolve())


def _script(folder: str) -> str:
    """Write the joined program to a file that prints its rows as JSON."""
    Path(folder).chmod(0o777)  # a throwaway directory that another uid must use
    path = Path(folder) / "attack.py"
    body = program().rsplit("\n", 1)
    path.write_text(f"{body[0]}\nprint(json.dumps({body[1]}))\n")
    return str(path)


def _run(argv: list[str], folder: str, *, drop: bool) -> list[Row]:
    """Run a control with a deadline; unprivileged when `drop` and we are root."""
    uid = NOBODY if drop and os.geteuid() == 0 else None
    try:
        done = subprocess.run(
            argv,
            cwd=folder,
            env={"HOME": folder, "CONTROL_DECOY": "visible"},
            user=uid,
            group=uid,
            extra_groups=[] if uid is not None else None,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=DEADLINE,
            check=False,
        )
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=list[Row])
    except (OSError, subprocess.TimeoutExpired, IndexError, msgspec.DecodeError) as error:
        raise HostFault(
            f"the control could not be run ({type(error).__name__})", next_step="run it by hand: " + " ".join(argv[:3])
        ) from None
