"""Budgets, reserved before a call and settled after it (C3).

Rule 1: `reserve` takes all charges of a call or none, under one lock: concurrent calls cannot all pass.
Rule 2: a reservation is given back only when the call surely did not run. An unknown outcome stays spent.
Rule 3: a child scope charges its own budgets and its parents', in the same ledger: narrowing makes no new money.
"""

from __future__ import annotations

import threading

from lockgate.policy.verdict import Charge


class Reservation:
    """Charges held for one call; ends in `Ledger.settle` or `Ledger.release`, once."""

    __slots__ = ("charges", "open")

    def __init__(self, charges: tuple[Charge, ...]) -> None:
        self.charges = charges
        self.open = True


class Ledger:
    """What was reserved and spent in one run and all its children. Thread-safe."""

    __slots__ = ("_lock", "_taken")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[tuple[str, str, str], int] = {}

    def reserve(self, charges: tuple[Charge, ...]) -> Reservation | None:
        """Take every charge, or return None and take nothing when one budget would be exceeded.

        A negative amount is refused as if the budget were exceeded: nothing ever pays in.
        """
        if not charges:
            return Reservation(())
        with self._lock:
            wanted: dict[tuple[str, str, str], int] = {}
            for charge in charges:
                total = wanted.get(charge.key, self._taken.get(charge.key, 0)) + charge.amount
                if charge.amount < 0 or total > charge.limit:
                    return None
                wanted[charge.key] = total
            self._taken.update(wanted)
        return Reservation(charges)

    def settle(self, reservation: Reservation) -> None:
        """Make a reservation final: the call ran, or may have run."""
        with self._lock:
            reservation.open = False

    def release(self, reservation: Reservation) -> None:
        """Give a reservation back: the call surely did not run. Settled or released before: no effect."""
        with self._lock:
            if not reservation.open:
                return
            reservation.open = False
            for charge in reservation.charges:
                self._taken[charge.key] -= charge.amount

    def taken(self, key: tuple[str, str, str]) -> int:
        """Return what is reserved or spent of one budget."""
        with self._lock:
            return self._taken.get(key, 0)
