"""The agent: PID 1 of the guest after init. Warm before the snapshot, one lease after it, one worker for the code.

Rule 1: it never runs code of a run. It forks one worker, which gives up everything and becomes the guest runner.
Rule 2: nothing runs before the handshake: fresh entropy into the kernel, its generator reseeded, the clock set, every
        generator in this interpreter seeded anew. A clone that skipped it would draw the same bytes as all others.
Rule 3: whatever goes wrong here ends PID 1, and with it the machine. There is no second lease.

Descriptors from init: 3 = control, 4 = call. Where the machine has virtio sockets and no ports (argument "vsock") the
agent listens on 52 (control) and 53 (call) instead: a listener survives a snapshot, a connection does not. It says its
first line on a connection that it closes before the snapshot, and accepts one more on each for the lease.

Control, to the host: before the lease one line, "R" + JSON ("F" and the reason when it cannot work). From the host:
LEASE, its header, JSON of the bounds; then the bytes for the worker. To the host after the lease: frames, u8 kind, u32
length, payload: "c" what the worker says on its control descriptor, "o" and "e" its two streams, "s" JSON {status, oom,
refused, full} as this side sees the worker.
"""

import contextlib
import fcntl
import gc
import importlib
import json
import os
import random
import resource
import select
import signal
import socket
import struct
import sys
import sysconfig
import time
import types

BOOT = "/tmp"  # noqa: S108 - where the build put this file; covered by an empty mount before anything else comes
sys.path.insert(0, BOOT)

from lockgate.kernel import caps_unsafe as caps  # noqa: E402 - placed in the image by the build
from lockgate.kernel import landlock_unsafe as landlock  # noqa: E402
from lockgate.kernel import mounts_unsafe as mounts  # noqa: E402
from lockgate.kernel import process_unsafe as process  # noqa: E402
from lockgate.kernel import seccomp  # noqa: E402
from lockgate.kernel.seccomp_unsafe import Filter  # noqa: E402
from lockgate.kernel.syscalls_unsafe import ARCH, call  # noqa: E402

CONTROL, CALL = 3, 4
LEASE = struct.Struct(">4sQI64s")  # magic, nanoseconds since the epoch, bytes of JSON, entropy
MAGIC = b"LSE1"
LEASE_BYTES = 64 * 1024
FRAME = struct.Struct(">BI")
PIECE = 64 * 1024  # a pipe of this size has 16 buffers; the port's queue cannot take many more in one splice
RUN_DIR = "/run"
GROUPS = "/proc"  # where init mounted them; they are in sight of this process alone
NOBODY = 65534
NOFILE = 256
RNDADDENTROPY, RNDRESEEDCRNG = 0x40085203, 0x5207  # linux/random.h
NO_SETUID_FIXUP = 1 << 2  # securebits: the change of ids keeps the capabilities, which drop_all then gives up
PR_SET_SECUREBITS = 28
FIONREAD = 0x541B
WORKER_FAILED = 99
MNT_DETACH = 2
FLAGS = mounts.MS_NOSUID | mounts.MS_NODEV | mounts.MS_NOEXEC

_exit = os._exit


def read_exactly(fd, count):
    """Return `count` bytes; the end of control before that is the end of the machine."""
    parts = []
    while count:
        part = os.read(fd, min(count, 1 << 20))
        if not part:
            _exit(0)
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def write_all(fd, data):
    """Write all of `data`."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def frame(kind, payload):
    """Send one frame to the host."""
    write_all(CONTROL, FRAME.pack(ord(kind), len(payload)) + payload)


def waiting(fd):
    """Return how many bytes a pipe holds."""
    return struct.unpack("i", fcntl.ioctl(fd, FIONREAD, bytes(4)))[0]


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


class Vsock:
    """The two listeners of a machine without ports; whoever connects is the host, nobody else can."""

    def __init__(self):
        self.listeners = []
        for port in (52, 53):
            one = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
            one.bind((socket.VMADDR_CID_ANY, port))
            one.listen(1)
            self.listeners.append(one)

    def greet(self, line):
        """Say the first line, and see the connection to its end: nothing of it may be under way at the snapshot."""
        stream = self.listeners[0].accept()[0]
        with stream:
            stream.sendall(line)
            stream.shutdown(socket.SHUT_WR)
            while stream.recv(4096):
                pass

    def connect(self):
        """Accept the lease's two connections, as descriptors 3 and 4, and listen no more."""
        streams = [one.accept()[0] for one in self.listeners]
        for one in self.listeners:
            one.close()
        high = [fcntl.fcntl(one.detach(), fcntl.F_DUPFD, 64) for one in streams]
        for target, fd in enumerate(high, CONTROL):
            os.dup2(fd, target)
            os.close(fd)


class Agent:
    """One machine: what is warm, then its one lease."""

    def __init__(self, vsock):
        self.step = "start"
        self.groups = -1
        self.vsock = None
        if vsock:
            for fd in (CONTROL, CALL):  # taken, so that nothing else lands there
                os.dup2(0, fd)
            self.vsock = Vsock()

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
        Pump(self, child, ours, {out_r: "o", err_r: "e"}).run()
        raise AssertionError

    def status(self, status):
        """Say what this side knows of the worker; `status` is its wait status once it is dead."""
        full = False
        with contextlib.suppress(OSError):
            disk = os.statvfs(RUN_DIR)
            full = disk.f_bfree == 0 or disk.f_ffree == 0
        oom, refused = self.counter("memory.events", "oom_kill"), self.counter("pids.events", "max")
        frame("s", json.dumps({"status": status, "oom": oom, "refused": refused, "full": full}).encode())


class Pump:
    """The agent after the fork: moves bytes between the worker and the host, reaps, and reports the worker's end."""

    def __init__(self, agent, child, worker, streams):
        self.agent = agent
        self.child = child
        self.worker = worker
        self.streams = streams
        self.told = False
        self.ready = False
        self.wake = os.pipe()
        for fd in (*streams, *self.wake):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake[1], warn_on_full_buffer=False)
        self.poll = select.poll()
        for fd in (CONTROL, worker.fileno(), self.wake[0], *streams):
            self.poll.register(fd, select.POLLIN)

    def run(self):
        """Move bytes until the host ends this machine."""
        self.reap()
        while True:
            for fd, _ in self.poll.poll():
                if fd == CONTROL:
                    self.from_host()
                elif fd == self.wake[0]:
                    with contextlib.suppress(BlockingIOError):
                        os.read(fd, 4096)
                    self.reap()
                elif fd in self.streams:
                    self.drain(fd)
                elif self.worker is not None and fd == self.worker.fileno():
                    self.from_worker()

    def from_host(self):
        """Bytes for the worker; the end of control is the end of the machine."""
        data = os.read(CONTROL, PIECE)
        if not data:
            _exit(0)
        if self.worker is not None:
            with contextlib.suppress(OSError):  # a dead worker: reap() tells
                self.worker.sendall(data)

    def drain(self, fd, *, whole=False):
        """Pass one piece of a stream on, or all that is in it."""
        while True:
            count = min(waiting(fd), PIECE)
            if not count:
                if self.ended(fd):
                    self.poll.unregister(fd)
                    del self.streams[fd]
                return
            # From the pipe to the port without a copy: a flood costs the emulated processor least this way.
            write_all(CONTROL, FRAME.pack(ord(self.streams[fd]), count))
            while count:
                count -= os.splice(fd, CONTROL, count)
            if not whole:
                return

    @staticmethod
    def ended(fd):
        """Whether an empty pipe has no writer any more."""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return any(mask & select.POLLHUP and not mask & select.POLLIN for _, mask in poll.poll(0))

    def drain_all(self):
        """Pass on what the streams hold: a result must not overtake the output that was written before it."""
        for fd in list(self.streams):
            self.drain(fd, whole=True)

    def from_worker(self):
        """What the worker says; its first words are the end of the handshake, all later ones its result."""
        try:
            data = self.worker.recv(PIECE)
        except ConnectionResetError:
            data = b""
        if not data:
            self.poll.unregister(self.worker.fileno())
            self.worker.close()
            self.worker = None
            return
        if self.ready and not self.told:
            self.told = True
            self.drain_all()
            self.agent.status(None)
        self.ready = True
        frame("c", data)

    def reap(self):
        """Reap whatever ended; the worker's end is told once."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child:
                while self.worker is not None:
                    self.from_worker()  # what it said before it ended
                self.drain_all()
                self.agent.status(status)


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
