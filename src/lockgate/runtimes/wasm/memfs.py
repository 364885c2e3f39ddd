"""The file tree of a run, in this process's memory: no file of the host is in it, and none can be reached through it.

Rule 1: the run's own directory is the only place that can change. There are no links of either kind.
Rule 2: a path is split once and walked from a directory of this tree; ".." at its root stays at the root.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from lockgate.runtimes.wasm import archives
from lockgate.runtimes.wasm.nodes import Archive, Directory, File, Node, Quota, Sealed
from lockgate.runtimes.wasm.wasi_errno import Errno, Refused

NAME_BYTES: Final = 255
PATH_BYTES: Final = 4096


class Tree:
    """The whole tree.

    Args:
        now: the clock, nanoseconds.

    """

    def __init__(self, now: Callable[[], int]) -> None:
        self.now = now
        self._numbers = 0
        self.root = Directory(self._number(), now())

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    # ---- what the host places ------------------------------------------------------------------------------------
    def place(self, path: str, quota: Quota | None = None) -> Directory:
        """Make a directory and those above it; with a quota, the run may change what is in it."""
        here = self.root
        for part in filter(None, path.encode().split(b"/")):
            found = here.entries.get(part)
            if not isinstance(found, Directory):
                found = self._attach(here, part, Directory(self._number(), self.now()))
            here = found
        if quota is not None:
            quota.name()
            here.quota = quota
        return here

    def place_file(self, path: str, data: memoryview) -> None:
        """Place a file that nobody changes."""
        where, _, name = path.rpartition("/")
        self._seal(self.place(where), name.encode(), len(data), lambda: data)

    def _seal(self, where: Directory, name: bytes, size: int, load: Callable[[], memoryview]) -> None:
        kind = Archive if name.endswith(b".zip") else Sealed
        made = where.entries[name] = kind(self._number(), self.now(), size, load)
        if isinstance(made, Archive):
            made.where = where

    def _inside(self, archive: Archive) -> Directory:
        """Return the members of an archive as a tree that nobody changes."""
        if archive.inside is None:
            top = archive.inside = self._directory(archive.where)
            for path, size, load in archives.members(archive.data):
                here = top
                *above, name = self.split(path)
                for part in above:
                    found = here.entries.get(part)
                    if not isinstance(found, Directory):
                        found = here.entries[part] = self._directory(here)
                    here = found
                if name:
                    self._seal(here, name, size, load)
        return archive.inside

    def _directory(self, parent: Directory) -> Directory:
        made = Directory(self._number(), self.now())
        made.parent, made.packed = parent, True
        return made

    @staticmethod
    def _attach(where: Directory, name: bytes, what: Directory) -> Directory:
        what.parent = where
        where.entries[name] = what
        return what

    # ---- paths ---------------------------------------------------------------------------------------------------
    @staticmethod
    def split(path: bytes) -> list[bytes]:
        """Return the parts of a path; "." parts are dropped, a trailing slash is an empty last part."""
        if len(path) > PATH_BYTES:
            raise Refused(Errno.NAMETOOLONG)
        if b"\0" in path:
            raise Refused(Errno.INVAL)
        if not path:
            raise Refused(Errno.NOENT)
        parts = [one for one in path.split(b"/") if one not in {b"", b"."}]
        if any(len(one) > NAME_BYTES for one in parts):
            raise Refused(Errno.NAMETOOLONG)
        if path.endswith((b"/", b"/.")) or path == b".":
            parts.append(b"")
        return parts

    def _step(self, here: Node, part: bytes) -> Node:
        if isinstance(here, Archive) and part:
            here = self._inside(here)
        if not isinstance(here, Directory):
            raise Refused(Errno.NOTDIR)
        if part == b"..":
            return here.parent
        found = here.entries.get(part) if part else here
        if found is None and here.packed:  # a package may have packed its data in an archive of the same name
            packed = here.entries.get(part + b".zip")
            found = self._inside(packed) if isinstance(packed, Archive) else None
        if found is None:
            raise Refused(Errno.NOENT)
        return found

    def find(self, start: Directory, path: bytes) -> Node:
        """Return what is at `path`."""
        here: Node = start
        for part in self.split(path):
            here = self._step(here, part)
        return here

    def slot(self, start: Directory, path: bytes, *, directory: bool = False) -> tuple[Directory, bytes]:
        """Return (directory, name) that `path` means; the name may be free. `directory`: a trailing slash is fine."""
        parts = self.split(path)
        if parts and parts[-1] == b"":
            parts.pop()
            if not directory and parts:
                self.find(start, path)  # gives NOENT or NOTDIR where that is the truth
                raise Refused(Errno.ISDIR)
        if not parts or parts[-1] == b"..":
            raise Refused(Errno.EXIST if directory else Errno.ISDIR)
        here: Node = start
        for part in parts[:-1]:
            here = self._step(here, part)
        if not isinstance(here, Directory):
            raise Refused(Errno.NOTDIR)
        return here, parts[-1]

    # ---- changes -------------------------------------------------------------------------------------------------
    @staticmethod
    def _quota(where: Directory) -> Quota:
        if where.quota is None:
            raise Refused(Errno.ROFS)
        if where.links == 0:
            raise Refused(Errno.NOENT)  # the directory itself was removed
        return where.quota

    @staticmethod
    def changeable(node: Node) -> bool:
        """Whether the run may change what is beneath a directory."""
        return isinstance(node, Directory) and node.quota is not None

    def _touch(self, where: Directory) -> None:
        where.times[1] = where.times[2] = self.now()

    def make_file(self, where: Directory, name: bytes) -> File:
        """Make an empty file under a free name."""
        quota = self._quota(where)
        quota.name()
        made = File(self._number(), self.now(), quota)
        where.entries[name] = made
        self._touch(where)
        return made

    def make_directory(self, start: Directory, path: bytes) -> None:
        """Make a directory, as mkdir(2)."""
        where, name = self.slot(start, path, directory=True)
        if name in where.entries:
            raise Refused(Errno.EXIST)
        quota = self._quota(where)
        quota.name()
        self._attach(where, name, Directory(self._number(), self.now(), quota))
        self._touch(where)

    def remove_directory(self, start: Directory, path: bytes) -> None:
        """Remove an empty directory, as rmdir(2)."""
        where, name = self.slot(start, path, directory=True)
        found = where.entries.get(name)
        if found is None:
            raise Refused(Errno.NOENT)
        if not isinstance(found, Directory):
            raise Refused(Errno.NOTDIR)
        quota = self._quota(where)
        if found.entries:
            raise Refused(Errno.NOTEMPTY)
        self._drop(where, name, found, quota)

    def _drop(self, where: Directory, name: bytes, what: Node, quota: Quota) -> None:
        del where.entries[name]
        what.links = 0
        if isinstance(what, File):
            what.forget()
        else:
            quota.count -= 1
        self._touch(where)

    def unlink(self, start: Directory, path: bytes) -> None:
        """Take a file away, as the system call does."""
        where, name = self.slot(start, path)
        found = where.entries.get(name)
        if found is None:
            raise Refused(Errno.NOENT)
        if isinstance(found, Directory):
            raise Refused(Errno.ISDIR)
        self._drop(where, name, found, self._quota(where))

    def rename(self, start: Directory, old: bytes, start_new: Directory, new: bytes) -> None:
        """Move something within the run's own directory, as the system call does."""
        where, name = self.slot(start, old, directory=True)
        target, target_name = self.slot(start_new, new, directory=True)
        moved = where.entries.get(name)
        if moved is None:
            raise Refused(Errno.NOENT)
        quota = self._quota(where)
        self._quota(target)
        if not isinstance(moved, Directory) and (old.endswith(b"/") or new.endswith(b"/")):
            raise Refused(Errno.NOTDIR)
        there = target.entries.get(target_name)
        if there is moved:
            return
        if isinstance(moved, Directory):
            above = target
            while above is not above.parent:
                if above is moved:
                    raise Refused(Errno.INVAL)
                above = above.parent
            if there is not None and not isinstance(there, Directory):
                raise Refused(Errno.NOTDIR)
        if isinstance(there, Directory):
            if not isinstance(moved, Directory):
                raise Refused(Errno.ISDIR)
            if there.entries:
                raise Refused(Errno.NOTEMPTY)
        if there is not None:
            self._drop(target, target_name, there, quota)
        del where.entries[name]
        target.entries[target_name] = moved
        if isinstance(moved, Directory):
            moved.parent = target
        self._touch(where)
        self._touch(target)
