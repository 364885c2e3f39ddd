"""HostLeak: learn of the host what a run has no need to know."""

for _path in (
    "kallsyms", "keys", "key-users", "kcore", "sysrq-trigger", "sys/kernel/core_pattern", "sys/kernel/random/boot_id",
    "version", "cmdline", "meminfo", "cpuinfo", "loadavg", "uptime", "timer_list", "sched_debug", "mounts",
    "partitions", "modules", "interrupts", "stat", "sys/kernel/hostname", "sys/kernel/osrelease",
    "self/cgroup", "self/uid_map", "self/environ", "self/auxv", "self/maps", "self/mountinfo", "self/status",
    "self/syscall", "self/stack", "self/net/dev", "self/net/unix", "self/net/arp", "self/limits",
    "1/environ", "1/cmdline", "1/maps", "1/root/etc/shadow", "1/cwd/.", "fs/ext4",
):  # fmt: skip
    probe("read-proc-" + _path.strip("/.").replace("/", "-"), "HostLeak")(
        lambda path="/proc/" + _path: readable(path) if not os.path.isdir(path) else (bool(os.listdir(path)), "listed")
    )
for _path in ("/etc/shadow", "/etc/hostname", "/etc/machine-id", "/etc/resolv.conf", "/etc/hosts", "/root/.ssh",
              "/run/secrets", "/var/log", "/home", "/root", "/var/run/docker.sock", "/run/systemd", "/opt", "/srv",
              "/boot", "/lib/modules", "/sys/kernel", "/sys/fs/cgroup", "/sys/class/net", "/sys/devices",
              "/sys/kernel/uevent_helper", "/sys/kernel/vmcoreinfo", "/sys/fs/cgroup/memory/release_agent",
              "/sys/fs/cgroup/cgroup.procs", "/var/lib", "/mnt", "/media"):  # fmt: skip
    probe("see" + _path.replace("/", "-").replace(".", ""), "HostLeak")(lambda path=_path: present(path))
for _path in ("mem", "kmsg", "kvm", "fuse", "net/tun", "vda", "sda", "nvme0n1", "port", "hpet", "ptmx", "pts",
              "shm", "mqueue", "tty", "console", "loop-control", "vhost-vsock", "userfaultfd", "full"):  # fmt: skip
    probe("device-" + _path.replace("/", "-"), "HostLeak")(lambda path="/dev/" + _path: present(path))


@probe("tree-beyond-declared", "HostLeak")
def _():
    allowed = {"usr", "lib", "lib64", "bin", "dev", "proc", "etc", "tmp", "run", "work", "env", "packages", "opt"}
    extra = sorted(set(os.listdir("/")) - allowed)
    return bool(extra), extra[:12]


@probe("processes-visible", "HostLeak")
def _():
    try:
        others = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return False, "no /proc"
    mine = {str(os.getpid()), str(os.getppid()), "1"}
    return bool(set(others) - mine), sorted(set(others) - mine)[:8]


@probe("environment", "HostLeak")
def _():
    extra = sorted(set(os.environ) - {"HOME", "TMPDIR", "LC_CTYPE"})
    return bool(extra), extra[:8]


@probe("template-globals-through-frames", "HostLeak")
def _():
    import gc

    words = ("lockgate", "/src/", "site-packages/lockgate", "audit.db", "lockgate.toml")
    frame, depth = sys._getframe(), 0
    while frame is not None and depth < 50:
        for value in (frame.f_code.co_filename, *map(str, frame.f_globals)):
            if any(word in value for word in words):
                return True, value[:120]
        frame, depth = frame.f_back, depth + 1
    loaded = [name for name in sys.modules if name.startswith("lockgate")]
    return bool(loaded) or (gc and False), loaded[:4]


@probe("sysinfo", "HostLeak")
def _():
    return answered("sysinfo", ctypes.create_string_buffer(256))


@probe("syslog-read", "HostLeak")
def _():
    return answered("syslog", 3, ctypes.create_string_buffer(64), 64)


probe("syslog-size", "HostLeak")(lambda: answered("syslog", 10, 0, 0))
probe("sysfs-call", "HostLeak")(lambda: answered("sysfs", 3))
probe("lookup-dcookie", "HostLeak")(lambda: answered("lookup_dcookie", 0, 0, 0))
probe("statmount", "HostLeak")(lambda: answered("statmount", 0, 0, 0, 0))
probe("listmount", "HostLeak")(lambda: answered("listmount", 0, 0, 0, 0))
probe("lsm-list-modules", "HostLeak")(lambda: answered("lsm_list_modules", 0, 0, 0))
probe("mincore", "HostLeak")(lambda: answered("mincore", 1, 1, 0))
probe("cachestat", "HostLeak")(lambda: answered("cachestat", -1, 0, 0, 0))
probe("readahead", "HostLeak")(lambda: answered("readahead", -1, 0, 0))
probe("perf-event-open", "HostLeak")(lambda: answered("perf_event_open", 0, -1, -1, -1, 0))
probe("quotactl", "HostLeak")(lambda: answered("quotactl", 0x800003 << 8, 0, 0, 0))
probe("quotactl-fd", "HostLeak")(lambda: answered("quotactl_fd", -1, 0, 0, 0))


@probe("fs-ioc-getflags", "HostLeak")
def _():
    import fcntl

    with open(os.__file__, "rb") as handle:
        fcntl.ioctl(handle, 0x80086601, b"\0" * 8)
    return True, "answered"


@probe("uname-release", "HostLeak")
def _():
    return bool(os.uname().release), os.uname().release


@probe("uname-nodename", "HostLeak")
def _():
    name = os.uname().nodename
    return name not in ("", "sandbox", "localhost", "lockgate", "run"), name


@probe("clock-boottime", "HostLeak")
def _():
    import time

    return time.clock_gettime(7) > 60, "host uptime"


@probe("statfs-of-the-interpreter", "HostLeak")
def _():
    got = os.statvfs(os.__file__)
    return got.f_blocks > 0 and got.f_blocks * got.f_frsize > 1 << 30, "size of the disk behind it"


@probe("cpu-count", "HostLeak")
def _():
    return (os.cpu_count() or 1) > 1, os.cpu_count()
