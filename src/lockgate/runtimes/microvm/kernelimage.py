"""Kernels: what a VMM can boot, and how to get it out of what distributions ship. Pure but for the reads.

Rule 1: what is handed to a VMM is an uncompressed ELF `vmlinux`: nothing is unpacked inside the guest, where it costs
        most, and one file serves both VMMs.
Rule 2: nothing here runs what it reads. Sizes in a header are checked before they are believed.

Sources: Documentation/arch/x86/boot.rst (setup_sects 0x1f1, "HdrS" 0x202, payload_offset 0x248, payload_length 0x24c);
lz4 doc/lz4_Block_format.md and the legacy frame of lz4_Frame_format.md; elf(5); PVH note type 18 of
xen/include/public/elfnote.h.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import struct
import zlib
from typing import Final

from lockgate.contract.errors import CannotIsolate

_MOST: Final = 512 * 1024 * 1024
_SETUP_SECTS: Final = 0x1F1
_MAGIC: Final = slice(0x202, 0x206)
_PAYLOAD: Final = 0x248
_LZ4_LEGACY: Final = b"\x02\x21\x4c\x18"
_LZ4_SKIP: Final = 0x184C2102
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_ELF: Final = b"\x7fELF"
_PT_NOTE: Final = 4
_PVH_NOTE: Final = 18
_WORDS: Final = 15  # a length nibble of 15 goes on in the next byte
_LONG: Final = 255

_BZIMAGE_FIX: Final = "give an uncompressed vmlinux, or a bzImage whose payload is lz4, gzip, xz, lzma or bzip2"


def _bad(what: str) -> CannotIsolate:
    return CannotIsolate(f"the kernel image cannot be used: {what}", next_step=_BZIMAGE_FIX)


def vmlinux(data: bytes) -> bytes:
    """Return the ELF kernel in `data`, which is one already or a bzImage.

    Raises:
        CannotIsolate: it is neither, or is packed by a method that the standard library lacks.

    """
    if data[:4] == _ELF:
        return data
    if len(data) < _PAYLOAD + 8 or data[_MAGIC] != b"HdrS":
        raise _bad("it is neither an ELF file nor a bzImage")
    start = ((data[_SETUP_SECTS] or 4) + 1) * 512
    offset, length = struct.unpack_from("<II", data, _PAYLOAD)
    payload = data[start + offset : start + offset + length]
    if len(payload) != length or not length:
        raise _bad("its header names a payload that is not there")
    try:
        kernel = _unpack(payload)
    except (OSError, EOFError, ValueError, IndexError, struct.error, zlib.error, lzma.LZMAError) as error:
        raise _bad(f"its payload cannot be unpacked ({type(error).__name__}: {error})") from error
    if kernel[:4] != _ELF:
        raise _bad("its payload holds no ELF kernel")
    return kernel


def _unpack(payload: bytes) -> bytes:
    if payload[:4] == _LZ4_LEGACY:
        return lz4_legacy(payload)
    if payload[:4] == _ZSTD:
        raise _bad("its payload is packed with zstd")
    # The kernel's build appends the unpacked size as a u32, which no packed stream contains.
    if payload[:2] == b"\x1f\x8b":
        return gzip.decompress(payload[:-4])
    if payload[:3] == b"BZh":
        return bz2.decompress(payload[:-4])
    return lzma.LZMADecompressor().decompress(payload, _MOST)


def lz4_legacy(data: bytes) -> bytes:
    """Return what an LZ4 stream in the legacy frame holds; the size that the kernel's build appends ends it.

    Raises:
        ValueError: a block goes beyond its end, or all of it beyond 512 MiB. IndexError: the same.

    """
    out = bytearray()
    at = 4
    while at + 8 <= len(data):
        (size,) = struct.unpack_from("<I", data, at)
        at += 4
        if size == _LZ4_SKIP:
            continue
        if not 0 < size <= len(data) - at:
            raise ValueError("a block is longer than its stream")
        lz4_block(data[at : at + size], out)
        at += size
        if len(out) > _MOST:
            raise ValueError("the kernel is larger than 512 MiB")
    return bytes(out)


def lz4_block(block: bytes, out: bytearray) -> None:
    """Append what one LZ4 block holds to `out`; a match may reach back into this block only."""
    floor = len(out)
    at, size = 0, len(block)
    while True:
        token = block[at]
        at += 1
        literals, at = _length(block, at, token >> 4)
        if at + literals > size:
            raise ValueError("literals go beyond the block")
        out += block[at : at + literals]
        at += literals
        if at >= size:
            return
        distance = block[at] | block[at + 1] << 8
        at += 2
        length, at = _length(block, at, token & _WORDS)
        length += 4
        start = len(out) - distance
        if distance == 0 or start < floor:
            raise ValueError("a match begins before the block")
        if distance >= length:
            out += out[start : start + length]
        else:  # it overlaps itself: a pattern repeated
            pattern = out[start:]
            out += (pattern * (length // distance + 1))[:length]


def _length(block: bytes, at: int, nibble: int) -> tuple[int, int]:
    if nibble == _WORDS:
        while True:
            more = block[at]
            at += 1
            nibble += more
            if more != _LONG:
                break
    return nibble, at


def has_pvh(kernel: bytes) -> bool:
    """Whether an ELF kernel carries the PVH entry that QEMU needs to boot it without firmware."""
    try:
        (table,) = struct.unpack_from("<Q", kernel, 32)
        each, count = struct.unpack_from("<HH", kernel, 54)
        for index in range(count):
            kind, _flags, offset, _v, _p, size = struct.unpack_from("<IIQQQQ", kernel, table + index * each)
            if kind == _PT_NOTE and _note(kernel[offset : offset + size]):
                return True
    except struct.error:
        return False
    return False


def _note(notes: bytes) -> bool:
    at = 0
    while at + 12 <= len(notes):
        name, size, kind = struct.unpack_from("<III", notes, at)
        if kind == _PVH_NOTE and notes[at + 12 : at + 15] == b"Xen":
            return True
        at += 12 + (name + 3 & ~3) + (size + 3 & ~3)
    return False
