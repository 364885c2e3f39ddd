"""The gateway process: from its argv to its last row.

Rule 1: it starts with an empty environment and exactly the descriptors its argv names; it has no children.
Rule 2: it ends when its lifeline closes: whoever started it is gone. Its sockets are then removed from their directory.
Rule 3: it is hardened before it accepts: no core, not readable by others of its user, no new privilege, no program.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from lockgate.audit.client import AuditClient
from lockgate.audit.rows import Row
from lockgate.contract.errors import HostFault, LockgateError
from lockgate.egress.ca import Trust, require
from lockgate.egress.control import Control
from lockgate.egress.gateway import Gateway
from lockgate.egress.relay import Limits
from lockgate.egress.resolver import Nameservers, parse_nameserver
from lockgate.kernel import arch, process_unsafe, refusing, seccomp_unsafe
from lockgate.policy.egress import EgressPolicy
from lockgate.policy.egress_spec import EgressSpec

DATA: Final = "data"
CONTROL: Final = "control"
# What a process does that was taken over: start a program, become another, look into another, listen anew.
_CALLS: Final = """
    execve execveat fork vfork ptrace process_vm_readv process_vm_writev pidfd_getfd kcmp bind listen
    mount umount2 move_mount open_tree fsopen fsmount mount_setattr pivot_root chroot setns unshare init_module
    finit_module delete_module kexec_load kexec_file_load bpf perf_event_open userfaultfd io_uring_setup
    io_uring_enter io_uring_register add_key request_key keyctl personality reboot swapon swapoff acct"""
_REFUSED: Final = frozenset(_CALLS.split())


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the launcher tells the process; none of it is secret.

    Attributes:
        spec: the policy's table.
        directory: holds both sockets; removed at the end.
        nameservers: `ADDRESS` or `ADDRESS@PORT`.
        ca_file: more trust anchors for destinations, PEM.
        uids: users that may connect.
        connections: most connections at one time.
        stall: seconds without progress. half: seconds half-open. idle: seconds without traffic.

    """

    spec: EgressSpec
    directory: str
    nameservers: tuple[str, ...]
    ca_file: str | None = None
    uids: tuple[int, ...] = ()
    connections: int = 4096
    stall: float = 60.0
    half: float = 60.0
    idle: float = 900.0


class _Made(NamedTuple):
    policy: EgressPolicy
    audit: AuditClient
    servers: Nameservers
    trust: Trust


def main(argv: Sequence[str] | None = None) -> int:
    """Run the gateway until its launcher is gone; returns the exit status."""
    options = _options(argv)
    life = socket.socket(fileno=options.life_fd)
    try:
        settings = _settings(options.settings_fd)
        _harden()
        made = _Made(
            policy=EgressPolicy.of(settings.spec),
            audit=AuditClient(socket.socket(fileno=options.audit_fd)),
            servers=Nameservers([parse_nameserver(text) for text in settings.nameservers]),
            trust=Trust(ca_file=settings.ca_file),
        )
        if made.policy.intercepted:
            require()  # told to who starts it, as every reason for which there is no gateway
        made.audit.ready()
        _say_warnings(made.audit, made.policy)
    except LockgateError as error:
        _tell(life, {"ok": False, "error": error.message, "next_step": error.next_step, "code": error.code})
        return 1
    except Exception as error:  # noqa: BLE001 - a start that failed must be told, and without its text
        _tell(life, {"ok": False, "error": f"the gateway could not start ({type(error).__name__})",
                     "next_step": "report this", "code": "host_fault"})  # fmt: skip
        return 1
    listeners = [socket.socket(fileno=options.data_fd), socket.socket(fileno=options.control_fd)]
    try:
        asyncio.run(_serve(settings, made, life, listeners))
    finally:
        made.audit.close()
        _remove(settings.directory)
    return 0


async def _serve(settings: Settings, made: _Made, life: socket.socket, listeners: list[socket.socket]) -> None:
    policy = made.policy
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    uids = frozenset(settings.uids)
    gateway = Gateway(
        policy,
        made.audit,
        ask=made.servers,
        trust=made.trust,
        uids=uids,
        limits=Limits(stall=settings.stall, half=settings.half, idle=settings.idle),
        connections=settings.connections,
    )
    control = Control(gateway, str(Path(settings.directory) / DATA), uids)
    gateway.listen(listeners[0])
    control.listen(listeners[1])
    life.setblocking(False)
    loop.add_reader(life.fileno(), _look, life, over)
    _tell(life, {"ok": True, "pid": os.getpid(), "policy": policy.hash, "mode": policy.mode})
    try:
        await over.wait()
    finally:
        loop.remove_reader(life.fileno())
        await control.close()
        await gateway.close()


def _look(life: socket.socket, over: asyncio.Event) -> None:
    try:
        data = life.recv(64)
    except BlockingIOError:
        return
    except OSError:
        data = b""
    if not data:
        over.set()


def _settings(fd: int) -> Settings:
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        data = file.read(4 * 1024 * 1024)
    try:
        return msgspec.json.decode(data, type=Settings)
    except msgspec.MsgspecError as error:
        raise HostFault(f"the gateway's settings cannot be read: {error}", next_step="report this") from None


def _say_warnings(audit: AuditClient, policy: EgressPolicy) -> None:
    """Write a row for each entry that should be looked at again, at each start."""
    for warning in policy.warnings:
        audit.append(
            Row(
                phase="egress",
                user="operator",
                agent="gateway",
                run="none",
                operation="egress.load",
                reason=warning.reason,
                rule=warning.entry,
                status="warning",
                detail={"policy": policy.hash, "text": warning.text},
            )
        )


def _harden() -> None:
    """Give up what the gateway does not need (prctl(2), setrlimit(2), seccomp(2)).

    Raises:
        HostFault: the kernel refused a step.

    """
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        process_unsafe.no_new_privileges()
        process_unsafe.set_dumpable(0)
        seccomp_unsafe.Filter(refusing.program(arch.current(), _REFUSED)).install()
    except OSError as error:
        raise HostFault(
            f"the gateway could not harden itself ({error.strerror})",
            next_step="use a kernel with seccomp (CONFIG_SECCOMP_FILTER); lockgate doctor names what is missing",
        ) from None


def _tell(life: socket.socket, words: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        life.setblocking(True)
        life.settimeout(5.0)
        life.sendall(msgspec.json.encode(words) + b"\n")
        life.setblocking(False)


def _remove(directory: str) -> None:
    for name in (DATA, CONTROL):
        with contextlib.suppress(OSError):
            (Path(directory) / name).unlink()
    with contextlib.suppress(OSError):
        Path(directory).rmdir()


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lockgate.egress", description="Started by a launcher; not for people.")
    for name in ("--settings-fd", "--audit-fd", "--life-fd", "--data-fd", "--control-fd"):
        parser.add_argument(name, type=int, required=True)
    return parser.parse_args(sys.argv[1:] if argv is None else argv)
