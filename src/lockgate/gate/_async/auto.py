"""`rung="auto"`: the first rung that is strong enough for a model's code and was seen to run here (X2, X3).

Rule 1: a rung counts only after a machine of it was booted for this Gate, and stood there whole, or with a weakness
        that the operator accepted. Nothing of a caller's code is sent meanwhile.
Rule 2: none is an error with the fix. "auto" never takes a rung below the level, whatever else was accepted.
Rule 3: the answer is kept for the life of the Gate; a refusal is not, so that a fix helps without a new one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from lockgate.contract import wire
from lockgate.contract.errors import LockgateError
from lockgate.contract.run import Rung
from lockgate.contract.rungs import BUILT, RUNGS, WEAKNESSES
from lockgate.policy.choose import Choice, ThreatModel, candidates, choose

if TYPE_CHECKING:
    from lockgate.gate._async.session import Session

BOOT_SECONDS: Final = 120.0
_NOT_BUILT: Final = "this version does not drive it"


class Auto:
    """Chooses for one Gate."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: dict[str | None, Choice] = {}

    async def choice(self, env: str | None) -> Choice:
        """Return what to use for the package set `env`.

        Raises:
            CannotIsolate: nothing that runs here is strong enough; names what would be, and the fix.

        """
        known = self._known.get(env)
        if known is not None:
            return known
        execution = self._session.config.execution
        model = ThreatModel(code="model", reaches=execution.reaches, lives="seconds")
        missing: dict[Rung, str | None] = dict.fromkeys(RUNGS, "not asked: another one is strong enough")
        for rung in candidates(model):
            missing[rung] = await self._look(rung, env) if rung in BUILT else _NOT_BUILT
            if missing[rung] is None:
                break
        chosen = self._known[env] = choose(model, missing)
        return chosen

    async def _look(self, rung: Rung, env: str | None) -> str | None:
        """Return what a rung lacks on this host, None when a machine of it stands ready."""
        execution = self._session.config.execution
        id_ = self._session.core().next_id()
        message = wire.Prewarm(id=id_, rung=rung, env=env, count=max(execution.pool, 1))
        try:
            answer: dict[str, Any] = await self._session.ask_supervisor(message, id_, BOOT_SECONDS)
        except LockgateError as error:
            return f"{error.message}; fix: {error.next_step}"
        weakness = answer["weakness"]
        if weakness is None or weakness in self._accepted():
            return None
        return f"it stands here without its whole wall ({weakness}: {WEAKNESSES[weakness]}); fix: see: lockgate doctor"

    def _accepted(self) -> tuple[str, ...]:
        execution = self._session.config.execution
        old = ("old runtime",) if execution.gvisor.allow_old else ()
        return (*(one for one in execution.accept_weaker if one != "emulated"), *old)
