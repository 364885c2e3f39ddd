"""Where secrets come from: a reference in, a lease out.

Rule 1: configuration holds references only; no store reads the environment.
Rule 2: errors name the reference and what is wrong with the place, never a value, and never a parser's own words.
Rule 3: the file that was checked is the file that is read: one descriptor, opened without following a link.
Rule 4: a value is read again after at most 30 s, so a rotated secret is taken up without a restart.

The file of a `file:///path#key` reference is TOML: `key = "value"`, or a multi-line string for a PEM. TOML, because
the standard library reads it strictly (duplicate keys are errors) and keys of many lines need no escapes. Without
`#key` the whole file is the value, without the line ends at its end.
"""

from __future__ import annotations

import os
import stat
import threading
import time
import tomllib
from typing import ClassVar, Final, Protocol

from lockgate.contract.errors import HostFault
from lockgate.secrets.leaks import MIN_BYTES
from lockgate.secrets.lease import Lease

CACHE_SECONDS: Final = 30.0
MAX_BYTES: Final = 64 * 1024
_FILE: Final = "file://"


class SecretUnavailable(HostFault):
    """A secret could not be had: missing, not readable, or kept in a way that others could read it."""

    code = "secret_unavailable"


class Store(Protocol):
    """A place that holds secrets."""

    scheme: ClassVar[str]

    def get(self, ref: str, *, purpose: str) -> Lease:
        """Lend the secret at `ref` for `purpose`.

        Raises:
            SecretUnavailable: it is not there, not readable, or not safely kept.

        """
        ...

    def reload(self) -> None:
        """Forget what was cached, so that the next `get` reads the place again."""
        ...


class FileStore:
    """Files that only root or we may read: `file:///path#key`.

    Args:
        cache: seconds for which a file's value is lent again without reading it, at most 30.

    """

    scheme: ClassVar[str] = "file"

    def __init__(self, *, cache: float = CACHE_SECONDS) -> None:
        self._cache_seconds = min(cache, CACHE_SECONDS)
        self._cache: dict[tuple[str, str], Lease] = {}
        self._lock = threading.Lock()

    def get(self, ref: str, *, purpose: str) -> Lease:
        """Lend the value at `ref`; each lease is the caller's own to end.

        Raises:
            SecretUnavailable: as the protocol says.

        """
        with self._lock:
            kept = self._cache.get((ref, purpose))
            if kept is None or not kept.alive:
                if kept is not None:
                    kept.end()
                    del self._cache[ref, purpose]
                kept = Lease(_read(ref), purpose=purpose, ttl=self._cache_seconds)
                self._cache[ref, purpose] = kept
            left = max(kept.expires - time.monotonic(), 0.0)
            return Lease(kept.value.reveal(), purpose=purpose, ttl=left, lease_id=kept.id)

    def reload(self) -> None:
        """Forget what was cached."""
        with self._lock:
            for kept in self._cache.values():
                kept.end()
            self._cache.clear()


def open_store(ref: str) -> Store:
    """Return the store that serves references like `ref`.

    Raises:
        SecretUnavailable: there is no store for its scheme.

    """
    scheme = ref.partition(":")[0]
    if scheme != FileStore.scheme:
        raise SecretUnavailable(
            f"there is no secret store for {scheme!r} references", next_step='use "file:///absolute/path#key"'
        )
    return FileStore()


def _read(ref: str) -> str:
    path, _, key = ref.removeprefix(_FILE).partition("#")
    if not ref.startswith(_FILE) or not path.startswith("/") or "\0" in ref:
        raise SecretUnavailable(
            f"{ref!r} is no reference to a file", next_step='write "file:///absolute/path#key" under [secrets.NAME]'
        )
    raw = _checked_bytes(ref, path)
    if not key:
        value = raw.rstrip("\r\n")
    else:
        try:
            table = tomllib.loads(raw)
        except (tomllib.TOMLDecodeError, RecursionError):
            table = None  # its message may quote the text
        if table is None:
            raise SecretUnavailable(
                f"the file of {ref!r} is not TOML", next_step='write lines of the form key = "value"'
            )
        found = table.get(key)
        if not isinstance(found, str):
            raise SecretUnavailable(
                f"the file of {ref!r} has no text under that key", next_step="add the key at the top level of the file"
            )
        value = found
    if len(value.strip().encode("utf-8", "surrogatepass")) < MIN_BYTES or "\0" in value:
        raise SecretUnavailable(
            f"the secret at {ref!r} is shorter than {MIN_BYTES} bytes or holds a NUL",
            next_step="make a longer one: results could not be searched for it",
        )
    return value


def _checked_bytes(ref: str, path: str) -> str:
    """Open without following a link or waiting for a FIFO, check what was opened, read that (open(2), fstat(2))."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise SecretUnavailable(
            f"the file of {ref!r} cannot be opened ({error.strerror})",
            next_step="name a regular file, no symbolic link, that the broker's user may read",
        ) from None
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise SecretUnavailable(f"{ref!r} is not a regular file", next_step="name a regular file")
        if about.st_uid not in {0, os.geteuid()}:
            raise SecretUnavailable(
                f"the file of {ref!r} belongs to another user", next_step="chown it to root or to the broker's user"
            )
        if stat.S_IMODE(about.st_mode) & 0o077:
            raise SecretUnavailable(
                f"the file of {ref!r} is open to its group or to others", next_step="chmod it to 0400 or 0600"
            )
        raw = b""
        while len(raw) <= MAX_BYTES and (part := os.read(fd, MAX_BYTES + 1 - len(raw))):
            raw += part
    except OSError as error:
        raise SecretUnavailable(
            f"the file of {ref!r} cannot be read ({error.strerror})", next_step="look at the disk it stands on"
        ) from None
    finally:
        os.close(fd)
    if len(raw) > MAX_BYTES:
        raise SecretUnavailable(f"the file of {ref!r} is over {MAX_BYTES} bytes", next_step="keep secrets alone in it")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        pass  # raised below: the codec's error carries the bytes
    raise SecretUnavailable(f"the file of {ref!r} is not UTF-8", next_step="store text; encode bytes as base64")
