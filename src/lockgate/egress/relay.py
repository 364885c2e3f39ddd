"""The pump: moves the bytes of established tunnels inside the kernel.

Rule 1: bytes go socket, pipe, socket with splice(2); none is copied through this process, and every count feeds the
        byte budget before the bytes leave.
Rule 2: one thread and one epoll set for many tunnels. No call blocks; a side that does not read stops its own tunnel
        only, and after `STALL_SECONDS` ends it.
Rule 3: an end of stream is passed on as one, and a half-open tunnel lives `HALF_SECONDS` more without traffic.
Rule 4: pipes are lent while bytes are in flight, so that a quiet tunnel holds two descriptors and nothing else.
Rule 5: the pump owns both sockets from `add` on and closes them exactly once; `done` is then called, from its thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from lockgate.policy.host import Refusal

STALL_SECONDS: Final = 60.0
HALF_SECONDS: Final = 60.0
IDLE_SECONDS: Final = 900.0
PIPE_BYTES: Final = 512 * 1024
_ROUNDS: Final = 4
_KEPT_PIPES: Final = 16
_SWEEP_SECONDS: Final = 1.0
_EVENTS: Final = 256
_READ: Final = select.EPOLLIN
_WRITE: Final = select.EPOLLOUT
_GONE: Final = select.EPOLLHUP | select.EPOLLERR
_FLAGS: Final = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK


class Ended(msgspec.Struct, frozen=True):
    """How a tunnel ended.

    Attributes:
        sent: bytes from the client to the destination. received: the other way.
        refusal: why it was cut; None when both sides were done or one went away.

    """

    sent: int
    received: int
    refusal: Refusal | None


class Limits(msgspec.Struct, frozen=True):
    """Seconds without which progress a tunnel is cut."""

    stall: float = STALL_SECONDS
    half: float = HALF_SECONDS
    idle: float = IDLE_SECONDS


class _Flow:
    """One direction of a tunnel."""

    __slots__ = ("ended", "filled", "fresh", "outward", "pipe", "sink", "source", "total")

    def __init__(self, source: socket.socket, sink: socket.socket, *, outward: bool) -> None:
        self.source = source.fileno()
        self.sink = sink.fileno()
        self.fresh = sink
        self.outward = outward
        self.pipe: tuple[int, int] | None = None
        self.filled = 0
        self.total = 0
        self.ended = False


class Tunnel:
    """One pair of connected, non-blocking sockets.

    Args:
        client: the confined side. upstream: the vetted side.
        charge: takes bytes from the budget before they leave; a refusal cuts the tunnel. Called from the pump.
        done: told once how it ended. Called from the pump.

    """

    __slots__ = ("charge", "client", "done", "inward", "moved", "outward", "over", "seen", "upstream")

    def __init__(
        self,
        client: socket.socket,
        upstream: socket.socket,
        charge: Callable[[int], Refusal | None],
        done: Callable[[Ended], None],
    ) -> None:
        self.client = client
        self.upstream = upstream
        self.charge = charge
        self.done = done
        self.outward = _Flow(client, upstream, outward=True)
        self.inward = _Flow(upstream, client, outward=False)
        self.moved = 0.0
        self.over = False
        self.seen = [0, 0]  # what epoll watches for: client, upstream


class Pump:
    """Runs tunnels in a thread of its own.

    Args:
        limits: when a tunnel without progress is cut.

    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._bell, _READ)
        self._orders: deque[tuple[Tunnel, Refusal | None, bool]] = deque()
        self._tunnels: dict[int, tuple[Tunnel, int]] = {}
        self._live: set[Tunnel] = set()
        self._pipes: list[tuple[int, int]] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="lockgate-pump", daemon=True)
        self._thread.start()

    @property
    def count(self) -> int:
        """How many tunnels there are."""
        return len(self._live)

    def add(self, tunnel: Tunnel) -> None:
        """Take over a tunnel and its sockets; returns at once."""
        self._order(tunnel, None, new=True)

    def cut(self, tunnel: Tunnel, refusal: Refusal | None) -> None:
        """End a tunnel; returns at once, `done` follows if it was still there."""
        self._order(tunnel, refusal, new=False)

    def close(self, timeout: float = 5.0) -> None:
        """End all tunnels and the thread; idempotent."""
        self._closing = True
        if self._bell >= 0:
            os.eventfd_write(self._bell, 1)
            self._thread.join(timeout)
            if not self._thread.is_alive():
                os.close(self._bell)
                self._bell = -1

    def _order(self, tunnel: Tunnel, refusal: Refusal | None, *, new: bool) -> None:
        self._orders.append((tunnel, refusal, new))
        os.eventfd_write(self._bell, 1)

    # ---- the thread -----------------------------------------------------------------------------------------
    def _run(self) -> None:
        sweep = time.monotonic() + _SWEEP_SECONDS
        while not self._closing:
            events = self._epoll.poll(_SWEEP_SECONDS, _EVENTS)
            now = time.monotonic()
            for fd, what in events:
                if fd == self._bell:
                    os.eventfd_read(self._bell)
                    continue
                found = self._tunnels.get(fd)
                if found is not None:
                    self._handle(*found, what, now)
            self._obey(now)
            if now >= sweep:
                sweep = now + _SWEEP_SECONDS
                self._sweep(now)
        for tunnel in list(self._live):
            self._end(tunnel, None)
        self._obey(time.monotonic())
        for tunnel in list(self._live):
            self._end(tunnel, None)
        for pipe in self._pipes:
            _close_pipe(pipe)
        self._epoll.close()

    def _obey(self, now: float) -> None:
        while self._orders:
            tunnel, refusal, new = self._orders.popleft()
            if not new:
                self._end(tunnel, refusal)
                continue
            tunnel.moved = now
            self._live.add(tunnel)
            self._tunnels[tunnel.client.fileno()] = (tunnel, 0)
            self._tunnels[tunnel.upstream.fileno()] = (tunnel, 1)
            self._watch(tunnel)

    def _handle(self, tunnel: Tunnel, side: int, what: int, now: float) -> None:
        reads, writes = (tunnel.outward, tunnel.inward) if side == 0 else (tunnel.inward, tunnel.outward)
        try:
            if what & (_WRITE | _GONE) and writes.filled:
                self._drain(tunnel, writes, now)
            if what & (_READ | _GONE) and not reads.ended and not reads.filled:
                self._move(tunnel, reads, now)
        except _Cut as cut:
            self._end(tunnel, cut.refusal)
            return
        except OSError:  # a side went away: ECONNRESET, EPIPE, ETIMEDOUT, ...
            self._end(tunnel, None)
            return
        outward, inward = tunnel.outward, tunnel.inward
        if (
            not outward.filled
            and not inward.filled
            and ((outward.ended and inward.ended) or (what & select.EPOLLHUP and reads.ended))
        ):
            self._end(tunnel, None)
            return
        self._watch(tunnel)

    def _move(self, tunnel: Tunnel, flow: _Flow, now: float) -> None:
        """Move what is there, in at most `_ROUNDS` pipes full so that others get their turn."""
        for _ in range(_ROUNDS):
            pipe = flow.pipe = flow.pipe or self._lend()
            try:
                count = os.splice(flow.source, pipe[1], PIPE_BYTES, flags=_FLAGS)
            except BlockingIOError:
                break
            if count == 0:
                flow.ended = True
                break
            if flow.outward:
                refusal = tunnel.charge(count)
                if refusal is not None:
                    flow.filled = count  # they stay in the pipe, which is thrown away with them
                    raise _Cut(refusal)
            flow.filled = count
            flow.total += count
            tunnel.moved = now
            if not self._push(tunnel, flow, now):
                return
        self._rest(flow)

    def _drain(self, tunnel: Tunnel, flow: _Flow, now: float) -> None:
        if self._push(tunnel, flow, now):
            self._rest(flow)

    def _push(self, tunnel: Tunnel, flow: _Flow, now: float) -> bool:
        """Empty the flow's pipe into its sink; False when the sink is full."""
        pipe = flow.pipe
        while flow.filled and pipe is not None:
            try:
                count = os.splice(pipe[0], flow.sink, flow.filled, flags=_FLAGS)
            except BlockingIOError:
                return False
            if count == 0:
                raise OSError(errno.EPIPE, "the pipe is empty")
            flow.filled -= count
            tunnel.moved = now
        return True

    def _rest(self, flow: _Flow) -> None:
        """Give the empty pipe back; pass on an end of stream."""
        if flow.pipe is not None:
            if len(self._pipes) < _KEPT_PIPES:
                self._pipes.append(flow.pipe)
            else:
                _close_pipe(flow.pipe)
            flow.pipe = None
        if flow.ended:
            with contextlib.suppress(OSError):
                flow.fresh.shutdown(socket.SHUT_WR)

    def _watch(self, tunnel: Tunnel) -> None:
        """Tell epoll what to wait for: data where its way is free, room where bytes wait.

        A side with nothing to wait for is taken out, since EPOLLHUP is told for whatever is watched (epoll_ctl(2)).
        """
        outward, inward = tunnel.outward, tunnel.inward
        for side, sock, reads, writes in (
            (0, tunnel.client, outward, inward),
            (1, tunnel.upstream, inward, outward),
        ):
            want = (0 if reads.ended or reads.filled else _READ) | (_WRITE if writes.filled else 0)
            have = tunnel.seen[side]
            if want == have:
                continue
            tunnel.seen[side] = want
            if not have:
                self._epoll.register(sock, want)
            elif not want:
                self._epoll.unregister(sock)
            else:
                self._epoll.modify(sock, want)

    def _sweep(self, now: float) -> None:
        limits = self._limits
        for tunnel in list(self._live):
            quiet = now - tunnel.moved
            if quiet < min(limits.stall, limits.half, limits.idle):
                continue
            waiting = tunnel.outward.filled or tunnel.inward.filled
            half = tunnel.outward.ended or tunnel.inward.ended
            limit = limits.stall if waiting else limits.half if half else limits.idle
            if quiet >= limit:
                self._end(tunnel, Refusal("idle_timeout", "the tunnel made no progress"))

    def _end(self, tunnel: Tunnel, refusal: Refusal | None) -> None:
        if tunnel.over:
            return
        tunnel.over = True
        self._live.discard(tunnel)
        for side, sock in ((0, tunnel.client), (1, tunnel.upstream)):
            self._tunnels.pop(sock.fileno(), None)
            if tunnel.seen[side]:
                with contextlib.suppress(OSError):
                    self._epoll.unregister(sock)
            sock.close()
        for flow in (tunnel.outward, tunnel.inward):
            if flow.pipe is not None:
                _close_pipe(flow.pipe)
                flow.pipe = None
        tunnel.done(Ended(tunnel.outward.total, tunnel.inward.total, refusal))

    def _lend(self) -> tuple[int, int]:
        if self._pipes:
            return self._pipes.pop()
        pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # Beyond the user's share of pipe pages (pipe(7)) the default of 64 KiB has to do.
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        return pipe


class _Cut(Exception):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


def _close_pipe(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    os.close(pipe[1])
