"""Firecracker's API: one request after another over a UNIX socket, each with a deadline.

Rule 1: what the VMM answers is read with a cap. A guest that took its VMM over speaks through this socket.
Rule 2: every wait has a deadline, and the process it waits for is looked at meanwhile: a dead VMM is an error at once.

Sources: Firecracker v1.12, src/firecracker/swagger/firecracker.yaml; RFC 9112 for what an answer looks like.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import select
import socket
import time
from collections.abc import Mapping
from typing import Any, Final

from lockgate.contract.errors import HostFault

_ANSWER_BYTES: Final = 16 * 1024
_STATUS: Final = re.compile(rb"\AHTTP/1\.1 ([0-9]{3})[ \r]")
_LENGTH: Final = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: *([0-9]{1,6})\r\n")
_SUN_PATH: Final = 107  # bytes of a socket's path, unix(7)
_PAUSE: Final = 0.001


class Api:
    """A connection to one VMM.

    Args:
        path: of its socket; it appears some time after the process began, and listens some time after that.
        pidfd: of the VMM.
        deadline: `time.monotonic` value for the connection to stand.

    Raises:
        HostFault: the VMM ended, does not answer in time, or the path is too long for a socket.

    """

    def __init__(self, path: str, pidfd: int, deadline: float) -> None:
        self._pidfd = pidfd
        self._socket = connect(path, pidfd, deadline)

    def put(self, path: str, body: Mapping[str, Any], deadline: float) -> None:
        """Send one `PUT` and take its answer, which must be 204.

        Raises:
            HostFault: refused (with what the VMM said), late, or no answer that the API gives.

        """
        self._ask("PUT", path, body, deadline)

    def patch(self, path: str, body: Mapping[str, Any], deadline: float) -> None:
        """As `put`, with `PATCH`."""
        self._ask("PATCH", path, body, deadline)

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._socket.close()

    def _ask(self, method: str, path: str, body: Mapping[str, Any], deadline: float) -> None:
        data = json.dumps(body, separators=(",", ":")).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        what = f"{method} {path}"
        try:
            self._socket.settimeout(max(deadline - time.monotonic(), _PAUSE))
            self._socket.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            status, said = self._answer(what, deadline)
        except TimeoutError:
            raise _late(what) from None
        except OSError as error:
            raise HostFault(
                f"the VMM broke off at {what}: {error.strerror}", next_step="see the lines that it wrote"
            ) from None
        if status != 204:
            raise HostFault(f"the VMM refused {what}: {status} {said}", next_step="see: lockgate doctor")

    def _answer(self, what: str, deadline: float) -> tuple[int, str]:
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._more(what, deadline)
            if len(data) > _ANSWER_BYTES:
                raise HostFault(f"the VMM's answer to {what} has no end", next_step="see: lockgate doctor")
        head, _, body = data.partition(b"\r\n\r\n")
        status = _STATUS.match(head)
        if status is None:
            raise HostFault(f"the VMM's answer to {what} is no HTTP", next_step="see: lockgate doctor")
        length = _LENGTH.search(head + b"\r\n")
        wanted = min(int(length[1]), _ANSWER_BYTES) if length else 0
        while len(body) < wanted:
            body += self._more(what, deadline)
        text = "".join(char if char.isprintable() else "?" for char in body[:300].decode("utf-8", "replace"))
        return int(status[1]), text

    def _more(self, what: str, deadline: float) -> bytes:
        mine = self._socket.fileno()
        ready, _, _ = select.select([mine, self._pidfd], [], [], max(deadline - time.monotonic(), 0))
        if mine in ready:
            data = self._socket.recv(4096)
            if data:
                return data
        if not ready:
            raise _late(what)
        raise HostFault(f"the VMM ended at {what}", next_step="see the lines that it wrote")


def connect(path: str, pidfd: int, deadline: float) -> socket.socket:
    """Return a stream to the socket at `path`, once somebody listens there.

    Raises:
        HostFault: the process of `pidfd` ended, nobody listened in time, or the path is too long.

    """
    if len(path.encode()) > _SUN_PATH:
        raise HostFault(
            f"the path of a VMM's socket has {len(path.encode())} bytes, over {_SUN_PATH}",
            next_step="choose a shorter directory for machines",
        )
    while True:
        one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            one.settimeout(max(deadline - time.monotonic(), _PAUSE))
            one.connect(path)
        except OSError as error:
            one.close()
            if error.errno not in {errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN}:
                raise HostFault(f"a VMM's socket: {error.strerror}", next_step="see: lockgate doctor") from None
        else:
            return one
        if time.monotonic() > deadline:
            raise _late("the start of its API")
        if select.select([pidfd], [], [], _PAUSE)[0]:
            raise HostFault("the VMM ended before it listened", next_step="see the lines that it wrote")


def vsock(path: str, port: int, pidfd: int, deadline: float) -> socket.socket:
    """Return a stream to `port` of the guest, through the VMM's socket at `path`.

    The answer is read byte by byte: what follows its newline is the guest's (docs/vsock.md of Firecracker).

    Raises:
        HostFault: nobody listens on that port, or no answer in time.

    """
    one = connect(path, pidfd, deadline)
    try:
        one.settimeout(max(deadline - time.monotonic(), _PAUSE))
        one.sendall(f"CONNECT {port}\n".encode())
        said = b""
        while not said.endswith(b"\n"):
            if len(said) > 32:
                break
            one.settimeout(max(deadline - time.monotonic(), _PAUSE))
            byte = one.recv(1)
            if not byte:
                break
            said += byte
    except TimeoutError:
        one.close()
        raise _late(f"a connection to port {port} of its guest") from None
    except OSError as error:
        one.close()
        raise HostFault(f"port {port} of the guest: {error.strerror}", next_step="see: lockgate doctor") from None
    if re.fullmatch(rb"OK [0-9]{1,10}\n", said) is None:
        one.close()
        raise HostFault(f"nobody in the guest listens on port {port}", next_step="see: lockgate doctor")
    with contextlib.suppress(OSError):
        one.settimeout(None)
    return one


def _late(what: str) -> HostFault:
    return HostFault(f"the VMM did not answer {what} in time", next_step="see: lockgate doctor")
