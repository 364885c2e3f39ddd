"""Answers that are still being written, between the calls that read them.

A reply is one frame, so a stream comes in pieces that are asked for: the first call opens it and brings the first
events, each later call brings what came since. Nothing reads ahead: while nobody asks, the vendor's connection waits.

Rule 1: a stream belongs to the run that opened it; another run's id for it is unknown to it.
Rule 2: a piece is whole events: the scan for leases sees each event whole, and who passes pieces on can stop anywhere.
Rule 3: what nobody reads for `IDLE_SECONDS` is closed; how many there are is bounded, for a run and for all.
Rule 4: a stream that was cut off is a failure, never an end.
"""

from __future__ import annotations

import os
import re
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from lockgate.broker.failures import BackendRefused, BackendTooLarge, BackendUnclear

if TYPE_CHECKING:
    from lockgate.broker.http import Streamed

IDLE_SECONDS: Final = 60.0
EVENT_BYTES: Final = 256 * 1024
"""Largest single event, and about the largest piece."""
GATHER_SECONDS: Final = 0.05
"""How long a piece waits for the next event to come with it, and `MOST` of that in all."""
MOST_SECONDS: Final = 0.25
RUN_STREAMS: Final = 8
ALL_STREAMS: Final = 256
# An event ends with an empty line (WHATWG HTML, "Parsing an event stream"); lines end with CR LF, LF or CR.
_BOUNDARY: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")


class Piece(NamedTuple):
    """Events, as they came, and whether they are the last."""

    events: str
    done: bool


class _Open:
    """One stream: its body and what was read of it beyond whole events."""

    def __init__(self, backend: str, body: Streamed) -> None:
        self.backend = backend
        self.body = body
        self.buffer = bytearray()
        self.reading = threading.Lock()
        self.used = time.monotonic()


class Streams:
    """All open streams of this broker. Any thread may call."""

    def __init__(self, *, idle: float = IDLE_SECONDS) -> None:
        self._idle = idle
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], _Open] = {}
        self._reaper: threading.Timer | None = None

    def backend(self, run: str, ident: str) -> str | None:
        """Return the backend that a stream of this run comes from, or None."""
        found = self._open.get((run, ident))
        return None if found is None else found.backend

    def begin(self, run: str, backend: str, body: Streamed) -> str:
        """Take an answer whose head is there; returns the stream's id.

        Raises:
            BackendRefused: too many are open; `body` is closed.

        """
        ident = f"ms_{int.from_bytes(os.urandom(8)) % 10**12}"
        with self._lock:
            mine = sum(1 for owner, _ in self._open if owner == run)
            room = mine < RUN_STREAMS and len(self._open) < ALL_STREAMS and (run, ident) not in self._open
            if room:
                self._open[run, ident] = _Open(backend, body)
                self._watch()
        if not room:
            body.close()
            raise BackendRefused(429)
        return ident

    def next(self, run: str, ident: str) -> Piece:
        """Return the next whole events; waits for at least one, as long as the body's own limit lets it.

        Raises:
            BackendRefused: this run has no such stream, or it is being read.
            BackendTimedOut, BackendUnclear, BackendTooLarge: as its body; the stream is over.

        """
        found = self._open.get((run, ident))
        if found is None or not found.reading.acquire(blocking=False):
            raise BackendRefused(404)
        try:
            found.used = time.monotonic()
            piece = _read(found)
        except BaseException:
            self._end(run, ident)
            raise
        finally:
            found.used = time.monotonic()
            found.reading.release()
        if piece.done:
            self._end(run, ident)
        return piece

    def _end(self, run: str, ident: str) -> None:
        with self._lock:
            found = self._open.pop((run, ident), None)
        if found is not None:
            found.body.close()

    def _watch(self) -> None:
        """Have the idle ones closed some time; the caller holds the lock."""
        if self._reaper is None and self._open:
            self._reaper = threading.Timer(self._idle / 2, self._reap)
            self._reaper.daemon = True
            self._reaper.start()

    def _reap(self) -> None:
        oldest = time.monotonic() - self._idle
        with self._lock:
            self._reaper = None
            old = [name for name, one in self._open.items() if one.used < oldest and not one.reading.locked()]
            closing = [self._open.pop(name) for name in old]
            self._watch()
        for one in closing:
            one.body.close()

    def __len__(self) -> int:
        return len(self._open)


def _read(stream: _Open) -> Piece:
    buffer, body = stream.buffer, stream.body
    until = time.monotonic() + MOST_SECONDS
    while True:
        cut = _whole(buffer)
        if cut and (len(buffer) >= EVENT_BYTES or time.monotonic() > until or not body.waits(GATHER_SECONDS)):
            break
        data = body.read()
        if not data:
            cut = len(buffer)
            break
        if not cut:
            until = time.monotonic() + MOST_SECONDS
        buffer += data
        if len(buffer) > EVENT_BYTES and not _whole(buffer):
            raise BackendTooLarge
    try:
        events = bytes(buffer[:cut]).decode("utf-8")
    except UnicodeDecodeError:
        events = None
    if events is None:
        raise BackendUnclear
    del buffer[:cut]
    return Piece(events, body.ended and not buffer)


def _whole(buffer: bytearray) -> int:
    """Return where the last whole event within `EVENT_BYTES` ends; of a larger first one its end; 0 for none."""
    end = 0
    for match in _BOUNDARY.finditer(buffer):
        if end and match.end() > EVENT_BYTES:
            break
        end = match.end()
    return end if end <= EVENT_BYTES else 0


STREAMS: Final = Streams()
