"""The template: a warm interpreter on the sealed tree, parent of slots. Stdlib only; runs inside the outer namespaces.

Rule 1: every run can read this process's memory as it was at the clone: there is no secret, no configuration and no
        path of the host in it.
Rule 2: exactly one thread, always: a raw clone copies one, and locks that others hold would never be released.
Rule 3: it never reads a byte that a slot wrote.

Protocol on ctl (SOCK_SEQPACKET, one JSON message a packet): to here {"bounds": {...}, "cold": bool} with SCM_RIGHTS
[channel, control, stdout, stderr]; from here {"ready": {...}} once, then for each request {"spawned": pid} with
SCM_RIGHTS [pidfd] or {"error": step, "errno": n, "detail": text}. EOF = exit.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import sysconfig
import types
from typing import Any

from lockgate.kernel import landlock_unsafe as landlock
from lockgate.kernel import mounts_unsafe as mounts
from lockgate.kernel import process_unsafe as process
from lockgate.kernel import seccomp
from lockgate.kernel.seccomp_unsafe import Filter
from lockgate.kernel.syscalls_unsafe import ARCH
from lockgate.runtimes import dialog
from lockgate.runtimes.container import layout, slot

_exit = os._exit  # the guest puts its own in the place of os._exit

# What runs import most; paid once, shared by all slots.
STDLIB_PRELOAD = """abc ast asyncio base64 binascii bisect calendar collections contextlib copy csv dataclasses datetime
decimal difflib enum fractions functools hashlib heapq html importlib inspect io itertools json linecache locale logging
math operator os pathlib random re shutil socket statistics string struct tempfile textwrap threading time timeit
traceback types typing unicodedata urllib.parse uuid warnings zlib zoneinfo"""


class Template:
    """Serves spawn requests until ctl ends.

    Args:
        settings: root, own_proc, preload, memory_by_rlimit; see launcher.py.
        arguments: only tests and the attack suite's controls give any: `--fail STEP` makes that step of every slot
            fail, `--open` leaves out S11 to S16 and shows a full procfs, `--marker ERRNO` is the errno of every refusal
            of the filter.

    """

    def __init__(self, settings: dict[str, Any], arguments: list[str]) -> None:
        self.step = "arguments"
        self.root: bool = settings["root"]
        self.own_proc: bool = settings["own_proc"]
        self.memory_by_rlimit: bool = settings["memory_by_rlimit"]
        self.preload: list[str] = settings["preload"]
        options = _options(arguments)
        self.fail: str = options.get("--fail", "")
        self.open = "--open" in options
        self.marker = int(options["--marker"]) if "--marker" in options else None
        self.ctl = socket.socket(fileno=layout.FD_CTL)
        self.ctl.set_inheritable(False)
        os.set_inheritable(layout.FD_PROC, False)
        self.slots = 0
        self.pids = array.array("i", [0]) * layout.SLOT_IDS
        self.image = 0

    def prepare(self) -> dict[str, Any]:
        """T8 and T9: preload, build the filter, seal the tree, check that nothing unexpected is here."""
        self.step = "filter"
        self.filter = Filter(seccomp.build(ARCH, every=self.marker))
        self.landlock = landlock.abi()
        if not self.landlock:
            raise OSError(95, "this kernel has no Landlock, or it is switched off")
        self.step = "guest"
        self.guest = _load_guest()
        self.step = "preload"
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        stdlib = f"{layout.STDLIB}/{version}"
        sys.path[:] = [stdlib, f"{stdlib}/lib-dynload", layout.PACKAGES]
        for name in (*STDLIB_PRELOAD.split(), *self.preload):
            self.step = f"preload {name}"
            importlib.import_module(name)
        _one_thread()
        self.step = "settle"
        main_module = sys.modules["__main__"]
        self.guest.settle()
        sys.modules["__main__"] = main_module
        self.step = "seal"
        sys.path[:] = ["", *sys.path]
        sys.argv[:] = [""]
        sys.orig_argv[:] = ["python3"]
        shutil.rmtree(layout.BOOT)
        # Out of sight here and not in each slot: what nothing frees there costs no page there. The build's variables
        # name the place where this interpreter was made; whoever asks for them gets them read again.
        for name in [one for one in sys.modules if one.partition(".")[0] == "lockgate" or "_sysconfigdata" in one]:
            del sys.modules[name]
        sysconfig.__dict__.update(_CONFIG_VARS=None, _CONFIG_VARS_INITIALIZED=False)
        sys.path_importer_cache.clear()
        if self.open:
            mounts.attach(layout.FD_PROC, "/proc")
        mounts.remount("/", mounts.MS_RDONLY | mounts.MS_NOSUID | mounts.MS_NODEV)
        self.step = "check"
        _one_thread()
        # The listing's own descriptors are among them, and closed by now.
        extra = [int(one) for one in _proc_list("self/fd") if int(one) > layout.FD_PROC and _is_open(int(one))]
        if extra:
            raise OSError(9, f"unexpected descriptors {extra}")
        with open(_proc_open("self/statm", os.O_RDONLY), encoding="utf-8") as file:
            self.image = int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps slots
        gc.collect()
        gc.freeze()
        self.step = "serve"
        return {
            "mode": "root" if self.root else "rootless",
            "landlock": self.landlock,
            "filter": self.filter.length,
            "python": ".".join(str(one) for one in sys.version_info[:3]),
            "proc": "own" if self.own_proc else "host's view",
            "image": self.image,
        }

    def serve(self) -> slot.Job:
        """Answer requests; returns only in a slot, and never in the template, which exits on EOF."""
        while True:
            message, fds, _, _ = socket.recv_fds(self.ctl, dialog.CTL_BYTES, dialog.MACHINE_DESCRIPTORS)
            if not message:
                _exit(0)
            try:
                job = self.spawn(json.loads(message), fds)
            except (OSError, ValueError, KeyError) as error:
                code = getattr(error, "errno", None) or 0
                self.send({"error": self.step, "errno": code, "detail": f"{type(error).__name__}: {error}"[:1000]})
                job = None
            if job is not None:
                return job
            for fd in fds:
                os.close(fd)

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Send one message to the supervisor."""
        data = json.dumps(message).encode()
        if fds:
            socket.send_fds(self.ctl, [data], fds)
        else:
            self.ctl.send(data)

    def spawn(self, request: dict[str, Any], fds: list[int]) -> slot.Job | None:
        """S1 and the template's half of S2: clone, write the slot's maps, report it. In the slot, return its job."""
        self.step = "request"
        if len(fds) != dialog.MACHINE_DESCRIPTORS:
            raise OSError(9, f"{len(fds)} descriptors with a request, not {dialog.MACHINE_DESCRIPTORS}")
        self.step = "clone"
        _one_thread()
        number = self._free_id()
        go_read, go_write = os.pipe()
        try:
            pid, pidfd = process.clone_slot()
        except OSError:
            os.close(go_read)
            os.close(go_write)
            raise
        if pid == 0:
            os.close(go_write)
            return self._job(request, fds, go_read)
        try:
            os.close(go_read)
            self.step = "maps"
            if self.root:
                seen = pid if self.own_proc else _seen_as(pidfd)
                inside, outside = layout.NOBODY, layout.FIRST_SLOT_ID + number
                _proc_write(f"{seen}/setgroups", b"deny")
                _proc_write(f"{seen}/uid_map", b"%d %d 1" % (inside, outside))
                _proc_write(f"{seen}/gid_map", b"%d %d 1" % (inside, outside))
            self.pids[number] = pid
            self.send({"spawned": pid}, (pidfd,))
            os.write(go_write, b"g")
        except BrokenPipeError:
            pass  # the slot died on its own; its pidfd says so to whoever waits for it
        finally:
            os.close(pidfd)
            os.close(go_write)  # without the byte the slot sees EOF and ends
        return None

    def _job(self, request: dict[str, Any], fds: list[int], go: int) -> slot.Job:
        return slot.Job(
            fds=fds,
            go=go,
            bounds=request["bounds"],
            cold=request["cold"],
            root=self.root,
            image=self.image if self.memory_by_rlimit else None,
            landlock=self.landlock,
            filter=self.filter,
            fail=self.fail,
            open=self.open,
            serve=self.guest.serve,
        )

    def _free_id(self) -> int:
        """Return an id number that no live slot has: two slots never share one, or they could reach each other."""
        for _ in range(layout.SLOT_IDS):
            number = self.slots % layout.SLOT_IDS
            self.slots += 1
            if not self.pids[number] or not _alive(self.pids[number]):
                return number
        raise OSError(11, "every slot id is in use")


def _options(arguments: list[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name not in {"--fail", "--open", "--marker"}:
            raise ValueError(f"unknown template argument {name!r}")
        options[name] = value
    return options


def _one_thread() -> None:
    tasks = len(_proc_list("self/task"))
    if tasks != 1:
        raise OSError(11, f"{tasks} threads in the template; do not preload the package that starts them")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _load_guest() -> types.ModuleType:
    """Load the guest's files as data under neutral names; returns the runner, and leaves `host` importable."""
    modules: dict[str, types.ModuleType] = {}
    for name in ("values", "host", "runner"):
        with open(f"{layout.BOOT}/guest/{name}.py", encoding="utf-8") as file:  # noqa: PTH123 - before pathlib is needed
            source = file.read()
        module = types.ModuleType(name)
        module.__dict__.update({one: modules[one] for one in modules})
        exec(compile(source, f"<{name}>", "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - our own file
        modules[name] = module
    sys.modules["host"] = modules["host"]
    return modules["runner"]


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _proc_open(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_CLOEXEC, dir_fd=layout.FD_PROC)


def _proc_write(name: str, data: bytes) -> None:
    fd = _proc_open(name, os.O_WRONLY)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def _proc_list(name: str) -> list[str]:
    fd = _proc_open(name, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return os.listdir(fd)  # noqa: PTH208 - a descriptor
    finally:
        os.close(fd)


def _seen_as(pidfd: int) -> int:
    """Return the pid that our procfs, which may be that of an outer pid namespace, shows for `pidfd`."""
    fd = _proc_open(f"self/fdinfo/{pidfd}", os.O_RDONLY)
    try:
        lines = os.read(fd, 4096).splitlines()
    finally:
        os.close(fd)
    return next(int(line.split()[1]) for line in lines if line.startswith(b"Pid:"))


def main(argv: list[str]) -> tuple[slot.Serve, dict[str, Any], int, bool]:
    """Run the template; return only in a hardened slot, with what is left to call.

    The caller is the one-line program of launcher.py: code of a run that walks its callers' frames finds that line and
    the guest's own.
    """
    process.die_with_parent()
    process.set_dumpable(1)
    template: Template | None = None
    try:
        template = Template(json.loads(argv[0]), argv[1:])
        facts = template.prepare()
        template.send({"ready": facts})
        job = template.serve()
    except BaseException as error:  # noqa: BLE001 - whatever it is, the supervisor must hear of it
        step = template.step if template else "arguments"
        code = getattr(error, "errno", None) or 0
        detail = f"{type(error).__name__}: {error}"[:1000]
        with contextlib.suppress(OSError), socket.socket(fileno=layout.FD_CTL) as ctl:
            ctl.send(json.dumps({"error": step, "errno": code, "detail": detail}).encode())
        _exit(dialog.STATUS_HARDENING_FAILED)
    return slot.enter(job)
