"""HostDoS: change or exhaust the host."""

probe("init-module", "HostDoS")(lambda: answered("init_module", 0, 0, 0))
probe("finit-module", "HostDoS")(lambda: answered("finit_module", -1, 0, 0))
probe("kexec-load", "HostDoS")(lambda: answered("kexec_load", 0, 0, 0, 0xFFFF))
probe("reboot", "HostDoS")(lambda: answered("reboot", 0, 0, 0, 0))
probe("swapon", "HostDoS")(lambda: answered("swapon", 0, 0))
probe("iopl", "HostDoS")(lambda: answered("iopl", 99))
probe("ioperm", "HostDoS")(lambda: answered("ioperm", 0x3FF, 9, 1))
probe("acct", "HostDoS")(lambda: answered("acct", b"/no-such-file"))
probe("settimeofday", "HostDoS")(lambda: answered("settimeofday", 1, 1))
probe("adjtimex", "HostDoS")(lambda: answered("adjtimex", 0))
probe("sethostname", "HostDoS")(lambda: answered("sethostname", 0, 1 << 20))
probe("bpf", "HostDoS")(lambda: answered("bpf", 9999, 0, 0))
probe("userfaultfd", "HostDoS")(lambda: answered("userfaultfd", 0))
probe("userfaultfd-user-only", "HostDoS")(lambda: answered("userfaultfd", 1))
probe("io-uring-setup", "HostDoS")(lambda: answered("io_uring_setup", 0, 0))
probe("io-setup", "HostDoS")(lambda: answered("io_setup", 0, 0))
probe("mbind", "HostDoS")(lambda: answered("mbind", 1, 1, 99, 0, 0, 0))
probe("set-mempolicy", "HostDoS")(lambda: answered("set_mempolicy", 99, 0, 0))
probe("remap-file-pages", "HostDoS")(lambda: answered("remap_file_pages", 1, 0, 0, 0, 0))
probe("memfd-secret", "HostDoS")(lambda: answered("memfd_secret", 0))
probe("map-shadow-stack", "HostDoS")(lambda: answered("map_shadow_stack", 1, 0, 0, refusals=("EPERM", "ENOSYS", "EACCES")))
probe("nfsservctl", "HostDoS")(lambda: answered("nfsservctl", 0, 0, 0))
probe("sync", "HostDoS")(lambda: answered("sync"))
probe("mlock", "HostDoS")(lambda: answered("mlock", 1, 1 << 30))


@probe("priority-up", "HostDoS")
def _():
    os.setpriority(os.PRIO_PROCESS, 0, -5)
    return True, "raised"


@probe("sched-fifo", "HostDoS")
def _():
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    return True, "realtime"


@probe("setrlimit-up", "HostDoS")
def _():
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard + 1))
    except (OSError, ValueError) as error:
        return soft != hard, "soft %d hard %d, %s" % (soft, hard, type(error).__name__)
    return True, "raised"


for _path in ("sysrq-trigger", "sys/kernel/core_pattern", "sys/vm/drop_caches", "self/oom_score_adj", "self/uid_map",
              "sys/kernel/modprobe", "sys/vm/overcommit_memory", "sys/kernel/hostname", "self/mem", "1/mem"):  # fmt: skip
    probe("write-proc-" + _path.replace("/", "-"), "HostDoS")(lambda path="/proc/" + _path: writable(path))
for _path in ("kernel/uevent_helper", "fs/cgroup/memory/release_agent", "fs/cgroup/cgroup.procs",
              "fs/cgroup/memory/tasks", "kernel/mm/transparent_hugepage/enabled", "power/state"):  # fmt: skip
    probe("write-sys-" + _path.replace("/", "-"), "HostDoS")(lambda path="/sys/" + _path: writable(path))
for _path in ("mem", "kmsg", "kvm", "fuse", "net/tun", "loop-control", "vda", "port", "vhost-net"):
    probe("open-device-" + _path.replace("/", "-"), "HostDoS")(lambda path="/dev/" + _path: writable(path))
