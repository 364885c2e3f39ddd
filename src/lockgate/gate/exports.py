"""Writes exported files into the caller's directory.

Rule 1: names and bytes are hostile. A name is one plain component, checked here again.
Rule 2: a file is created, never opened: O_EXCL and O_NOFOLLOW relative to the directory's descriptor. What is there
        already is neither followed nor changed; it is an error (open(2)).
Rule 3: a file that is not complete, or whose SHA-256 is not the one in the audit row, is removed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from lockgate.contract.errors import ExportRefused
from lockgate.contract.run import ExportInfo
from lockgate.gate.escape import escape

_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NAME_BYTES: Final = 255


class Target:
    """The directory that exports go to, held open. Made (0700) when only its last component is missing.

    Raises:
        ExportRefused: it is not a directory that can be written to. Nothing was run yet.

    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        try:
            with contextlib.suppress(FileExistsError):
                self.directory.mkdir(mode=0o700)
            self._fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ExportRefused(
                f"exports cannot go to {escape(str(directory))!r}: {error.strerror}",
                next_step="name a directory whose parent exists and that this user may write to",
            ) from None

    def create(self, info: ExportInfo) -> File:
        """Create the file of `info`.

        Raises:
            ExportRefused: the name is no plain file name, or something is there already.

        """
        if not plain_name(info.name):
            raise ExportRefused(
                f"an export is named {escape(info.name)[:120]!r}, which is no plain file name",
                next_step="have the code export under a name of letters, digits, dot, dash and underscore",
            )
        try:
            return File(os.open(info.name, _CREATE, 0o600, dir_fd=self._fd), self._fd, info)
        except FileExistsError:
            raise ExportRefused(
                f"there is a {info.name!r} in {escape(str(self.directory))!r} already, and it was left as it is",
                next_step="name an empty directory",
            ) from None
        except OSError as error:
            raise ExportRefused(
                f"{info.name!r} cannot be written: {error.strerror}", next_step="name another directory"
            ) from None

    def close(self) -> None:
        """Let go of the directory; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class File:
    """One export being written; a context manager that keeps it only if it is whole and the right one."""

    def __init__(self, fd: int, directory: int, info: ExportInfo) -> None:
        self._fd, self._directory, self.info = fd, directory, info
        self._digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> None:
        """Append a chunk.

        Raises:
            ExportRefused: more bytes came than were announced, or the disk does not take them.

        """
        self.size += len(data)
        if self.size > self.info.size:
            raise ExportRefused(f"{self.info.name!r} is longer than its row says", next_step=_TAMPERED)
        self._digest.update(data)
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise ExportRefused(
                f"{self.info.name!r} cannot be written: {error.strerror}", next_step="make room, or name another disk"
            ) from None

    def finish(self) -> None:
        """Check that all came, and that it is what the audit row says.

        Raises:
            ExportRefused: size or SHA-256 differ.

        """
        if self.size != self.info.size or self._digest.hexdigest() != self.info.sha256:
            raise ExportRefused(f"{self.info.name!r} is not the file that its row describes", next_step=_TAMPERED)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)
        if kind is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.info.name, dir_fd=self._directory)


_TAMPERED: Final = "do not use it; look at the run's rows: lockgate audit tail"


def plain_name(name: str) -> bool:
    """Whether `name` is one component that neither hides nor acts: printable, no slash, no leading dot or dash."""
    return (
        name != ""
        and name.isprintable()
        and "/" not in name
        and name[0] not in ".- "
        and escape(name) == name
        and len(name.encode()) <= _NAME_BYTES
    )
