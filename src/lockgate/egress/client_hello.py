"""What a TLS ClientHello says about its server, read before any byte of it goes upstream.

Rule 1: no I/O; time comes in as an argument. At most 16 KiB and 5 seconds over all records and fragments.
Rule 2: exactly one server name, and it equals the host of the CONNECT. That both are allowed is not enough: a front
        of a content network would serve the other one.
Rule 3: a hello that hides a second one (ECH, ESNI) is refused, since nobody here can read it. GREASE ECH looks the
        same, so clients that send it need interception, where the extension ends at the gateway.
Sources: RFC 8446 sections 4.1.2 and 5.1, RFC 6066 section 3, RFC 9849 (ECH).
"""

from __future__ import annotations

from typing import Final

import msgspec

from lockgate.policy.host import Endpoint, Host, Refusal

HELLO_BYTES: Final = 16 * 1024
HELLO_SECONDS: Final = 5.0
# Fatal alert 49, access_denied (RFC 8446 section 6.2): one record, two bytes.
ALERT: Final = b"\x15\x03\x03\x00\x02\x02\x31"

_HANDSHAKE: Final = 0x16
_CLIENT_HELLO: Final = 1
_RECORD: Final = 5
_RECORD_BYTES: Final = 2**14
_SERVER_NAME: Final = 0
_ALPN: Final = 16
_HIDING: Final = frozenset((0xFE0D, 0xFFCE))


class Hello(msgspec.Struct, frozen=True):
    """What was read.

    Attributes:
        sni: the server name, None when there was none.
        alpn: offered protocols, in order.
        extensions: their numbers, in order.

    """

    sni: Host | None
    alpn: tuple[bytes, ...]
    extensions: tuple[int, ...]


class _Malformed(Exception):  # never leaves this module
    pass


def _need(holds: bool) -> None:
    if not holds:
        raise _Malformed


def parse(data: bytes) -> Hello | Refusal | None:
    """Read the ClientHello at the start of a TLS stream; None while it is incomplete."""
    return _Records().feed(data)


def check(hello: Hello, connect: Endpoint, *, intercepted: bool = False) -> Refusal | None:
    """Say why the hello does not fit the host of the CONNECT, or None.

    Args:
        hello: what `parse` read.
        connect: where the CONNECT led.
        intercepted: the handshake ends at the gateway, so a hidden second hello goes nowhere.

    """
    if not intercepted and not _HIDING.isdisjoint(hello.extensions):
        return Refusal("ech_present", "an encrypted ClientHello cannot be checked")
    if connect.host.kind != "name":
        return None if hello.sni is None else Refusal("bad_sni", "an address has no server name")
    if hello.sni is None:
        return Refusal("sni_missing", "the ClientHello names no server")
    if hello.sni != connect.host:
        return Refusal("sni_mismatch", "the ClientHello names another server than the CONNECT")
    return None


class Reader:
    """Reads the hello of one tunnel against its caps.

    Args:
        connect: where the CONNECT led.
        now: seconds, monotonic.
        intercepted: as `check`.

    Attributes:
        data: everything received, to be sent on once it was accepted.
        deadline: seconds, monotonic; `tick` refuses from then on.

    """

    def __init__(self, connect: Endpoint, now: float, *, intercepted: bool = False) -> None:
        self._connect = connect
        self._intercepted = intercepted
        self._records = _Records()
        self.data = bytearray()
        self.deadline = now + HELLO_SECONDS

    def feed(self, data: bytes, now: float) -> Hello | Refusal | None:
        """Take received bytes; returns the accepted hello, why it is refused, or None while it is incomplete."""
        late = self.tick(now)
        if late is not None:
            return late
        self.data += data
        hello = self._records.feed(data)
        if isinstance(hello, Hello):
            refusal = check(hello, self._connect, intercepted=self._intercepted)
            return hello if refusal is None else refusal
        return hello

    def tick(self, now: float) -> Refusal | None:
        """Refuse when time is up."""
        return Refusal("sni_timeout", "the ClientHello did not arrive in time") if now >= self.deadline else None


_TOO_LARGE: Final = Refusal("hello_too_large", "a ClientHello is at most 16 KiB")


def _may_be_record(head: bytes) -> bool:
    """Whether bytes can begin a handshake record: type 22, version 3.0 to 3.4."""
    return (not head or head[0] == _HANDSHAKE) and head[1:2] in {b"", b"\x03"} and (len(head) < 3 or head[2] <= 4)


class _Records:
    """Joins the handshake bytes of records as they come; each byte is looked at once."""

    def __init__(self) -> None:
        self._waiting = bytearray()
        self._handshake = bytearray()
        self._seen = 0
        self._begun = False

    def feed(self, data: bytes) -> Hello | Refusal | None:
        room = HELLO_BYTES + 1 - self._seen
        self._waiting += data[:room]
        self._seen += len(data)
        found = self._take()
        if found is None and self._seen > HELLO_BYTES:
            return _TOO_LARGE
        return found

    def _take(self) -> Hello | Refusal | None:
        data, handshake = self._waiting, self._handshake
        at = 0
        while at < len(data):
            record = bytes(data[at : at + _RECORD])
            if not _may_be_record(record):
                return Refusal("not_tls", "a tunnel begins with a TLS handshake record")
            if len(record) < _RECORD:
                break
            size = int.from_bytes(record[3:5])
            if not 1 <= size <= _RECORD_BYTES:
                return Refusal("not_tls", "a handshake record holds 1 to 16384 bytes")
            if not self._begun and len(data) > at + _RECORD and data[at + _RECORD] != _CLIENT_HELLO:
                return Refusal("not_tls", "the first handshake message is a ClientHello")
            if len(data) < at + _RECORD + size:
                break
            self._begun = True
            handshake += data[at + _RECORD : at + _RECORD + size]
            at += _RECORD + size
            if len(handshake) < 4:
                continue
            end = 4 + int.from_bytes(handshake[1:4])
            if end > HELLO_BYTES:
                return _TOO_LARGE
            if len(handshake) > end:
                return Refusal("not_tls", "nothing stands behind a ClientHello in its record")
            if len(handshake) == end:
                return _hello(bytes(handshake[4:]))
        del data[:at]
        return None


class _Bytes:
    """Reads length-prefixed vectors; raises `_Malformed` past the end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise _Malformed
        out = self._data[self._at : self._at + count]
        self._at += count
        return out

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def vector(self, size: int) -> _Bytes:
        return _Bytes(self.take(self.number(size)))


def _hello(body: bytes) -> Hello | Refusal:
    try:
        source = _Bytes(body)
        _need(source.take(2)[0] == 3)
        source.take(32)
        _need(source.vector(1).left <= 32)
        suites = source.vector(2).left
        _need(suites >= 2 and suites % 2 == 0 and source.vector(1).left >= 1)
        found: dict[int, bytes] = {}
        if source.left:
            block = source.vector(2)
            _need(source.left == 0)
            while block.left:
                kind = block.number(2)
                if kind in found:
                    return Refusal("bad_sni", "an extension stands twice")
                inside = block.vector(2)
                found[kind] = inside.take(inside.left)
    except _Malformed:
        return Refusal("not_tls", "the ClientHello is malformed")
    sni = _server_name(found[_SERVER_NAME]) if _SERVER_NAME in found else None
    if isinstance(sni, Refusal):
        return sni
    return Hello(sni, _protocols(found.get(_ALPN, b"")), tuple(found))


def _server_name(data: bytes) -> Host | Refusal:
    try:
        source = _Bytes(data)
        names = source.vector(2)
        _need(source.left == 0 and names.number(1) == 0)
        inside = names.vector(2)
        name = inside.take(inside.left)
        _need(names.left == 0)
    except _Malformed:
        return Refusal("bad_sni", "server_name holds exactly one host name")
    host = Host.parse(name)
    if isinstance(host, Refusal) or host.kind != "name":
        return Refusal("bad_sni", "the server name is not a canonical host name")
    return host


def _protocols(data: bytes) -> tuple[bytes, ...]:
    """Return the offered protocols; a malformed list is an empty one, and then no protocol is chosen."""
    out: list[bytes] = []
    try:
        source = _Bytes(data)
        names = source.vector(2) if data else source
        while names.left:
            inside = names.vector(1)
            out.append(inside.take(inside.left))
    except _Malformed:
        return ()
    return tuple(out)
