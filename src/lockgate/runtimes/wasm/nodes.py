"""What stands in the tree of a run: its files, its directories, what is packed in archives; and what they count as.

Rule 1: bytes and names are counted before they exist: a write past the disk bound is ENOSPC, and so is one name too
        many. A hole counts as what it would hold.
Rule 2: a file without a name is given back when the last descriptor on it is closed, and not before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from lockgate.runtimes.wasm.wasi_errno import Errno, Refused

_FILE_MAX: Final = (1 << 31) - 1


class Quota:
    """What a run's directory may hold: `disk` bytes in `inodes` files and directories, its own included."""

    def __init__(self, disk: int, inodes: int) -> None:
        self.disk = disk
        self.inodes = inodes
        self.used = 0
        self.count = 0

    def bytes(self, change: int) -> None:
        """Take or give back bytes."""
        if change > self.disk - self.used:
            raise Refused(Errno.NOSPC)
        self.used += change

    def name(self) -> None:
        """Take one inode."""
        if self.count >= self.inodes:
            raise Refused(Errno.NOSPC)
        self.count += 1


class Node:
    """A file or a directory.

    Attributes:
        number: the inode number. links: 0 once its name is gone. opened: descriptors on it. times: (access,
            modification, change) in nanoseconds.

    """

    def __init__(self, number: int, now: int) -> None:
        self.number = number
        self.times = [now, now, now]
        self.links = 1
        self.opened = 0

    @property
    def size(self) -> int:
        """Bytes of a file, 0 for a directory."""
        return 0


class Directory(Node):
    """A directory: `quota` is set where things may be made, None where nothing changes; `packed`: of an archive."""

    def __init__(self, number: int, now: int, quota: Quota | None = None) -> None:
        super().__init__(number, now)
        self.entries: dict[bytes, Node] = {}
        self.parent: Directory = self
        self.quota = quota
        self.packed = False


class Sealed(Node):
    """A file that nobody changes: `load` gives its bytes when they are first asked for."""

    def __init__(self, number: int, now: int, size: int, load: Callable[[], memoryview]) -> None:
        super().__init__(number, now)
        self._size = size
        self._load = load
        self._data: memoryview | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return self._size

    @property
    def data(self) -> memoryview:
        """All of it."""
        if self._data is None:
            self._data = self._load()
        return self._data

    def read(self, at: int, count: int) -> memoryview:
        """Return what is there."""
        return self.data[at : at + count]


class Archive(Sealed):
    """A zip file whose members can be named as if it were a directory: packages have data beside their code.

    Attributes:
        where: the directory it is in. inside: its members; None until somebody asks.

    """

    where: Directory
    inside: Directory | None = None


class File(Node):
    """A file of the run."""

    def __init__(self, number: int, now: int, quota: Quota) -> None:
        super().__init__(number, now)
        self.data = bytearray()
        self.quota = quota

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.data)

    def read(self, at: int, count: int) -> bytes:
        """Return what is there."""
        return bytes(self.data[at : at + count])

    def write(self, at: int, data: bytes | memoryview) -> int:
        """Write as much as the quota holds, at least one byte; returns how many.

        Raises:
            Refused: NOSPC when there is no room at all, FBIG past what an offset can say.

        """
        end = at + len(data)
        if end > _FILE_MAX:
            raise Refused(Errno.FBIG)
        grow = end - len(self.data)
        if grow > 0:
            room = self.quota.disk - self.quota.used
            if grow > room:  # a short write, as on a full disk
                end = len(self.data) + room
                if end <= at:
                    raise Refused(Errno.NOSPC)
                grow, data = room, data[: end - at]
            self.quota.bytes(grow)
            if at > len(self.data):
                self.data += bytes(at - len(self.data))
        self.data[at:end] = data
        return len(data)

    def resize(self, size: int) -> None:
        """Cut or fill with zeros."""
        if size > _FILE_MAX:
            raise Refused(Errno.FBIG)
        change = size - len(self.data)
        self.quota.bytes(change)
        if change > 0:
            self.data += bytes(change)
        else:
            del self.data[size:]

    def forget(self) -> None:
        """Give back what it holds, once nobody can reach it any more."""
        if self.links == 0 and self.opened == 0:
            self.quota.bytes(-len(self.data))
            self.quota.count -= 1
            self.data = bytearray()
