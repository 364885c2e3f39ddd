"""What an operation's function gets beside its arguments.

Rule 1: it speaks for one call. Tokens are minted for exactly that call and end with it, also when the function goes on
        after its deadline.
Rule 2: it has no way to another call, to another run, or to a secret that is not a token of this call.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol

from lockgate.broker.failures import CallOver
from lockgate.contract.errors import ConfigError
from lockgate.contract.run import Principal
from lockgate.secrets import Lease
from lockgate.secrets.minters import MAX_TTL, CallFacts, Minter

if TYPE_CHECKING:
    from lockgate.broker.http import BackendClient

_GRACE: Final = 1.0
_IDENTIFIER_CHARS: Final = 128


class BackendEntry(Protocol):
    """A configured backend, as a call needs it."""

    @property
    def name(self) -> str:
        """Its name in the configuration."""
        ...

    @property
    def url(self) -> str | None:
        """Where it listens, or None."""
        ...

    @property
    def minter(self) -> Minter | None:
        """What mints its tokens; None = it takes none."""
        ...

    @property
    def ttl(self) -> float:
        """Longest life of a token in seconds."""
        ...

    @property
    def header(self) -> str | None:
        """The field that carries a token bare; None = `Authorization: Bearer`."""
        ...


class Token:
    """A credential for one backend and one call. Put `header()` into the request and nowhere else."""

    __slots__ = ("_field", "_lease", "id")

    def __init__(self, lease: Lease, field: str | None = None) -> None:
        self._lease = lease
        self._field = field
        self.id = lease.id

    def bearer(self) -> str:
        """Return the value of an `Authorization` header.

        Raises:
            ValueError: the call is over.

        """
        return f"Bearer {self._lease.value.reveal()}"

    def header(self) -> dict[str, str]:
        """Return the header that carries it."""
        if self._field is not None:
            return {self._field: self._lease.value.reveal()}
        return {"Authorization": self.bearer()}

    @contextmanager
    def use(self) -> Generator[str]:
        """Read the bare credential inside one `with` block; it ends with the block.

        Raises:
            ValueError: the call is over.

        """
        try:
            yield self._lease.value.reveal()
        finally:
            self._lease.end()

    def end(self) -> None:
        """Forget it; idempotent. Happens by itself when the call ends."""
        self._lease.end()

    def __repr__(self) -> str:
        return f"<token {self.id}>"


class Minting:
    """A token to come: `await` it, or use it in `with` or `async with`."""

    __slots__ = ("_backend", "_call", "_scope", "_token")

    def __init__(self, call: Call, backend: str, scope: Sequence[str]) -> None:
        self._call = call
        self._backend = backend
        self._scope = scope
        self._token: Token | None = None

    def __await__(self) -> Generator[None, None, Token]:
        yield from ()
        return self._call.mint_now(self._backend, self._scope)

    def __enter__(self) -> Token:
        self._token = self._call.mint_now(self._backend, self._scope)
        return self._token

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None:
            self._token.end()

    async def __aenter__(self) -> Token:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


class Call:
    """One allowed call.

    Attributes:
        id: names the call; the audit id of its intent row.
        operation: the registry's name.
        principal: on whose behalf, from the run.
        deadline: when the function must be done, seconds on the monotonic clock.
        idempotency_key: the key to give to the backend: equal for each try of the same write, None for reads.
        sent: whether a request of `backend()` may have left this process.
        changed: whether a backend confirmed a write of this call.

    """

    __slots__ = (
        "_args",
        "_backends",
        "_leases",
        "_over",
        "changed",
        "deadline",
        "id",
        "idempotency_key",
        "operation",
        "principal",
        "sent",
    )

    def __init__(
        self,
        *,
        call_id: str,
        operation: str,
        principal: Principal,
        deadline: float,
        idempotency_key: str | None,
        backends: Mapping[str, BackendEntry],
        args: Any,
    ) -> None:
        self.id = call_id
        self.operation = operation
        self.principal = principal
        self.deadline = deadline
        self.idempotency_key = idempotency_key
        self.sent = False
        self.changed = False
        self._backends = backends
        self._args = args
        self._leases: list[Lease] = []
        self._over = False

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, never below zero."""
        return max(self.deadline - time.monotonic(), 0.0)

    def mint(self, backend: str, *, scope: Sequence[str]) -> Minting:
        """Get a token for `backend` that allows `scope` for this call alone.

        Args:
            backend: a name under [backends] of the configuration.
            scope: words of the backend's own vocabulary.

        Returns:
            Something to `await`, or to open with `with` or `async with`; only then is the token made.

        """
        return Minting(self, backend, scope)

    def mint_now(self, backend: str, scope: Sequence[str]) -> Token:
        """Make the token; what `mint` does once it is awaited or entered.

        Raises:
            ConfigError: there is no such backend, or it has no minter.
            MintFailed, SecretUnavailable: no token could be made.
            CallOver: the call has ended.

        """
        entry = self.entry(backend)
        if entry.minter is None:
            raise ConfigError(f"backend {backend!r} has no minter", next_step=f"set minter under [backends.{backend}]")
        facts = CallFacts(self.operation, self.id, _identifiers(self._args))
        ttl = min(entry.ttl, MAX_TTL, self.remaining + _GRACE)
        lease = entry.minter.mint(self.principal, facts, backend, scope, ttl)
        self._leases.append(lease)
        if self._over:  # the deadline passed while the token was made
            self.end()
            raise CallOver
        return Token(lease, entry.header)

    def backend(self, name: str) -> BackendClient:
        """Return an HTTP client for one backend, bound to this call; see `broker.http`."""
        from lockgate.broker.http import BackendClient  # noqa: PLC0415 - httpx is an extra

        return BackendClient(self, self.entry(name))

    def entry(self, name: str) -> BackendEntry:
        """Return the configured backend.

        Raises:
            ConfigError: there is none of that name.
            CallOver: the call has ended.

        """
        if self._over:
            raise CallOver
        try:
            return self._backends[name]
        except KeyError:
            raise ConfigError(
                f"there is no backend {name!r}", next_step=f"add [backends.{name}] to the configuration"
            ) from None

    @property
    def lease_ids(self) -> str | None:
        """The ids of the tokens that were minted, for the audit row."""
        return ",".join([lease.id for lease in self._leases]) if self._leases else None

    def end(self) -> None:
        """End all tokens of this call; no more are made. Idempotent."""
        self._over = True
        for lease in self._leases:
            lease.end()

    def __repr__(self) -> str:
        return f"<call {self.id} {self.operation}>"


def _identifiers(args: Any) -> dict[str, str | int]:
    """The plain arguments, which a token names so that it is good for this call alone."""
    found: dict[str, str | int] = {}
    for name in args.__struct_fields__:
        value = getattr(args, name)
        if type(value) is int or (type(value) is str and len(value) <= _IDENTIFIER_CHARS):
            found[name] = value
    return found
