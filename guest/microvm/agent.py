"""The agent: PID 1 of the guest after init. Warm before the snapshot, one lease after it, one worker for the code.

Rule 1: it never runs code of a run. It forks one worker, which gives up everything and becomes the guest runner.
Rule 2: nothing runs before the handshake: fresh entropy into the kernel, its generator reseeded, the clock set, every
        generator in this interpreter seeded anew. A clone that skipped it would draw the same bytes as all others.
Rule 3: whatever goes wrong here ends PID 1, and with it the machine. There is no second lease.

Control, to the host: before the lease one line, "R" + JSON ("F" and the reason when it cannot work). From the host:
LEASE, its header, JSON of the bounds; then the bytes for the worker. To the host after the lease: frames (control.py).
The argument "vsock" says that the machine has virtio sockets and no ports.
"""

import contextlib
import fcntl
import gc
import importlib
import json
import os
import random
import resource
import signal
import socket
import struct
import sys
import sysconfig
import time
import types

BOOT = "/tmp"  # noqa: S108 - where the build put this file; covered by an empty mount before anything else comes
sys.path.insert(0, BOOT)

from control import CALL, CONTROL, Vsock, frame, read_exactly, write_all  # noqa: E402 - placed in the image by the build
from pump import Pump  # noqa: E402

for _name in ("control", "pump"):  # a package that is preloaded may have one of these names
    del sys.modules[_name]

from lockgate.kernel import caps_unsafe as caps  # noqa: E402
from lockgate.kernel import landlock_unsafe as landlock  # noqa: E402
from lockgate.kernel import mounts_unsafe as mounts  # noqa: E402
from lockgate.kernel import process_unsafe as process  # noqa: E402
from lockgate.kernel import seccomp  # noqa: E402
from lockgate.kernel.seccomp_unsafe import Filter  # noqa: E402
from lockgate.kernel.syscalls_unsafe import ARCH, call  # noqa: E402

LEASE = struct.Struct(">4sQI64s")  # magic, nanoseconds since the epoch, bytes of JSON, entropy
MAGIC = b"LSE1"
LEASE_BYTES = 64 * 1024
RUN_DIR = "/run"
GROUPS = "/proc"  # where init mounted them; they are in sight of this process alone
NOBODY = 65534
NOFILE = 256
RNDADDENTROPY, RNDRESEEDCRNG = 0x40085203, 0x5207  # linux/random.h
NO_SETUID_FIXUP = 1 << 2  # securebits: the change of ids keeps the capabilities, which drop_all then gives up
PR_SET_SECUREBITS = 28
WORKER_FAILED = 99
MNT_DETACH = 2
FLAGS = mounts.MS_NOSUID | mounts.MS_NODEV | mounts.MS_NOEXEC

_exit = os._exit


def load_guest():
    """Load the guest's files as data under neutral names, as every rung does; returns the runner."""
    modules = {}
    for name in ("values", "host", "runner"):
        with open(f"{BOOT}/guest/{name}.py", encoding="utf-8") as file:
            source = file.read()
        module = types.ModuleType(name)
        module.__dict__.update(modules)
        exec(compile(source, f"<{name}>", "exec", dont_inherit=True), module.__dict__)
        modules[name] = module
    sys.modules["host"] = modules["host"]
    return modules["runner"]


class Agent:
    """One machine: what is warm, then its one lease."""

    def __init__(self, vsock):
        self.step = "start"
        self.groups = -1
        self.vsock = Vsock() if vsock else None

    # ---- before the snapshot -------------------------------------------------------------------------------------
    def prepare(self):
        """Everything that clones may share: imports, the filter, the runner's own warm-up."""
        with open(f"{BOOT}/settings.json", encoding="utf-8") as file:
            settings = json.load(file)
        self.handshake = settings.get("handshake", True)
        self.step = "filter"
        self.filter = Filter(seccomp.build(ARCH, every=settings.get("marker")))
        self.open = settings.get("open", False)
        self.landlock = landlock.abi()
        self.step = "guest"
        self.runner = load_guest()
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        sys.path[:] = [f"/usr/lib/{version}", f"/usr/lib/{version}/lib-dynload", "/packages"]
        for name in settings["preload"]:
            self.step = f"preload {name}"
            importlib.import_module(name)
        self.step = "packages"
        if settings["packages"] and not os.listdir("/packages"):
            raise OSError(2, "the package set is not there")
        self.step = "groups"
        self.make_group()
        mounts.set_hostname("sandbox")
        self.step = "settle"
        main_module = sys.modules["__main__"]
        self.runner.settle()
        sys.modules["__main__"] = main_module
        sys.path[:] = ["", *sys.path]
        sys.argv[:] = [""]
        sys.orig_argv[:] = ["python3"]
        for name in [one for one in sys.modules if one.partition(".")[0] == "lockgate" or "_sysconfigdata" in one]:
            del sys.modules[name]
        sysconfig.__dict__.update(_CONFIG_VARS=None, _CONFIG_VARS_INITIALIZED=False)
        sys.path_importer_cache.clear()
        self.step = "cover"
        mounts.mount("tmpfs", BOOT, mounts.MS_RDONLY | FLAGS, "size=4k,nr_inodes=2,mode=755")
        gc.collect()
        gc.freeze()
        self.step = "age"
        # The kernel reseeds itself when its seed is old, which is then up to the moment of the snapshot: clones would
        # differ by luck, and a handshake that does nothing would not be seen.
        with open("/dev/urandom", "rb", buffering=0) as device:
            fcntl.ioctl(device, RNDRESEEDCRNG)
        self.step = "ready"
        return {
            "python": ".".join(str(one) for one in sys.version_info[:3]),
            "kernel": os.uname().release,
            "landlock": self.landlock,
            "filter": self.filter.length,
        }

    def make_group(self):
        """A group for the worker and all that it starts; the agent stays outside. Its place is a descriptor only."""
        top = os.open(GROUPS, os.O_RDONLY | os.O_DIRECTORY)
        for knob in ("+memory", "+pids"):
            with open(os.open("cgroup.subtree_control", os.O_WRONLY, dir_fd=top), "w", encoding="ascii") as file:
                file.write(knob)
        os.mkdir("run", 0o700, dir_fd=top)
        self.groups = os.open("run", os.O_RDONLY | os.O_DIRECTORY, dir_fd=top)
        os.close(top)
        call("umount2", GROUPS.encode(), MNT_DETACH)
        self.write("memory.oom.group", "1")

    def write(self, knob, text):
        """Write a control file of the worker's group in one call."""
        fd = os.open(knob, os.O_WRONLY, dir_fd=self.groups)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)

    def counter(self, file, key):
        """Return a counter of the worker's group, 0 where there is none."""
        with contextlib.suppress(OSError, ValueError):
            fd = os.open(file, os.O_RDONLY, dir_fd=self.groups)
            try:
                lines = os.read(fd, 4096).decode("ascii").splitlines()
            finally:
                os.close(fd)
            for line in lines:
                name, _, number = line.partition(" ")
                if name == key:
                    return int(number)
        return 0

    # ---- the lease -----------------------------------------------------------------------------------------------
    def take_lease(self):
        """Wait for the lease and do the handshake, as root, before anything of the run exists."""
        magic, now, length, entropy = LEASE.unpack(read_exactly(CONTROL, LEASE.size))
        if magic != MAGIC or length > LEASE_BYTES:
            raise OSError(71, "this is no lease")
        bounds = json.loads(read_exactly(CONTROL, length))
        if self.handshake:
            self.step = "reseed"
            with open("/dev/urandom", "wb", buffering=0) as device:
                data = struct.pack("ii", 8 * len(entropy), len(entropy)) + entropy
                fcntl.ioctl(device, RNDADDENTROPY, data)
                fcntl.ioctl(device, RNDRESEEDCRNG)
            self.step = "clock"
            time.clock_settime(time.CLOCK_REALTIME, now / 1e9)
            self.step = "seed"
            random.seed()
        del entropy
        return bounds

    def bind(self, bounds):
        """Give the worker's group and directory the bounds of this run."""
        self.step = "group"
        self.write("memory.max", str(int(bounds["memory"])))
        with contextlib.suppress(FileNotFoundError):  # a kernel without swap has no such file
            self.write("memory.swap.max", "0")
        self.write("pids.max", str(int(bounds["processes"])))
        self.step = "tmpfs"
        owner = f"mode=0700,uid={NOBODY},gid={NOBODY}"
        size, inodes = int(bounds["disk"]), int(bounds["inodes"])
        mounts.mount("tmpfs", RUN_DIR, FLAGS, f"size={size},nr_inodes={inodes},{owner}")

    def worker(self, bounds, control, out, err):
        """Be the worker: give up everything, in the order of the container rung's slot. Returns facts."""
        self.write("cgroup.procs", "0")
        null = os.open("/dev/null", os.O_RDONLY)
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in (null, out, err, CALL, control)]
        for target, source in enumerate(high):
            os.dup2(source, target)
        process.close_from(len(high))
        limits = {
            resource.RLIMIT_NOFILE: NOFILE,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
            resource.RLIMIT_NICE: 0,
            resource.RLIMIT_RTPRIO: 0,
            resource.RLIMIT_SIGPENDING: 128,
            resource.RLIMIT_STACK: 8 << 20,
            resource.RLIMIT_FSIZE: int(bounds["disk"]),
            # The host counts the CPU time of the whole machine; this only backs it.
            resource.RLIMIT_CPU: 2 * max(1, -int(-bounds["cpu"] // 1)) + 2,
            # The group refuses and counts first; forks in flight need room above it.
            resource.RLIMIT_NPROC: 2 * int(bounds["processes"]),
        }
        call("prctl", PR_SET_SECUREBITS, NO_SETUID_FIXUP, 0, 0, 0)
        os.setgroups([])
        process.become(NOBODY, NOBODY)
        for which, value in limits.items():
            resource.setrlimit(which, (value, value))
        os.chdir(RUN_DIR)
        os.setsid()
        os.umask(0o077)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        facts = {"landlock": 0, "mdwe": False, "filter": 0, "memory": "group", "open": self.open, "userns": "none"}
        if not self.open:
            process.no_new_privileges()
            if self.landlock:
                landlock.confine(self.landlock, (RUN_DIR,), ("/dev/null",))
            caps.drop_all()
            process.set_dumpable(0)
            facts["mdwe"] = process.refuse_exec_gain()
            self.filter.install()
            facts.update(landlock=self.landlock, filter=self.filter.length)
        facts["stages_us"] = {}
        return facts

    def start(self, bounds):
        """Fork the worker. Returns its facts in the worker; never returns in the agent."""
        self.step = "fork"
        ours, theirs = socket.socketpair()
        out_r, out_w = os.pipe()
        err_r, err_w = os.pipe()
        process.unshare(process.NEWPID)  # the worker is the first process of its own, and sees no other
        child = os.fork()
        if child == 0:
            try:
                return self.worker(bounds, theirs.fileno(), out_w, err_w)
            except BaseException as error:
                report = {
                    "step": "worker",
                    "errno": getattr(error, "errno", None) or 0,
                    "detail": f"{type(error).__name__}: {error}"[:500],
                }
                with contextlib.suppress(OSError):
                    write_all(theirs.fileno(), b"F" + json.dumps(report).encode() + b"\n")
                _exit(WORKER_FAILED)
        for fd in (theirs.detach(), out_w, err_w, CALL):
            os.close(fd)
        Pump(self.status, child, ours, {out_r: "o", err_r: "e"}).run()
        raise AssertionError

    def status(self, status):
        """Say what this side knows of the worker; `status` is its wait status once it is dead."""
        full = False
        with contextlib.suppress(OSError):
            disk = os.statvfs(RUN_DIR)
            full = disk.f_bfree == 0 or disk.f_ffree == 0
        oom, refused = self.counter("memory.events", "oom_kill"), self.counter("pids.events", "max")
        frame("s", json.dumps({"status": status, "oom": oom, "refused": refused, "full": full}).encode())


def main():
    """Be the agent; return only in a hardened worker, with what is left to call."""
    agent = Agent("vsock" in sys.argv)
    try:
        line = b"R" + json.dumps(agent.prepare()).encode() + b"\n"
        if agent.vsock is None:
            write_all(CONTROL, line)
        else:
            agent.vsock.greet(line)
            agent.vsock.connect()
        agent.step = "lease"
        bounds = agent.take_lease()
        agent.bind(bounds)
    except BaseException as error:
        report = {
            "step": agent.step,
            "errno": getattr(error, "errno", None) or 0,
            "detail": f"{type(error).__name__}: {error}"[:500],
        }
        write_all(CONTROL, b"F" + json.dumps(report).encode() + b"\n")
        _exit(70)
    serve = agent.runner.serve
    facts = agent.start(bounds)
    return serve, facts, time.perf_counter_ns(), True


if __name__ == "__main__":
    _serve, *_ready = main()
    # Code of a run that walks its callers' frames finds these lines, and nothing of the agent.
    for _name in [one for one in globals() if one not in ("_serve", "_ready", "__builtins__")]:
        del globals()[_name]
    _serve(*_ready)
