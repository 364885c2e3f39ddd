"""Rows of the gateway: each denial durable before its answer (E4).

Rule 1: `deny` returns once the row is on the disk. When it cannot be, the answer is withheld and the caller closes.
Rule 2: what is allowed has a row too, sent before the first byte goes out; without rows nothing is allowed.
Rule 3: the audit client waits in threads of its own, a few, so that a slow disk slows denials and not tunnels.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

from lockgate.audit.denials import Kind, egress_row
from lockgate.audit.rows import Row, Value
from lockgate.contract.errors import LockgateError
from lockgate.policy.egress import Verdict

_THREADS: Final = 8


class Rows(Protocol):
    """The part of `lockgate.audit.client.AuditClient` that is used here."""

    @property
    def available(self) -> bool:
        """Whether rows are being stored, as far as is known."""
        ...

    def append(self, row: Row) -> str:
        """Send a row."""
        ...

    def commit(self, row: Row) -> str:
        """Store a row."""
        ...


class Who:
    """For whom a row is: the run and the caller's socket.

    Args:
        user: on whose behalf. agent: which agent. run: which run. tool: what runs there. tenant: whose data.

    """

    __slots__ = ("agent", "run", "tenant", "tool", "user")

    def __init__(self, user: str, agent: str, run: str, tool: str = "", tenant: str = "") -> None:
        self.user = user
        self.agent = agent
        self.run = run
        self.tool = tool
        self.tenant = tenant


NOBODY: Final = Who("nobody", "nobody", "none")


class Recorder:
    """Writes the rows of one gateway.

    Args:
        rows: where they go.
        policy_hash: of the policy in force.

    """

    def __init__(self, rows: Rows, policy_hash: str) -> None:
        self._rows = rows
        self._policy = policy_hash
        self._threads = ThreadPoolExecutor(_THREADS, "lockgate-rows")

    @property
    def available(self) -> bool:
        """Whether rows are being stored, as far as is known."""
        return self._rows.available

    async def deny(
        self,
        who: Who,
        kind: Kind,
        verdict: Verdict,
        *,
        destination: str | None = None,
        peer: str = "",
        raw: bytes = b"",
        **more: Value,
    ) -> str | None:
        """Store a denial; returns its audit id, None when it could not be stored: then nothing may be answered."""
        row = self._row(who, kind, verdict, destination=destination, peer=peer, raw=raw, reported=False, more=more)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._rows.commit, row)
        except LockgateError:
            return None

    def report(
        self, who: Who, kind: Kind, verdict: Verdict, *, destination: str | None, peer: str = "", **more: Value
    ) -> bool:
        """Send the row of what report mode lets through; False when rows cannot be stored."""
        return self._append(
            self._row(who, kind, verdict, destination=destination, peer=peer, raw=b"", reported=True, more=more)
        )

    def allow(
        self, who: Who, kind: Kind, verdict: Verdict, status: str, *, destination: str, peer: str = "", **more: Value
    ) -> bool:
        """Send the row of something allowed; False when rows cannot be stored.

        Args:
            status: "open" before the first byte goes out, "closed" with the counts after the last.

        """
        detail: dict[str, Value] = {"kind": kind, "destination": destination, "policy": self._policy}
        detail |= {name: value for name, value in {"peer": peer, "tool": who.tool, **more}.items() if value}
        return self._append(
            Row(
                phase="egress",
                user=who.user,
                agent=who.agent,
                run=who.run,
                tenant=who.tenant,
                operation=f"egress.{kind}",
                verdict="allow",
                rule=verdict.rule,
                reason=verdict.reason,
                status=status,
                detail=detail,
            )
        )

    def close(self) -> None:
        """Let the threads end; idempotent."""
        self._threads.shutdown(wait=False)

    def _append(self, row: Row) -> bool:
        try:
            self._rows.append(row)
        except LockgateError:
            return False
        return True

    def _row(
        self,
        who: Who,
        kind: Kind,
        verdict: Verdict,
        *,
        destination: str | None,
        peer: str,
        raw: bytes,
        reported: bool,
        more: dict[str, Value],
    ) -> Row:
        return egress_row(
            kind=kind,
            reason=verdict.reason,
            rule=verdict.rule,
            user=who.user,
            agent=who.agent,
            run=who.run,
            tenant=who.tenant,
            tool=who.tool,
            destination=destination,
            policy=self._policy,
            peer=peer,
            raw=raw,
            metadata=verdict.metadata,
            reported=reported,
            **more,
        )
