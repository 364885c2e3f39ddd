"""The two channels of a guest to its host: control and call.

Rule 1: the end of control is the end of the machine: what reads it exactly ends PID 1 there.
Rule 2: a frame is written whole before anything else is: u8 kind, u32 length, payload.

Descriptors from init: 3 = control, 4 = call. Where the machine has virtio sockets and no ports the agent listens on 52
(control) and 53 (call) instead: a listener survives a snapshot, a connection does not. It says its first line on a
connection that it closes before the snapshot, and accepts one more on each for the lease.

Kinds, to the host, after the lease: "c" what the worker says on its control descriptor, "o" and "e" its two streams,
"s" JSON {status, oom, refused, full} as the agent sees the worker.
"""

import fcntl
import os
import socket
import struct

CONTROL, CALL = 3, 4
FRAME = struct.Struct(">BI")

_exit = os._exit


def read_exactly(fd, count):
    """Return `count` bytes; the end of control before that is the end of the machine."""
    parts = []
    while count:
        part = os.read(fd, min(count, 1 << 20))
        if not part:
            _exit(0)
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def write_all(fd, data):
    """Write all of `data`."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def frame(kind, payload):
    """Send one frame to the host."""
    write_all(CONTROL, FRAME.pack(ord(kind), len(payload)) + payload)


class Vsock:
    """The two listeners of a machine without ports; whoever connects is the host, nobody else can."""

    def __init__(self):
        for fd in (CONTROL, CALL):  # taken, so that nothing else lands there
            os.dup2(0, fd)
        self.listeners = []
        for port in (52, 53):
            one = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
            one.bind((socket.VMADDR_CID_ANY, port))
            one.listen(1)
            self.listeners.append(one)

    def greet(self, line):
        """Say the first line, and see the connection to its end: nothing of it may be under way at the snapshot."""
        stream = self.listeners[0].accept()[0]
        with stream:
            stream.sendall(line)
            stream.shutdown(socket.SHUT_WR)
            while stream.recv(4096):
                pass

    def connect(self):
        """Accept the lease's two connections, as descriptors 3 and 4, and listen no more."""
        streams = [one.accept()[0] for one in self.listeners]
        for one in self.listeners:
            one.close()
        high = [fcntl.fcntl(one.detach(), fcntl.F_DUPFD, 64) for one in streams]
        for target, fd in enumerate(high, CONTROL):
            os.dup2(fd, target)
            os.close(fd)
