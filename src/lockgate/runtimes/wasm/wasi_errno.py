"""What a call of WASI preview 1 answers when it is refused."""

from __future__ import annotations

import enum


class Errno(enum.IntEnum):
    """Errno values of WASI preview 1 (`$errno` of the witx), those that this rung gives."""

    SUCCESS = 0
    ACCES = 2
    BADF = 8
    EXIST = 20
    FAULT = 21
    FBIG = 22
    INVAL = 28
    IO = 29
    ISDIR = 31
    MFILE = 33
    NAMETOOLONG = 37
    NOENT = 44
    NOSPC = 51
    NOSYS = 52
    NOTDIR = 54
    NOTEMPTY = 55
    NOTSOCK = 57
    NOTSUP = 58
    OVERFLOW = 61
    PERM = 63
    PIPE = 64
    ROFS = 69
    SPIPE = 70


class Refused(Exception):
    """A call failed with this errno."""

    def __init__(self, errno: Errno) -> None:
        super().__init__(errno)
        self.errno = errno
