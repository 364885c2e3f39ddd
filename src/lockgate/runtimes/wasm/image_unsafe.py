"""Images of a guest's memory: sealed in a memfd, mapped copy-on-write over a fresh instance.

Rule 1: an image is a memfd with every seal (F_SEAL_WRITE, SHRINK, GROW, SEAL), made from bytes whose digest was
        checked: whoever holds it sees those bytes for ever. A mapped plain file would show later edits.
Rule 2: a mapping is MAP_PRIVATE: what a run writes is its own and is gone with its process.

Sources: memfd_create(2), fcntl(2) "File Sealing", mmap(2).
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
from typing import Final

from lockgate.runtimes.wasm import guest_abi
from lockgate.runtimes.wasm.engine_unsafe import EngineError, Memory

_SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_CHUNK: Final = 1 << 20
_MAP_FIXED: Final = 0x10  # the same on every architecture of this rung (x86-64, aarch64)
_FAILED: Final = ctypes.c_void_p(-1).value

_libc: Final = ctypes.CDLL(None, use_errno=True)
_mmap: Final = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]


def seal(path: str, digest: str) -> int:
    """Copy an image file into a sealed memfd, checking its SHA-256 on the way.

    Args:
        path: the file.
        digest: hexadecimal.

    Returns: the descriptor, close-on-exec; the caller closes it.

    Raises:
        EngineError: the content is not that of the digest, or no number of whole pages.

    """
    seen, size = hashlib.sha256(), 0
    memory = os.memfd_create("lockgate-image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(_CHUNK):
                seen.update(chunk)
                size += len(chunk)
                view = memoryview(chunk)
                while view:
                    view = view[os.write(memory, view) :]
        _accept(seen.hexdigest() == digest, size)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(memory)
        raise
    return memory


def _accept(same: bool, size: int) -> None:
    if not same:
        raise EngineError("the memory image is not the one that was built")
    if size == 0 or size % guest_abi.PAGE:
        raise EngineError("the memory image is no number of whole pages")


def is_sealed(fd: int) -> bool:
    """Whether nobody can change what the descriptor holds."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:
        return False


def restore(memory: Memory, image: int) -> int:
    """Lay an image over a fresh guest's memory; returns its bytes.

    Raises:
        EngineError: the image is not sealed, or the memory cannot be that large.

    """
    if not is_sealed(image):
        raise EngineError("an image must be a sealed memfd")
    size = os.fstat(image).st_size
    if memory.size() > size:
        raise EngineError("the guest begins with more memory than the image has")
    memory.grow(size)
    got = _mmap(memory.base, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED, image, 0)
    if got == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "mmap")
    if got != memory.base:
        raise EngineError("the image was mapped elsewhere")
    return size
