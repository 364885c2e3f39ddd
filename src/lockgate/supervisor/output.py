"""Drains what a run writes, and keeps little of it (X9).

Rule 1: a stream is read for as long as the run lives, so that the run does not stall, but only its first `keep` bytes
        are held; the others are counted. One buffer of 64 KiB serves all streams of the process.
Rule 2: what was dropped is said in the text itself, by a marker with the number of bytes, and in `truncated`.
Rule 3: pushes to the agent while a run streams are the kept bytes and nothing more.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Final

from lockgate.contract.bounds import Bounds
from lockgate.runtimes.protocol import Machine
from lockgate.supervisor.loop import Reactor

_PIPE: Final = 64 * 1024
_BUFFER: Final = bytearray(_PIPE)
_VIEW: Final = memoryview(_BUFFER)
_READS_A_WAKE: Final = 4


def marker(dropped: int) -> str:
    """Return the text that stands for `dropped` bytes."""
    return f"\n[lockgate: {dropped} bytes dropped]"


def cut_text(text: str, cap: int) -> tuple[str, int]:
    """Return `text` cut to `cap` bytes of UTF-8 with the marker, and the bytes dropped."""
    if len(text) * 4 <= cap:
        return text, 0
    raw = text.encode("utf-8", "replace")
    if len(raw) <= cap:
        return text, 0
    dropped = len(raw) - cap
    return _decode_cut(raw[:cap]) + marker(dropped), dropped


def _decode_cut(raw: bytes) -> str:
    # A cut may fall inside a character: leave off its first bytes rather than show a replacement for it.
    for back in range(1, min(4, len(raw) + 1)):
        byte = raw[-back]
        if byte & 0xC0 == 0xC0:
            width = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2
            if width > back:
                raw = raw[:-back]
            break
        if byte < 0x80:
            break
    return raw.decode("utf-8", "replace")


class Stream:
    """One of a run's two output pipes.

    Args:
        fd: non-blocking read end; owned by the machine.
        keep: bytes held.
        kill: bytes after which the run is ended.
        push: called with each piece of the kept bytes as it comes, for a run that streams.

    Attributes:
        total: bytes read so far.
        open: False once the other end is closed everywhere.

    """

    __slots__ = ("_keep", "_kept", "_kill", "_push", "fd", "open", "total")

    def __init__(self, fd: int, *, keep: int, kill: int, push: Callable[[bytes], object] | None = None) -> None:
        self.fd = fd
        self.total = 0
        self.open = True
        self._keep = keep
        self._kill = kill
        self._kept = bytearray()
        self._push = push

    def read(self) -> bool:
        """Take what is there, at most four buffers; True once more than `kill` bytes came."""
        for _ in range(_READS_A_WAKE):
            got = self._read_once()
            if self.total > self._kill:
                return True
            if got < _PIPE:
                break
        return False

    def finish(self) -> None:
        """Take what was written before the run ended: at most one pipe's worth, which sizes the pipe cannot exceed."""
        left = _PIPE
        while self.open and left > 0:
            got = self._read_once()
            if got <= 0:
                break
            left -= got

    def _read_once(self) -> int:
        try:
            got = os.readv(self.fd, [_BUFFER])
        except BlockingIOError:
            return -1
        except OSError:
            self.open = False
            return 0
        if got == 0:
            self.open = False
            return 0
        self.total += got
        room = self._keep - len(self._kept)
        if room > 0:
            piece = _VIEW[: min(room, got)]
            self._kept += piece
            if self._push is not None:
                self._push(bytes(piece))
        return got

    @property
    def dropped(self) -> int:
        """Bytes that were read and not kept."""
        return self.total - len(self._kept)

    def text(self) -> str:
        """Return the kept bytes as UTF-8, with U+FFFD for what is not, and the marker if bytes were dropped."""
        if not self.dropped:
            return self._kept.decode("utf-8", "replace") if self._kept else ""
        return _decode_cut(bytes(self._kept)) + marker(self.dropped)


class Output:
    """Both streams of a run, read as they come.

    Args:
        push: called with (stream's name, kept bytes) as they come, for a run that streams.
        flooded: called when a stream brought more than the run may write.

    """

    __slots__ = ("_flooded", "_reactor", "stderr", "stdout")

    def __init__(
        self,
        reactor: Reactor,
        machine: Machine,
        bounds: Bounds,
        *,
        push: Callable[[str, bytes], object] | None,
        flooded: Callable[[], object],
    ) -> None:
        self._reactor = reactor
        self._flooded = flooded
        self.stdout = self._stream("stdout", machine.stdout, bounds, push)
        self.stderr = self._stream("stderr", machine.stderr, bounds, push)

    def _stream(self, name: str, fd: int, bounds: Bounds, push: Callable[[str, bytes], object] | None) -> Stream:
        piece = None if push is None else partial(push, name)
        stream = Stream(fd, keep=bounds.output, kill=bounds.output_kill, push=piece)
        self._reactor.handler(fd, lambda _mask: self._on_bytes(stream))
        return stream

    def _on_bytes(self, stream: Stream) -> None:
        if stream.read():
            self._flooded()
        elif not stream.open:
            self._reactor.remove(stream.fd)

    def finish(self) -> dict[str, int]:
        """Take what was written before the run ended; returns the bytes dropped of each stream that lost some."""
        self.stdout.finish()
        self.stderr.finish()
        dropped = (("stdout", self.stdout.dropped), ("stderr", self.stderr.dropped))
        return {name: count for name, count in dropped if count}
