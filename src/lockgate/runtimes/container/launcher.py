"""The launcher: makes a template's namespaces and sealed tree, then execs the template inside it.

Rule 1: it never runs code of a run and holds nothing of one. Its memory does not reach a slot: the template is a
        fresh interpreter that starts inside the sealed tree, so nothing of this host's paths is left in it.
Rule 2: every source is opened before the user namespace is entered (as root), so that a parent directory which the
        mapped ids may not cross is no obstacle and no reason to open it up.
Rule 3: the template dies with the launcher (PDEATHSIG) and the launcher with the supervisor (its lifeline).

Rule 4: nothing is imported late: once the ids are mapped the host's files may be out of reach.

Started as `python -I -S launcher.py CTL LIFELINE PLAN`: three descriptors. Steps T3 to T7 in order.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import stat
import sys
import types
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":  # the package's own __init__ files need more than the standard library
    _here = Path(__file__).resolve()
    for _name, _level in (("lockgate", 2), ("lockgate.runtimes", 1), ("lockgate.runtimes.container", 0)):
        _package = types.ModuleType(_name)
        _package.__path__ = [str(_here.parents[_level])]
        sys.modules[_name] = _package

from lockgate.kernel import mounts_unsafe as mounts
from lockgate.kernel import process_unsafe as process
from lockgate.runtimes import dialog
from lockgate.runtimes.container import layout

_NO_SUID_DEV = mounts.ATTR_NOSUID | mounts.ATTR_NODEV
_READ_ONLY = mounts.ATTR_RDONLY | _NO_SUID_DEV
_MOUNT_POINTS = ("/tmp", "/mnt", "/usr")  # noqa: S108 - any directory of this host: it is left behind by the pivot
# All that a slot has on its stack above the guest's own frames. `main` returns in a slot only.
_PROGRAM = f"""
import sys
sys.path.insert(0, {layout.BOOT!r})
from lockgate.runtimes.container import template
serve, *ready = template.main(sys.argv[1:])
del template
serve(*ready)
"""


class Launcher:
    """One template on its way. `step` names what is being done, for the error that a failure becomes."""

    def __init__(self, plan: dict[str, Any], *, root: bool) -> None:
        self.plan = plan
        self.root = root
        self.step = "start"
        self.trees: list[tuple[int, str]] = []
        self.files: list[tuple[int, str]] = []
        self.devices: list[tuple[int, str]] = []
        self.host_proc = -1

    def open_sources(self) -> None:
        """Open everything of this host that the tree will show (T7, first half); all or nothing."""
        self.trees.clear()
        self.files.clear()
        for source, target in self.plan["copies"]:
            self.step = f"open {Path(target).name}"
            self.files.append((os.open(source, os.O_RDONLY | os.O_CLOEXEC), target))
        for source, target in self.plan["binds"]:
            self.step = f"open_tree for {target}"
            tree = mounts.clone_tree(source)
            mounts.set_attributes(tree, _READ_ONLY)
            self.trees.append((tree, target))
        for name in layout.DEVICES:
            self.step = f"open_tree for /dev/{name}"
            tree = mounts.clone_tree(f"/dev/{name}")
            mounts.set_attributes(tree, mounts.ATTR_RDONLY | mounts.ATTR_NOSUID | mounts.ATTR_NOEXEC)
            self.devices.append((tree, f"/dev/{name}"))
        self.host_proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def enter_namespaces(self) -> None:
        """T3 to T5: fresh namespaces, then the id maps. Afterwards this process is id 0 of its user namespace."""
        uid, gid = os.getuid(), os.getgid()
        self.step = "unshare"
        if self.root:
            base = self.plan["base"]
            ready_r, ready_w = os.pipe()
            writer = os.fork()
            if writer == 0:
                os.close(ready_w)
                _write_range(os.getppid(), base, ready_r)
            os.close(ready_r)
            process.unshare(process.ALL_NAMESPACES)
            self.step = "maps"
            os.write(ready_w, b"m")
            os.close(ready_w)
            if os.waitpid(writer, 0)[1] != 0:
                raise OSError(1, "the id range could not be mapped")
            self.step = "ids"
            os.setgroups([])
            process.become(0, 0)
        else:
            process.unshare(process.ALL_NAMESPACES)
            self.step = "maps"
            Path("/proc/self/setgroups").write_text("deny", encoding="utf-8")
            Path("/proc/self/uid_map").write_text(f"0 {uid} 1", encoding="utf-8")
            Path("/proc/self/gid_map").write_text(f"0 {gid} 1", encoding="utf-8")
        process.set_dumpable(1)  # a change of ids cleared it, and then no child's map could be written

    def build_tree(self) -> int:
        """T7: the sealed tree, entered. Returns a descriptor of a procfs that is mounted nowhere."""
        self.step = "private"
        mounts.make_private("/")
        self.step = "proc"
        try:
            proc = mounts.new_filesystem("proc", _NO_SUID_DEV | mounts.ATTR_NOEXEC)
        except OSError:
            proc = self.host_proc  # masked procfs around us (we run in a container): its own view serves as well
        self.step = "root"
        root = mounts.new_filesystem("tmpfs", _NO_SUID_DEV, size="512m", nr_inodes="8192", mode="0755")
        place = next(one for one in _MOUNT_POINTS if Path(one).is_dir())
        mounts.attach(root, place)
        os.close(root)
        os.chdir(place)
        for directory in ("dev", "etc", "proc", layout.RUN_DIR[1:], "tmp", "usr/lib", "usr/bin"):
            Path(directory).mkdir(parents=True)
        for target, name in self.plan["links"]:
            Path("." + name).symlink_to(target)
        for source, target in self.files:
            self.step = f"copy {Path(target).name}"
            _copy(source, Path("." + target))
        for tree, target in (*self.trees, *self.devices):
            self.step = f"attach {target}"
            path = Path("." + target)
            path.parent.mkdir(parents=True, exist_ok=True)
            if _is_directory(tree):
                path.mkdir()
            else:
                path.touch()
            mounts.attach(tree, "." + target)
            os.close(tree)
        for target in self.plan["covers"]:
            self.step = f"cover {target}"
            empty = mounts.new_filesystem("tmpfs", _READ_ONLY | mounts.ATTR_NOEXEC, size="4k", nr_inodes="2")
            mounts.attach(empty, "." + target)
            os.close(empty)
        self.step = "etc"
        Path("etc/passwd").write_text(
            f"nobody:x:{layout.NOBODY}:{layout.NOBODY}::{layout.RUN_DIR}:/\n", encoding="utf-8"
        )
        self.step = "pivot_root"
        mounts.pivot_here()
        self.step = "hostname"
        mounts.set_hostname(layout.HOSTNAME)
        return proc

    def start_template(self, ctl: int, proc: int) -> NoReturn:
        """Exec the template on the sealed tree with nothing but its control socket and the procfs."""
        self.step = "exec"
        null = os.open("/dev/null", os.O_RDWR)
        own_proc = proc != self.host_proc
        # Up and out of the way first: a target number may hold a source.
        ctl, proc, null = (_above(fd) for fd in (ctl, proc, null))
        for fd in range(layout.FIRST_UNUSED_FD):
            os.dup2(null, fd)  # also 3 and 4, or a received descriptor lands there
        os.dup2(ctl, layout.FD_CTL)
        os.dup2(proc, layout.FD_PROC)
        process.close_from(layout.FD_PROC + 1)
        argv = [layout.PYTHON, "-I", "-S", "-B", "-X", "utf8", "-c", _PROGRAM]
        settings = json.dumps(
            {
                "root": self.root,
                "own_proc": own_proc,
                "preload": self.plan["preload"],
                "memory_by_rlimit": self.plan["memory_by_rlimit"],
            }
        )
        # One thread each: a raw clone copies one thread, and a BLAS pool would wait for the others for ever.
        threads = {f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "MKL", "NUMEXPR")}
        os.execve(layout.PYTHON, [*argv, settings, *self.plan["arguments"]], threads)  # noqa: S606 - fixed program


def _above(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD, 64)


def _is_directory(tree: int) -> bool:
    return stat.S_ISDIR(os.fstat(tree).st_mode)


def _copy(source: int, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        os.close(source)
        return
    with open(source, "rb") as reader, target.open("wb") as writer:
        while chunk := reader.read(1 << 20):
            writer.write(chunk)
        target.chmod(0o644 if target.suffix == ".py" else 0o755)


def _write_range(pid: int, base: int, ready: int) -> NoReturn:
    """Map 65,536 ids for the launcher from the parent user namespace, where that is still allowed."""
    status = 1
    try:
        if os.read(ready, 1) == b"m":
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{pid}/{name}").write_text(f"0 {base} 65536", encoding="utf-8")
            status = 0
    finally:
        os._exit(status)


def _wait(child: int, lifeline: int) -> NoReturn:
    """Stay until the template or the supervisor is gone, whichever comes first."""
    pidfd = os.pidfd_open(child)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(lifeline, select.POLLIN)
    poll.poll()
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.waitpid(child, 0)
    os._exit(0)


def main() -> NoReturn:
    """Do T3 to T7; a failure is one message on ctl and exit status 99."""
    ctl_fd, lifeline, plan_fd = (int(one) for one in sys.argv[1:4])
    ctl = socket.socket(fileno=ctl_fd)
    launcher: Launcher | None = None
    try:
        with open(plan_fd, "rb") as file:  # noqa: PTH123 - a descriptor
            plan = json.load(file)
        launcher = Launcher(plan, root=plan["base"] > 0)
        os.umask(0o022)  # slots are other ids than the owner of the tree
        if launcher.root:
            # EPERM: root without CAP_SYS_ADMIN, as in many containers. It may still have it in a namespace of its own.
            with contextlib.suppress(PermissionError):
                launcher.open_sources()
        launcher.enter_namespaces()
        if not launcher.devices:
            launcher.open_sources()
        launcher.step = "fork"
        child = os.fork()
        if child:
            ctl.close()
            process.close_from(max(lifeline, 2) + 1)
            _wait(child, lifeline)
        process.die_with_parent()
        os.close(lifeline)
        launcher.start_template(ctl.fileno(), launcher.build_tree())
    except BaseException as error:  # noqa: BLE001 - whatever it is, the supervisor must hear of it
        step = launcher.step if launcher else "plan"
        code = error.errno if isinstance(error, OSError) and error.errno else 0
        detail = f"{type(error).__name__}: {error}"[:1000]
        ctl.send(json.dumps({"error": step, "errno": code, "detail": detail}).encode())
    os._exit(dialog.STATUS_HARDENING_FAILED)


if __name__ == "__main__":
    main()
