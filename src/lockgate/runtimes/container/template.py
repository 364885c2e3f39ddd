"""The template: a warm interpreter on the sealed tree, parent of slots. Stdlib only; runs inside the outer namespaces.

Rule 1: every run can read this process's memory as it was at the clone: there is no secret, no configuration and no
        path of the host in it.
Rule 2: one thread, and no byte that a slot wrote is read: see nursery.py.
"""

from __future__ import annotations

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
from lockgate.runtimes import dialog, nursery
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
        self.memory_by_rlimit: bool = settings["memory_by_rlimit"]
        self.preload: list[str] = settings["preload"]
        options = _options(arguments)
        self.fail: str = options.get("--fail", "")
        self.open = "--open" in options
        self.marker = int(options["--marker"]) if "--marker" in options else None
        self.own_proc: bool = settings["own_proc"]
        ctl = socket.socket(fileno=layout.FD_CTL)
        ctl.set_inheritable(False)
        os.set_inheritable(layout.FD_PROC, False)
        first = layout.FIRST_SLOT_ID if self.root else None
        self.nursery = nursery.Nursery(ctl, layout.FD_PROC, first_id=first, own_proc=self.own_proc)
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
        self.nursery.one_thread()
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
        self.nursery.one_thread()
        # The listing's own descriptors are among them, and closed by now.
        extra = [
            int(one)
            for one in nursery.names(layout.FD_PROC, "self/fd")
            if int(one) > layout.FD_PROC and _is_open(int(one))
        ]
        if extra:
            raise OSError(9, f"unexpected descriptors {extra}")
        statm = nursery.open_in(layout.FD_PROC, "self/statm", os.O_RDONLY)
        with open(statm, encoding="utf-8") as file:  # noqa: PTH123 - a descriptor
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

    def job(self, child: nursery.Child) -> slot.Job:
        """Return what a slot knows when it is born."""
        return slot.Job(
            nursery=self.nursery,
            child=child,
            bounds=child.request["bounds"],
            cold=child.request["cold"],
            root=self.root,
            image=self.image if self.memory_by_rlimit else None,
            landlock=self.landlock,
            filter=self.filter,
            fail=self.fail,
            open=self.open,
            serve=self.guest.serve,
        )


def _options(arguments: list[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name not in {"--fail", "--open", "--marker"}:
            raise ValueError(f"unknown template argument {name!r}")
        options[name] = value
    return options


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
        template.nursery.send({"ready": facts})
        job = template.nursery.serve(template.job)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the supervisor must hear of it
        step = template.step if template else "arguments"
        code = getattr(error, "errno", None) or 0
        detail = f"{type(error).__name__}: {error}"[:1000]
        with contextlib.suppress(OSError), socket.socket(fileno=layout.FD_CTL) as ctl:
            ctl.send(json.dumps({"error": step, "errno": code, "detail": detail}).encode())
        _exit(dialog.STATUS_HARDENING_FAILED)
    return slot.enter(job)
