"""The attack suite's negative controls: the same list of probes where less of the sandbox stands, or none of it.

Rule 1: outside a sandbox a control runs without privileges. The one exception, `root`, asks only the probes of
        `AS_ROOT`: they open and close, or change the process that asks and ends with it.
Rule 2: a control that this host or this user cannot have is named with the reason; it never counts as one that ran.
Rule 3: decoys stand only in controls: they show that a probe which looks for a leak would see one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal

import msgspec

from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import CannotIsolate, HostFault
from lockgate.runtimes.container.plan import guest_directory
from lockgate.runtimes.container.runtime import ContainerRuntime
from lockgate.runtimes.protocol import TemplateSpec
from lockgate.runtimes.single import run_once

Goal = Literal["Escape", "HostLeak", "Exfil", "Lateral", "HostDoS", "PeerDoS"]
FILES: Final = ("prelude", "escape", "hostleak", "exfil", "lateral", "dos")
NOBODY: Final = 65534
DEADLINE: Final = 60.0  # seconds for one control
MARKER: Final = 133  # EHWPOISON: no handler of these primitives gives it

# What `root` may ask, by the beginning of an id.
AS_ROOT: Final = (
    "create-in-", "device-", "open-device-", "read-proc-", "see-", "write-",
    "prctl-set-mm", "priority-up", "sched-fifo", "shared-files-writable", "x32-getpid",
)  # fmt: skip

# Refused by the end of the process that asks; where a run may have but one process, each takes a run of its own.
FATAL: Final[dict[str, Goal]] = {"x32-getpid": "Escape"}

_CAPABILITIES: Final = (1, 19, 21, 23)  # DAC_OVERRIDE SYS_PTRACE SYS_ADMIN SYS_NICE

# A directory, a listening socket and pipes that nobody closed, a limit that can be raised, a module of ours.
_DECOYS: Final = """
import os as _os, resource as _resource, socket as _socket, sys as _sys
_resource.setrlimit(_resource.RLIMIT_NOFILE, (200, 300))
_kept = [_os.open("/", _os.O_RDONLY), _socket.socket(_socket.AF_INET), *_os.pipe(), *_os.pipe()]
_kept[1].bind(("127.0.0.1", 0))
_kept[1].listen(1)
_sys.modules["lockgate_decoy"] = _os
"""


class Row(msgspec.Struct, frozen=True):
    """The answer of one probe."""

    id: str
    goal: Goal
    reached: bool
    detail: str


class Controls(msgspec.Struct, frozen=True):
    """What the controls answered, by name, and why those are missing that could not be run."""

    rows: dict[str, list[Row]]
    missing: dict[str, str]


def program(only: Iterable[str] | None = None) -> str:
    """Return the joined probes as one program whose last expression is the list of rows.

    Args:
        only: ids to ask; all when None.

    """
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


def control_none(only: Iterable[str] | None = None) -> list[Row]:
    """Run the list without any sandbox, in a throwaway directory, as an unprivileged user."""
    return _outside([], only, drop=True)


def control_root(only: Iterable[str] | None = None) -> list[Row]:
    """Run the probes of `AS_ROOT` without any sandbox as root."""
    return _outside([], only, drop=False, prefix=AS_ROOT)


def control_bwrap(only: Iterable[str] | None = None, *, as_root: bool) -> list[Row]:
    """Run the list under plain bubblewrap."""
    # As root the host's uid 0 stays mapped: capabilities are dropped so that no probe can act.
    options = "--unshare-all --die-with-parent --cap-drop ALL --ro-bind / / --dev /dev --proc /proc"
    return _outside(["bwrap", *options.split()], only, drop=not as_root)


def control_container(argument: str, only: Iterable[str] | None = None) -> list[Row]:
    """Run the list in a slot that lacks something: see the arguments of the container's template.

    Raises:
        CannotIsolate: this host cannot have a slot.
        HostFault: the slot did not answer.

    """
    template = ContainerRuntime((argument,)).start(TemplateSpec())
    try:
        outcome = run_once(template, program(only).encode(), Bounds(wall=DEADLINE))
    finally:
        template.close()
    if outcome.result is None or outcome.result.value is None:
        raise HostFault(f"the control slot ({argument}) did not answer", next_step="run `lockgate doctor`")
    return rows(msgspec.json.decode(outcome.result.value))


def run_controls(only: Iterable[str] | None = None) -> Controls:
    """Run every control that this host and this user can have, two at a time."""
    chosen = None if only is None else list(only)
    missing: dict[str, str] = {}
    jobs: dict[str, Callable[[], list[Row]]] = {
        "none": lambda: control_none(chosen),
        "open": lambda: control_container("--open", chosen),
        "marker": lambda: control_container(f"--marker={MARKER}", chosen),
    }
    if _full_root():
        jobs["root"] = lambda: control_root(chosen)
    else:
        missing["root"] = "needs to be root of the host with its capabilities"
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        missing["bwrap"] = missing["bwrap-root"] = "bubblewrap is not installed (Debian: apt-get install bubblewrap)"
    else:
        jobs["bwrap"] = lambda: control_bwrap(chosen, as_root=False)
        if os.geteuid() == 0:
            jobs["bwrap-root"] = lambda: control_bwrap(chosen, as_root=True)
        else:
            missing["bwrap-root"] = "needs to be root"
    seen: dict[str, list[Row]] = {}
    with ThreadPoolExecutor(2) as workers:
        waiting = {name: workers.submit(job) for name, job in jobs.items()}
        for name, future in waiting.items():
            try:
                seen[name] = future.result()
            except (CannotIsolate, HostFault) as error:
                if name == "none":
                    raise
                missing[name] = error.message
    return Controls(rows=seen, missing=missing)


def _full_root() -> bool:
    """Whether this is root of the initial user namespace with what `AS_ROOT` needs: root of most containers is not."""
    if os.geteuid() != 0 or Path("/proc/self/uid_map").read_text("ascii").split() != ["0", "0", str(2**32 - 1)]:
        return False
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text("ascii").splitlines())
    return all(int(status["CapEff"], 16) >> number & 1 for number in _CAPABILITIES)


def _python() -> str:
    """An interpreter that an unprivileged user can start."""
    system = Path("/usr/bin/python3")
    return str(system if system.exists() else Path(sys.executable).resolve())


def _outside(
    wrapper: list[str], only: Iterable[str] | None, *, drop: bool, prefix: tuple[str, ...] | None = None
) -> list[Row]:
    """Run the list as a program of its own, under `wrapper`, with decoys and a deadline."""
    uid = NOBODY if drop and os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="lockgate-control-") as folder:
        Path(folder).chmod(0o777)  # a throwaway directory that another uid must use
        script = Path(folder) / "attack.py"
        head, _, last = program(only).rpartition("\n")
        keep = "" if prefix is None else f"PROBES[:] = [one for one in PROBES if one[0].startswith({prefix!r})]\n"
        script.write_text(f"{_DECOYS}{head}\n{keep}print(json.dumps({last}))\n")
        inside = ["--bind", folder, folder, "--chdir", folder] if wrapper else []
        argv = [*wrapper, *inside, _python(), "-I", "-S", str(script)]
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
                f"the control could not be run by {argv[0]} ({type(error).__name__})",
                next_step="try again when this host is less busy, or leave them out: lockgate attack --no-controls",
            ) from None
