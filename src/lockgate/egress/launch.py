"""Starts a gateway: the audit writer and the gateway process, with nothing but what they need.

Rule 1: both start with an empty environment, stdin from /dev/null, and exactly the descriptors in their argv (C6).
Rule 2: the sockets lie in a directory of ours (0700), are made by us with mode 0600 and are handed over listening, so
        that there is no moment at which somebody else could connect or bind.
Rule 3: both end with us: the gateway sees its lifeline close, the writer its stream. Nothing waits without a deadline.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from lockgate.audit import writer_argv
from lockgate.contract.errors import ConfigError, HostFault, LockgateError
from lockgate.egress.process import CONTROL, DATA, Settings
from lockgate.egress.resolver import parse_nameserver, system_nameservers
from lockgate.policy.egress import EgressPolicy
from lockgate.policy.egress_spec import EgressSpec

START_SECONDS: Final = 30.0
CLOSE_SECONDS: Final = 10.0
_BACKLOG: Final = 1024
_PATH_BYTES: Final = 100  # of 107 in struct sockaddr_un (unix(7)), so that "control" fits behind it


class Gateway:
    """A running gateway; made by `start`.

    Attributes:
        control: path of the control socket. data: path of the data socket. directory: holds both.
        pid: of the gateway. writer_pid: of its audit writer.
        pidfd, writer_pidfd: readable when one of them ended.

    """

    def __init__(
        self, directory: str, gateway: subprocess.Popen[bytes], writer: subprocess.Popen[bytes], life: socket.socket
    ) -> None:
        self.directory = directory
        self.control = str(Path(directory) / CONTROL)
        self.data = str(Path(directory) / DATA)
        self._gateway = gateway
        self._writer = writer
        self._life = life
        self.pid = gateway.pid
        self.writer_pid = writer.pid
        self.pidfd = os.pidfd_open(gateway.pid)
        self.writer_pidfd = os.pidfd_open(writer.pid)

    def exited(self) -> int | None:
        """Return the gateway's exit status, None while it lives."""
        return self._gateway.poll()

    def close(self) -> None:
        """End the gateway and its writer, in this order, and remove the directory; idempotent."""
        self._life.close()
        for process in (self._gateway, self._writer):
            try:
                process.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(CLOSE_SECONDS)
        if self.pidfd >= 0:
            os.close(self.pidfd)
            os.close(self.writer_pidfd)
            self.pidfd = self.writer_pidfd = -1
        _remove(self.directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def start(
    spec: EgressSpec,
    audit_path: str | Path,
    *,
    directory: str | Path | None = None,
    nameservers: Sequence[str] | None = None,
    ca_file: str | None = None,
    uids: Sequence[int] = (),
    connections: int = 4096,
    output: int = subprocess.DEVNULL,
    **limits: float,
) -> Gateway:
    """Start a gateway and wait until it accepts.

    Args:
        spec: its policy.
        audit_path: file of its rows; its own, since a file has one writer.
        directory: where its sockets are made; None = a new one. It must not be there yet, or be empty and ours (0700).
        nameservers: `ADDRESS` or `ADDRESS@PORT`; None = those of the system (resolv.conf(5)).
        ca_file: more trust anchors for destinations, PEM.
        uids: users that may connect beside ourselves and root.
        connections: most connections at one time.
        output: descriptor for what it prints.
        limits: `stall`, `half`, `idle`, seconds; see `process.Settings`.

    Raises:
        ConfigError: the policy or an argument is wrong. HostFault: it could not start.

    """
    EgressPolicy.of(spec)  # an error is told here, by whom it concerns, before anything is started
    servers = tuple(system_nameservers() if nameservers is None else nameservers)
    for server in servers:
        parse_nameserver(server)
    with contextlib.ExitStack() as undo:
        place = _directory(directory)
        undo.callback(_remove, place)
        settings = Settings(
            spec=spec,
            directory=place,
            nameservers=servers,
            ca_file=ca_file,
            uids=tuple({os.geteuid(), 0, *uids}),
            connections=connections,
            **limits,
        )
        with contextlib.ExitStack() as theirs:
            data = theirs.enter_context(_listener(Path(place) / DATA))
            control = theirs.enter_context(_listener(Path(place) / CONTROL))
            life, their_life = socket.socketpair()
            undo.callback(life.close)
            theirs.callback(their_life.close)
            rows, writer_end = socket.socketpair()
            theirs.callback(rows.close)
            theirs.callback(writer_end.close)
            words = os.memfd_create("lockgate-egress", os.MFD_CLOEXEC)
            theirs.callback(os.close, words)
            os.write(words, msgspec.json.encode(settings))
            writer = _spawn(
                writer_argv(writer_end.fileno(), str(Path(audit_path).absolute())), (writer_end.fileno(),), output
            )
            undo.callback(_kill, writer)
            inherited = {
                "--settings-fd": words,
                "--audit-fd": rows.fileno(),
                "--life-fd": their_life.fileno(),
                "--data-fd": data.fileno(),
                "--control-fd": control.fileno(),
            }
            argv = [sys.executable, "-I", "-m", "lockgate.egress"]
            argv += [word for name, fd in inherited.items() for word in (name, str(fd))]
            gateway = _spawn(argv, tuple(inherited.values()), output)
            undo.callback(_kill, gateway)
        _wait_ready(life, gateway)
        undo.pop_all()
        return Gateway(place, gateway, writer, life)


def _spawn(argv: list[str], fds: tuple[int, ...], output: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv,
        env={},
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=fds,
        start_new_session=True,
        umask=0o077,
    )


def _wait_ready(life: socket.socket, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    data = b""
    while not data.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([life], [], [], left)[0]:
            raise HostFault("the egress gateway did not start in time", next_step="try again; report this if it stays")
        part = life.recv(65536)
        if not part:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(CLOSE_SECONDS)
            raise HostFault(
                f"the egress gateway ended while it started (status {process.returncode})", next_step="report this"
            )
        data += part
    words: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
    if words.get("ok") is not True:
        kind: type[LockgateError] = ConfigError if words.get("code") == "config" else HostFault
        raise kind(str(words.get("error")), next_step=str(words.get("next_step")))


def _directory(wanted: str | Path | None) -> str:
    if wanted is None:
        return tempfile.mkdtemp(prefix="lockgate-egress-")
    path = Path(wanted).absolute()
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.stat()
        if found.st_uid == os.geteuid():
            _clear_stale(path)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077 or any(path.iterdir()):
            raise ConfigError(
                f"the directory {str(path)!r} is not ours alone, or not empty",
                next_step="name one that is not there yet",
            )
    except OSError as error:
        raise ConfigError(
            f"the directory {str(path)!r} cannot be made ({error.strerror})", next_step="name a place of yours"
        ) from None
    return str(path)


def _clear_stale(path: Path) -> None:
    """Remove sockets that a killed gateway left behind: those on which nobody listens any more.

    Raises:
        ConfigError: a gateway runs there.

    """
    for name in (DATA, CONTROL):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
            try:
                sock.settimeout(1.0)
                sock.connect(str(path / name))
            except ConnectionRefusedError:
                (path / name).unlink()
            except OSError:
                continue
            else:
                raise ConfigError(
                    f"a gateway runs in {str(path)!r} already", next_step="use it, or name another --directory"
                )


def _listener(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > _PATH_BYTES:
        raise ConfigError("the path of the gateway's directory is too long", next_step="name one under 90 bytes")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.bind(str(path))
        path.chmod(0o600)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise HostFault(
            f"the gateway's socket cannot be made ({error.strerror})", next_step="look at that directory"
        ) from None
    return sock


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(CLOSE_SECONDS)


def _remove(directory: str) -> None:
    for name in (DATA, CONTROL):
        with contextlib.suppress(OSError):
            (Path(directory) / name).unlink()
    with contextlib.suppress(OSError):
        Path(directory).rmdir()
