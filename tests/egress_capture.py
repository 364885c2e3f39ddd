"""Counts packets in a network namespace, as a program of its own: `python egress_capture.py PID|0`.

It joins the user and network namespace of a process (0: stays), opens a packet socket (packet(7)), says "ready", counts
until a line comes on stdin, and then prints one JSON object: every packet as [interface, hex of the first 600 bytes].
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from types import TracebackType
from typing import Self

ETH_P_ALL = 3
MOST = 20_000
BYTES = 600


def main() -> None:
    """Join, count, print."""
    from lockgate.kernel.syscalls_unsafe import call

    pid = int(sys.argv[1])
    if pid:
        places = [f"/proc/{pid}/ns/{kind}" for kind in ("user", "net")]
        # Joining one's own user namespace is an error (setns(2)).
        others = [one for one in places if os.readlink(one) != os.readlink(one.replace(str(pid), "self"))]
        for fd in [os.open(one, os.O_RDONLY) for one in others]:
            call("setns", fd, 0)
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    seen: list[list[str]] = []
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    poll.register(0, select.POLLIN)
    ended = False
    while not ended or poll.poll(200):
        for fd, _ in poll.poll():
            if fd == 0:
                ended = True
                poll.unregister(0)
            elif len(seen) < MOST:
                data, address = sock.recvfrom(65536)
                if address[0] != "lo" or address[2] != socket.PACKET_OUTGOING:  # there each packet comes twice
                    seen.append([address[0], data[:BYTES].hex()])
            else:
                sock.recv(1)
    sys.stdout.write(json.dumps(seen) + "\n")


class Capture:
    """Counts in the namespaces of `pid`, or in those of the tests with 0."""

    def __init__(self, pid: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == "ready\n", line

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def packets(self) -> list[bytes]:
        """End the count; what came, from the link header on."""
        out, _ = self.process.communicate("\n", timeout=60)
        return [bytes.fromhex(data) for _, data in json.loads(out)]


if __name__ == "__main__":
    main()
