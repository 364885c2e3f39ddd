"""Runs one command in a namespace of its own, with the gateway as its only way out.

Rule 1: the command starts after the gateway has taken the run, and ends when the gateway, the run or this process does.
Rule 2: what the gateway says about the run decides (policy, authority, token); nothing is decided twice.
Rule 3: the exit code is the command's own; 128 and the signal when it was killed; 137 when the run was ended here.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import ssl
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from lockgate.contract.errors import ConfigError, HostFault
from lockgate.egress import confine
from lockgate.egress.client import Control
from lockgate.egress.dns import Responder
from lockgate.egress.inside import Plan
from lockgate.egress.keeper import CONNECT_SECONDS, Proxy
from lockgate.egress.names import Names
from lockgate.egress.namespace import FORWARDED, Ended, Namespace
from lockgate.egress.preface import preface
from lockgate.egress.view import View
from lockgate.kernel.signals_unsafe import Signals
from lockgate.policy import canary
from lockgate.policy.egress import EgressPolicy
from lockgate.policy.host import Host

ROUTED_MOST: Final = 200
"""Listening sockets for clients without a proxy setting; names behind that are reached through the proxy alone."""
KILLED: Final = 137
_BOUND: Final = re.compile(r"^\S+: (?:\S+ +){6}(/.*)$", re.MULTILINE)
_UNIX_STREAM_DOMAINS: Final = (socket.AF_UNIX,)
_DECOY_VARIABLE: Final = "BACKUP_SERVICE_TOKEN"
_DECOY_FILE: Final = "backup-service.key"


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """What to run and how.

    Attributes:
        argv: program and arguments.
        env: its environment before ours is added.
        declared: variables that win over ours.
        cwd: where it starts; None = here.
        port: of the proxy.
        routed: whether allowed names lead to the gateway for clients that know no proxy.
        unix: whether the command may have sockets of the file system; those of others that are known are covered.
        servers: sockets of others that it may use.
        uid: become this user, -1 = stay. gid: its group.
        devices: further device nodes.
        covers: further paths to cover.
        decoys: whether values are planted that nobody uses.

    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = {}
    declared: Mapping[str, str] = {}
    cwd: Path | None = None
    port: int = confine.PROXY_PORT
    routed: bool = True
    unix: bool = False
    servers: tuple[str, ...] = ()
    uid: int = -1
    gid: int = -1
    devices: tuple[str, ...] = ()
    covers: tuple[str, ...] = ()
    decoys: bool = True


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Whose run it is: what stands in its rows."""

    user: str
    agent: str
    run: str
    tool: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """How it went.

    Attributes:
        exit_code: the command's, or what stands for it.
        signal: what killed the command, if one did.
        ended_by: "command", or why the run was ended: "canary", "gateway_failed", ...
        names: how many questions for names were judged, by reason.

    """

    run: str
    exit_code: int
    signal: int | None
    ended_by: str
    names: dict[str, int]


class DataSocket:
    """The gateway's data socket, as one run."""

    def __init__(self, path: str, token: str) -> None:
        self._path = path
        self._hello = preface(token)

    def open(self, client: socket.socket | None = None) -> socket.socket:
        """Open a connection; with `client`, its descriptor goes along and the conversation is on that.

        Raises:
            OSError: the gateway is gone or too busy.

        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(CONNECT_SECONDS)
            sock.connect(self._path)
            socket.send_fds(sock, [self._hello], [] if client is None else [client.fileno()])
        except BaseException:
            sock.close()
            raise
        return sock


class Confined:
    """One run; `run` does it all.

    Args:
        command: what to run.
        who: whose it is.
        control: a fresh connection to the gateway.

    """

    def __init__(self, command: Command, who: Identity, control: Control) -> None:
        self._command = command
        self._who = who
        self._control = control
        self._alarm = ""
        self._bell = -1

    def run(self) -> Report:
        """Run the command to its end.

        Raises:
            ConfigError: the command cannot be started. CannotIsolate: there can be no namespace here.
            HostFault: the gateway or the namespace failed.

        """
        check_streams()
        command, who = self._command, self._who
        planted = [canary.mint(os.urandom(canary.RANDOM_BYTES)) for _ in range(2)] if command.decoys else []
        opened = self._control.open(user=who.user, agent=who.agent, run=who.run, tool=who.tool, canaries=tuple(planted))
        policy = EgressPolicy.from_data(msgspec.json.decode(opened.policy))
        responder = Responder(policy)
        gateway = DataSocket(opened.data, opened.token)
        watch = canary.Watch(canary.Needles.of(planted)) if planted else None
        with contextlib.ExitStack() as stack:
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            stack.callback(os.close, self._bell)
            signals = Signals(FORWARDED)
            stack.callback(signals.close)
            namespace = Namespace(self._plan(policy, responder, opened.ca_pem, planted), cwd=command.cwd)
            stack.callback(namespace.close)
            namespace.prepare()
            responder.ipv6 = namespace.ipv6
            proxy = Proxy(namespace.served, gateway, responder, self._ring)
            events = (self._control.fileno(), self._told)
            names = Names(
                namespace.served,
                responder,
                self._control,
                self._ring,
                refusals=policy.limits.requests,
                watch=watch,
                events=events,
            )
            for thread in (proxy, names):
                thread.start()
                stack.callback(thread.stop)
            namespace.started()
            ended = self._wait(namespace, signals)
        return Report(
            run=who.run,
            exit_code=KILLED if ended is None else ended.exit_code,
            signal=None if ended is None else ended.signal,
            ended_by=self._alarm or "command",
            names=dict(names.questions),
        )

    def _plan(self, policy: EgressPolicy, responder: Responder, authority: str | None, planted: list[str]) -> Plan:
        command = self._command
        declared = dict(command.declared)
        files: list[tuple[str, str]] = []
        if planted:
            declared.setdefault(_DECOY_VARIABLE, planted[0])
            files.append((_DECOY_FILE, planted[1] + "\n"))
        if authority is not None:
            files.append((confine.CA_FILE, _system_authorities() + authority))
        env = confine.child_env(command.env, declared, port=command.port, ca=authority is not None)
        return Plan(
            argv=tuple(os.fsencode(one) for one in command.argv),
            env=tuple((os.fsencode(name), os.fsencode(value)) for name, value in env.items()),
            port=command.port,
            routed=tuple(self._routed(policy, responder)) if command.routed else (),
            unix=command.unix,
            uid=command.uid,
            gid=command.gid,
            view=View(
                devices=command.devices,
                files=tuple(files),
                covers=(*command.covers, *(servers_here() if command.unix else ())),
                shown=command.servers,
            ),
        )

    @staticmethod
    def _routed(policy: EgressPolicy, responder: Responder) -> list[tuple[str, int]]:
        hosts = [host for name in sorted(policy.names) if isinstance(host := Host.parse(name.encode()), Host)]
        given = responder.give(hosts)
        found = [(four.hex(), port) for host, four, _ in given for port in policy.ports(host)]
        found += [(six.hex(), port) for host, _, six in given for port in policy.ports(host)]
        return found[:ROUTED_MOST]

    def _ring(self, reason: str) -> None:
        """End the run; from any thread."""
        self._alarm = self._alarm or reason
        os.eventfd_write(self._bell, 1)

    def _told(self) -> None:
        """Hear what the gateway says unasked; called by the thread that has the connection."""
        try:
            event = self._control.poll()
        except (HostFault, OSError):
            self._ring("gateway_failed")
            return
        if event is not None and event.get("event") == "kill":
            self._ring(event.get("reason") or "killed")

    def _wait(self, namespace: Namespace, signals: Signals) -> Ended | None:
        """Wait for the command's end, passing signals on; None: the run was ended here."""
        poll = select.poll()
        for fd in (namespace.fileno(), signals.fileno(), self._bell):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if namespace.fileno() in ready:
                return namespace.poll()
            if self._bell in ready:
                return None
            while (taken := signals.next()) is not None:
                number, by_terminal = taken
                # The terminal has sent it to the command as well, which is in the same group.
                if not (by_terminal and number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGWINCH)):
                    namespace.signal(number)


def check_streams() -> None:
    """Refuse to hand a network connection to a command as its input or output: it would be a way out.

    Raises:
        ConfigError: one of the three is one.

    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as sock:
                if sock.family not in _UNIX_STREAM_DOMAINS:
                    raise ConfigError(
                        f"{name} is a network connection, which would be a way out for the command",
                        next_step="give it a pipe or a file: lockgate egress run -- CMD | cat",
                    )


def servers_here() -> list[str]:
    """Return the paths of sockets that somebody of this network namespace has bound (proc(5), /proc/net/unix)."""
    text = Path("/proc/net/unix").read_text(encoding="utf-8", errors="surrogateescape")
    return sorted(set(_BOUND.findall(text)))


def _system_authorities() -> str:
    """Return the authorities that this system trusts, as PEM."""
    built_in = ssl.get_default_verify_paths().openssl_cafile
    for path in (built_in, "/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/cert.pem"):
        if Path(path).is_file():
            return Path(path).read_text(encoding="utf-8", errors="replace") + "\n"
    return ""
