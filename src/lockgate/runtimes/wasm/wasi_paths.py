"""The part of WASI preview 1 that is about paths; each is walked in the run's own tree (memfs.py), from a directory."""

from __future__ import annotations

from lockgate.runtimes.wasm.nodes import Directory, File, Sealed
from lockgate.runtimes.wasm.wasi_errno import Errno, Refused
from lockgate.runtimes.wasm.wasi_files import (
    CREATE,
    EXCLUSIVE,
    FIRST_FD,
    MUST_BE_DIRECTORY,
    OPEN_FILES,
    RIGHT_ALLOCATE,
    RIGHT_READ,
    RIGHT_WRITE,
    TRUNCATE,
    U32,
    Files,
    Opened,
)


class Paths(Files):
    """What a guest does with paths."""

    def path_open(
        self,
        fd: int,
        _follow: int,
        pointer: int,
        length: int,
        how: int,
        rights: int,
        _more: int,
        flags: int,
        result: int,
    ) -> int:
        """openat(2)."""
        start, path = self._directory(fd), self._path(pointer, length)
        self.memory.check(result, 4)
        if len(self._open) >= OPEN_FILES:
            return Errno.MFILE
        reads, writes = bool(rights & RIGHT_READ), bool(rights & (RIGHT_WRITE | RIGHT_ALLOCATE))
        try:
            node = self._tree.find(start, path)
        except Refused as refused:
            if refused.errno != Errno.NOENT or not how & CREATE:
                raise
            where, name = self._tree.slot(start, path)
            if how & MUST_BE_DIRECTORY:
                return Errno.INVAL
            node = self._tree.make_file(where, name)
        else:
            if how & CREATE and how & EXCLUSIVE:
                return Errno.EXIST
            if isinstance(node, Directory):
                if writes or how & TRUNCATE or (how & CREATE and not how & MUST_BE_DIRECTORY):
                    return Errno.ISDIR
            elif how & MUST_BE_DIRECTORY:
                return Errno.NOTDIR
            elif isinstance(node, Sealed) and (writes or how & TRUNCATE):
                return Errno.ROFS
            elif isinstance(node, File) and how & TRUNCATE:
                node.resize(0)
        number = next(n for n in range(FIRST_FD, FIRST_FD + OPEN_FILES) if n not in self._open)
        self._open[number] = Opened(node, reads=reads, writes=writes, flags=flags & 0x1F)
        node.opened += 1
        self.memory.pack(U32, result, number)
        return 0

    def path_filestat_get(self, fd: int, _follow: int, pointer: int, length: int, result: int) -> int:
        """fstatat(2)."""
        return self._stat(result, self._tree.find(self._directory(fd), self._path(pointer, length)))

    def path_filestat_set_times(
        self, fd: int, _follow: int, pointer: int, length: int, access: int, change: int, flags: int
    ) -> int:
        """utimensat(2)."""
        node = self._tree.find(self._directory(fd), self._path(pointer, length))
        return self._set_times(node, access, change, flags)

    def path_create_directory(self, fd: int, pointer: int, length: int) -> int:
        """mkdirat(2)."""
        self._tree.make_directory(self._directory(fd), self._path(pointer, length))
        return 0

    def path_remove_directory(self, fd: int, pointer: int, length: int) -> int:
        """rmdir(2)."""
        self._tree.remove_directory(self._directory(fd), self._path(pointer, length))
        return 0

    def path_unlink_file(self, fd: int, pointer: int, length: int) -> int:
        """unlink(2)."""
        self._tree.unlink(self._directory(fd), self._path(pointer, length))
        return 0

    def path_rename(self, fd: int, old: int, old_length: int, fd_new: int, new: int, new_length: int) -> int:
        """renameat(2)."""
        self._tree.rename(
            self._directory(fd), self._path(old, old_length), self._directory(fd_new), self._path(new, new_length)
        )
        return 0

    def path_readlink(self, fd: int, pointer: int, length: int, _buffer: int, _size: int, _result: int) -> int:
        """No name is a link."""
        self._tree.find(self._directory(fd), self._path(pointer, length))
        return Errno.INVAL

    def path_link(self, *_: int) -> int:
        """There are no hard links."""
        return Errno.NOTSUP

    def path_symlink(self, *_: int) -> int:
        """There are no symbolic links."""
        return Errno.NOTSUP
