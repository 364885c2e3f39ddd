"""Makes the namespace of a run and starts the command in it; three processes, none of which serves anybody.

Rule 1: nothing of the command runs before every step is done; a step that fails is one message and status 99.
Rule 2: the command's processes end with the first process of its pid namespace, and that one ends when the other end of
        the control socket does: whoever is killed, and by whatever, nothing is left.
Rule 3: the command gets descriptors 0, 1 and 2, an environment made for it, no capability, no new privileges, and the
        filter of `callfilter`. These processes hold nothing else that would be worth reaching.
Rule 4: the sockets of the namespace (proxy, names) are made here and served outside: a socket keeps its namespace
        whoever holds it.

Started as `python -I -m lockgate.egress.inside CTL PLAN`: a SOCK_SEQPACKET socket and a file with the plan as JSON.
To here, one packet each: "maps" once the id maps are written; then one byte for each signal to pass on.
From here, JSON: {"unshared": true}; {"sockets": [[kind, address, port], ...], "ipv6": bool, "last": bool} with the
sockets themselves; {"started": pid}; {"exit": n} or {"signal": n}; {"error": step, "errno": n, "detail": text}.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import resource
import select
import signal
import socket
import sys
from typing import Any, Final, NoReturn

import msgspec

from lockgate.egress import callfilter, dns
from lockgate.egress.view import Builder, View
from lockgate.kernel import caps_unsafe as caps
from lockgate.kernel import netlink
from lockgate.kernel import process_unsafe as process
from lockgate.kernel.seccomp_unsafe import Filter
from lockgate.kernel.syscalls_unsafe import ARCH

STATUS_FAILED: Final = 99
MESSAGE_BYTES: Final = 65_536
FDS_PER_MESSAGE: Final = 200  # SCM_MAX_FD is 253
DNS_PORT: Final = 53
_BACKLOG: Final = 128
_IPV6_FREEBIND: Final = 78
_IGNORED_BY_PYTHON: Final = (signal.SIGPIPE, signal.SIGXFSZ)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be started.

    Attributes:
        argv: the command; looked up in PATH of `env`. Bytes, since a file name is any bytes.
        env: its whole environment, names and values.
        port: where the proxy listens on 127.0.0.1.
        routed: (address in hex, port) that lead to the gateway without a proxy setting.
        unix: whether sockets of the file system may be used.
        uid: become this user first, -1: stay who we are. gid: the same for the group.
        view: what the file system shows.

    """

    argv: tuple[bytes, ...]
    env: tuple[tuple[bytes, bytes], ...]
    port: int
    routed: tuple[tuple[str, int], ...] = ()
    unix: bool = False
    uid: int = -1
    gid: int = -1
    view: View = View()


class Inside:
    """The first process: user, network, pid and ipc namespace, its sockets, then the next one."""

    def __init__(self, ctl: socket.socket, plan: Plan) -> None:
        self.ctl = ctl
        self.plan = plan
        self.step = "start"

    def run(self) -> NoReturn:
        """Do everything; never returns."""
        plan = self.plan
        if plan.uid >= 0:
            self.step = "become the user"
            os.setgroups(os.getgrouplist(pwd.getpwuid(plan.uid).pw_name, plan.gid))
            process.become(plan.uid, plan.gid)
            process.set_dumpable(1)
        self.step = "unshare"
        process.unshare(process.NEWUSER | process.NEWNET | process.NEWPID | process.NEWIPC)
        self.say({"unshared": True})
        self.step = "maps"
        if self.ctl.recv(16) != b"maps":
            os._exit(STATUS_FAILED)
        self.step = "network"
        self.sockets()
        self.step = "fork"
        child = os.fork()
        if child == 0:
            process.die_with_parent()
            First(self.ctl, plan).run()
        _let_go(keep=())
        process.set_dumpable(0)
        os.waitpid(child, 0)
        os._exit(0)

    def sockets(self) -> None:
        """Switch `lo` on, route the pools to it, and hand out the sockets that are served outside."""
        netlink.loopback_up()
        netlink.deliver_here(dns.POOL_4.to_bytes(4), dns.POOL_4_BITS)
        ipv6 = True
        try:
            netlink.deliver_here(dns.POOL_6.to_bytes(16), dns.POOL_6_BITS)
        except OSError:
            ipv6 = False  # this kernel or this namespace has no IPv6: one way out less
        made = [("proxy", _listen("127.0.0.1", self.plan.port))]
        made.append(("dns-udp", _bind("127.0.0.1", DNS_PORT, socket.SOCK_DGRAM)))
        made.append(("dns-tcp", _listen("127.0.0.1", DNS_PORT)))
        for address, port in self.plan.routed:
            packed = bytes.fromhex(address)
            if len(packed) == 4 or ipv6:
                family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
                made.append(("routed", _listen(socket.inet_ntop(family, packed), port)))
        for at in range(0, len(made), FDS_PER_MESSAGE):
            part = made[at : at + FDS_PER_MESSAGE]
            names = [[kind, *sock.getsockname()[:2]] for kind, sock in part]
            last = at + FDS_PER_MESSAGE >= len(made)
            data = json.dumps({"sockets": names, "ipv6": ipv6, "last": last}).encode()
            socket.send_fds(self.ctl, [data], [sock.fileno() for _, sock in part])
        for _, sock in made:
            sock.close()

    def say(self, message: dict[str, Any]) -> None:
        """Send one message."""
        self.ctl.send(json.dumps(message).encode())


class First:
    """The first process of the pid namespace: the view, the command, signals to it, the end of everything."""

    def __init__(self, ctl: socket.socket, plan: Plan) -> None:
        self.ctl = ctl
        self.plan = plan
        self.step = "mounts"
        self.builder = Builder(plan.view)

    def run(self) -> NoReturn:
        """Start the command and stay until it ends; its namespace ends with this process."""
        try:
            # From inside nobody can end this process, as long as it handles no signal (pid_namespaces(7)).
            for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
                # What the operator's shell ignores stays ignored (nohup); what Python itself ignores does not.
                if signal.getsignal(number) != signal.SIG_IGN or number in _IGNORED_BY_PYTHON:
                    signal.signal(number, signal.SIG_DFL)
            process.unshare(process.NEWNS)
            self.builder.build()
            self.step = "filter"
            confined = Filter(callfilter.build(ARCH, unix=self.plan.unix))
            self.step = "fork"
            wake_r, wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            signal.set_wakeup_fd(wake_w)
            signal.signal(signal.SIGCHLD, _woken)
            failed_r, failed_w = os.pipe2(os.O_CLOEXEC)
            child = os.fork()
            if child == 0:
                self.command(confined, failed_w)
            os.close(failed_w)
            process.no_new_privileges()
            caps.drop_all()
            process.set_dumpable(0)
            _let_go(keep=(self.ctl.fileno(), wake_r, wake_w, failed_r))
            self.say({"started": child})
            with open(failed_r, "rb") as file:  # noqa: PTH123 - a descriptor
                problem = file.read(4096)  # ends at exec, which closes the other end
            self.stay(child, wake_r, problem)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the other end must hear of it
            step = self.builder.step if self.step == "mounts" else self.step
            with contextlib.suppress(OSError):
                self.say(_problem(step, error))
        os._exit(STATUS_FAILED)

    def command(self, confined: Filter, failed: int) -> NoReturn:
        """Be the command."""
        step = "confine"
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            process.die_with_parent()
            if failed != 3:
                failed = os.dup2(failed, 3, inheritable=False)
            process.close_from(4)
            # A core that the kernel pipes to a program outside would carry memory there; 1 is the value that ends this
            # (do_coredump, fs/coredump.c), 0 is not.
            resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
            process.no_new_privileges()
            caps.drop_all()
            confined.install()
            step = "exec"
            os.execvpe(self.plan.argv[0], self.plan.argv, dict(self.plan.env))  # noqa: S606 - the operator's command
        except BaseException as error:  # noqa: BLE001 - reported, then the end
            code = error.errno if isinstance(error, OSError) and error.errno else 0
            os.write(failed, json.dumps({"step": step, "errno": code}).encode())
        os._exit(STATUS_FAILED)

    def stay(self, child: int, wake: int, problem: bytes) -> NoReturn:
        """Reap, pass signals on, and end when the command or the other end does."""
        poll = select.poll()
        poll.register(self.ctl, select.POLLIN)
        poll.register(wake, select.POLLIN)
        while True:
            ended = _reap(child)
            if ended is not None:
                self.say(_ended(ended, problem))
                os._exit(0)
            for fd, _ in poll.poll():
                if fd == wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake, 4096)
                    continue
                data = self.ctl.recv(MESSAGE_BYTES)
                if not data:
                    os._exit(0)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, data[0])

    def say(self, message: dict[str, Any]) -> None:
        """Send one message."""
        self.ctl.send(json.dumps(message).encode())


def _woken(number: int, frame: object) -> None:
    """Be a handler, so that the wake-up descriptor is written to."""


def _reap(child: int) -> int | None:
    """Reap whatever has ended; returns the wait status of `child` once it is among that."""
    found: int | None = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = status


def _ended(status: int, problem: bytes) -> dict[str, Any]:
    if problem:
        told = json.loads(problem)
        return {"error": told["step"], "errno": told["errno"], "detail": ""}
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status)}
    return {"exit": os.WEXITSTATUS(status)}


def _problem(step: str, error: BaseException) -> dict[str, Any]:
    code = error.errno if isinstance(error, OSError) and error.errno else 0
    return {"error": step, "errno": code, "detail": f"{type(error).__name__}: {error}"[:1000]}


def _listen(address: str, port: int) -> socket.socket:
    sock = _bind(address, port, socket.SOCK_STREAM)
    sock.listen(_BACKLOG)
    return sock


def _bind(address: str, port: int, kind: socket.SocketKind) -> socket.socket:
    six = ":" in address
    sock = socket.socket(socket.AF_INET6 if six else socket.AF_INET, kind)
    if six:
        # A route makes an IPv6 address deliverable, not assigned, and bind(2) wants the latter.
        sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_FREEBIND, 1)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    sock.bind((address, port))
    return sock


def _descriptors() -> list[int]:
    return [int(one) for one in os.listdir("/proc/self/fd")]  # noqa: PTH208 - names are enough


def _let_go(keep: tuple[int, ...]) -> None:
    """Close everything else; the streams too, or their readers would wait for us after the command's end."""
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for fd in range(3):
        os.dup2(null, fd)
    for fd in _descriptors():
        if fd > 2 and fd not in keep:
            with contextlib.suppress(OSError):
                os.close(fd)


def main() -> NoReturn:
    """Read the plan and run it."""
    # A terminal sends ^C to every process of its foreground group; these two stay until the command has ended.
    signal.pthread_sigmask(signal.SIG_SETMASK, set(signal.Signals) - {signal.SIGCHLD})
    ctl_fd, plan_fd = (int(one) for one in sys.argv[1:3])
    ctl = socket.socket(fileno=ctl_fd)
    ctl.set_inheritable(False)
    inside: Inside | None = None
    try:
        with open(plan_fd, "rb") as file:  # noqa: PTH123 - a descriptor
            plan = msgspec.json.decode(file.read(), type=Plan)
        inside = Inside(ctl, plan)
        inside.run()
    except BaseException as error:  # noqa: BLE001 - whatever it is, the other end must hear of it
        with contextlib.suppress(OSError):
            ctl.send(json.dumps(_problem(inside.step if inside else "plan", error)).encode())
    os._exit(STATUS_FAILED)


if __name__ == "__main__":
    main()
