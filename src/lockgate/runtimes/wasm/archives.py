"""The members of a zip file in memory. Its content was held to a digest before: nothing here is hostile.

Rule 1: nothing is imported and no file is opened when it is used: a worker that serves a run may do neither.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator
from functools import partial

"".encode("cp437")  # zipfile's encoding for names, loaded now


class _View(io.RawIOBase):
    """A file over bytes that are there already."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = max(start + offset, 0)
        return self._at

    def read(self, count: int = -1, /) -> bytes:
        end = len(self._data) if count < 0 else self._at + count
        data = self._data[self._at : end].tobytes()
        self._at += len(data)
        return data


def members(data: memoryview) -> Iterator[tuple[bytes, int, Callable[[], memoryview]]]:
    """Give (path, bytes, how to get them) of every file in an archive."""
    archive = zipfile.ZipFile(_View(data))
    for one in archive.infolist():
        if not one.is_dir():
            yield one.filename.encode(), one.file_size, partial(_load, archive, one)


def _load(archive: zipfile.ZipFile, one: zipfile.ZipInfo) -> memoryview:
    return memoryview(archive.read(one))
