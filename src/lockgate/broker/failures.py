"""What an operation may raise to say how far a call to its backend came.

Rule 1: none of these carries a URL, a header, a body or a word of the provider; a status number at most.
Rule 2: whoever raises one claims what its name says. What is not claimed counts, for a write, as "may have happened".
"""

from __future__ import annotations


class BackendError(Exception):
    """Base: a call to a backend did not succeed."""

    def __init__(self, status: int | None = None) -> None:
        super().__init__(status)
        self.status = status


class BackendRefused(BackendError):
    """The backend answered that it did not and will not do this. Nothing was changed."""


class BackendUnreachable(BackendError):
    """No byte of the request left this process: no connection, or no token. Nothing was changed."""


class BackendTimedOut(BackendError):
    """The backend did not answer in time. A write may have happened."""


class BackendUnclear(BackendError):
    """The request left and no usable answer came (reset, 5xx, not the protocol). A write may have happened."""


class BackendTooLarge(BackendError):
    """The answer is larger than the operation reads. A write has happened."""


class CallOver(BackendError):
    """The call ended (its deadline passed) while its function went on; it gets no token and no backend any more."""
