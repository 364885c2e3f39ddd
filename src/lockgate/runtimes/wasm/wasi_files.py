"""The part of WASI preview 1 that is about descriptors; wasi.py has the rules of all of it.

Layouts (bytes): fdstat 24, filestat 64, prestat 8, dirent 24, iovec 8, as in the witx.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from lockgate.runtimes.wasm.memfs import Tree
from lockgate.runtimes.wasm.nodes import Directory, File, Node, Sealed
from lockgate.runtimes.wasm.wasi_errno import Errno, Refused

if TYPE_CHECKING:
    from lockgate.runtimes.wasm.engine_unsafe import Memory

_IOVEC: Final = struct.Struct("<II")
_FDSTAT: Final = struct.Struct("<BxHxxxxQQ")
_FILESTAT: Final = struct.Struct("<QQBxxxxxxxQQQQQ")
_PRESTAT: Final = struct.Struct("<BxxxI")
_DIRENT: Final = struct.Struct("<QQIBxxx")
U32: Final = struct.Struct("<I")
U64: Final = struct.Struct("<Q")

_DIRECTORY, _REGULAR, _UNKNOWN = 3, 4, 0
_APPEND: Final = 1
CREATE, MUST_BE_DIRECTORY, EXCLUSIVE, TRUNCATE = 1, 2, 4, 8
RIGHT_READ, RIGHT_WRITE = 1 << 1, 1 << 6
_ALL_RIGHTS: Final = (1 << 30) - 1
_READ_RIGHTS: Final = _ALL_RIGHTS & ~(RIGHT_WRITE | 1 << 8 | 1 << 22)
_IOVECS: Final = 1024
IO_BYTES: Final = 16 << 20  # of one read; the rest comes with the next
OPEN_FILES: Final = 256
_ROOT_FD: Final = 3
_GIVEN: Final = (b"/", b"/run")  # descriptors 3 and 4: the tree, and what of it may be changed
FIRST_FD: Final = _ROOT_FD + len(_GIVEN)
# Beneath a directory that cannot be changed nothing is writable; a wish to write is still told by the other right that
# comes with it, so that it can be refused.
RIGHT_ALLOCATE: Final = 1 << 8
_BENEATH_READ_ONLY: Final = _ALL_RIGHTS & ~RIGHT_WRITE
_SIGNED: Final = 1 << 63


class Opened:
    """What a descriptor stands for."""

    __slots__ = ("flags", "node", "position", "reads", "writes")

    def __init__(self, node: Node, *, reads: bool, writes: bool, flags: int) -> None:
        self.node = node
        self.reads = reads
        self.writes = writes
        self.flags = flags
        self.position = 0


class Files:
    """What a guest does with descriptors; `Wasi` is the whole.

    Args:
        tree: the files it sees.
        output: takes the bytes that were written to descriptor 1 or 2.

    Attributes:
        memory: set once the guest exists.

    """

    memory: Memory

    def __init__(self, tree: Tree, output: Callable[[int, bytes], None]) -> None:
        self._tree = tree
        self._output = output
        self._open: dict[int, Opened] = {
            _ROOT_FD + n: Opened(tree.place(name.decode()), reads=True, writes=False, flags=0)
            for n, name in enumerate(_GIVEN)
        }

    def open_files(self) -> int:
        """Return how many descriptors the guest holds beside those that it is given."""
        return len(self._open) - len(_GIVEN)

    # ---- descriptors -------------------------------------------------------------------------------------------------
    def _at(self, fd: int) -> Opened:
        found = self._open.get(fd)
        if found is None:
            raise Refused(Errno.SPIPE if fd < _ROOT_FD else Errno.BADF)
        return found

    def _directory(self, fd: int) -> Directory:
        node = self._at(fd).node
        if not isinstance(node, Directory):
            raise Refused(Errno.NOTDIR)
        return node

    def _path(self, pointer: int, length: int) -> bytes:
        if length > 4096:
            raise Refused(Errno.NAMETOOLONG)
        return self.memory.read(pointer, length)

    def _vectors(self, pointer: int, count: int) -> list[tuple[int, int]]:
        if count > _IOVECS:
            raise Refused(Errno.INVAL)
        window = self.memory.window(pointer, count * _IOVEC.size)
        return list(_IOVEC.iter_unpack(window))

    def fd_prestat_get(self, fd: int, result: int) -> int:
        """Two directories are given, see `_GIVEN`."""
        if not 0 <= fd - _ROOT_FD < len(_GIVEN):
            return Errno.BADF
        self.memory.pack(_PRESTAT, result, 0, len(_GIVEN[fd - _ROOT_FD]))
        return 0

    def fd_prestat_dir_name(self, fd: int, buffer: int, length: int) -> int:
        """Their names."""
        if not 0 <= fd - _ROOT_FD < len(_GIVEN):
            return Errno.BADF
        name = _GIVEN[fd - _ROOT_FD]
        if length < len(name):
            return Errno.INVAL
        self.memory.write(buffer, name)
        return 0

    def fd_close(self, fd: int) -> int:
        """close(2)."""
        if fd < _ROOT_FD:
            return 0
        opened = self._open.pop(fd, None)
        if opened is None:
            return Errno.BADF
        opened.node.opened -= 1
        if isinstance(opened.node, File):
            opened.node.forget()
        return 0

    def fd_fdstat_get(self, fd: int, result: int) -> int:
        """What a descriptor is."""
        if fd < _ROOT_FD:
            rights = RIGHT_READ if fd == 0 else RIGHT_WRITE
            self.memory.pack(_FDSTAT, result, _UNKNOWN, 0, rights, 0)
            return 0
        opened = self._at(fd)
        kind = _DIRECTORY if isinstance(opened.node, Directory) else _REGULAR
        rights = _ALL_RIGHTS if opened.writes or kind == _DIRECTORY else _READ_RIGHTS
        if not opened.reads:
            rights &= ~RIGHT_READ
        beneath = _ALL_RIGHTS if self._tree.changeable(opened.node) else _BENEATH_READ_ONLY
        self.memory.pack(_FDSTAT, result, kind, opened.flags, rights, beneath)
        return 0

    def fd_fdstat_set_flags(self, fd: int, flags: int) -> int:
        """fcntl(F_SETFL): append or not."""
        if fd >= _ROOT_FD:
            self._at(fd).flags = flags & 0x1F
        return 0

    def _stat(self, result: int, node: Node | None) -> int:
        if node is None:
            self.memory.pack(_FILESTAT, result, 0, 0, _UNKNOWN, 1, 0, 0, 0, 0)
            return 0
        kind = _DIRECTORY if isinstance(node, Directory) else _REGULAR
        self.memory.pack(_FILESTAT, result, 1, node.number, kind, max(node.links, 0), node.size, *node.times)
        return 0

    def fd_filestat_get(self, fd: int, result: int) -> int:
        """fstat(2)."""
        if _ROOT_FD <= fd < FIRST_FD:
            return Errno.BADF  # given to find names in; to the program they are no open files
        return self._stat(result, None if fd < _ROOT_FD else self._at(fd).node)

    def fd_filestat_set_size(self, fd: int, size: int) -> int:
        """ftruncate(2)."""
        opened = self._at(fd)
        if not isinstance(opened.node, File) or not opened.writes:
            return Errno.INVAL
        opened.node.resize(size)
        opened.node.times[1] = self._tree.now()
        return 0

    def _set_times(self, node: Node, access: int, change: int, flags: int) -> int:
        if isinstance(node, Sealed) or (isinstance(node, Directory) and node.quota is None):
            return Errno.ROFS
        for n, (given, value) in enumerate(((flags & 3, access), (flags >> 2 & 3, change))):
            if given == 3:
                return Errno.INVAL
            if given:
                node.times[n] = value if given == 1 else self._tree.now()
        return 0

    def fd_filestat_set_times(self, fd: int, access: int, change: int, flags: int) -> int:
        """futimens(3)."""
        return self._set_times(self._at(fd).node, access, change, flags)

    def fd_advise(self, fd: int, _offset: int, _length: int, advice: int) -> int:
        """Advice is heard."""
        self._at(fd)
        return 0 if advice < 6 else Errno.INVAL

    def fd_sync(self, fd: int) -> int:
        """There is nothing behind the memory."""
        if fd >= _ROOT_FD:
            self._at(fd)
        return 0

    fd_datasync = fd_sync

    # ---- reading and writing -----------------------------------------------------------------------------------------
    def _read(self, opened: Opened, vectors: int, count: int, at: int, result: int) -> int:
        node = opened.node
        if not isinstance(node, (File, Sealed)):
            raise Refused(Errno.ISDIR if isinstance(node, Directory) else Errno.BADF)
        if not opened.reads:
            raise Refused(Errno.BADF)
        total = 0
        for pointer, length in self._vectors(vectors, count):
            data = node.read(at + total, min(length, IO_BYTES))
            self.memory.write(pointer, data)
            total += len(data)
            if len(data) < length:
                break
        self.memory.pack(U32, result, total)
        return total

    def fd_read(self, fd: int, vectors: int, count: int, result: int) -> int:
        """readv(2); standard input is at its end."""
        if fd == 0:
            self.memory.pack(U32, result, 0)
            return 0
        opened = self._at(fd)
        opened.position += self._read(opened, vectors, count, opened.position, result)
        return 0

    def fd_pread(self, fd: int, vectors: int, count: int, offset: int, result: int) -> int:
        """preadv(2)."""
        if offset & _SIGNED:
            return Errno.INVAL
        self._read(self._at(fd), vectors, count, offset, result)
        return 0

    def _write(self, opened: Opened, vectors: int, count: int, at: int, result: int) -> int:
        node = opened.node
        if not opened.writes or not isinstance(node, File):
            raise Refused(Errno.BADF)
        total = 0
        for pointer, length in self._vectors(vectors, count):
            if not length:
                continue
            try:
                wrote = node.write(at + total, self.memory.window(pointer, length))
            except Refused:
                if total == 0:
                    raise
                break
            total += wrote
            if wrote < length:
                break
        node.times[1] = self._tree.now()
        self.memory.pack(U32, result, total)
        return total

    def fd_write(self, fd: int, vectors: int, count: int, result: int) -> int:
        """writev(2)."""
        if fd < _ROOT_FD:
            if fd == 0:
                return Errno.BADF
            data = b"".join([self.memory.read(*one) for one in self._bounded(vectors, count)])
            self._output(fd, data)
            self.memory.pack(U32, result, len(data))
            return 0
        opened = self._at(fd)
        at = opened.node.size if opened.flags & _APPEND else opened.position
        opened.position = at + self._write(opened, vectors, count, at, result)
        return 0

    def _bounded(self, vectors: int, count: int) -> list[tuple[int, int]]:
        """At most as much as one write may carry: the same bytes may be named a thousand times."""
        room, kept = IO_BYTES, list[tuple[int, int]]()
        for pointer, length in self._vectors(vectors, count):
            kept.append((pointer, min(length, room)))
            room -= min(length, room)
        return kept

    def fd_pwrite(self, fd: int, vectors: int, count: int, offset: int, result: int) -> int:
        """pwritev(2)."""
        if offset & _SIGNED:
            return Errno.INVAL
        self._write(self._at(fd), vectors, count, offset, result)
        return 0

    def fd_seek(self, fd: int, offset: int, whence: int, result: int) -> int:
        """lseek(2)."""
        opened = self._at(fd)
        if isinstance(opened.node, Directory):
            return Errno.BADF
        signed = offset - (1 << 64) if offset & _SIGNED else offset
        start = {0: 0, 1: opened.position, 2: opened.node.size}.get(whence)
        if start is None or not 0 <= start + signed < _SIGNED:
            return Errno.INVAL
        opened.position = start + signed
        self.memory.pack(U64, result, opened.position)
        return 0

    def fd_tell(self, fd: int, result: int) -> int:
        """lseek(fd, 0, SEEK_CUR)."""
        self.memory.pack(U64, result, self._at(fd).position)
        return 0

    def fd_readdir(self, fd: int, buffer: int, length: int, cookie: int, result: int) -> int:
        """Names from number `cookie` on, as many as fit; the last may be cut."""
        directory = self._directory(fd)
        self.memory.check(buffer, length)
        names = [(b".", directory), (b"..", directory.parent), *directory.entries.items()]
        used = 0
        for n in range(min(cookie, len(names)), len(names)):
            if used >= length:
                break
            name, node = names[n]
            kind = _DIRECTORY if isinstance(node, Directory) else _REGULAR
            entry = (_DIRENT.pack(n + 1, node.number, len(name), kind) + name)[: length - used]
            self.memory.write(buffer + used, entry)
            used += len(entry)
        self.memory.pack(U32, result, used)
        return 0

    # ---- sockets: none -----------------------------------------------------------------------------------------------
    def sock_accept(self, *_: int) -> int:
        """No descriptor is a socket, and nothing makes one."""
        return Errno.NOTSOCK

    sock_recv = sock_send = sock_shutdown = sock_accept
