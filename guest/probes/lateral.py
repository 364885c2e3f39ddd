"""Lateral and PeerDoS: reach another process, another run, or what all runs share."""

probe("ptrace-traceme", "Lateral")(lambda: answered("ptrace", 0, 0, 0, 0))
probe("ptrace-seize-parent", "Lateral")(lambda: answered("ptrace", 0x4206, os.getppid(), 0, 0, refusals=("EPERM", "ENOSYS", "EACCES")))
probe("process-vm-readv", "Lateral")(lambda: answered("process_vm_readv", 1, 0, 0, 0, 0, 0))
probe("process-vm-writev", "Lateral")(lambda: answered("process_vm_writev", 1, 0, 0, 0, 0, 0))
probe("pidfd-getfd", "Lateral")(lambda: answered("pidfd_getfd", -1, 0, 0))
probe("kcmp", "Lateral")(lambda: answered("kcmp", os.getpid(), os.getpid(), 0, 0, 0))
probe("process-madvise", "Lateral")(lambda: answered("process_madvise", -1, 0, 0, 0, 0))
probe("move-pages", "Lateral")(lambda: answered("move_pages", 0, 0, 0, 0, 0, 0))
probe("keyctl-session", "Lateral")(lambda: answered("keyctl", 0, -3, 0, 0, 0))
probe("keyctl-read", "Lateral")(lambda: answered("keyctl", 11, -1, 0, 0, 0))
probe("add-key", "Lateral")(lambda: answered("add_key", 0, 0, 0, 0, 0))
probe("request-key", "Lateral")(lambda: answered("request_key", 0, 0, 0, 0))
probe("shmget", "Lateral")(lambda: answered("shmget", 0x5eed, 0, 0))
probe("msgget", "Lateral")(lambda: answered("msgget", 0x5eed, 0))
probe("semget", "Lateral")(lambda: answered("semget", 0x5eed, -1, 0))
probe("mq-open", "Lateral")(lambda: answered("mq_open", 0, 0, 0, 0))
probe("inotify", "Lateral")(lambda: answered("inotify_init1", 0))
probe("fanotify", "Lateral")(lambda: answered("fanotify_init", 0, 0))
probe("dnotify", "Lateral")(lambda: _dnotify())
probe("flock-shared-file", "PeerDoS")(lambda: _flock())
probe("rt-sigqueueinfo", "Lateral")(lambda: answered("rt_sigqueueinfo", 0x7FFFFFFF, 0, 0))


def _dnotify():
    import fcntl

    fd = os.open(os.path.dirname(os.__file__), os.O_RDONLY)
    fcntl.fcntl(fd, 1026, 0x1)
    return True, "watching"


def _flock():
    import fcntl

    with open(os.__file__, "rb") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True, "locked a file that all runs share"


@probe("fcntl-lease", "PeerDoS")
def _():
    import fcntl

    fd = os.open(os.__file__, os.O_RDONLY)
    fcntl.fcntl(fd, 1024, 0)
    return True, "leased a file that all runs share"


@probe("fcntl-setown", "Lateral")
def _():
    import fcntl

    reader, _ = os.pipe()
    fcntl.fcntl(reader, 8, os.getppid())
    return True, "set"


@probe("kill-everyone", "PeerDoS", last=True)
def _():
    # Signal 0 delivers nothing. In a process namespace of its own the run's first process and the asker are left out
    # (kill(2)), so that an answer means somebody else.
    os.kill(-1, 0)
    return True, "somebody is there"


@probe("signal-pid-1-parent", "Lateral")
def _():
    pids = [p for p in range(2, 400) if p not in (os.getpid(), os.getppid())]
    hit = []
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        except PermissionError:
            hit.append(pid)  # it exists, and we were told so
            continue
        hit.append(pid)
    return len(hit) > 2, hit[:6]


@probe("tiocsti", "Lateral")
def _():
    import fcntl

    master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
    os.close(master)
    return True, "a terminal can be had"


# A pointer to nowhere: a terminal says EFAULT or EIO, and nothing is typed.
probe("tiocsti-ioctl", "Lateral")(
    lambda: answered("ioctl", 0, 0x5412, 1, refusals=("EPERM", "ENOSYS", "EACCES", "ENOTTY"))
)


@probe("shared-memory-directory", "Lateral")
def _():
    return os.access("/dev/shm", os.W_OK), "writable"


@probe("posix-semaphore", "Lateral")
def _():
    import _multiprocessing

    _multiprocessing.SemLock(0, 1, 1, "/lockgate-probe-%d" % os.getpid(), True)
    return True, "named semaphore"


@probe("shared-files-writable", "Lateral")
def _():
    places = (os.__file__, os.path.dirname(os.__file__), sys.executable or "/usr/bin/python3", "/etc/passwd")
    open_ones = [place for place in places if os.access(place, os.W_OK)]
    return bool(open_ones), open_ones
