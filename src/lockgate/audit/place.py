"""Where the audit file may stand, who may hold it, and what a failure of its disk is called.

Rule 1: the file is ours alone: mode 0600, one name, no symbolic link, nobody else may write in its directory.
Rule 2: one writer: a second one waits a little (the writer of a gate that just ended may still be storing what was in
        its pipe) and is then refused.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from pathlib import Path
from typing import Final

from lockgate.contract.errors import AuditUnavailable

LOCK_SECONDS: Final = 2.0


def claim_file(path: Path) -> tuple[int, tuple[int, int]]:
    """Make or open the file safely and lock it; returns the descriptor, never to be closed, and device and inode.

    The lock is flock(2), which SQLite does not use. Closing any descriptor of the file would drop SQLite's own POSIX
    locks (fcntl(2), "Record locks ... released if the process closes any file descriptor"), so this one stays open.
    """
    parent = path.parent
    try:
        if not parent.exists():
            parent.mkdir(mode=0o700)
        folder = parent.stat()
        if folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX:
            raise unusable(f"anybody may write in {parent}", f"run `chmod o-w {parent}` or choose another directory")
        new = not path.exists()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise unusable(f"{path} is not a regular file with one name", "choose another path for the audit file")
        if found.st_uid not in {os.geteuid(), 0}:
            raise unusable(f"{path} belongs to uid {found.st_uid}", "choose a file of your own")
        if found.st_mode & 0o077:
            raise unusable(f"others may open {path} (mode {found.st_mode & 0o777:04o})", f"run `chmod 600 {path}`")
        if new:
            folder_fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            os.fsync(folder_fd)
            os.close(folder_fd)
    except OSError as error:
        raise unusable(
            f"the audit file {path} cannot be opened ({error.strerror})", "choose a place that you may write"
        ) from None
    deadline = time.monotonic() + LOCK_SECONDS
    while True:  # the writer of a gate that just ended may still be storing what was in its pipe
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise unusable(
                    f"another gate writes to {path}", "stop it, or give this one its own audit file"
                ) from None
            time.sleep(0.01)
        else:
            return fd, (found.st_dev, found.st_ino)


def explain(error: Exception, path: Path) -> AuditUnavailable:
    """Return the typed error for a failure of SQLite or of the file system."""
    if isinstance(error, FileNotFoundError):
        return unusable(f"{path} was removed while it was written", "find out by whom, then restart the gate")
    name = getattr(error, "sqlite_errorname", "") or getattr(error, "strerror", "") or type(error).__name__
    if name == "SQLITE_FULL":
        return unusable(f"the disk under {path} is full", "free space there; no write runs until a row fits")
    if name.startswith("SQLITE_IOERR"):
        return unusable(
            f"{path} cannot be written ({name})", "look at that disk, its quota and the file-size limit of the gate"
        )
    if name in {"SQLITE_BUSY", "SQLITE_LOCKED"}:
        return unusable(f"{path} is locked by another program", "close what has it open for writing")
    if name.startswith("SQLITE_CONSTRAINT"):
        return unusable(f"{path} was changed by another program", "run `lockgate audit verify`")
    return unusable(f"{path} cannot be written ({name})", "run `lockgate audit verify` and look at the disk")


def unusable(message: str, next_step: str) -> AuditUnavailable:
    """Return `AuditUnavailable` with these words."""
    return AuditUnavailable(message, next_step=next_step)
