"""A secret on loan: for one purpose, for a short time, known by an id that may be logged.

Rule 1: a lease is scanned for (`leaks.LIVE`) from its birth to its end, so a result cannot carry it out unseen.
Rule 2: ending it is idempotent and also happens when its block fails.
"""

from __future__ import annotations

import os
import time
from types import TracebackType
from typing import Final, Self

from lockgate.secrets import leaks
from lockgate.secrets.hazmat import Hazmat

_ID_BYTES: Final = 9


class Lease:
    """One secret, alive until its block ends.

    Args:
        value: the plaintext.
        purpose: what it was taken for, in the words of a log.
        ttl: seconds until it is useless anyway.
        lease_id: names it in audit rows; a token's `jti`, or made here. Never derived from the value.

    Attributes:
        id: as above.
        expires: when it ends, seconds on the monotonic clock.

    """

    __slots__ = ("_needles", "expires", "id", "purpose", "value")

    def __init__(self, value: str, *, purpose: str, ttl: float, lease_id: str | None = None) -> None:
        self.value: Hazmat[str] = Hazmat(value)
        self.purpose = purpose
        self.id = lease_id or f"lease-{os.urandom(_ID_BYTES).hex()}"
        self.expires = time.monotonic() + ttl
        self._needles = leaks.needles(value)
        leaks.LIVE.enter(self)

    @property
    def needles(self) -> tuple[bytes, ...]:
        """What the leak scan looks for; empty once the lease ended."""
        return self._needles

    @property
    def alive(self) -> bool:
        """Whether it was neither ended nor is out of time."""
        return bool(self._needles) and time.monotonic() < self.expires

    def end(self) -> None:
        """Forget the plaintext and stop looking for it; idempotent."""
        self.value.drop()
        self._needles = ()
        leaks.LIVE.leave(self)

    def __repr__(self) -> str:
        return f"<lease {self.id} for {self.purpose}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
