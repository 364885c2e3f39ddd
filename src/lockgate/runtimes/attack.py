"""The attack suite: which primitives can be reached from inside a rung, and what the same list reaches without one.

Rule 1: a probe asks and never uses (guest/probes).
Rule 2: a probe that no control can see reached is dead, proves nothing and fails the suite, unless this host lacks the
        primitive outside as well (`MAY_LACK`) or only a control that this user cannot have would see it.
Rule 3: what a rung is allowed to leak is a short list with a reason and a document each; all else must be zero.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from lockgate.runtimes.controls import AS_ROOT, FATAL, Controls, Row, control_none, program, rows, run_controls

__all__ = [
    "ALLOWED",
    "FATAL",
    "MAY_LACK",
    "Controls",
    "Leak",
    "Report",
    "Row",
    "control_none",
    "judge",
    "program",
    "rows",
]
__all__ += ["run_controls"]


class Leak(msgspec.Struct, frozen=True):
    """A primitive that a rung is allowed to leave reachable, and why."""

    id: str
    reason: str
    document: str


class Report(msgspec.Struct, frozen=True):
    """What the suite found in one rung.

    Attributes:
        rung: the rung. total: number of probes asked.
        reached: rows that are reached and no allowed leak. allowed_leaks: those that are.
        controls: primitives reached in each control.
        dead: probes that no control saw reached: they prove nothing, and the suite fails.
        absent: probes of primitives that this host lacks outside as well.
        unproven: probes that only a control could show alive which this user cannot have.

    """

    rung: str
    total: int
    reached: tuple[Row, ...]
    allowed_leaks: tuple[Leak, ...]
    controls: dict[str, dict[str, int]]
    dead: tuple[str, ...]
    absent: tuple[str, ...]
    unproven: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing was reached that should not be, and every probe could have seen it."""
        return not self.reached and not self.dead

    def data(self) -> dict[str, Any]:
        """Return the document of `lockgate attack --json`."""
        return {
            "rung": self.rung,
            "total": self.total,
            "reached": [{"id": row.id, "goal": row.goal, "detail": row.detail} for row in self.reached],
            "allowed_leaks": msgspec.to_builtins(self.allowed_leaks),
            "controls": self.controls,
        }


_LIMITS: Final = "docs/security/limits.md#what-of-the-host-shows"
_SENTRY: Final = "docs/security/limits.md#of-the-gvisor-rung"
_GUEST: Final = "docs/security/limits.md#of-the-microvm-rung"
ALLOWED: Final[dict[str, tuple[Leak, ...]]] = {
    "container": (
        Leak("uname-release", "the kernel is shared, and uname needs no privilege to say which", _LIMITS),
        Leak("clock-boottime", "a time namespace would hide it and costs each slot a clone more", _LIMITS),
        Leak("statfs-of-the-interpreter", "read-only binds show the size of the disk behind them", _LIMITS),
        Leak("cpu-count", "the affinity mask is that of the host; the share is a quota", _LIMITS),
    ),
    "gvisor": (
        Leak("uname-release", "it is the sentry's own, the same on every host", _SENTRY),
        Leak("clock-boottime", "the sentry's clock began with the template, not with the host", _SENTRY),
        Leak("cpu-count", "the sentry shows as many processors as the host has", _SENTRY),
    ),
    "microvm": (Leak("uname-release", "it is the guest's own kernel, the same on every host", _GUEST),),
}

# Primitives that a host may lack, with what its kernel says outside any sandbox when it does. Everything else must
# be seen alive in a control.
_NO_FILE: Final = "FileNotFoundError"
_PROC: Final = (
    "kallsyms keys key-users kcore sysrq-trigger modules sched_debug timer_list interrupts partitions fs-ext4"
    " self-stack self-syscall self-net-arp self-net-unix self-net-dev sys-kernel-modprobe"
)
_SEEN: Final = (
    "run-secrets var-run-dockersock run-systemd lib-modules etc-machine-id etc-hostname etc-resolvconf etc-hosts"
    " etc-shadow root-ssh boot opt srv mnt media home var-log var-lib sys-kernel sys-devices sys-class-net"
    " sys-fs-cgroup sys-kernel-uevent_helper sys-kernel-vmcoreinfo sys-fs-cgroup-cgroupprocs"
    " sys-fs-cgroup-memory-release_agent"
)
_DEVICES: Final = (
    "mem kmsg kvm fuse net-tun vda sda nvme0n1 port hpet ptmx pts shm mqueue tty console loop-control vhost-vsock"
    " vhost-net userfaultfd"
)
_SYSFS: Final = (
    "kernel-uevent_helper fs-cgroup-memory-release_agent fs-cgroup-cgroup.procs fs-cgroup-memory-tasks"
    " kernel-mm-transparent_hugepage-enabled power-state"
)
MAY_LACK: Final[dict[str, str]] = {
    **{f"{verb}-proc-{name}": _NO_FILE for verb in ("read", "write") for name in _PROC.split()},
    **{f"see-{name}": _NO_FILE for name in _SEEN.split()},
    **{f"{verb}{name}": _NO_FILE for verb in ("device-", "open-device-") for name in _DEVICES.split()},
    **{f"write-sys-{name}": _NO_FILE for name in _SYSFS.split()},
    "x32-getpid": "ENOSYS",  # the filter kills here, so its marker cannot show; a kernel without x32 has no such call
}


def judge(rung: str, found: list[Row], controls: Controls) -> Report:
    """Split what was reached into allowed leaks and the rest, and account for probes that no control saw reached.

    Args:
        rung: the rung. found: what its probes answered.
        controls: what the controls answered; none at all means that nothing is said about dead probes.

    """
    allowed = {leak.id: leak for leak in ALLOWED.get(rung, ())}
    hit = [row for row in found if row.reached]
    live = {row.id for control in controls.rows.values() for row in control if row.reached}
    # As root where there is one, for whom a name is never hidden.
    outside = {row.id: row.detail for name in ("none", "root") for row in controls.rows.get(name, ())}
    # A device that a device cgroup keeps from root itself is not this host's to give.
    rootless = {row.id for row in controls.rows.get("root", ()) if row.detail == "PermissionError"}
    dead: list[str] = []
    absent: list[str] = []
    unproven: list[str] = []
    for row in found if controls.rows else ():
        if row.id in live:
            continue
        refused = row.id.startswith("open-device-") and row.id in rootless
        if row.id in MAY_LACK and (refused or outside.get(row.id) == MAY_LACK[row.id]):
            absent.append(row.id)
        elif "root" in controls.missing and row.id.startswith(AS_ROOT):
            unproven.append(row.id)
        else:
            dead.append(row.id)
    return Report(
        rung=rung,
        total=len(found),
        reached=tuple(row for row in hit if row.id not in allowed),
        allowed_leaks=tuple(allowed[row.id] for row in hit if row.id in allowed),
        controls={name: {"reached": sum(row.reached for row in control)} for name, control in controls.rows.items()},
        dead=tuple(dead),
        absent=tuple(absent),
        unproven=tuple(unproven),
    )
