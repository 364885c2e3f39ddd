"""The file system as a confined command sees it: its user's own, without what leads out of the namespace.

Rule 1: every change is a mount in the namespace of this run and ends with it; no file of the host is touched.
Rule 2: a step that fails ends the run before the command starts.
Rule 3: what is covered is a way out: sockets of resolvers and container engines, device nodes, automatic mounts, and
        the switches of the kernel that belong to root.

Runs as the first process of a fresh pid namespace, with every capability over its own user namespace.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Final

import msgspec

from lockgate.kernel import mounts_unsafe as mounts

PRIVATE: Final = "/dev/lockgate"
RESOLV_CONF: Final = "# Written by lockgate for this run.\nnameserver 127.0.0.1\nsearch .\noptions ndots:1\n"
HOSTS_ORDER: Final = "hosts: files dns"

_NO_SUID_DEV: Final = mounts.ATTR_NOSUID | mounts.ATTR_NODEV
_READ_ONLY: Final = mounts.ATTR_RDONLY | _NO_SUID_DEV
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS: Final = (("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"), ("stdout", "/proc/self/fd/1"),
                 ("stderr", "/proc/self/fd/2"), ("ptmx", "pts/ptmx"))  # fmt: skip
_OWN: Final = (("shm", "tmpfs", "mode=1777"), ("pts", "devpts", "newinstance,ptmxmode=0666,mode=0620"))
# Each answers for names or for networks on behalf of whoever connects.
_COVERED: Final = (
    "/run/systemd/resolve", "/run/nscd", "/var/run/nscd", "/var/cache/nscd", "/run/avahi-daemon", "/run/dbus",
    "/run/systemd/private", "/run/docker.sock", "/var/run/docker.sock", "/run/docker", "/run/containerd", "/run/podman",
    "/run/crio", "/run/libvirt", "/run/user",
)  # fmt: skip
_PROC_READ_ONLY: Final = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi")


class View(msgspec.Struct, frozen=True):
    """What the operator decides about the view.

    Attributes:
        devices: further device nodes, absolute paths.
        files: name and text of files of this run, put into `PRIVATE`.
        covers: further directories or files to cover, absolute paths.
        shown: what must not be covered, whatever else says so.

    """

    devices: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    covers: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()


class Builder:
    """Makes the view. `step` names what is being done, for the error that a failure becomes."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.step = "start"
        self.covered: list[str] = []

    def build(self) -> None:
        """Change the mounts of this process's namespace, which must be one of its own.

        Raises:
            OSError: the kernel refused `step`.

        """
        self.step = "private"
        mounts.make_private("/")
        self._proc()
        self._sys()
        self._dev()
        self._covers()
        self._names()
        self.step = "seal"
        self._seal()

    def _proc(self) -> None:
        """A procfs of the new pid namespace, where root of the host can change nothing that is the host's."""
        self.step = "proc"
        # EPERM: a masked procfs is around us (we run in a container). The host's view stays; it gives nothing away that
        # this user could not see, and its processes stay out of reach.
        with contextlib.suppress(PermissionError):
            proc = mounts.new_filesystem("proc", _NO_SUID_DEV | mounts.ATTR_NOEXEC)
            mounts.attach(proc, "/proc")
            os.close(proc)
        for name in _PROC_READ_ONLY:
            if Path("/proc", name).exists():
                self.step = f"/proc/{name}"
                _bind_over(f"/proc/{name}", _READ_ONLY | mounts.ATTR_NOEXEC)

    def _sys(self) -> None:
        if Path("/sys").is_dir():
            self.step = "sys"
            _bind_over("/sys", _READ_ONLY | mounts.ATTR_NOEXEC)

    def _dev(self) -> None:
        """Only the devices that are no way out; terminals and shared memory of its own."""
        self.step = "dev"
        wanted = [*(f"/dev/{name}" for name in _DEVICES if Path("/dev", name).exists()), *self.view.devices]
        nodes = [(path, mounts.clone_tree(path)) for path in wanted]
        root = mounts.new_filesystem("tmpfs", mounts.ATTR_NOSUID | mounts.ATTR_NOEXEC, size="1m", mode="0755")
        mounts.attach(root, "/dev")
        os.close(root)
        for path, tree in nodes:
            self.step = path
            target = Path(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            if stat.S_ISDIR(os.fstat(tree).st_mode):
                target.mkdir()
            else:
                target.touch()
            mounts.attach(tree, path)
            os.close(tree)
        for name, where in _LINKS:
            Path("/dev", name).symlink_to(where)
        for name, kind, options in _OWN:
            self.step = f"/dev/{name}"
            Path("/dev", name).mkdir()
            mounts.mount(kind, f"/dev/{name}", mounts.MS_NOSUID | mounts.MS_NOEXEC, options)
        Path(PRIVATE).mkdir()
        for name, text in self.view.files:
            self.step = f"file {name}"
            (Path(PRIVATE) / name).write_text(text, encoding="utf-8")

    def _covers(self) -> None:
        """Cover what answers for names or networks; a file by an empty one, a directory by an empty one."""
        mounted = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        automatic = [_unescape(line.split(" ")[4]) for line in mounted if " - autofs " in line]
        shown = [Path(os.path.realpath(one)) for one in self.view.shown]
        for path in dict.fromkeys(os.path.realpath(one) for one in (*_COVERED, *automatic, *self.view.covers)):
            if any(one.is_relative_to(path) for one in shown):
                continue
            try:
                mode = Path(path).stat().st_mode
            except OSError:
                continue  # not there, or out of this user's reach, and then out of the command's too
            self.step = f"cover {path}"
            if stat.S_ISDIR(mode):
                empty = mounts.new_filesystem(
                    "tmpfs", _NO_SUID_DEV | mounts.ATTR_NOEXEC, size="64k", nr_inodes="16", mode="0755"
                )
                mounts.attach(empty, path)
                os.close(empty)
                self.covered.append(path)
            else:
                _bind("/dev/null", path)

    def _names(self) -> None:
        """Point every resolver library at the responder of this namespace, and at nothing else."""
        self.step = "resolv.conf"
        self._replace("/etc/resolv.conf", RESOLV_CONF)
        order = Path("/etc/nsswitch.conf")
        if order.is_file():
            self.step = "nsswitch.conf"
            lines = order.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
            kept = [line for line in lines if not line.lstrip().startswith("hosts:")]
            self._replace("/etc/nsswitch.conf", "\n".join([*kept, HOSTS_ORDER, ""]))

    def _replace(self, path: str, text: str) -> None:
        if not os.path.lexists(path):
            return  # libraries then ask 127.0.0.1, where the responder is (resolv.conf(5))
        ours = Path(PRIVATE, Path(path).name)
        ours.write_text(text, encoding="utf-8", errors="surrogateescape")
        target = os.path.realpath(path)
        if Path(target).exists():
            _bind(str(ours), target)
        elif any(Path(target).is_relative_to(one) for one in self.covered):
            # systemd-resolved keeps the file that /etc leads to beside its socket.
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            Path(target).write_text(text, encoding="utf-8", errors="surrogateescape")

    def _seal(self) -> None:
        _bind_over(PRIVATE, _READ_ONLY | mounts.ATTR_NOEXEC)
        for path in self.covered:
            here = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            mounts.set_attributes(here, _READ_ONLY | mounts.ATTR_NOEXEC)
            os.close(here)


def _bind(source: str, target: str) -> None:
    tree = mounts.clone_tree(source)
    mounts.attach(tree, target)
    os.close(tree)


def _bind_over(path: str, attributes: int) -> None:
    tree = mounts.clone_tree(path)
    mounts.set_attributes(tree, attributes)
    mounts.attach(tree, path)
    os.close(tree)


def _unescape(path: str) -> str:
    """Undo the octal escapes of mountinfo (proc(5))."""
    return path.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
