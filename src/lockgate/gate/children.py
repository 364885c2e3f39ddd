"""The processes beside the agent: audit writer, broker, supervisor, and the alerter where one is wanted.

Rule 1: each starts with an empty environment, stdin from /dev/null, a session of its own, and exactly the descriptors
        named in its argv (C6). Ctrl-C in a terminal reaches the agent alone, which then ends them in order.
Rule 2: they end with us: each sees EOF on its link, and asks the kernel for SIGKILL when its parent thread ends.
        That is why no short-lived thread may start them (prctl(2), PR_SET_PDEATHSIG).
Rule 3: what they print is kept bounded. It may end in an error text only escaped, and from the broker only until it
        is ready: after that it may lease secrets.
Rule 4: nothing here waits without a deadline, and `kill` leaves no process and no descriptor.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Final, TypeVar, cast

from lockgate.gate.escape import escape

T = TypeVar("T")
_TAIL: Final = 16 * 1024
_SHOWN: Final = 600
CLOSE_SECONDS: Final = 8.0
KILL_SECONDS: Final = 5.0


class Child:
    """One process.

    Attributes:
        name: "broker", "supervisor" or "audit writer".
        output: read end of its stdout and stderr, non-blocking; -1 once closed.
        pidfd: readable when it ended.
        may_show: whether `last_words` may quote it.

    """

    def __init__(self, name: str, argv: list[str], fds: tuple[int, ...], cwd: str, log: int) -> None:
        self.name = name
        self.may_show = True
        self._log = log
        self._tail = bytearray()
        self.output, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            os.set_blocking(self.output, False)
            self.process = subprocess.Popen(
                [sys.executable, "-I", *argv],
                env={},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
                pass_fds=fds,
                start_new_session=True,
                umask=0o077,
            )
        except BaseException:
            os.close(self.output)
            raise
        finally:
            os.close(theirs)
        self.pidfd = os.pidfd_open(self.process.pid)

    def read_output(self) -> bool:
        """Take what it printed, keep the end of it; False when it closed its output."""
        try:
            data = os.read(self.output, 65536)
        except BlockingIOError:
            return True
        if self._log >= 0 and data:
            with contextlib.suppress(OSError):  # a full disk under the log must not stop the gate
                os.write(self._log, data)
        self._tail += data
        del self._tail[:-_TAIL]
        return bool(data)

    def exited(self, within: float = 0.0) -> int | None:
        """Return the exit status (negative: the signal), None while it lives. Waits `within` seconds at most."""
        if self.process.returncode is None:
            poller = select.poll()
            poller.register(self.pidfd, select.POLLIN)
            if poller.poll(within * 1000):
                self.process.wait()
        return self.process.returncode

    def last_words(self) -> str:
        """Return the end of what it printed, escaped and bounded, or nothing where that could hold a secret."""
        with contextlib.suppress(OSError):
            while self.output >= 0 and select.select([self.output], [], [], 0)[0] and self.read_output():
                pass
        lines = self._tail.decode("utf-8", "replace").strip().splitlines() if self.may_show else []
        return escape(" | ".join(lines[-3:]))[-_SHOWN:]

    def end(self) -> None:
        """SIGKILL it if it lives, reap it, close what is ours. Idempotent."""
        if self.exited() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            self.exited(KILL_SECONDS)
        for fd in (self.pidfd, self.output):
            if fd >= 0:
                os.close(fd)
        self.pidfd = self.output = -1


class Children:
    """Starts the three and holds our ends.

    Args:
        config: descriptor of the validated configuration, inherited by broker and alerter and closed here.
        base: directory of the configuration, the broker's working directory.
        audit_path: the audit database. settings: the supervisor's settings, JSON.
        log: file descriptor that also takes what they print, -1 for none.
        alerts: whether the configuration asks for an alerter.

    Attributes:
        alerter: follows the audit log and tells the sinks; None where nothing was asked for.
        life: our end of the alerter's life line.

    """

    def __init__(
        self, *, config: int, base: str, audit_path: str, settings: str, log: int, alerts: bool = False
    ) -> None:
        self.log = log
        self._audit_path = audit_path
        self.alerter: Child | None = None
        self.life: socket.socket | None = None
        self.all: list[Child] = []
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            theirs.callback(os.close, config)
            ours.callback(self._end_all)

            def pair(kind: socket.SocketKind = socket.SOCK_STREAM) -> tuple[socket.socket, socket.socket]:
                left, right = socket.socketpair(socket.AF_UNIX, kind)
                theirs.callback(right.close)
                return left, right

            self.to_broker, broker_agent = pair()
            ours.callback(self.to_broker.close)
            self.to_supervisor, supervisor_agent = pair()
            ours.callback(self.to_supervisor.close)
            broker_supervisor, supervisor_broker = pair(socket.SOCK_SEQPACKET)
            theirs.callback(broker_supervisor.close)
            broker_audit, writer = pair()
            theirs.callback(broker_audit.close)

            self.writer = self._start(
                "audit writer", "lockgate.audit.writer", "/", {"--fd": writer, "--path": audit_path}
            )
            self.broker = self._start(
                "broker",
                "lockgate.broker",
                base if os.path.isdir(base) else "/",  # noqa: PTH112 - a string is what we hold
                {
                    "--agent-fd": broker_agent,
                    "--supervisor-fd": broker_supervisor,
                    "--audit-fd": broker_audit,
                    "--config": f"/proc/self/fd/{config}",
                },
                config,
            )
            self.supervisor = self._start(
                "supervisor",
                "lockgate.supervisor",
                "/",
                {"--agent-fd": supervisor_agent, "--broker-fd": supervisor_broker, "--settings": settings},
            )
            if alerts:
                self.start_alerter(config)
                ours.callback(self.close_life)
            ours.pop_all()

    def start_alerter(self, config: int) -> Child:
        """Start the alerter, or a new one in the place of one that ended. `config` stays the caller's."""
        self.close_life()
        self.life, theirs = socket.socketpair()
        with contextlib.closing(theirs):
            options: dict[str, socket.socket | str] = {
                "--life": theirs,
                "--audit": self._audit_path,
                "--config": f"/proc/self/fd/{config}",
            }
            self.alerter = self._start("alerter", "lockgate.alerts", "/", options, config)
        return self.alerter

    def _start(self, name: str, module: str, cwd: str, options: dict[str, socket.socket | str], *more: int) -> Child:
        argv = ["-m", module]
        fds = list(more)
        for option, value in options.items():
            if isinstance(value, socket.socket):
                fds.append(value.fileno())
                argv += [option, str(value.fileno())]
            else:
                argv += [option, value]
        child = Child(name, argv, tuple(fds), cwd, self.log)
        self.all.append(child)
        return child

    def kill(self) -> None:
        """Kill what still lives, reap all, let go of our descriptors. Idempotent."""
        self.to_broker.close()
        self.to_supervisor.close()
        self.close_life()
        self._end_all()

    def close_life(self) -> None:
        """End the alerter's life line: it tells what is left, bounded, and exits. Idempotent."""
        if self.life is not None:
            self.life.close()

    def _end_all(self) -> None:
        for child in self.all:
            child.end()


class _Keeper:
    """A thread that lasts as long as this process and starts children for threads that may not."""

    def __init__(self) -> None:
        self.pid = os.getpid()  # threads do not survive a fork: a forked process makes its own
        self.work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._keep, name="lockgate-keeper", daemon=True).start()

    def _keep(self) -> None:
        while True:
            self.work.get()()


_keepers: Final[list[_Keeper]] = []
_keepers_lock: Final = threading.Lock()


def start_from_lasting_thread(start: Callable[[], T]) -> T:
    """Run `start` in a thread that lasts as long as this program: here if this is the main one, else in a keeper."""
    if threading.current_thread() is threading.main_thread():
        return start()
    with _keepers_lock:
        if not _keepers or _keepers[-1].pid != os.getpid():
            _keepers.append(_Keeper())
        keeper = _keepers[-1]
    answer: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            answer.put((start(), None))
        except BaseException as error:  # noqa: BLE001 - handed to the thread that asked
            answer.put((None, error))

    keeper.work.put(work)
    value, error = answer.get(timeout=60)
    if error is not None:
        raise error
    return cast("T", value)
