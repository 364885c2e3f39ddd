"""The guest's first program: puts the run's tree in order, waits warm, and hardens itself into one run. Stdlib only.

It runs inside the sentry, as pid 1 with a few of *the sentry's* capabilities, none of the host's. It is checkpointed
while its worker waits in `_birth`; a restored box goes on from there.

Rule 1: nothing of a run is known before the birth message, and the worker has given up its rights before that.
Rule 2: init stays outside the worker's pid namespace and under another id: code can neither see nor signal it.
Rule 3: a step that fails ends the box, with its name where somebody listens. There is no second try.

Steps: Z1 devices, Z2 pivot, Z3 a pid namespace and the worker's fork, Z4 imports, Z5 ids, capabilities and filter,
Z6 birth: the run's disk (init mounts it), descriptors, limits; then the runner of guest/.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import json
import os
import resource
import socket
import stat
import sys
import sysconfig
import time
import types
from collections.abc import Callable
from typing import Any, NoReturn

from lockgate.kernel import caps_unsafe as caps
from lockgate.kernel import libraries_unsafe as libraries
from lockgate.kernel import mounts_unsafe as mounts
from lockgate.kernel import process_unsafe as process
from lockgate.kernel import seccomp
from lockgate.kernel.seccomp_unsafe import Filter
from lockgate.kernel.syscalls_unsafe import ARCH
from lockgate.runtimes.gvisor import layout

_kept: list[object] = []  # libraries, for as long as the box lives
Serve = Callable[[dict[str, Any], int, bool], NoReturn]
_exit = os._exit  # the guest puts its own in the place of os._exit

_TMPFS = mounts.MS_NOSUID | mounts.MS_NODEV | mounts.MS_NOEXEC
_DEV = mounts.MS_NOSUID | mounts.MS_NOEXEC
_NOFILE = 256
_LOOK_EVERY = 0.02  # seconds between two counts of the run's files, where the sentry has no limit for them
_LOOK_SHARE = 20  # and at least so many times what a count takes
# What runs import most. Not asyncio: it is a tenth of a checkpoint, and each box has to be read from one.
_PRELOAD = """abc ast base64 binascii bisect calendar collections contextlib copy csv dataclasses datetime
decimal difflib enum fractions functools hashlib heapq html importlib inspect io itertools json linecache locale logging
math operator os pathlib random re shutil socket statistics string struct tempfile textwrap threading time timeit
traceback types typing unicodedata urllib.parse uuid warnings zlib zoneinfo"""


class _Steps:
    """Where the machine is, and how long each step of its hardening took."""

    def __init__(self) -> None:
        self.name = "start"
        self.microseconds: dict[str, int] = {}
        self._since = time.perf_counter_ns()

    def next(self, name: str) -> None:
        now = time.perf_counter_ns()
        self.microseconds[self.name] = (now - self._since) // 1000
        self.name, self._since = name, now


# ---- the template ------------------------------------------------------------------------------------------------
def main(settings: dict[str, Any], guest: dict[str, str]) -> tuple[Serve, dict[str, Any], int, bool]:
    """Be the template and then one machine of it; returns in the worker, once hardened, what is left to call.

    Args:
        settings: preload: modules of the package set. open: only controls of the attack suite give it; see `_give_up`.
        guest: sources of the guest's modules by name.

    """
    steps = _Steps()
    birth = socket.socket(fileno=os.dup2(0, layout.FD_BIRTH))
    try:
        _tree()
        steps.name = "fork"
        ask, answer = socket.socketpair()
        process.unshare(process.NEWPID)
        worker = os.fork()
        if worker:
            birth.close()
            ask.close()
            _init(worker, answer)
        answer.close()
        runner = _imports(steps, settings["preload"], guest)
        length = _give_up(steps, sealed=not settings.get("open"))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the host must hear of it
        _say(birth, {"step": steps.name, "errno": getattr(error, "errno", 0) or 0, "detail": repr(error)[:500]})
        _exit(layout.STATUS_LOST)
    _say(birth, {"ready": {"python": ".".join(str(one) for one in sys.version_info[:3])}})
    return _become(birth, ask, runner, length)


def _say(birth: socket.socket, message: dict[str, Any]) -> None:
    birth.sendall(json.dumps(message).encode() + b"\n")


def _tree() -> None:
    """Z1, Z2: devices of our own, then the run's tree as the root; what the sentry mounted around it goes."""
    mounts.mount("tmpfs", layout.BOX + "/dev", _DEV, "mode=0755,size=4k")
    for name, (major, minor) in layout.DEVICES.items():
        path = f"{layout.BOX}/dev/{name}"
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))
        os.chmod(path, 0o666)  # noqa: PTH101, S103 - what these devices are for; umask took it from mknod
    mounts.bind(layout.BOX, layout.BOX)
    os.chdir(layout.BOX)
    mounts.pivot_here()
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)


def _imports(steps: _Steps, preload: list[str], guest: dict[str, str]) -> types.ModuleType:
    """Z4: what runs import most, the package set, the guest's own files; then nothing of ours is left to import."""
    steps.name = "guest"
    modules: dict[str, types.ModuleType] = {}
    for name in ("values", "host", "runner"):
        module = types.ModuleType(name)
        module.__dict__.update({one: modules[one] for one in modules})
        exec(compile(guest[name], f"<{name}>", "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - our own
        modules[name] = module
    sys.modules["host"] = modules["host"]
    stdlib = f"{layout.STDLIB}/python{sys.version_info[0]}.{sys.version_info[1]}"
    sys.path[:] = [stdlib, f"{stdlib}/lib-dynload", layout.PACKAGES]
    for name in (*_PRELOAD.split(), *preload):
        steps.name = f"preload {name}"
        importlib.import_module(name)
    steps.name = "libraries"
    # No sentry heeds noexec when it maps a file, so nothing may be mapped executable later (Z5): all of it is now.
    _kept.extend(libraries.map_all(layout.STDLIB, layout.PACKAGES))
    steps.name = "settle"
    main_module = sys.modules["__main__"]
    modules["runner"].settle()
    sys.modules["__main__"] = main_module
    sys.path[:] = ["", *sys.path]
    sys.argv[:] = [""]
    sys.orig_argv[:] = ["python3"]
    for name in [one for one in sys.modules if one.partition(".")[0] == "lockgate" or "_sysconfigdata" in one]:
        del sys.modules[name]
    sys.meta_path[:] = [one for one in sys.meta_path if not hasattr(one, "sources")]
    sysconfig.__dict__.update(_CONFIG_VARS=None, _CONFIG_VARS_INITIALIZED=False)
    sys.path_importer_cache.clear()
    gc.collect()
    gc.freeze()
    return modules["runner"]


def _give_up(steps: _Steps, *, sealed: bool) -> int:
    """Z5: ids, capabilities and most system calls, before it is known what for; returns the filter's length.

    Not `sealed` leaves out the filter: a control of the attack suite, which shows that its probes see.
    """
    steps.name = "ids"
    os.setsid()
    os.umask(0o077)
    _limit({resource.RLIMIT_NOFILE: _NOFILE, resource.RLIMIT_CORE: 0, resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_STACK: 8 << 20})  # fmt: skip
    process.no_new_privileges()
    caps.drop_bounding()
    os.setgroups([])
    process.become(layout.NOBODY, layout.NOBODY)
    caps.drop_sets()
    process.set_dumpable(0)
    steps.name = "seccomp"
    filter_ = Filter(seccomp.build(ARCH, sealed=True))
    if sealed:
        filter_.install()
    return filter_.length if sealed else 0


# ---- init --------------------------------------------------------------------------------------------------------
def _init(worker: int, line: socket.socket) -> NoReturn:
    """Mount the run's disk when the worker knows its size, wait for its end, and count files where the sentry cannot.

    It was forked before anything was imported: what it shares with the worker is copied in pieces of megabytes.
    """
    for fd in (1, 2):
        os.dup2(0, fd)
    try:
        most = 0
        asked = line.recv(64)
        if asked:
            size, inodes = (int(one) for one in asked.split())
            counted = _disk(size, inodes)
            line.sendall(b"sentry" if counted else b"init")
            most = 0 if counted else inodes
        line.close()
        while True:
            began = time.monotonic()
            pid, status = os.waitpid(worker, os.WNOHANG if most else 0)
            if pid:
                break
            if _files(most) > most:
                _exit(layout.STATUS_DISK)  # as pid 1: everything in the box ends with it
            time.sleep(max(_LOOK_EVERY, _LOOK_SHARE * (time.monotonic() - began)))
    except BaseException:  # noqa: BLE001 - fail closed
        _exit(layout.STATUS_LOST)
    code = os.waitstatus_to_exitcode(status)
    _exit(min(code, layout.EXIT_MOST) if code >= 0 else 128 - code)


def _files(most: int) -> int:
    """Count the files and directories below the run's directory, itself included; stops above `most`."""
    count, todo = 1, [os.open(layout.RUN_DIR, os.O_RDONLY | os.O_DIRECTORY)]
    try:
        while todo and count <= most:
            here = todo.pop()
            try:
                with os.scandir(here) as entries:
                    for entry in entries:
                        count += 1
                        if count > most:
                            break
                        if entry.is_dir(follow_symlinks=False) and len(todo) < _NOFILE // 2:
                            with contextlib.suppress(OSError):
                                todo.append(
                                    os.open(entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
                                )
            finally:
                os.close(here)
    finally:
        for fd in todo:
            os.close(fd)
    return count


# ---- one machine -------------------------------------------------------------------------------------------------
def _become(
    birth: socket.socket, ask: socket.socket, runner: types.ModuleType, length: int
) -> tuple[Serve, dict[str, Any], int, bool]:
    """Z6: wait until this template is a machine, then take what is its own; all else was the same for all of them."""
    order, fds = _birth(birth)
    steps = _Steps()
    control = fds[1]
    facts: dict[str, Any] = {"filter": length, "open": not length, "kernel": os.uname()[2]}
    try:
        steps.next("disk")
        bounds = order["bounds"]
        ask.sendall(b"%d %d" % (bounds["disk"], bounds["inodes"]))
        facts["inodes"] = ask.recv(16).decode()
        os.chdir(layout.RUN_DIR if facts["inodes"] else "/init-could-not-mount-it")
        steps.next("fds")
        birth.close()
        ask.close()
        channel, control, stdout, stderr = (os.dup2(fd, 64 + fd) for fd in fds)
        for source, target in ((stdout, 1), (stderr, 2), (channel, layout.FD_CHANNEL), (control, layout.FD_CONTROL)):
            os.dup2(source, target)
        control = layout.FD_CONTROL
        os.closerange(layout.FIRST_UNUSED_FD, 2 * _NOFILE)
        steps.next("limits")
        _limit({
            resource.RLIMIT_FSIZE: int(bounds["disk"]),
            resource.RLIMIT_CPU: max(1, -int(-bounds["cpu"] // 1)),  # for the day it is enforced; the host counts too
            resource.RLIMIT_NPROC: int(bounds["processes"]) - 1,  # sentries of 2024 let one more be
        })  # fmt: skip
    except BaseException as error:  # noqa: BLE001 - fail closed on anything
        report = {"step": steps.name, "errno": getattr(error, "errno", 0) or 0, "detail": repr(error)[:500]}
        with contextlib.suppress(OSError):
            os.write(control, b"F" + json.dumps(report).encode() + b"\n")
        _exit(layout.STATUS_LOST)
    steps.next("warmup")
    facts["stages_us"] = steps.microseconds
    return runner.serve, facts, time.perf_counter_ns(), bool(order["cold"])


def _birth(birth: socket.socket) -> tuple[dict[str, Any], list[int]]:
    data, fds, _, _ = socket.recv_fds(birth, layout.BIRTH_HEADER.size, layout.MACHINE_DESCRIPTORS)
    while data and len(data) < layout.BIRTH_HEADER.size:
        data += birth.recv(layout.BIRTH_HEADER.size - len(data))
    if not data:
        _exit(0)  # nobody needs this machine any more
    (length,) = layout.BIRTH_HEADER.unpack(data)
    body = b""
    while len(body) < length:
        more = birth.recv(length - len(body))
        if not more:
            _exit(0)
        body += more
    if len(fds) != layout.MACHINE_DESCRIPTORS:
        _exit(layout.STATUS_LOST)
    return json.loads(body), fds


def _disk(size: int, inodes: int) -> bool:
    """The run's own directory; False when this sentry knows no limit of inodes."""
    options = f"mode=0700,uid={layout.NOBODY},gid={layout.NOBODY},size={size}"
    try:
        mounts.mount("tmpfs", layout.RUN_DIR, _TMPFS, f"{options},nr_inodes={inodes}")
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        mounts.mount("tmpfs", layout.RUN_DIR, _TMPFS, options)
        return False
    return True


def _limit(limits: dict[int, int]) -> None:
    """Set limits hard; only those that a sentry lets be set are ever asked for."""
    for which, value in limits.items():
        hard = resource.getrlimit(which)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (bound, bound))
