"""What a confined command may not ask of the kernel: the ways out that a network namespace does not close. Pure.

Rule 1: everything an ordinary program does is allowed; refused is what reaches beyond the namespace, each with its
        reason below. The namespace is the wall, this closes the holes that it has by design.
Rule 2: a refusal gives the errno with which programs fall back.

Refused, and why:
- sockets of other families than IPv4, IPv6 and route netlink: AF_VSOCK reaches the hypervisor from any namespace, and
  so may hardware families (Bluetooth, CAN, NFC, InfiniBand, QIPCRTR). AF_UNIX reaches every server that has a socket
  in the file system (a container engine, a resolver, an agent of keys): a network of its own. socketpair(2) stays.
- io_uring: it opens sockets without the calls that are judged here.
- add_key, request_key, keyctl: a key of type dns_resolver has the kernel start a resolver outside.
- ioctl TIOCSTI and TIOCLINUX: type into the terminal that the operator shares with the command.
- foreign architectures: their numbers are other numbers.

Sources: socket(2), vsock(7), io_uring(7), Documentation/networking/dns_resolver.rst, ioctl_tty(2).
"""

from __future__ import annotations

import errno
from typing import Final

from lockgate.kernel import bpf, tables
from lockgate.kernel.arch import Arch

AF_UNIX: Final = 1
AF_INET: Final = 2
AF_INET6: Final = 10
AF_NETLINK: Final = 16
NETLINK_ROUTE: Final = 0
TIOCSTI: Final = 0x5412
TIOCLINUX: Final = 0x541C

REFUSED: Final = {
    "io_uring_setup": errno.ENOSYS,
    "io_uring_enter": errno.ENOSYS,
    "io_uring_register": errno.ENOSYS,
    "add_key": errno.EPERM,
    "request_key": errno.EPERM,
    "keyctl": errno.EPERM,
}


def build(arch: Arch, *, unix: bool) -> bytes:
    """Return the filter as an array of struct sock_filter.

    Args:
        arch: for which architecture; any other kills the process.
        unix: whether sockets of the file system may be used.

    """
    program = bpf.begin(arch.audit, arch.x32, _segments(arch))
    _socket(program, unix=unix)
    _ioctl(program)
    program.label("allow")
    program.ret(bpf.ALLOW)
    return bpf.assemble(program)


def _segments(arch: Arch) -> list[tuple[int, int | str]]:
    actions: list[int | str] = [bpf.ALLOW] * (tables.NEWEST + 1)
    for name, code in REFUSED.items():
        actions[arch.calls[name]] = bpf.ERRNO | code
    for name in ("socket", "ioctl"):
        actions[arch.calls[name]] = name
    actions.append(bpf.ERRNO | errno.ENOSYS)  # calls that nobody has looked at yet
    return bpf.joined(actions)


def _socket(program: bpf.Program, *, unix: bool) -> None:
    program.label("socket")
    program.load(bpf.arg(0))
    for family in (AF_INET, AF_INET6, *((AF_UNIX,) if unix else ())):
        program.emit(bpf.JMP_JEQ, family, "allow")
    program.emit(bpf.JMP_JEQ, AF_NETLINK, None, "no_family")
    program.load(bpf.arg(2))
    program.emit(bpf.JMP_JEQ, NETLINK_ROUTE, "allow", "no_family")
    program.label("no_family")
    program.ret(bpf.ERRNO | errno.EAFNOSUPPORT)


def _ioctl(program: bpf.Program) -> None:
    program.label("ioctl")
    program.load(bpf.arg(1))
    program.emit(bpf.JMP_JEQ, TIOCSTI, "no_terminal")
    program.emit(bpf.JMP_JEQ, TIOCLINUX, "no_terminal", "allow")
    program.label("no_terminal")
    program.ret(bpf.ERRNO | errno.EPERM)
