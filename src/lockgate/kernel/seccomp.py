"""What a slot may ask of the kernel. Pure: `build` makes the filter's bytes.

Rule 1: an allow list. A call that is not named here is refused, and so is every call the kernel gains later.
Rule 2: calls with a dangerous argument are decided by that argument; pointers are never followed.
Rule 3: refusals give the errno that makes libc and CPython fall back or fail cleanly, not the prettiest one.

Left out on purpose: splice, tee, vmsplice, sendfile and copy_file_range (pipes over page cache), inotify and flock
(both cross slots on shared files), memfd_create and execve (code from outside the package set), mount, key, bpf,
perf, io_uring, userfaultfd, ptrace and process_vm families, sync (flushes the host's disks), mincore (a view of the
page cache), sysinfo (host memory), everything that opens or connects a socket.
"""

from __future__ import annotations

import errno
from typing import Final

from lockgate.kernel import bpf, tables
from lockgate.kernel.arch import Arch

# One group per thing that Python, numpy, pandas, sqlite3, asyncio and threads use the calls for.
_DATA: Final = """read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek close close_range dup
dup2 dup3 pipe pipe2 fsync fdatasync sync_file_range truncate ftruncate fallocate fadvise64"""
_TIME: Final = """poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2
eventfd eventfd2 signalfd signalfd4 timerfd_create timerfd_settime timerfd_gettime pause time gettimeofday
clock_gettime clock_getres clock_nanosleep nanosleep times alarm getitimer setitimer timer_create timer_settime
timer_gettime timer_getoverrun timer_delete"""
_INHERITED_SOCKETS: Final = """recvfrom recvmsg recvmmsg sendto sendmsg sendmmsg shutdown getsockname getpeername
setsockopt getsockopt"""
_FILES: Final = """open openat openat2 creat stat fstat lstat newfstatat statx access faccessat faccessat2 getdents
getdents64 getcwd chdir fchdir mkdir mkdirat rmdir rename renameat renameat2 link linkat unlink unlinkat symlink
symlinkat readlink readlinkat chmod fchmod fchmodat umask utime utimes utimensat statfs fstatfs getxattr lgetxattr
fgetxattr listxattr llistxattr flistxattr"""
_PROCESSES: Final = """fork vfork exit exit_group wait4 waitid kill tkill tgkill pidfd_open pidfd_send_signal getpid
getppid gettid setsid getsid setpgid getpgid getpgrp getrlimit prlimit64 getrusage getpriority"""
_MEMORY_IDENTITY_SIGNALS: Final = """brk munmap mremap madvise msync getrandom getuid geteuid getgid getegid
getgroups getresuid getresgid uname rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend
rt_sigtimedwait sigaltstack restart_syscall"""
_THREADS: Final = """futex futex_waitv set_robust_list get_robust_list set_tid_address arch_prctl rseq membarrier
sched_yield getcpu sched_getaffinity sched_setaffinity sched_getattr sched_getparam sched_getscheduler
sched_get_priority_max sched_get_priority_min sched_rr_get_interval"""

ALLOWED: Final = frozenset(
    f"{_DATA} {_TIME} {_INHERITED_SOCKETS} {_FILES} {_PROCESSES} {_MEMORY_IDENTITY_SIGNALS} {_THREADS}".split()
)

NAMESPACE_FLAGS: Final = 0x7E020000  # the seven CLONE_NEW* of clone(2)
IOCTLS: Final = (0x541B, 0x5421, 0x5451, 0x5450, 0x5401, 0x5413)  # FIONREAD FIONBIO FIOCLEX FIONCLEX TCGETS TIOCGWINSZ
# DUPFD to SETLKW, the OFD locks, DUPFD_CLOEXEC, GETPIPE_SZ: sqlite needs the locks. No leases, signals, seals or sizes.
FCNTLS: Final = (*range(8), 36, 37, 38, 1030, 1032)
# GET_PDEATHSIG GET_DUMPABLE SET_NAME GET_NAME CAPBSET_READ GET_SECUREBITS GET_NO_NEW_PRIVS SET_VMA. PDEATHSIG is read
# only: with it a run could outlive its template.
PRCTLS: Final = (2, 3, 15, 16, 23, 27, 39, 0x53564D41)
AF_UNIX: Final = 1
PROT_WRITE: Final = 2
PROT_EXEC: Final = 4

# Calls that always get this errno instead of the filter's default refusal.
FIXED: Final = {
    "clone3": errno.ENOSYS,  # its flags sit behind a pointer; glibc falls back to clone on ENOSYS alone
    "socket": errno.EAFNOSUPPORT,  # every family: an empty network namespace does not confine vsock
}


def _one_of(program: bpf.Program, name: str, index: int, values: tuple[int, ...], refusal: int) -> None:
    program.label(name)
    program.load(bpf.arg(index))
    for value in values:
        program.emit(bpf.JMP_JEQ, value, "allow")
    program.ret(bpf.ERRNO | refusal)


def _none_of(program: bpf.Program, name: str, index: int, mask: int, refusal: int) -> None:
    program.label(name)
    program.load(bpf.arg(index))
    program.emit(bpf.JMP_JSET, mask, f"{name}_refused", "allow")
    program.label(f"{name}_refused")
    program.ret(bpf.ERRNO | refusal)


def _routines(program: bpf.Program, every: int | None, *, sealed: bool) -> None:
    """The decisions that need an argument; labels are the calls' names."""
    _none_of(program, "clone", 0, NAMESPACE_FLAGS, every or errno.EPERM)
    _one_of(program, "socketpair", 0, (AF_UNIX,), every or errno.EAFNOSUPPORT)  # asyncio's wake-up pair
    _one_of(program, "ioctl", 1, IOCTLS, every or errno.ENOTTY)
    _one_of(program, "fcntl", 1, FCNTLS, every or errno.EPERM)
    _one_of(program, "prctl", 0, PRCTLS, every or errno.EPERM)
    # W^X, whether or not the kernel has PR_SET_MDWE: no mapping is born writable and executable, none becomes
    # executable later. Package libraries are mapped executable from their file and never changed.
    if sealed:
        _none_of(program, "mmap", 2, PROT_EXEC, every or errno.EACCES)
    else:
        program.label("mmap")
        program.load(bpf.arg(2))
        program.emit(bpf.ALU_AND, PROT_WRITE | PROT_EXEC)
        program.emit(bpf.JMP_JEQ, PROT_WRITE | PROT_EXEC, "mmap_refused", "allow")
        program.label("mmap_refused")
        program.ret(bpf.ERRNO | (every or errno.EACCES))
    _none_of(program, "mprotect", 2, PROT_EXEC, every or errno.EACCES)
    program.label("allow")
    program.ret(bpf.ALLOW)


BY_ARGUMENT: Final = ("clone", "socketpair", "ioctl", "fcntl", "prctl", "mmap", "mprotect")


def segments(arch: Arch, refusal: int, every: int | None = None) -> list[tuple[int, int | str]]:
    """Return the numbers 0 to NEWEST and above as (first number, action), neighbours of equal action joined."""
    refuse = bpf.ERRNO | (every or refusal)
    actions: list[int | str] = [refuse] * (tables.NEWEST + 1)
    for name in ALLOWED & arch.calls.keys():  # an architecture lacks the calls it never had
        actions[arch.calls[name]] = bpf.ALLOW
    for name in BY_ARGUMENT:
        actions[arch.calls[name]] = name
    for name, code in FIXED.items():
        actions[arch.calls[name]] = bpf.ERRNO | (every or code)
    # A call newer than the table: libc falls back on ENOSYS only.
    actions.append(bpf.ERRNO | errno.ENOSYS)
    return bpf.joined(actions)


def build(arch: Arch, *, refusal: int = errno.EPERM, every: int | None = None, sealed: bool = False) -> bytes:
    """Return the slot's filter as an array of struct sock_filter.

    Args:
        arch: for which architecture; any other kills the process.
        refusal: errno of a refused call whose errno nothing else decides.
        every: errno of every refusal instead. The attack suite's control gives one that no handler gives: it tells the
            filter from other checks.
        sealed: no mapping is executable from now on, not even of a file: for a kernel that does not heed noexec.

    """
    program = bpf.begin(arch.audit, arch.x32, segments(arch, refusal, every))
    _routines(program, every, sealed=sealed)
    return bpf.assemble(program)
