"""What this rung does not have, said where it is missed: what it is, and what to use instead.

Rule 1: nothing here protects anything. The things are absent; this file only words the error.
Rule 2: the kind of error stays what a program expects where it falls back by itself: ImportError, OSError,
        RuntimeError, AttributeError.
"""

import builtins
import errno
import os
import signal
import socket
import subprocess
import threading
import time

_ELSEWHERE = "run this code on the container, gvisor or microvm rung"
_NO_PROCESS = "the wasm rung has no processes: compute it in Python, call an operation (host.call), or " + _ELSEWHERE
_NO_NETWORK = "the wasm rung has no network and no sockets: ask the host for an operation with host.call"
_NO_THREAD = (
    "the wasm rung has no threads: call the function directly, await coroutines with asyncio.run, or " + _ELSEWHERE
)
_NO_SIGNAL = "the wasm rung has no signals and timers: bound the work itself, or " + _ELSEWHERE
_NO_NATIVE = "the wasm rung loads no native libraries: use a package that is linked in, or " + _ELSEWHERE
_NO_HOST = "the wasm rung has no Unix system behind it: " + _ELSEWHERE

# Modules that are there for other modules to import, or not at all: an import from the run's own code says so at once.
MODULES = {
    "subprocess": _NO_PROCESS,
    "multiprocessing": _NO_PROCESS,
    "pty": _NO_PROCESS,
    "ssl": _NO_NETWORK,
    "ctypes": _NO_NATIVE,
    "cffi": _NO_NATIVE,
    "fcntl": _NO_HOST,
    "grp": _NO_HOST,
    "pwd": _NO_HOST,
    "resource": _NO_HOST,
    "syslog": _NO_HOST,
    "termios": _NO_HOST,
    "tty": _NO_HOST,
}
_PROCESS_NAMES = """execl execle execlp execlpe execv execve execvp execvpe fork forkpty kill killpg nice openpty
pidfd_open pipe pipe2 popen posix_spawn posix_spawnp setpgid setsid spawnl spawnle spawnlp spawnlpe spawnv spawnve
spawnvp spawnvpe system wait wait3 wait4 waitid waitpid WNOHANG"""
_HOST_NAMES = """chmod chown chroot getegid geteuid getgid getgroups getlogin getppid getuid lchown mkfifo mknod
sched_getaffinity setgid setuid umask"""
_SIGNAL_NAMES = "alarm getitimer pause pthread_kill pthread_sigmask setitimer sigpending sigwait"

_import = builtins.__import__


def find(name, globals=None, locals=None, fromlist=(), level=0):  # noqa: A002 - the names of builtins.__import__
    """builtins.__import__, which words the refusal when the run's own code asks for what is not here."""
    mine = level == 0 and globals is not None and globals.get("__name__") == "__main__"
    if mine:
        why = MODULES.get(name.partition(".")[0])
        if why is not None:
            raise ImportError("import %s: %s" % (name, why), name=name)
    try:
        return _import(name, globals, locals, fromlist, level)
    except ModuleNotFoundError as error:
        top = name.partition(".")[0]
        if not mine or error.name != top:
            raise
        raise ModuleNotFoundError(
            "No module named %r: the wasm rung has only the packages that are linked into its guest; for others use the"
            " container, gvisor or microvm rung with a package set (lockgate env build)" % top,
            name=top,
        ) from None


def _refuse(kind, *arguments):
    def refuse(*_args, **_kwargs):
        raise kind(*arguments)

    return refuse


def _attributes(module, reasons):
    """Give a module a __getattr__ (PEP 562) that words what is missing; hasattr stays false."""

    def missing(name):
        why = reasons.get(name)
        if why is None:
            raise AttributeError("module %r has no attribute %r" % (module.__name__, name), name=name, obj=module)
        raise AttributeError("%s.%s: %s" % (module.__name__, name, why), name=name, obj=module)

    module.__getattr__ = missing


def uname():
    """os.uname for a system that has a name and no kernel behind it."""
    return os.uname_result(("wasi", "sandbox", "", "", "wasm32"))


def _checked(read):
    """A clock by its number: the C library takes any number for the address of a clock."""
    clocks = {getattr(time, name) for name in dir(time) if name.startswith("CLOCK_")}

    def clock(number):
        if number not in clocks:
            raise OSError(errno.EINVAL, "there is no such clock")
        return read(number)

    return clock


def settle():
    """Put the words where they are needed; once, when the image is made."""
    builtins.__import__ = find
    refused = errno.EAFNOSUPPORT  # for every family: the errno of one that a system does not have
    socket.socket.__init__ = _refuse(OSError, refused, _NO_NETWORK)
    for name in ("create_connection", "create_server", "fromfd", "socketpair"):
        setattr(socket, name, _refuse(OSError, refused, _NO_NETWORK))
    for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "gethostbyaddr", "getnameinfo", "getfqdn"):
        setattr(socket, name, _refuse(socket.gaierror, -2, _NO_NETWORK))
    subprocess.Popen.__init__ = _refuse(OSError, errno.ENOTSUP, _NO_PROCESS)
    threading.Thread.start = _refuse(RuntimeError, _NO_THREAD)
    reasons = dict.fromkeys(_PROCESS_NAMES.split(), _NO_PROCESS)
    reasons.update(dict.fromkeys(_HOST_NAMES.split(), _NO_HOST))
    for name in [one for one in reasons if hasattr(os, one)]:
        del reasons[name]
    _attributes(os, reasons)
    os.uname = uname
    time.clock_gettime, time.clock_gettime_ns = _checked(time.clock_gettime), _checked(time.clock_gettime_ns)
    _attributes(signal, dict.fromkeys(_SIGNAL_NAMES.split(), _NO_SIGNAL))


NO_NETWORK, NO_PROCESS, NO_THREAD, NO_SIGNAL = _NO_NETWORK, _NO_PROCESS, _NO_THREAD, _NO_SIGNAL
