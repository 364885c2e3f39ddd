"""The slot: hardens itself step by step, then hands itself to the guest runner. Stdlib only.

Rule 1: the order below is the security of this rung; each step says why it stands where it does.
Rule 2: a step that fails ends the slot with status 99 before any code can arrive. There is no second try.
Rule 3: nothing of a run is known before S18.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from lockgate.kernel import caps_unsafe as caps
from lockgate.kernel import landlock_unsafe as landlock
from lockgate.kernel import mounts_unsafe as mounts
from lockgate.kernel import process_unsafe as process
from lockgate.kernel.seccomp_unsafe import Filter
from lockgate.runtimes import dialog
from lockgate.runtimes.container import layout
from lockgate.runtimes.nursery import NO_LIMITS, Child, Nursery, Stages, set_limits

STEPS = (
    "maps", "ids", "deathsig", "tmpfs", "proc", "hostname", "fds", "rlimits", "cwd",
    "no_new_privs", "landlock", "caps", "dumpable", "mdwe", "seccomp", "warmup",
)  # fmt: skip
_exit = os._exit  # the guest puts its own in the place of os._exit
Serve = Callable[[dict[str, Any], int, bool], NoReturn]
_TMPFS = mounts.MS_NOSUID | mounts.MS_NODEV | mounts.MS_NOEXEC
_NOFILE = 256


@dataclass
class Job:
    """What a slot knows when it is born: descriptors, bounds of its class, what the template prepared."""

    nursery: Nursery
    child: Child
    bounds: dict[str, Any]
    cold: bool
    root: bool
    image: int | None
    landlock: int
    filter: Filter
    fail: str
    open: bool
    serve: Serve


def enter(job: Job) -> tuple[Serve, dict[str, Any], int, bool]:
    """Be the slot: S1 (second half) to S16. Returns what is left to call, with nothing of ours on the stack."""
    stages = Stages(job.fail)
    control = job.child.fds[1]
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        stages.next("maps")
        job.nursery.settle_child(job.child)  # S2: one id, mapped by the template (root) or by the slot itself
        stages.next("ids")
        # S3. Before the mounts, for their owner. There is no id 0 here, so the capabilities survive it.
        process.become(layout.NOBODY, layout.NOBODY)
        stages.next("deathsig")
        process.die_with_parent()  # S4, after S3: a change of credentials clears it
        _own_view(job, stages)
        stages.next("fds")
        _descriptors(job.child.fds)
        control = layout.FD_CONTROL
        stages.next("rlimits")
        _limits(job)
        stages.next("cwd")
        os.chdir(layout.RUN_DIR)  # S10, after S5, or this is the directory below the mount
        os.setsid()
        os.umask(0o077)
        facts = _confine(job, stages)
        stages.next("warmup")
    except BaseException as error:  # noqa: BLE001 - fail closed on anything
        _fail(control, stages.name, error)
    facts["stages_us"] = stages.microseconds
    return job.serve, facts, time.perf_counter_ns(), job.cold


def _own_view(job: Job, stages: Stages) -> None:
    """S5 to S7: the run's own directory, no procfs, a name."""
    stages.next("tmpfs")
    size, inodes = int(job.bounds["disk"]), int(job.bounds["inodes"])
    owner = f"mode=0700,uid={layout.NOBODY},gid={layout.NOBODY}"
    # NOEXEC: a file that a run wrote can be neither executed nor mapped executable (dlopen, ld.so).
    mounts.mount("tmpfs", layout.RUN_DIR, _TMPFS, f"size={size},nr_inodes={inodes},{owner}")
    stages.next("proc")
    # S6. The template's procfs is mounted nowhere, so there is nothing to cover; check that it stays so.
    if job.open:
        mounts.mount("proc", "/proc", _TMPFS)
    elif os.listdir("/proc"):  # noqa: PTH208 - names are enough
        raise OSError(1, "/proc is not empty")
    stages.next("hostname")
    mounts.set_hostname(layout.HOSTNAME)


def _descriptors(received: list[int]) -> None:
    """S8: 0 null, 1 stdout, 2 stderr, 3 channel, 4 control, and nothing else."""
    channel, control, stdout, stderr = received
    null = os.open("/dev/null", os.O_RDONLY)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2), (channel, 3), (control, 4)):
        os.dup2(source, target)
    process.close_from(layout.FIRST_UNUSED_FD)


def _limits(job: Job) -> None:
    """S9: every limit hard. NPROC counts per user namespace and uid, so it is this run's own."""
    bounds = job.bounds
    limits = {
        resource.RLIMIT_NOFILE: _NOFILE,
        **NO_LIMITS,
        resource.RLIMIT_STACK: 8 << 20,
        resource.RLIMIT_FSIZE: int(bounds["disk"]),
        resource.RLIMIT_CPU: max(1, -int(-bounds["cpu"] // 1)),
        resource.RLIMIT_NPROC: int(bounds["processes"]),
    }
    if job.image is not None:
        # No memory cgroup: the address space is the cap, so there may be one process only. The image that all slots
        # share is mapped already and is not this run's.
        limits[resource.RLIMIT_AS] = int(bounds["memory"]) + job.image
        limits[resource.RLIMIT_NPROC] = 1
    set_limits(limits)


def _confine(job: Job, stages: Stages) -> dict[str, Any]:
    """S11 to S16, in this order; each locks the door that the one before it needed open."""
    facts: dict[str, Any] = {
        "userns": "root" if job.root else "rootless",
        "landlock": 0,
        "mdwe": False,
        "filter": 0,
        "memory": "rlimit" if job.image is not None else "group",
        "open": job.open,
    }
    if job.open:
        return facts
    stages.next("no_new_privs")
    process.no_new_privileges()  # S11: without it the next steps would need CAP_SYS_ADMIN
    stages.next("landlock")
    # S12: after every mount, since a confined process may not change mounts; before the filter, which refuses it.
    landlock.confine(job.landlock, (layout.RUN_DIR,), ("/dev/null",))
    stages.next("caps")
    caps.drop_all()  # S13
    stages.next("dumpable")
    process.set_dumpable(0)  # S14: after S2, which writes maps, and after the last change of credentials
    stages.next("mdwe")
    mdwe = process.refuse_exec_gain()  # S15: the filter refuses this call; on kernels without it the filter is W^X
    stages.next("seccomp")
    job.filter.install()  # S16: last, because every step above uses calls that it refuses
    facts.update(landlock=job.landlock, mdwe=mdwe, filter=job.filter.length)
    return facts


def _fail(control: int, step: str, error: BaseException) -> NoReturn:
    report = {
        "step": step,
        "errno": getattr(error, "errno", None) or 0,
        "detail": f"{type(error).__name__}: {error}"[:500],  # a line of at most READY_LINE_BYTES
    }
    try:
        os.write(control, dialog.FAILED + json.dumps(report).encode() + b"\n")
    finally:
        _exit(dialog.STATUS_HARDENING_FAILED)
