"""The one type that holds plaintext.

Rule 1: it cannot be printed, compared, hashed, walked, copied, serialised or tested for truth: each of these is a way
        in which a credential once ended in a log.
Rule 2: `reveal()` is the only way in, so that every use of plaintext can be found by its name.

Python cannot wipe memory that held a string; what is promised is a short life, not a clean page.
"""

# ruff: noqa: PLE0303, PLE0304, PLE0307, PLE0308 - refusing what these methods promise is the point
from __future__ import annotations

from typing import Final, Generic, NoReturn, TypeVar, final

T = TypeVar("T", str, bytes)

_NEXT: Final = "use reveal() inside the block that needs the plaintext"


def _refuse(what: str) -> NoReturn:
    raise TypeError(f"hazmat is not {what}; {_NEXT}")


@final
class Hazmat(Generic[T]):
    """Plaintext. Born in secrets/, dies inside one block in broker/."""

    __slots__ = ("_value",)
    __hash__ = None  # type: ignore[assignment]  # a hash of a short secret can be guessed

    def __init__(self, value: T) -> None:
        self._value: T | None = value

    def reveal(self) -> T:
        """Return the plaintext.

        Raises:
            ValueError: it was dropped.

        """
        if self._value is None:
            raise ValueError("this secret was dropped; take a new lease for each use")
        return self._value

    def drop(self) -> None:
        """Forget the plaintext; idempotent."""
        self._value = None

    def __repr__(self) -> str:
        return "<hazmat>"

    def __str__(self) -> NoReturn:
        _refuse("text")

    def __format__(self, spec: str) -> NoReturn:
        _refuse("text")

    def __bytes__(self) -> NoReturn:
        _refuse("bytes")

    def __eq__(self, other: object) -> NoReturn:
        _refuse("comparable")

    def __ne__(self, other: object) -> NoReturn:
        _refuse("comparable")

    def __bool__(self) -> NoReturn:
        _refuse("a truth value")

    def __len__(self) -> NoReturn:
        _refuse("measurable")

    def __iter__(self) -> NoReturn:
        _refuse("iterable")

    def __contains__(self, item: object) -> NoReturn:
        _refuse("searchable")

    def __getitem__(self, key: object) -> NoReturn:
        _refuse("indexable")

    def __copy__(self) -> NoReturn:
        _refuse("copyable")

    def __deepcopy__(self, memo: object) -> NoReturn:
        _refuse("copyable")

    def __reduce__(self) -> NoReturn:
        _refuse("fit to cross a process")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        _refuse("fit to cross a process")

    def __getstate__(self) -> NoReturn:
        _refuse("fit to cross a process")
