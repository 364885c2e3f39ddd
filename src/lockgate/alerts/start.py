"""Starts the alerter beside whoever writes an audit log.

Rule 1: it starts with an empty environment and exactly one descriptor beside its configuration: its life line.
Rule 2: it ends with us: it sees the end of its life line, tells what is left, bounded, and exits.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from lockgate.contract.errors import HostFault

READY_SECONDS: Final = 30.0
CLOSE_SECONDS: Final = 6.0


class _Said(msgspec.Struct):
    ready: bool = False
    error: str = ""
    next_step: str = ""


def argv(config: str, audit: str, life: int, source: str = "") -> list[str]:
    """Return the command line behind `python -I`."""
    line = ["-m", "lockgate.alerts", "--config", config, "--audit", audit, "--life", str(life)]
    return [*line, "--source", source] if source else line


class AlerterProcess:
    """The running alerter.

    Attributes:
        pid: of the process. pidfd: readable when it ended.

    """

    def __init__(self, process: subprocess.Popen[bytes], life: socket.socket) -> None:
        self._process = process
        self._life = life
        self.pid = process.pid
        self.pidfd = os.pidfd_open(process.pid)

    def wait_ready(self, timeout: float = READY_SECONDS) -> None:
        """Wait until it follows the log.

        Raises:
            HostFault: it cannot, in its own words, or did not within `timeout` seconds.

        """
        said = wait_ready(self._life, timeout)
        if not said.ready:
            raise HostFault(
                f"the alerter did not start: {said.error or 'it ended, or was not ready in time'}",
                next_step=said.next_step or "correct [alerts], or leave it out; see: lockgate alerts test",
            )

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """End it: it tells what is left, bounded. Idempotent."""
        self._life.close()
        if self.pidfd < 0:
            return
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            self._process.wait(timeout)
        os.close(self.pidfd)
        self.pidfd = -1


def wait_ready(life: socket.socket, timeout: float) -> _Said:
    """Return what the alerter says on its life line; nothing said is not ready."""
    deadline = time.monotonic() + timeout
    poller = select.poll()
    poller.register(life, select.POLLIN)
    data = b""
    while not data.endswith(b"\n") and len(data) < 4096:
        left = deadline - time.monotonic()
        if left <= 0 or not poller.poll(left * 1000):
            return _Said()
        more = life.recv(4096)
        if not more:
            return _Said()
        data += more
    try:
        return msgspec.json.decode(data, type=_Said)
    except msgspec.DecodeError:
        return _Said()


def start_alerter(config: int | str | Path, audit: str | Path, *, source: str = "") -> AlerterProcess:
    """Start the alerter of the log at `audit`; `wait_ready` comes next.

    Args:
        config: path of the configuration, or a descriptor of the validated one (`gate.start.config_file`), which stays
            the caller's.
        audit: the audit file.
        source: names the log in metrics where the same configuration is used for another log, too.

    """
    ours, theirs = socket.socketpair()
    try:
        fds = [theirs.fileno()]
        if isinstance(config, int):
            fds.append(config)
            config = f"/proc/self/fd/{config}"
        process = subprocess.Popen(
            [sys.executable, "-I", *argv(str(config), str(audit), theirs.fileno(), source)],
            env={},
            cwd="/",
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            start_new_session=True,
            umask=0o077,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return AlerterProcess(process, ours)
