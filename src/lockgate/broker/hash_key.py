"""The deployment's key for argument hashes: arguments have so little entropy that a plain hash would give them away.

Rule 1: it stands beside the database, readable by the broker's user alone, and never in a row. Who has the rows
        without it cannot guess arguments; who has both can.
Rule 2: it is made once, and never replaced by guesswork: without it, repeats could not be told from conflicts.
"""

from __future__ import annotations

import hashlib
import os
import stat
from typing import Final

from lockgate.contract.errors import HostFault

KEY_BYTES: Final = 32
_BLOCK: Final = 64  # of SHA-256


class ArgumentHash:
    """`audit.rows.argument_hash` with the key's two blocks hashed beforehand: a fifth of the time (RFC 2104).

    Args:
        key: at most 64 bytes.

    """

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes) -> None:
        if len(key) > _BLOCK:
            raise ValueError("the key is longer than a block; give at most 64 bytes")
        block = key.ljust(_BLOCK, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in block))

    def __call__(self, operation: str, canonical: bytes) -> str:
        """Return HMAC-SHA-256 over the operation's name and its canonical arguments, hexadecimal."""
        inner = self._inner.copy()
        inner.update(b"%b\0%b" % (operation.encode(), canonical))
        outer = self._outer.copy()
        outer.update(inner.digest())
        return outer.hexdigest()


def load(audit_path: str) -> bytes:
    """Return the key beside the database at `audit_path`; makes it when there is none.

    Raises:
        HostFault: it cannot be made or read, or others may read it.

    """
    path = f"{audit_path}.key"
    try:
        key = _read(path)
        if key is None:
            _make(path)
            key = _read(path)
    except OSError as error:
        raise HostFault(
            f"the key file {path!r} cannot be used ({error.strerror})",
            next_step="let the broker's user write beside the audit database",
        ) from None
    if key is None or len(key) != KEY_BYTES:
        raise HostFault(f"the key file {path!r} is not one that lockgate wrote", next_step="restore it from a backup")
    return key


def _read(path: str) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or stat.S_IMODE(about.st_mode) & 0o077:
            raise HostFault(f"the key file {path!r} is open to others", next_step="chmod it to 0600, a regular file")
        return os.read(fd, KEY_BYTES + 1)
    finally:
        os.close(fd)


def _make(path: str) -> None:
    """Write it aside and link it into place: whoever comes second finds the first one's, whole."""
    draft = f"{path}.{os.urandom(6).hex()}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, os.urandom(KEY_BYTES))
        os.fsync(fd)
        os.link(draft, path)
    except FileExistsError:
        return
    finally:
        os.close(fd)
        os.unlink(draft)  # noqa: PTH108 - strings throughout
