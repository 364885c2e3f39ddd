"""An HTTP client for one backend and one call, for operations that want no client of their own.

Rule 1: the host is the operator's. A path is built from parts, each quoted; no answer, redirect or environment variable
        can send the token elsewhere.
Rule 2: one request is one try: no retries, no redirects, no kept connection that may have died in between.
Rule 3: the body is capped while it is read.
Rule 4: a failure says whether a byte of the request may have left (`failures`), and nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote

import msgspec

from lockgate.broker.failures import (
    BackendRefused,
    BackendTimedOut,
    BackendTooLarge,
    BackendUnclear,
    BackendUnreachable,
)
from lockgate.contract.errors import ConfigError

if TYPE_CHECKING:
    import httpx

    from lockgate.broker.call import BackendEntry, Call

T = TypeVar("T")
BODY_BYTES: Final = 1024 * 1024
REQUEST_TIMEOUT: Final = 408  # says nothing about whether the request was taken up
_SAFE_METHODS: Final = frozenset({"GET", "HEAD"})
_clients: Final[dict[str, httpx.Client]] = {}
_lock: Final = threading.Lock()


class Answer(msgspec.Struct, frozen=True):
    """A successful answer: its status (2xx) and its body."""

    status: int
    body: bytes

    def json(self, type: type[T]) -> T:  # noqa: A002 - as msgspec names it
        """Decode the body into `type`; other fields of the backend are dropped.

        Raises:
            BackendUnclear: the body is not that.

        """
        try:
            return msgspec.json.decode(self.body, type=type)
        except (msgspec.DecodeError, UnicodeError):
            pass  # raised below: the decoder's words quote the body
        raise BackendUnclear(self.status)


class BackendClient:
    """Requests to one backend on behalf of one call."""

    __slots__ = ("_call", "_entry")

    def __init__(self, call: Call, entry: BackendEntry) -> None:
        self._call = call
        self._entry = entry

    def get(self, *path: str, scope: Sequence[str] = (), cap: int = BODY_BYTES) -> Answer:
        """GET the path made of `path`; see `request`."""
        return self.request("GET", path, scope=scope, cap=cap)

    def post(self, *path: str, json: object, scope: Sequence[str] = (), cap: int = BODY_BYTES) -> Answer:
        """POST `json` to the path made of `path`; see `request`."""
        return self.request("POST", path, scope=scope, json=json, cap=cap)

    def request(
        self, method: str, path: Sequence[str], *, scope: Sequence[str] = (), json: object = None, cap: int = BODY_BYTES
    ) -> Answer:
        """Make one request with a token for this call, within the call's time.

        Args:
            method: in capitals.
            path: the parts between the slashes, each quoted here.
            scope: of the token; empty = send none.
            json: the body, any type msgspec encodes; None = no body.
            cap: bytes of the answer that are read at most.

        Raises:
            BackendRefused: the backend answered 3xx or 4xx.
            BackendUnreachable: no connection; no byte left.
            BackendTimedOut: no answer in time.
            BackendUnclear: 5xx, a reset, or no HTTP.
            BackendTooLarge: the answer is over `cap`.

        """
        url = self._url(path)
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if self._call.idempotency_key is not None:
            headers["Idempotency-Key"] = self._call.idempotency_key
        body = None
        if json is not None:
            body = msgspec.json.encode(json)
            headers["Content-Type"] = "application/json"
        if not scope:
            return self._send(method, url, headers, body, cap)
        with self._call.mint(self._entry.name, scope=scope) as token:
            return self._send(method, url, {**headers, **token.header()}, body, cap)

    def _url(self, path: Sequence[str]) -> str:
        base = self._entry.url
        if base is None:
            raise ConfigError(
                f"backend {self._entry.name!r} has no url", next_step=f"set url under [backends.{self._entry.name}]"
            )
        if any(part in {"", ".", ".."} for part in path):
            raise BackendUnreachable
        return "/".join((base.rstrip("/"), *(quote(part, safe="") for part in path)))

    def _send(self, method: str, url: str, headers: dict[str, str], body: bytes | None, cap: int) -> Answer:
        import httpx  # noqa: PLC0415 - an extra

        failure: type[BackendUnreachable | BackendTimedOut | BackendUnclear]
        status: int | None = None
        before = self._call.sent
        try:
            request = httpx.Request(
                method, url, headers=headers, content=body, extensions={"timeout": self._timeouts()}
            )
            self._call.sent = True
            answer = client(self._entry.name).send(request, stream=True, follow_redirects=False)
            try:
                status = answer.status_code
                if 300 <= status < 500 and status != REQUEST_TIMEOUT:
                    raise BackendRefused(status)
                if not 200 <= status < 300:
                    raise BackendUnclear(status)
                if method not in _SAFE_METHODS:
                    self._call.changed = True
                return Answer(status, self._read(answer, cap))
            finally:
                answer.close()
        except (
            httpx.ConnectError,
            httpx.ConnectTimeout,
            httpx.PoolTimeout,
            httpx.UnsupportedProtocol,
            httpx.InvalidURL,
        ):
            self._call.sent = before
            failure = BackendUnreachable
        except httpx.TimeoutException:
            failure = BackendTimedOut
        except httpx.HTTPError:
            failure = BackendUnclear
        raise failure(status)  # outside the handlers: a cause would carry the URL, and its frames the token

    def _read(self, answer: httpx.Response, cap: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        for part in answer.iter_raw():
            size += len(part)
            if size > cap:
                raise BackendTooLarge(answer.status_code)
            if time.monotonic() > self._call.deadline:
                raise BackendTimedOut(answer.status_code)
            parts.append(part)
        return b"".join(parts)

    def _timeouts(self) -> dict[str, float]:
        left = max(self._call.remaining, 0.001)
        return {"connect": left, "read": left, "write": left, "pool": left}


def client(name: str) -> httpx.Client:
    """Return the one client of a backend: making one loads certificates, which takes longer than a call."""
    import httpx  # noqa: PLC0415 - an extra

    with _lock:
        found = _clients.get(name)
        if found is None:
            limits: Any = httpx.Limits(max_keepalive_connections=0, max_connections=None)
            found = _clients[name] = httpx.Client(
                trust_env=False, limits=limits, transport=httpx.HTTPTransport(retries=0, trust_env=False, limits=limits)
            )
    return found
