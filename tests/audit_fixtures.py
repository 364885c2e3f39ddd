"""A real audit writer process with a client, and a nursery that forks writers and clients quickly."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockgate.audit import writer_argv
from lockgate.audit.client import AuditClient
from lockgate.audit.rows import Row


def audit_row(phase: Any = "outcome", **fields: Any) -> Row:
    """Return a row of somebody's run."""
    return Row(**{"phase": phase, "user": "u1", "agent": "support", "run": "run_1", "tenant": "t1", **fields})


def audit_intent(**fields: Any) -> Row:
    """Return the intent of a write."""
    return audit_row("intent", **{"effect": "write", "operation": "refund", "args_hash": "a" * 64, **fields})


class AuditLink:
    """A writer process and the client that talks to it."""

    def __init__(self, path: Path, *, timeout: float = 10.0, prefix: tuple[str, ...] = (), fsize: int = 0) -> None:
        self.path = path
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [*prefix, *writer_argv(theirs.fileno(), str(path))],
            pass_fds=[theirs.fileno()],
            env={},
            stderr=subprocess.PIPE,
            preexec_fn=(  # noqa: PLW1509 - no thread of ours holds a lock yet
                lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (fsize, -1))
            )
            if fsize
            else None,
        )
        theirs.close()
        self.socket = ours
        self.client = AuditClient(ours, timeout=timeout)

    def kill(self) -> None:
        """Kill -9 the writer."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def close(self) -> int:
        """End the client, wait for the writer, return its exit code; what it wrote to stderr must be nothing."""
        self.client.close()
        try:
            code = self.process.wait(15)
        finally:
            self.process.kill()
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            assert stderr.read() == b""
        return code


@pytest.fixture
def audit_link(tmp_path: Path) -> Iterator[Callable[..., AuditLink]]:
    """Start writers on `audit.db` in the test's own directory; what still runs at the end is killed."""
    links: list[AuditLink] = []

    def start(path: Path | None = None, **options: Any) -> AuditLink:
        link = AuditLink(path or tmp_path / "audit.db", **options)
        links.append(link)
        return link

    yield start
    for link in links:
        if link.process.poll() is None:
            link.kill()
        link.client.close()
        if link.process.stderr is not None:
            link.process.stderr.close()


class AuditNursery:
    """A small process that has everything imported and forks real writers and clients on demand.

    Starting two interpreters for each of hundreds of kills would test the import system. What is forked runs the same
    `main` as the real command line.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                ours.close()
                signal.signal(signal.SIGCHLD, signal.SIG_IGN)
                _nurse(theirs)
                code = 0
            finally:
                os._exit(code)
        theirs.close()

    def fork(self, role: str, argument: str, *fds: int) -> int:
        """Fork a process that runs `role`; returns its pid."""
        socket.send_fds(self._socket, [f"{role} {argument}".encode()], list(fds))
        self._socket.settimeout(20)
        return int(self._socket.recv(64))

    def close(self) -> None:
        """End the nursery."""
        self._socket.close()
        os.waitpid(self.pid, 0)


def _nurse(link: socket.socket) -> None:
    while True:
        message, fds, _, _ = socket.recv_fds(link, 4096, 8)
        if not message:
            return
        role, _, argument = message.decode().partition(" ")
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                link.close()
                code = _ROLES[role](argument, fds)
            finally:
                os._exit(code)
        for fd in fds:
            os.close(fd)
        link.send(str(pid).encode())


def _writer(path: str, fds: list[int]) -> int:
    from lockgate.audit import writer

    return writer.main(["--fd", str(fds[0]), "--path", path])


def _client(seed: str, fds: list[int]) -> int:
    """Write like a broker with four channels, and acknowledge on a pipe what was acknowledged to it."""
    import threading

    client = AuditClient(socket.socket(fileno=fds[0]), timeout=10.0)
    acks = fds[1]

    def channel(number: int) -> None:
        try:
            for at in range(100_000):
                key = f"{seed}-{number}-{at}"
                appended = client.append(audit_row(operation="get_order", effect="read", run=f"run_{seed}"))
                os.write(acks, f"append {appended} -\n".encode())
                intent = client.intent(audit_intent(run=f"run_{seed}"), key)
                assert isinstance(intent, str)
                os.write(acks, f"intent {intent} {key}\n".encode())
                ended = client.outcome(audit_row(effect="write", status="ok", run=f"run_{seed}"), intent, b'"done"')
                os.write(acks, f"outcome {ended} {intent}\n".encode())
        except Exception as error:
            os.write(acks, f"error {type(error).__name__} {number}\n".encode())

    threads = [threading.Thread(target=channel, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 0


_ROLES: dict[str, Callable[[str, list[int]], int]] = {"writer": _writer, "client": _client}


@pytest.fixture
def audit_nursery() -> Iterator[AuditNursery]:
    """Give a nursery for one test."""
    nursery = AuditNursery()
    yield nursery
    nursery.close()
