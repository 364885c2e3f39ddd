"""The cage of a VMM's process: what it sees of this host, who it is there, and what it may still do.

Rule 1: a hostile guest that takes over its VMM finds fresh namespaces, an id that nothing else has, no capability, no
        network, and a tree that holds the VMM, its libraries, three devices and a procfs of its own pid namespace.
Rule 2: a step that fails ends the process before the VMM is executed. There is no uncaged run.
Rule 3: each machine has its own id where the supervisor is root; it is used again only after its machine was reaped.

Order in `enter`: view, then ids of the process, then limits, then capabilities; each step needs what the next gives up.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
from pathlib import Path
from typing import Final, NoReturn

from lockgate.contract.errors import CannotIsolate
from lockgate.kernel import caps_unsafe as caps
from lockgate.kernel import mounts_unsafe as mounts
from lockgate.kernel import process_unsafe as process
from lockgate.runtimes.container import elf

_MOUNT_POINTS: Final = ("/tmp", "/mnt", "/usr")  # noqa: S108 - any directory: it is left behind by the pivot
_NO_SUID_DEV: Final = mounts.ATTR_NOSUID | mounts.ATTR_NODEV
_DEVICES: Final = {"null": (1, 3), "zero": (1, 5), "urandom": (1, 9), "kvm": (10, 232)}
HOSTNAME: Final = "vmm"
STATUS: Final = 99
_LIMITS: Final = {
    resource.RLIMIT_NOFILE: 64,
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_MEMLOCK: 0,
    resource.RLIMIT_MSGQUEUE: 0,
    resource.RLIMIT_NICE: 0,
    resource.RLIMIT_RTPRIO: 0,
    resource.RLIMIT_SIGPENDING: 64,
    resource.RLIMIT_NPROC: 64,
}


def view(binary: str) -> tuple[tuple[str, str], ...]:
    """Return (path here, path in the cage) of all that `binary` needs: libraries, modules, firmware.

    Raises:
        CannotIsolate: it is not a program of this machine's kind.

    """
    real = os.path.realpath(binary)
    prefix = Path(real).parent.parent
    data = [prefix / "share" / name for name in ("qemu", "seabios", "qemu-firmware")]
    modules = [prefix / "lib" / "qemu", *sorted((prefix / "lib").glob("*-linux-gnu/qemu"))]
    program = elf.read(real)
    if program is None:
        raise CannotIsolate(f"{binary} is no program for this machine", next_step="install qemu-system-x86")
    accelerators = [str(one) for folder in modules for one in sorted(folder.glob("accel-*.so"))]
    binds = [(real, real), *((one, one) for one in accelerators)]
    binds += [(str(one), str(one)) for one in data if one.is_dir()]
    binds += [
        (path, f"/usr/lib/{Path(name).name}") for name, path in sorted(elf.closure([real, *accelerators], ()).items())
    ]
    if program.interpreter is not None:
        binds.append((os.path.realpath(program.interpreter), program.interpreter))
    return tuple({target: (source, target) for source, target in binds}.values())


def build_tree(binds: tuple[tuple[str, str], ...], devices: tuple[str, ...], *, root: bool) -> str:
    """Lay the tree out in this process's own mount namespace, once for all machines; return where it is.

    Args:
        devices: names below /dev that a VMM gets.
        root: whether this is root of the host, who makes devices that the machines' ids may open.

    """
    trees = [(mounts.clone_tree(source), target) for source, target in binds]
    given = {} if root else {name: mounts.clone_tree(f"/dev/{name}") for name in devices}
    place = next(one for one in _MOUNT_POINTS if Path(one).is_dir())
    tmpfs = mounts.new_filesystem("tmpfs", mounts.ATTR_NOSUID, size="1m", nr_inodes="1024", mode="0755")
    mounts.attach(tmpfs, place)
    os.close(tmpfs)
    base = Path(place)
    for directory in ("dev", "proc", "usr/lib"):
        (base / directory).mkdir(parents=True)
    for tree, target in trees:
        mounts.set_attributes(tree, mounts.ATTR_RDONLY | _NO_SUID_DEV)
        _place(tree, base / target[1:])
    for name in devices:
        path = base / "dev" / name
        if root:
            os.mknod(path, stat.S_IFCHR, os.makedev(*_DEVICES[name]))
            path.chmod(0o666)
        else:
            _place(given[name], path)
    mounts.remount(place, mounts.MS_RDONLY | mounts.MS_NOSUID)
    return place


def _place(tree: int, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISDIR(os.fstat(tree).st_mode):
        path.mkdir(exist_ok=True)
    else:
        path.touch()
    mounts.attach(tree, str(path))
    os.close(tree)


def enter(tree: str, program: tuple[str, ...], descriptors: dict[int, int], go: int, *, writes: int) -> NoReturn:
    """Be the VMM: in a process that was just cloned into fresh namespaces. Ends in execve, or with status 99.

    Args:
        tree: what `build_tree` returned.
        descriptors: the number each has in the program -> ours.
        writes: bytes that it may write to a file: a clone has only sockets to write to.
        go: becomes readable once this process's ids are mapped; its end means that the loader is gone.

    """
    words = descriptors[2]
    try:
        _await(go)
        process.become(0, 0)  # an id of this user namespace alone; on the host it is one that nothing else has
        process.die_with_parent()  # after the change of ids, which clears it
        proc = mounts.new_filesystem("proc", _NO_SUID_DEV | mounts.ATTR_NOEXEC)  # while the host's own is in sight
        copy = mounts.clone_tree(tree)  # what came with the namespace is locked and cannot be pivoted to
        mounts.attach(copy, tree)
        os.chdir(tree)
        mounts.pivot_here()
        mounts.attach(proc, "/proc")
        mounts.set_hostname(HOSTNAME)
        high = {number: _raised(fd) for number, fd in descriptors.items()}
        null = _raised(os.open("/dev/null", os.O_RDWR))
        for number in range(3):
            os.dup2(null, number)
        for number, fd in high.items():
            os.dup2(fd, number)
        words = 2
        process.close_from(max(descriptors) + 1)
        os.setsid()
        os.umask(0o077)
        for which, value in {**_LIMITS, resource.RLIMIT_FSIZE: writes}.items():
            resource.setrlimit(which, (value, value))
        process.no_new_privileges()
        caps.drop_all()
        os.execve(program[0], list(program), {})  # noqa: S606 - our own argv
    except BaseException as error:  # noqa: BLE001 - fail closed on anything, and say why where it is read
        os.write(words, f"cage: {type(error).__name__}: {error}\n".encode())
    os._exit(STATUS)


_HIGHEST: Final = 63


def _await(go: int) -> None:
    if os.read(go, 1) != b"g":
        raise OSError(errno.EPIPE, "the loader ended before the ids were mapped")


def _raised(fd: int) -> int:
    """Return a copy of `fd` above every number that a program's descriptors have."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGHEST + 1)
