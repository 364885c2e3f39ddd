"""An HTTP client for one backend and one call, for operations that want no client of their own.

Rule 1: the host is the operator's. A path is built from parts, each quoted; no answer, redirect or environment variable
        can send the token elsewhere.
Rule 2: one request is one try: no retries, no redirects, no kept connection that may have died in between.
Rule 3: the body is capped while it is read.
Rule 4: a failure says whether a byte of the request may have left (`failures`), and nothing else.
Rule 5: an answer that is still being written (`open`) may be read on after its call, by later calls of the same run;
        it carries no token, and nothing can be asked through it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
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
        self,
        method: str,
        path: Sequence[str],
        *,
        scope: Sequence[str] = (),
        json: object = None,
        cap: int = BODY_BYTES,
        fields: Mapping[str, str] | None = None,
    ) -> Answer:
        """Make one request with a token for this call, within the call's time.

        Args:
            method: in capitals.
            path: the parts between the slashes, each quoted here.
            scope: of the token; empty = send none.
            json: the body, any type msgspec encodes; None = no body.
            cap: bytes of the answer that are read at most.
            fields: further fields of the request, the operation's own words.

        Raises:
            BackendRefused: the backend answered 3xx or 4xx.
            BackendUnreachable: no connection; no byte left.
            BackendTimedOut: no answer in time.
            BackendUnclear: 5xx, a reset, or no HTTP.
            BackendTooLarge: the answer is over `cap`.

        """
        url = self._url(path)
        headers, body = self._prepared(json, fields)
        if not scope:
            return self._send(method, url, headers, body, cap)
        with self._call.mint(self._entry.name, scope=scope) as token:
            return self._send(method, url, {**headers, **token.header()}, body, cap)

    def open(
        self,
        *path: str,
        json: object,
        scope: Sequence[str],
        fields: Mapping[str, str] | None = None,
        cap: int = BODY_BYTES,
        idle: float = 60.0,
    ) -> Streamed:
        """POST `json`, and return the answer once its head is there; its body is read piece by piece.

        Args:
            path: as `post`. json: as `post`. scope: of the token. fields: as `request`.
            cap: bytes of the whole body.
            idle: seconds that may pass between two pieces.

        Raises:
            as `request`, for the head.

        """
        url = self._url(path)
        headers, body = self._prepared(json, fields)
        headers["Accept"] = "text/event-stream"
        with self._call.mint(self._entry.name, scope=scope) as token:
            left = max(min(self._call.remaining, idle), 0.001)
            times = {**self._timeouts(), "read": left}
            answer = self._head("POST", url, {**headers, **token.header()}, body, times)
            answer.request.headers.clear()
            return Streamed(answer, cap)

    def _prepared(self, json: object, fields: Mapping[str, str] | None) -> tuple[dict[str, str], bytes | None]:
        """Return the fields and the body of a request, without a token."""
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", **(fields or {})}
        if self._call.idempotency_key is not None:
            headers["Idempotency-Key"] = self._call.idempotency_key
        if json is None:
            return headers, None
        headers["Content-Type"] = "application/json"
        return headers, bytes(json) if isinstance(json, msgspec.Raw) else msgspec.json.encode(json)

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
        answer = self._head(method, url, headers, body, self._timeouts())
        if method not in _SAFE_METHODS:
            self._call.changed = True
        try:
            return Answer(answer.status_code, self._read(answer, cap))
        except (BackendTooLarge, BackendTimedOut):
            raise
        except Exception as error:  # noqa: BLE001 - what is not the transport's goes on as it is
            failure = _failure(error)
        finally:
            answer.close()
        raise failure(answer.status_code)

    def _head(
        self, method: str, url: str, headers: dict[str, str], body: bytes | None, times: dict[str, float]
    ) -> httpx.Response:
        """Send one request and return its answer with the body unread; what is not 2xx is raised."""
        import httpx  # noqa: PLC0415 - an extra

        failure: type[BackendUnreachable | BackendTimedOut | BackendUnclear]
        before = self._call.sent
        try:
            request = httpx.Request(method, url, headers=headers, content=body, extensions={"timeout": times})
            self._call.sent = True
            answer = client(self._entry.name).send(request, stream=True, follow_redirects=False)
            status = answer.status_code
            if 200 <= status < 300:
                return answer
            answer.close()
            if 300 <= status < 500 and status != REQUEST_TIMEOUT:
                raise BackendRefused(status)
            raise BackendUnclear(status)
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
        raise failure  # outside the handlers: a cause would carry the URL, and its frames the token

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


class Streamed:
    """The body of an answer that is still being written. Read by one thread at a time; closed by any.

    Args:
        answer: an open response. cap: bytes of the whole body.

    Attributes:
        ended: there is no more.

    """

    __slots__ = ("_answer", "_cap", "_parts", "_size", "_sock", "ended")

    def __init__(self, answer: httpx.Response, cap: int) -> None:
        self.ended = False
        self._answer = answer
        self._cap = cap
        self._size = 0
        self._parts: Iterator[bytes] = answer.iter_raw()
        network = answer.extensions.get("network_stream")
        self._sock: socket.socket | None = None if network is None else network.get_extra_info("socket")

    def read(self) -> bytes:
        """Return the next piece; b"" at the end. Waits as long as the `idle` of `open`.

        Raises:
            BackendTimedOut, BackendUnclear: as `BackendClient.request`. BackendTooLarge: over the cap.

        """
        status = self._answer.status_code
        try:
            piece = next(self._parts, None)
        except Exception as error:  # noqa: BLE001 - what is not the transport's goes on as it is
            failure = _failure(error)
        else:
            if piece is None:
                self.close()
                return b""
            self._size += len(piece)
            if self._size > self._cap:
                self.close()
                raise BackendTooLarge(status)
            return piece
        self.close()
        raise failure(status)

    def waits(self, seconds: float) -> bool:
        """Whether more bytes are there within `seconds`; not knowing is a no."""
        if self.ended or self._sock is None:
            return False
        try:
            return bool(getattr(self._sock, "pending", int)()) or bool(select.select([self._sock], [], [], seconds)[0])
        except (OSError, ValueError):  # closed meanwhile
            return False

    def close(self) -> None:
        """End it, from any thread: a read in progress fails."""
        self.ended = True
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(Exception):  # whatever state the other thread left it in, it is over
            self._answer.close()


def _failure(error: Exception) -> type[BackendTimedOut | BackendUnclear]:
    """Return what a failure of reading a body is called; raise it outside the handler, which holds URL and token.

    Raises:
        Exception: `error` itself, when it is none of the transport's.

    """
    import httpx  # noqa: PLC0415 - an extra

    if isinstance(error, httpx.TimeoutException):
        return BackendTimedOut
    if isinstance(error, httpx.HTTPError | httpx.StreamError | OSError):
        return BackendUnclear
    raise error


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
