"""What every probe stands on. The files of this folder are joined to one program and run as the code of a run.

Rule 1: a probe asks whether a primitive can be reached. It never uses one: arguments are chosen so that the real
        handler fails late (EBADF, EFAULT, EINVAL), and whatever opens is closed at once.
Rule 2: REACHED = the call succeeded, content was read, or an errno came back that only the real handler gives.
Rule 3: each probe runs in a forked child with a deadline where the rung lets it fork, so that none spoils the next. Where
        forks are slow, those that change nothing of their process share a child.
"""

import json
import os
import platform
import select
import signal
import socket
import struct
import sys
import time

try:
    import ctypes

    LIBC = ctypes.CDLL(None, use_errno=True)
    LIBC.syscall.restype = ctypes.c_long
except Exception:  # no ctypes on this rung: no raw system call exists to reach
    ctypes = None

X86 = platform.machine() == "x86_64"
# Numbers below 424 differ per architecture; from 424 on they are common (linux include/uapi/asm-generic/unistd.h).
NR = {
    "ioctl": 16, "getpid": 39, "socketpair": 53, "mmap": 9, "mprotect": 10, "clone": 56, "ptrace": 101, "syslog": 103, "setuid": 105, "chroot": 161,
    "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "reboot": 169, "sethostname": 170,
    "iopl": 172, "ioperm": 173, "init_module": 175, "quotactl": 179, "nfsservctl": 180, "personality": 135,
    "sysfs": 139, "sysinfo": 99, "setpriority": 141, "sched_setscheduler": 144, "modify_ldt": 154, "pivot_root": 155,
    "prctl": 157, "adjtimex": 159, "io_setup": 206, "lookup_dcookie": 212, "remap_file_pages": 216, "mbind": 237,
    "set_mempolicy": 238, "mq_open": 240, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250,
    "inotify_init1": 294, "move_pages": 279, "unshare": 272, "splice": 275, "tee": 276, "vmsplice": 278,
    "perf_event_open": 298, "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304, "setns": 308,
    "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "seccomp": 317,
    "memfd_create": 319, "bpf": 321, "execveat": 322, "userfaultfd": 323, "copy_file_range": 326, "shmget": 29,
    "msgget": 68, "semget": 64, "mknod": 133, "flock": 73, "sendfile": 40, "mlock": 149, "readahead": 187,
    "mincore": 27, "sync": 162, "capset": 126, "chown": 92, "rt_sigqueueinfo": 129, "setrlimit": 160,
    "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
    "fspick": 433, "pidfd_getfd": 438, "clone3": 435, "process_madvise": 440, "mount_setattr": 442,
    "landlock_create_ruleset": 444, "memfd_secret": 447, "cachestat": 451, "map_shadow_stack": 453, "statmount": 457,
    "listmount": 458, "lsm_list_modules": 461, "quotactl_fd": 443, "futex_waitv": 449,
}  # fmt: skip

E = {name: getattr(__import__("errno"), name) for name in dir(__import__("errno")) if name.startswith("E")}
PROBES = []
FATAL = {"x32-getpid"}  # refused by the end of the process that asks
# Two that trace each other stop at the first signal of either, and nobody is left to let them go on.
TRACING = {"ptrace-traceme", "ptrace-seize-parent"}


class Absent(Exception):
    """The primitive does not exist here at all."""


def probe(ident, goal, last=False):
    """Register a probe: `goal` is Escape, HostLeak, Exfil, Lateral, HostDoS or PeerDoS."""

    def add(function):
        PROBES.append((ident, goal, function, last))
        return function

    return add


def syscall(name, *args):
    """Make a raw system call; return (result, errno)."""
    if ctypes is None or not X86:
        raise Absent("no raw system calls")
    ctypes.set_errno(0)
    made = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    got = LIBC.syscall(ctypes.c_long(NR[name] if isinstance(name, str) else name), *made)
    return got, ctypes.get_errno()


def answered(name, *args, refusals=("EPERM", "ENOSYS", "EACCES")):
    """Reached unless the answer is one of `refusals`. A returned descriptor is closed."""
    got, number = syscall(name, *args)
    if got >= 0:
        if got > 2 and name not in ("clone", "getpid"):
            try:
                os.close(got)
            except (OSError, OverflowError):  # modify_ldt gives a negative int as if it were unsigned
                pass
        return True, "returned %d" % got
    label = [key for key, value in E.items() if value == number]
    text = label[0] if label else str(number)
    if number == 133:  # see attempt()
        return True, "marker"
    return text not in refusals, text


def readable(path, count=64):
    """Reached when content is read."""
    try:
        with open(path, "rb") as handle:
            data = handle.read(count)
        return bool(data), "read %d bytes" % len(data)
    except OSError as error:
        return False, type(error).__name__


def writable(path, flags=0):
    """Reached when a descriptor for writing is given; it is closed unused."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | flags))
        return True, "opened for writing"
    except OSError as error:
        # A program that runs says so before the mount says that it is read-only; access(2) asks the mount.
        return error.errno == E["ETXTBSY"] and os.access(path, os.W_OK), type(error).__name__


def present(path):
    """Reached when the name exists."""
    try:
        os.lstat(path)
        return True, "exists"
    except OSError as error:
        return False, type(error).__name__


def attempt(function):
    """Run one probe here; every Python error means not reached."""
    try:
        reached, detail = function()
        return bool(reached), str(detail)[:200]
    except Absent as absent:
        return False, str(absent)
    except OSError as error:
        # 133 is given by no handler: a control filter uses it to show that a refusal came from the filter.
        return error.errno == 133, type(error).__name__ + ": " + str(error)[:120]
    except BaseException as error:
        return False, type(error).__name__ + ": " + str(error)[:120]


def in_child(function, seconds=2.0):
    """Run one probe in a forked child with a deadline."""
    reader, writer = os.pipe()
    try:
        child = os.fork()
    except (OSError, AttributeError):
        os.close(reader)
        os.close(writer)
        raise
    if child == 0:
        os.close(reader)
        mine = os.getpid()
        answer = json.dumps(attempt(function)).encode()
        if os.getpid() == mine:  # a probe that made a process comes back twice
            os.write(writer, answer)
        os._exit(0)
    os.close(writer)
    got = (False, "no answer in time")
    if select.select([reader], [], [], seconds)[0]:
        raw = os.read(reader, 4096)
        got = tuple(json.loads(raw)) if raw else (False, "died")
    os.close(reader)
    try:
        os.kill(child, signal.SIGKILL)
    except OSError:
        pass
    status = os.waitpid(child, 0)[1]
    while os.getpid() == 1:  # what a probe forked and left is ours now, and would look like a stranger to the next
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                break
        except ChildProcessError:
            break
    if got == (False, "died") and os.WIFSIGNALED(status):
        got = (False, "killed by signal %d" % os.WTERMSIG(status))
    return got


def in_children(entries, seconds=2.0):
    """Run probes one after another in a child, in another one after each that ended or stalled it."""
    rows = []
    left = list(entries)
    while left:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            mine = os.getpid()
            for _, _, function, _ in left:
                answer = json.dumps(attempt(function)).encode() + b"\n"
                if os.getpid() != mine:  # a probe that made a process comes back twice
                    os._exit(0)
                _reap()
                os.write(writer, answer)
            os._exit(0)
        os.close(writer)
        raw, why = b"", "no answer in time"
        while left:
            if b"\n" not in raw:
                if not select.select([reader], [], [], seconds)[0]:
                    break
                more = os.read(reader, 65536)
                if not more:
                    why = "died"
                    break
                raw += more
                continue
            line, raw = raw.split(b"\n", 1)
            reached, detail = json.loads(line)
            rows.append({"id": left[0][0], "goal": left[0][1], "reached": reached, "detail": detail})
            del left[0]
        os.close(reader)
        try:
            os.kill(child, signal.SIGKILL)
        except OSError:
            pass
        status = os.waitpid(child, 0)[1]
        if left:
            if why == "died" and os.WIFSIGNALED(status):
                why = "killed by signal %d" % os.WTERMSIG(status)
            rows.append({"id": left[0][0], "goal": left[0][1], "reached": False, "detail": why})
            del left[0]
        if os.getpid() == 1:
            _reap()
    return rows


def _reap():
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except OSError:
            return


SLOW_FORK = 0.008  # seconds: where a process is dear, the probes that change nothing of it share one


def run_all(only=None):
    """Run every probe (or those whose id is in `only`); return a list of rows."""
    rows = []
    forks = True
    began = time.monotonic()
    try:
        in_child(lambda: (False, ""))
    except (OSError, AttributeError):
        forks = False
    slow = forks and time.monotonic() - began > SLOW_FORK
    # What looks for descriptors goes first: where nothing forks, the others leave theirs behind.
    ordered = sorted(PROBES, key=lambda entry: (entry[3], not entry[0].startswith(("leaked-", "inherited-"))))
    chosen = [one for one in ordered if only is None or one[0] in only]
    if slow:
        apart = FATAL | TRACING
        together = [one for one in chosen if not one[3] and one[0] not in apart and not one[0].startswith("leaked-")]
        rows += in_children(together)
        chosen = [one for one in chosen if one not in together]
    for ident, goal, function, _last in chosen:
        if ident in FATAL and not forks and only != [ident]:
            continue  # it would end the run: whoever asks has to give it one of its own
        try:
            reached, detail = in_child(function) if forks else attempt(function)
        except OSError as error:
            reached, detail = False, "no child: " + type(error).__name__
        rows.append({"id": ident, "goal": goal, "reached": reached, "detail": detail})
    return rows
