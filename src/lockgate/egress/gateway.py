"""The gateway: accepts connections, finds their run, serves them.

Rule 1: a connection is whose token it carries, and only if the kernel says that its other end is an allowed user. The
        token comes first, before a byte of the conversation is read, and it names exactly one run.
Rule 2: there is no other way in: no TCP port, no admin page. Runs are opened over a control socket that confined
        processes cannot reach.
Rule 3: the number of connections is bounded by what descriptors there are; beyond it, new ones wait in the backlog.
Rule 4: a fault of ours ends the connection that met it, without an answer, and no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import struct
import sys
from collections.abc import Callable, Iterable
from typing import Final

from lockgate.egress import aio, ca
from lockgate.egress import dial as dialling
from lockgate.egress.answer import refusal_answer
from lockgate.egress.exchange import Memory
from lockgate.egress.model import ModelLink
from lockgate.egress.preface import PREFACE_BYTES, parse_preface
from lockgate.egress.record import NOBODY, Recorder, Rows, Who
from lockgate.egress.relay import Limits, Pump
from lockgate.egress.resolver import Exchange, Nameservers
from lockgate.egress.run import Run, new_token, token_key
from lockgate.egress.session import Dial, Parts, Session
from lockgate.policy.egress import EgressPolicy, Verdict

PREFACE_SECONDS: Final = 5.0
MEMORY_BYTES: Final = 128 * 1024 * 1024
_ACCEPTED_AT_ONCE: Final = 64
_SPARE_FDS: Final = 128
_FDS_EACH: Final = 4
_PEERCRED: Final = struct.Struct("3i")
_STRANGER: Final = Verdict(False, "caller_unauthenticated", None, "the token names no run, or the user is another")


class Gateway:
    """One gateway process's worth of state.

    Args:
        policy: in force for all runs.
        rows: the audit client.
        ask: sends questions to nameservers.
        dial: connects to vetted addresses.
        trust: how TLS is verified upstream.
        uids: users whose processes may connect; None = our own.
        limits: when a tunnel without progress is cut.
        connections: most connections at one time.

    """

    def __init__(
        self,
        policy: EgressPolicy,
        rows: Rows,
        *,
        ask: Exchange | Nameservers,
        dial: Dial = dialling.dial,
        trust: ca.Trust | None = None,
        uids: frozenset[int] = frozenset(),
        limits: Limits | None = None,
        connections: int = 4096,
    ) -> None:
        if policy.intercepted:
            ca.require()
        self.policy = policy
        self.recorder = Recorder(rows, policy.hash)
        self._pump = Pump(limits)
        self._parts = Parts(
            policy=policy,
            recorder=self.recorder,
            pump=self._pump,
            ask=ask,
            dial=dial,
            trust=trust or ca.Trust(),
            memory=Memory(MEMORY_BYTES),
        )
        self._uids = uids
        self._room = min(connections, max(1, (_descriptors() - _SPARE_FDS) // _FDS_EACH))
        self._runs: dict[bytes, Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._paused = False

    @property
    def count(self) -> int:
        """How many connections there are, tunnels included."""
        return len(self._tasks) + self._pump.count

    # ---- runs -----------------------------------------------------------------------------------------------
    def open_run(
        self,
        who: Who,
        canaries: Iterable[str] = (),
        killed: Callable[[str], None] | None = None,
        model: ModelLink | None = None,
    ) -> tuple[Run, str]:
        """Open a run; returns it and its token, which is told to its launcher and kept nowhere."""
        run = Run(who, self.policy.limits, canaries, killed, model)
        token = new_token()
        self._runs[token_key(token.encode("ascii"))] = run
        return run, token

    def authority(self, run: Run) -> str | None:
        """Return the certificate that the run must trust, PEM; None when nothing is intercepted."""
        if not self.policy.intercepted:
            return None
        if run.authority is None:
            run.authority = ca.Authority(self.policy.intercepted)
        return run.authority.pem

    def kill_run(self, run: Run, reason: str) -> None:
        """End a run because of what it did; its launcher is told."""
        run.kill(reason, self._pump)

    def close_run(self, run: Run) -> None:
        """End a run: its token names nobody any more, its connections are cut. Idempotent."""
        for key in [key for key, value in self._runs.items() if value is run]:
            del self._runs[key]
        run.end(self._pump)

    # ---- connections ----------------------------------------------------------------------------------------
    def listen(self, listener: socket.socket) -> None:
        """Begin to accept on a listening unix socket; owned from here on."""
        listener.setblocking(False)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)

    async def close(self) -> None:
        """Stop accepting, end all runs and connections; idempotent."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for run in list(self._runs.values()):
            self.close_run(run)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)
        await asyncio.get_running_loop().run_in_executor(None, self._pump.close)
        await asyncio.sleep(0)  # the last rows of tunnels are on their way to this loop
        self.recorder.close()

    def _accept(self) -> None:
        listener = self._listener
        if listener is None:
            return
        loop = asyncio.get_running_loop()
        for _ in range(_ACCEPTED_AT_ONCE):
            if self.count >= self._room:
                self._pause()
                return
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor, no memory, or gone before it was accepted
                self._pause()
                return
            sock.setblocking(False)
            task = loop.create_task(self._serve(sock, loop.time()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _pause(self) -> None:
        """Let new connections wait in the backlog for a moment."""
        loop = asyncio.get_running_loop()
        if self._listener is not None and not self._paused:
            self._paused = True
            loop.remove_reader(self._listener.fileno())
            loop.call_later(0.05, self._resume)

    def _resume(self) -> None:
        self._paused = False
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    async def _serve(self, sock: socket.socket, began: float) -> None:
        given = False
        run: Run | None = None
        try:
            pid, uid, _ = _PEERCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))
            peer = f"{pid}/{uid}"
            token, sock = await self._preface(sock, began + PREFACE_SECONDS)
            found = self._runs.get(token_key(token))
            if found is None or found.over or (self._uids and uid not in self._uids):
                await self._refuse_stranger(sock, peer)
                return
            session = Session(self._parts, found, sock, peer)
            refusal = found.enter()
            if refusal is not None:
                await session.refuse_connection(refusal)
                return
            run = found
            task = asyncio.current_task()
            if task is not None:
                run.hold(task)
            given = await session.serve(began)
        except (OSError, TimeoutError):
            pass  # it went away, or never said whose it is
        except Exception as error:  # noqa: BLE001 - one connection's fault must not end the gateway
            where = error.__traceback__
            while where is not None and where.tb_next is not None:
                where = where.tb_next
            place = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where is not None else "?"
            print(f"lockgate: a connection failed: {type(error).__name__} at {place}", file=sys.stderr, flush=True)  # noqa: T201
        finally:
            if not given:
                sock.close()
                if run is not None:
                    run.leave()

    async def _preface(self, sock: socket.socket, deadline: float) -> tuple[bytes, socket.socket]:
        """Read the token; returns it and the socket on which the conversation is held.

        Raises:
            OSError: there is no preface, or what came with it is no connected TCP socket.
            TimeoutError: it did not come in time.

        """
        data = b""
        passed = -1
        try:
            while len(data) < PREFACE_BYTES:
                try:
                    part, fds, flags, _ = socket.recv_fds(sock, PREFACE_BYTES - len(data), 1, socket.MSG_CMSG_CLOEXEC)
                except BlockingIOError:
                    await aio.ready(sock, deadline)
                    continue
                for fd in fds:
                    if passed >= 0:
                        with contextlib.suppress(OSError):
                            socket.close(passed)
                    passed = fd
                if not part or flags & socket.MSG_CTRUNC:
                    raise ConnectionError("no preface")
                data += part
            token = parse_preface(data)
            if passed < 0:
                return token, sock
            other, passed = _tcp(passed), -1
        finally:
            if passed >= 0:
                with contextlib.suppress(OSError):
                    socket.close(passed)
        sock.close()
        return token, other

    async def _refuse_stranger(self, sock: socket.socket, peer: str) -> None:
        if await self.recorder.deny(NOBODY, "caller", _STRANGER, peer=peer) is not None:
            await aio.send(sock, refusal_answer(_STRANGER), asyncio.get_running_loop().time() + PREFACE_SECONDS)


def _tcp(fd: int) -> socket.socket:
    """Return the connected TCP socket behind `fd`.

    Raises:
        OSError: it is something else.

    """
    found = socket.socket(fileno=fd)
    try:
        if found.family not in {socket.AF_INET, socket.AF_INET6} or found.type != socket.SOCK_STREAM:
            raise ConnectionError("not a TCP socket")
        found.getpeername()
        found.setblocking(False)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError:
        found.close()
        raise
    return found


def _descriptors() -> int:
    """Raise the limit of descriptors as far as the kernel lets us; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return soft
