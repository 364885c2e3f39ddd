"""Which control groups this host lets us make, and the group of one slot.

Rule 1: a group belongs to one slot and is never used again; counters start at zero and nothing is carried over.
Rule 2: limits are set before the slot is moved in, and the slot is moved in before code is sent.
Rule 3: a controller counts as present only if a group with its limits could really be made at start (`probe`).

Sources: Documentation/admin-guide/cgroup-v1/{memory,pids,cpuacct}.rst, Documentation/admin-guide/cgroup-v2.rst,
Documentation/scheduler/sched-bwc.rst. Making, filling and removing groups is the keeper's work (`keeper.py`): a move
waits for an RCU grace period (5 to 20 ms), which the reactor must not.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final, Literal

import msgspec

from lockgate.contract.bounds import Bounds

FIX: Final = (
    "run it as root, under `systemd-run --user --scope -p Delegate=yes`, or as a systemd service with Delegate=yes"
)
MemoryBy = Literal["cgroup v1", "cgroup v2", "rlimit", "none"]
PERIOD_US: Final = 100_000
_PREFIX: Final = "lockgate-"
_LEAF: Final = "inner"  # where a delegated directory's own processes go
_MOVES: Final = 16


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Where groups are made; None = this host gives us no such controller.

    Attributes:
        version: 1 = one hierarchy a controller; 2 = one for all; 0 = none at all.
        memory, pids, cpu, cpuacct: directories of v1 hierarchies, or the same v2 directory where it has the controller.
        unified: a v2 directory (also on hybrid hosts), for `cgroup.kill` and `cpu.stat`.
        swap: what keeps the run out of swap: "memsw", "swap.max", "no swap on this host", or "" (nothing does).
        missing: controller or file -> why it is missing and what brings it.

    """

    version: Literal[0, 1, 2] = 0
    memory: str | None = None
    pids: str | None = None
    cpu: str | None = None
    cpuacct: str | None = None
    unified: str | None = None
    swap: str = ""
    missing: dict[str, str] = {}

    @property
    def bases(self) -> tuple[str, ...]:
        """The distinct directories in which groups are made."""
        return tuple(dict.fromkeys(p for p in (self.memory, self.pids, self.cpu, self.cpuacct, self.unified) if p))

    @property
    def memory_by(self) -> MemoryBy:
        """What caps the memory of a whole run."""
        if not self.memory or not self.swap:
            return "none"
        return "cgroup v1" if self.version == 1 else "cgroup v2"


class Limits(msgspec.Struct, frozen=True):
    """The part of `Bounds` that a group holds: bytes, tasks, cores."""

    memory: int
    processes: int
    cpu_share: float

    @staticmethod
    def of(bounds: Bounds, overhead: int = 0, overhead_tasks: int = 0) -> Limits:
        """Take them from the bounds of a run, with what the machine itself takes beside it (bytes, tasks)."""
        return Limits(bounds.memory + overhead, bounds.processes + overhead_tasks, bounds.cpu_share)


def write(path: str, text: str) -> None:
    """Write a control file with a single system call; raises OSError as the kernel says it."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def read(path: str) -> str:
    """Read a control file whole."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 65536).decode()
    finally:
        os.close(fd)


def owner_name() -> str:
    """Return the name of this supervisor's directories: its pid and start time, so that a dead owner's are known."""
    return f"{_PREFIX}{os.getpid()}-{_start_time(os.getpid())}"


def _start_time(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]  # field 22, proc_pid_stat(5)


# ---- finding -----------------------------------------------------------------------------------------------------
class Mount(msgspec.Struct, frozen=True):
    """A cgroup file system: where, which part of the hierarchy, v1 controllers (empty for v2)."""

    point: str
    root: str
    controllers: frozenset[str]
    version: int


def _unescape(field: str) -> str:
    return field.encode().decode("unicode_escape")


def parse_mounts(mountinfo: str) -> list[Mount]:
    """Return the cgroup mounts of a /proc/self/mountinfo text (proc_pid_mountinfo(5))."""
    found: list[Mount] = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        head, tail = left.split(), right.split()
        if len(head) < 5 or len(tail) < 3 or tail[0] not in ("cgroup", "cgroup2"):
            continue
        version = 2 if tail[0] == "cgroup2" else 1
        options = frozenset(tail[2].split(",")) if version == 1 else frozenset[str]()
        found.append(Mount(_unescape(head[4]), _unescape(head[3]), options, version))
    return found


def parse_own(cgroup: str) -> dict[str, str]:
    """Return controller -> own path of a /proc/self/cgroup text; "" is the unified hierarchy (cgroups(7))."""
    own: dict[str, str] = {}
    for line in cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            own[name] = path
    return own


def locate(mount: Mount, path: str) -> str | None:
    """Return the directory of hierarchy path `path` below a mount, None when the mount does not show it."""
    root = mount.root.rstrip("/")
    if path != root and not path.startswith(root + "/"):
        return None
    return (mount.point.rstrip("/") + path[len(root) :]).rstrip("/") or "/"


def _swap_active() -> bool:
    try:
        return len(Path("/proc/swaps").read_text().splitlines()) > 1
    except OSError:
        return True


def find(explicit: str | None = None) -> Layout:
    """Return what this process may use, by making, limiting and removing a real group in each place.

    Args:
        explicit: a delegated cgroup v2 directory named by the operator.

    """
    try:
        mounts = parse_mounts(Path("/proc/self/mountinfo").read_text())
        own = parse_own(Path("/proc/self/cgroup").read_text())
    except OSError as err:
        return Layout(missing={"memory": f"/proc cannot be read ({err.strerror}); mount procfs"})
    name = owner_name()
    missing: dict[str, str] = {}
    v2 = _find_v2(mounts, own, explicit, name, missing)
    if v2.memory is not None:
        return v2
    v1 = _find_v1(mounts, own, name, missing)
    if v1.memory is None and v1.pids is None and v2.unified is not None and v2.version == 2:
        return msgspec.structs.replace(v2, missing=missing)
    return msgspec.structs.replace(v1, unified=v2.unified, missing=missing)


def _find_v1(mounts: list[Mount], own: dict[str, str], name: str, missing: dict[str, str]) -> Layout:
    found: dict[str, str] = {}
    swap = ""
    for controller, knob in (
        ("memory", "memory.limit_in_bytes"),
        ("pids", "pids.max"),
        ("cpu", "cpu.cfs_quota_us"),
        ("cpuacct", "cpuacct.usage"),
    ):
        mount = next((m for m in mounts if controller in m.controllers), None)
        where = locate(mount, own[controller]) if mount is not None and controller in own else None
        if where is None:
            missing.setdefault(
                controller, f"the kernel's {controller} controller is in no hierarchy that is ours to use"
            )
            continue
        base = f"{where}/{name}"
        try:
            _sweep(where)
            _try(base, knob)
        except OSError as err:
            missing.setdefault(controller, f"no group can be made in {where} ({err.strerror})")
            continue
        found[controller] = base
        if controller == "memory":
            swap = _swap_of(base, "memory.memsw.limit_in_bytes", "memsw")
            if not swap:
                missing["swap"] = "the kernel does not account swap; boot with swapaccount=1 or swapoff -a"
    return Layout(
        version=1 if found else 0,
        memory=found.get("memory"),
        pids=found.get("pids"),
        cpu=found.get("cpu"),
        cpuacct=found.get("cpuacct"),
        swap=swap,
    )


def _swap_of(base: str, knob: str, name: str) -> str:
    if Path(base, knob).exists():
        return name
    return "" if _swap_active() else "no swap on this host"


def _find_v2(
    mounts: list[Mount], own: dict[str, str], explicit: str | None, name: str, missing: dict[str, str]
) -> Layout:
    mount = next((m for m in mounts if m.version == 2), None)
    where = explicit or (locate(mount, own[""]) if mount is not None and "" in own else None)
    if where is None:
        missing["kill"] = "no cgroup v2 hierarchy is mounted; mount one at /sys/fs/cgroup/unified"
        return Layout()
    places = [explicit] if explicit else delegated(where, mount.point if mount is not None else None)
    controllers: list[str] = []
    parent = where
    for place in places:
        try:
            controllers = sorted(set(read(f"{place}/cgroup.controllers").split()) & {"memory", "pids", "cpu"})
            if controllers:
                _hand_down(place, controllers)
                parent = place
                break
        except OSError as err:
            missing["memory"] = f"controllers cannot be handed down in {place} ({err.strerror})"
            controllers = []
    base = f"{parent}/{name}"
    try:
        _sweep(parent)
        _try(base, "cgroup.procs")
        if controllers:
            write(f"{base}/cgroup.subtree_control", " ".join(f"+{one}" for one in controllers))
    except OSError as err:
        missing["kill"] = f"no group can be made in {parent} ({err.strerror})"
        return Layout()
    if not Path(base, "cgroup.kill").exists():
        missing["kill"] = "the kernel has no cgroup.kill; Linux 5.14 brings it (kills are then through the pidfd alone)"
    return Layout(
        version=2,
        memory=base if "memory" in controllers else None,
        pids=base if "pids" in controllers else None,
        cpu=base if "cpu" in controllers else None,
        unified=base,
        swap=_swap_v2(base) if "memory" in controllers else "",
    )


def delegated(own: str, top: str | None) -> list[str]:
    """Return the v2 directories whose children may be given controllers by us, best first.

    - What systemd marked as delegated: our own directory or, where our service has a DelegateSubgroup, its parent.
    - The top of a cgroup namespace: a container manages what is below it.
    - The top of the whole hierarchy, for root alone, as container engines without systemd do.

    A directory without a mark is somebody else's to manage.
    """
    found = [place for place in (os.path.dirname(own), own) if _marked(place)]  # noqa: PTH120
    if top is not None:
        real_root = not Path(top, "cgroup.type").exists()  # only the root of all has no type
        if (real_root and os.getuid() == 0) or (not real_root and own == top):
            found.append(top)
    return list(dict.fromkeys(found))


def _marked(place: str) -> bool:
    return any(_xattr(place, attribute) == b"1" for attribute in ("user.delegate", "trusted.delegate"))


def _hand_down(place: str, controllers: list[str]) -> None:
    """Give controllers to the children of `place`; its own processes move to a leaf first (no inner processes).

    All in one write: `cpu` alone would turn a directory that has processes into a threaded domain.
    """
    lacking = [one for one in controllers if one not in read(f"{place}/cgroup.subtree_control").split()]
    if not lacking:
        return
    if Path(place, "cgroup.type").exists():  # the root of all may keep its processes
        leaf = f"{place}/{_LEAF}"
        for _ in range(_MOVES):
            pids = read(f"{place}/cgroup.procs").split()
            if not pids:
                break
            os.makedirs(leaf, exist_ok=True)  # noqa: PTH103
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    write(f"{leaf}/cgroup.procs", pid)
    write(f"{place}/cgroup.subtree_control", " ".join(f"+{one}" for one in lacking))


def _swap_v2(base: str) -> str:
    probe = f"{base}/probe"
    os.mkdir(probe)  # noqa: PTH102
    try:
        return _swap_of(probe, "memory.swap.max", "swap.max")
    finally:
        os.rmdir(probe)  # noqa: PTH106


def _xattr(path: str, name: str) -> bytes:
    try:
        return os.getxattr(path, name)
    except OSError:
        return b""


def _try(base: str, knob: str) -> None:
    """Make the supervisor's directory and look whether a group in it would have `knob`."""
    os.makedirs(base, exist_ok=True)  # noqa: PTH103
    probe = f"{base}/probe"
    os.mkdir(probe)  # noqa: PTH102
    try:
        if not os.access(f"{probe}/{knob}", os.F_OK):
            raise FileNotFoundError(2, f"a group has no {knob}")
        if not os.access(f"{probe}/cgroup.procs", os.W_OK):
            raise PermissionError(13, "cgroup.procs is not writable")
    finally:
        os.rmdir(probe)  # noqa: PTH106


def _sweep(where: str) -> None:
    """Remove what a supervisor that was killed together with its keeper left here."""
    for entry in os.scandir(where):
        if not entry.name.startswith(_PREFIX):
            continue
        pid, _, start = entry.name[len(_PREFIX) :].partition("-")
        if pid.isdigit() and start and _start_time(int(pid)) != start:
            remove_tree(entry.path)


def remove_tree(base: str) -> bool:
    """Remove a supervisor's directory and the groups in it; False while one of them is in use."""
    try:
        for entry in os.scandir(base):
            if entry.is_dir(follow_symlinks=False):
                os.rmdir(entry.path)  # noqa: PTH106
        os.rmdir(base)  # noqa: PTH106
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
