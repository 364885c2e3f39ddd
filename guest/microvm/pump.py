"""The agent after its fork: moves bytes between the worker and the host, reaps, and tells of the worker's end.

Rule 1: a result never overtakes the output that was written before it: what the streams hold is passed on first.
Rule 2: what the agent sees of the worker is told once before the worker's result, and once at its end.
Rule 3: a worker that is gone ends nothing: the machine goes on until the host ends it.
"""

import contextlib
import fcntl
import os
import select
import signal
import struct

from control import CONTROL, FRAME, frame, write_all

PIECE = 64 * 1024  # a pipe of this size has 16 buffers; the port's queue cannot take many more in one splice
FIONREAD = 0x541B

_exit = os._exit


def waiting(fd):
    """Return how many bytes a pipe holds."""
    return struct.unpack("i", fcntl.ioctl(fd, FIONREAD, bytes(4)))[0]


class Pump:
    """Serves one worker.

    `tell` says what the agent sees of it, given its wait status, or None while it lives. `streams`: pipe -> kind.
    """

    def __init__(self, tell, child, worker, streams):
        self.tell = tell
        self.child = child
        self.worker = worker
        self.streams = streams
        self.told = False
        self.ready = False
        self.wake = os.pipe()
        for fd in (*streams, *self.wake):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake[1], warn_on_full_buffer=False)
        self.poll = select.poll()
        for fd in (CONTROL, worker.fileno(), self.wake[0], *streams):
            self.poll.register(fd, select.POLLIN)

    def run(self):
        """Move bytes until the host ends this machine."""
        self.reap()
        while True:
            for fd, _ in self.poll.poll():
                if fd == CONTROL:
                    self.from_host()
                elif fd == self.wake[0]:
                    with contextlib.suppress(BlockingIOError):
                        os.read(fd, 4096)
                    self.reap()
                elif fd in self.streams:
                    self.drain(fd)
                elif self.worker is not None and fd == self.worker.fileno():
                    self.from_worker()

    def from_host(self):
        """Bytes for the worker; the end of control is the end of the machine."""
        data = os.read(CONTROL, PIECE)
        if not data:
            _exit(0)
        if self.worker is not None:
            with contextlib.suppress(OSError):  # a dead worker: reap() tells
                self.worker.sendall(data)

    def drain(self, fd, *, whole=False):
        """Pass one piece of a stream on, or all that is in it."""
        while True:
            count = min(waiting(fd), PIECE)
            if not count:
                if self.ended(fd):
                    self.poll.unregister(fd)
                    del self.streams[fd]
                return
            # From the pipe to the port without a copy: a flood costs the emulated processor least this way.
            write_all(CONTROL, FRAME.pack(ord(self.streams[fd]), count))
            while count:
                count -= os.splice(fd, CONTROL, count)
            if not whole:
                return

    @staticmethod
    def ended(fd):
        """Whether an empty pipe has no writer any more."""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return any(mask & select.POLLHUP and not mask & select.POLLIN for _, mask in poll.poll(0))

    def drain_all(self):
        """Pass on what the streams hold: a result must not overtake the output that was written before it."""
        for fd in list(self.streams):
            self.drain(fd, whole=True)

    def from_worker(self):
        """What the worker says; its first words are the end of the handshake, all later ones its result."""
        try:
            data = self.worker.recv(PIECE)
        except ConnectionResetError:
            data = b""
        if not data:
            self.poll.unregister(self.worker.fileno())
            self.worker.close()
            self.worker = None
            return
        if self.ready and not self.told:
            self.told = True
            self.drain_all()
            self.tell(None)
        self.ready = True
        frame("c", data)

    def reap(self):
        """Reap whatever ended; the worker's end is told once."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child:
                while self.worker is not None:
                    self.from_worker()  # what it said before it ended
                self.drain_all()
                self.tell(status)
