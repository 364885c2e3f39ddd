"""Files that leave a run (X7): named, counted, capped, hashed, spooled without a path.

Rule 1: a name is one path segment that looks like what it is: nothing that walks, hides, breaks a line or turns text
        around. It is checked here, before anything is kept, and written to a disk only by the caller's own program.
Rule 2: the size is checked before the bytes are kept; a run cannot make the broker keep more than its bounds say.
Rule 3: the spool has no name in any directory: it ends with the run, or with the broker.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from typing import Final

import msgspec

from lockgate.contract.errors import GuestProtocolError, HostFault
from lockgate.contract.glyphs import BLANK
from lockgate.contract.run import ExportInfo

NAME_BYTES: Final = 128
CHUNK_BYTES: Final = 512 * 1024
OPERATION: Final = "host.export"


class ExportArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the sandbox sends: one piece of a file. `data` is base64."""

    name: str
    data: bytes
    last: bool


class Refusal(Exception):
    """The export is not taken. `why` is for the audit row; `too_large` says which reason the code sees."""

    def __init__(self, why: str, *, too_large: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.too_large = too_large


_decoder: Final = msgspec.json.Decoder(ExportArgs)


def decode(raw: bytes) -> ExportArgs:
    """Return the arguments in `raw`.

    Raises:
        Refusal: they are not those of `host.export`.
        GuestProtocolError: one piece is larger than the protocol lets it be.

    """
    try:
        args = _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeError):
        args = None  # its text quotes the sandbox's bytes
    if args is None:
        raise Refusal("arguments are not name, data and last")
    if len(args.data) > CHUNK_BYTES:
        raise GuestProtocolError(
            f"a piece of an export has {len(args.data)} bytes, above {CHUNK_BYTES}", next_step="send smaller pieces"
        )
    return args


def bad_name(name: str, *, hidden: bool = False) -> str | None:
    """Say what is wrong with an export's name, or None.

    Args:
        name: as the sandbox gave it.
        hidden: whether a leading dot is allowed.

    """
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "holds a lone surrogate"
    if not 0 < size <= NAME_BYTES:
        return f"is outside 1..{NAME_BYTES} bytes"
    if "/" in name or "\\" in name:
        return "is more than one path segment"
    if name in {".", ".."}:
        return "is a directory"
    if name.startswith(".") and not hidden:
        return "is hidden"
    # No control, format, unassigned or private character, no space but the plain one, nothing that is blank to the eye.
    if not name.isprintable() or any(ord(char) in BLANK for char in name):
        return "holds a character that does not show as itself"
    if name != name.strip() or name.startswith(("-", "~")):
        return "begins or ends in a way that shells and people misread"
    return None


class _File:
    __slots__ = ("digest", "extents", "info", "size")

    def __init__(self) -> None:
        self.size = 0
        self.extents: list[tuple[int, int]] = []
        self.digest = hashlib.sha256()
        self.info: ExportInfo | None = None


class Spool:
    """The exports of one execution of code. One thread writes; others read when it is done.

    Args:
        max_bytes: of all files together. max_files: how many.

    """

    def __init__(self, *, max_bytes: int, max_files: int) -> None:
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._files: dict[str, _File] = {}
        self._fd = -1
        self._end = 0

    def take(self, args: ExportArgs) -> ExportInfo | None:
        """Keep one piece; returns the file's facts with its last one.

        Raises:
            Refusal: name, order, count or size is not allowed; a file that was begun is dropped with it.
            HostFault: the spool cannot take it.

        """
        wrong = bad_name(args.name)
        if wrong is not None:
            raise Refusal(f"the name {wrong}")
        file = self._files.get(args.name)
        if file is not None and file.info is not None:
            raise Refusal("a file of that name was exported before")
        if file is None:
            if len(self._files) >= self._max_files:
                raise Refusal(f"more than {self._max_files} files", too_large=True)
            file = self._files[args.name] = _File()
        if self._end + len(args.data) > self._max_bytes:
            del self._files[args.name]
            raise Refusal(f"more than {self._max_bytes} bytes", too_large=True)
        self._write(args.data)
        file.extents.append((self._end, len(args.data)))
        file.digest.update(args.data)
        file.size += len(args.data)
        self._end += len(args.data)
        if args.last:
            file.info = ExportInfo(args.name, file.size, file.digest.hexdigest())
        return file.info

    @property
    def infos(self) -> tuple[ExportInfo, ...]:
        """The files that are complete."""
        return tuple(file.info for file in self._files.values() if file.info is not None)

    def read(self, name: str, offset: int, count: int) -> tuple[bytes, bool] | None:
        """Return up to `count` bytes of a complete file from `offset`, and whether they end it; None = no such file."""
        file = self._files.get(name)
        if file is None or file.info is None or not 0 <= offset <= file.size:
            return None
        last = offset + count >= file.size
        parts: list[bytes] = []
        for start, length in file.extents:
            if offset >= length:
                offset -= length
                continue
            part = os.pread(self._fd, min(length - offset, count), start + offset)
            parts.append(part)
            count -= len(part)
            offset = 0
            if not count:
                break
        return b"".join(parts), last

    def pieces(self, name: str, count: int) -> Iterator[bytes]:
        """Yield a complete file in pieces of `count` bytes."""
        at, last = 0, False
        while not last:
            data, last = self.read(name, at, count) or (b"", True)
            at += len(data)
            yield data

    def drop(self, name: str) -> None:
        """Forget a file."""
        self._files.pop(name, None)

    def fetched(self, name: str) -> bool:
        """Forget a file that was read to its end; True when none is left."""
        self._files.pop(name, None)
        return not self.infos

    def close(self) -> None:
        """Drop everything; idempotent."""
        self._files.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, data: bytes) -> None:
        try:
            if self._fd < 0:
                self._fd = _unnamed()
            view = memoryview(data)
            at = self._end
            while view:
                done = os.pwrite(self._fd, view, at)
                view, at = view[done:], at + done
        except OSError as error:
            raise HostFault(
                f"the export spool cannot be written ({error.strerror})",
                next_step="free space in the temporary directory",
            ) from None


def _unnamed() -> int:
    """Return a descriptor of a file without a name: O_TMPFILE where the file system has it, memory where not."""
    try:
        return os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        return os.memfd_create("lockgate-export", os.MFD_CLOEXEC)
