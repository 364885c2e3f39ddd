"""The strict HTTP/1.1 front of the gateway: bytes in, judged requests out.

Rule 1: no I/O and no clock. What is not plainly HTTP/1.1 (RFC 9112) in its one strict reading is refused, never mended.
Rule 2: the request target alone names the destination; `Host` must say the same, and no other field may say anything.
Rule 3: a request is judged before a byte of its body is handed on, and each request of a connection is judged anew.
Rule 4: after a refusal nothing more is read: `feed` returns no event any more, whatever stands behind it.
Rule 5: what goes upstream is written again from the parsed head: one spelling, no hop-by-hop field, no trailer.

The one exception to "1.1 only": CONNECT may be HTTP/1.0 and may then lack `Host`, because the http.client of Python
before 3.12, and so pip, sends it that way. The target, which alone counts, is as strict there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from lockgate.egress.body import Framing
from lockgate.policy.egress import Ask, How, Verdict
from lockgate.policy.host import Endpoint, Host, Refusal, parse_port
from lockgate.policy.steering import steers

HEAD_BYTES: Final = 16 * 1024
MAX_FIELDS: Final = 100
HEAD_SECONDS: Final = 10.0

Form = Literal["proxy", "tunnel"]
BodyKind = Literal["none", "length", "chunked"]
Fields = tuple[tuple[bytes, bytes], ...]

_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_REQUEST_LINE: Final = re.compile(rb"(" + _TOKEN + rb") ([\x21-\x7e]+) HTTP/1\.([01])\Z")
_FIELD: Final = re.compile(rb"(" + _TOKEN + rb"):[ \t]*([\x20-\x7e\x80-\xff\t]*)\Z")
# An absolute URI without an authority (RFC 9112 section 3.2.2); a number behind the colon makes it `host:port`.
_OPAQUE: Final = re.compile(rb"(?!(?i:https?):)[A-Za-z][A-Za-z0-9+\-]*:(?![0-9]+(?:[/?#]|\Z))")
_ABSOLUTE: Final = re.compile(rb"([A-Za-z][A-Za-z0-9+.\-]*)://([^/?#]*)([^#]*)\Z")
_DIGITS: Final = re.compile(rb"[0-9]{1,18}\Z")

# RFC 9110 section 7.6.1, and the fields that only ever concern one hop. `expect` is answered here (RFC 9110 10.1.1).
HOP: Final = frozenset(
    b"connection keep-alive proxy-connection proxy-authorization proxy-authenticate te trailer upgrade "
    b"http2-settings expect transfer-encoding content-length".split()
)
_FRAMING: Final = frozenset((b"content-length", b"transfer-encoding"))
_UPGRADES: Final = frozenset((b"upgrade", b"http2-settings"))


class Head(msgspec.Struct, frozen=True):
    """One parsed request head.

    Attributes:
        method: as it was sent; methods are case-sensitive.
        how: "connect" or "http".
        endpoint: where the target leads; None in the tunnel form, where the tunnel has said it.
        target: the origin-form to send upstream, b"" for CONNECT.
        fields: lower-case names and values in their order, all of them.
        body: how the body is framed. length: its bytes when that is "length".
        keep_alive: whether another request may follow.
        size: bytes of the head itself.
        expects: the client waits for an interim answer before it sends the body.

    """

    method: str
    how: How
    endpoint: Endpoint | None
    target: bytes
    fields: Fields
    body: BodyKind
    length: int
    keep_alive: bool
    size: int
    expects: bool = False

    def value(self, name: bytes) -> bytes:
        """Return the first value of a field, b"" when there is none."""
        return next((value for key, value in self.fields if key == name), b"")

    def upstream(self, authority: bytes, *, length: int | None, keep_alive: bool, upgrade: bool = False) -> bytes:
        """Return the head that goes upstream.

        Args:
            authority: the canonical Host value.
            length: bytes of the body that follows; None when there is none and none was announced.
            keep_alive: whether the upstream connection is to last.
            upgrade: pass the request to change the protocol on; it was judged.

        """
        lines = [b"%b %b HTTP/1.1" % (self.method.encode("ascii"), self.target), b"host: " + authority]
        lines += [b"%b: %b" % field for field in self.fields if field[0] not in HOP and field[0] != b"host"]
        if length is not None:
            lines.append(b"content-length: %d" % length)
        if upgrade:
            lines += [b"upgrade: " + self.value(b"upgrade"), b"connection: upgrade"]
        else:
            lines.append(b"connection: " + (b"keep-alive" if keep_alive else b"close"))
        return b"\r\n".join(lines) + b"\r\n\r\n"


class Request(msgspec.Struct, frozen=True):
    """A head that may be answered. `verdict` is None in the tunnel form: the caller judges there."""

    head: Head
    verdict: Verdict | None


class Body(msgspec.Struct, frozen=True):
    """Bytes of the body of the last request, without their framing."""

    data: bytes


class End(msgspec.Struct, frozen=True):
    """The last request is complete."""


class Refused(msgspec.Struct, frozen=True):
    """The connection ends here. `endpoint` is where it would have led, where that could be read."""

    verdict: Verdict
    endpoint: Endpoint | None


Event = Request | Body | End | Refused


def parse(data: bytes, *, form: Form = "proxy") -> Head | Refusal | None:
    """Read one request head; None while it is incomplete.

    Args:
        data: everything received since the last request ended.
        form: "proxy" takes CONNECT and absolute-form; "tunnel" is what clients send inside an intercepted tunnel.

    """
    end = data.find(b"\r\n\r\n")
    region = data[: end + 4] if end >= 0 else data
    if len(region) > HEAD_BYTES:
        return Refusal("head_too_large", "a request head is at most 16 KiB")
    refusal = _line_ends(region, complete=end >= 0)
    if refusal is not None or end < 0:
        return refusal
    lines = region[:-4].split(b"\r\n")
    start = _REQUEST_LINE.match(lines[0])
    if start is None:
        return Refusal("bad_request", "the first line is METHOD TARGET HTTP/1.1")
    method, target, minor = start[1], start[2], start[3]
    if minor == b"0" and not (method == b"CONNECT" and form == "proxy"):
        return Refusal("bad_request", "only HTTP/1.1 is spoken here")
    if len(lines) - 1 > MAX_FIELDS:
        return Refusal("head_too_large", "a request has at most 100 fields")
    fields = _fields(lines[1:])
    if isinstance(fields, Refusal):
        return fields
    if form == "tunnel":
        place: _Place | Refusal = _tunnel_target(method, target)
    else:
        place = _connect_target(target) if method == b"CONNECT" else _absolute_target(target)
    if isinstance(place, Refusal):
        return place
    refusal = _host(fields, place, missing_is_fine=minor == b"0", form=form)
    if refusal is not None:
        return refusal
    framing = _framing(fields, connect=place.how == "connect" and form == "proxy")
    if isinstance(framing, Refusal):
        return framing
    connection = _connection(fields, form)
    if isinstance(connection, Refusal):
        return connection
    return Head(
        method=method.decode("ascii"),
        how=place.how,
        endpoint=place.endpoint,
        target=place.target,
        fields=fields,
        body=framing[0],
        length=framing[1],
        keep_alive=connection,
        size=len(region),
        expects=any(name == b"expect" and value.lower() == b"100-continue" for name, value in fields),
    )


class Front:
    """Reads the requests of one connection.

    Args:
        decide: the policy, asked once for each request of the proxy form.
        form: see `parse`.

    Attributes:
        closed: nothing more will be read: a refusal, a CONNECT, or a request that was to be the last.
        rest: the bytes behind a CONNECT head; they belong to the tunnel and were not looked at.

    """

    def __init__(self, decide: Callable[[Ask], Verdict] | None = None, form: Form = "proxy") -> None:
        if (decide is None) == (form == "proxy"):
            raise TypeError("the proxy form needs a policy, and the tunnel form is judged by its caller")
        self._decide = decide
        self._form: Form = form
        self._data = bytearray()
        self._body: Framing | None = None
        self._last = False
        self._partial = 0
        self.closed = False
        self.rest = b""

    @property
    def idle(self) -> bool:
        """Whether no request has begun."""
        return self._body is None and not self._data

    def feed(self, data: bytes) -> list[Event]:
        """Take what was received; returns what it means, in order."""
        if self.closed:
            return []
        self._data += data
        events: list[Event] = []
        while not self.closed and (self._take_body(events) if self._body is not None else self._take_head(events)):
            pass
        return events

    def _take_head(self, events: list[Event]) -> bool:
        if not self._data or (len(self._data) < HEAD_BYTES and not self._changed()):
            return False
        head = parse(bytes(self._data[: HEAD_BYTES + 1]), form=self._form)
        if head is None:
            return False
        self._partial = 0
        if isinstance(head, Refusal):
            self._refuse(events, Verdict(allow=False, reason=head.reason, rule=None, detail=head.detail), None)  # type: ignore[arg-type]
            return False
        del self._data[: head.size]
        verdict = None
        if self._decide is not None and head.endpoint is not None:
            verdict = self._decide(Ask(head.endpoint, head.how))
            if not verdict.allow:
                self._refuse(events, verdict, head.endpoint)
                return False
        events.append(Request(head, verdict))
        if head.how == "connect" and self._form == "proxy":
            self.closed = True
            self.rest = bytes(self._data)
            self._data.clear()
            return False
        self._last = not head.keep_alive
        self._body = Framing(head.body, head.length)
        return True

    def _changed(self) -> bool:
        """Whether a new line came since the last look: one parse for each line, not for each byte."""
        seen, self._partial = self._partial, len(self._data)
        return any(self._data.find(byte, max(0, seen - 1)) >= 0 for byte in (b"\n", b"\r", b"\0"))

    def _take_body(self, events: list[Event]) -> bool:
        body = self._body
        if body is None:
            return False
        data = body.take(self._data)
        if isinstance(data, Refusal):
            self._refuse(events, Verdict(allow=False, reason="smuggling", rule=None, detail=data.detail), None)
            return False
        if data:
            events.append(Body(data))
        if not body.complete:
            return False
        events.append(End())
        self._body = None
        if self._last:
            self.closed = True
            self._data.clear()
        return not self.closed

    def _refuse(self, events: list[Event], verdict: Verdict, endpoint: Endpoint | None) -> None:
        self.closed = True
        self._data.clear()
        events.append(Refused(verdict, endpoint))


class _Place(msgspec.Struct, frozen=True):
    how: How
    endpoint: Endpoint | None
    target: bytes


def _line_ends(region: bytes, *, complete: bool) -> Refusal | None:
    """Refuse a CR or LF that is not part of CRLF, and NUL; a last CR may still get its LF."""
    pairs = region.count(b"\r\n")
    open_end = not complete and region.endswith(b"\r")
    if region.count(b"\n") != pairs or region.count(b"\r") - open_end != pairs or b"\0" in region:
        return Refusal("bad_request", "lines end with CR LF, and no other line end and no NUL stands in a head")
    return None


def _fields(lines: list[bytes]) -> Fields | Refusal:
    fields: list[tuple[bytes, bytes]] = []
    for line in lines:
        match = _FIELD.match(line)
        if match is None:
            return Refusal("bad_request", "a field is NAME: VALUE on one line, without a space before the colon")
        fields.append((match[1].lower(), match[2].rstrip(b" \t")))
    return tuple(fields)


def _connect_target(target: bytes) -> _Place | Refusal:
    if re.search(rb"[/?#]", target):
        return Refusal("bad_target", "CONNECT takes host:port, not a URL")
    endpoint = Endpoint.parse(target)
    return endpoint if isinstance(endpoint, Refusal) else _Place("connect", endpoint, b"")


def _absolute_target(target: bytes) -> _Place | Refusal:
    match = _ABSOLUTE.match(target)
    if match is None:
        if b"#" in target and b"://" in target:
            return Refusal("bad_target", "a request target has no fragment")
        if _OPAQUE.match(target):
            return Refusal("bad_scheme", "the scheme is http")
        return Refusal("not_absolute_form", "a proxy takes http://host/path, or CONNECT host:port")
    scheme, authority, rest = match[1].lower(), match[2], match[3]
    if scheme == b"https":
        return Refusal("https_needs_connect", "use CONNECT host:port; this gateway makes no TLS for its clients")
    if scheme != b"http":
        return Refusal("bad_scheme", "the scheme is http")
    endpoint = _authority(authority, 80)
    if isinstance(endpoint, Refusal):
        return endpoint
    if b"\\" in rest:
        return Refusal("bad_target", "a request target has no backslash")
    return _Place("http", endpoint, rest if rest.startswith(b"/") else b"/" + rest)


def _tunnel_target(method: bytes, target: bytes) -> _Place | Refusal:
    if method == b"CONNECT":
        return Refusal("upgrade_denied", "there is no tunnel inside a tunnel")
    if not target.startswith(b"/"):
        if b"://" in target:
            return Refusal("absolute_form_in_tunnel", "inside a tunnel the target is a path")
        return Refusal("bad_target", "inside a tunnel the target is a path")
    if b"#" in target:
        return Refusal("bad_target", "a request target has no fragment")
    if b"\\" in target:
        return Refusal("path_not_canonical", "some servers take a backslash for a slash")
    return _Place("http", None, target)


def _authority(text: bytes, default: int) -> Endpoint | Refusal:
    """Read host[:port] of a target or of a Host field."""
    head, colon, tail = text.rpartition(b":")
    if not colon or text.endswith(b"]"):
        host = Host.parse(text)
        return host if isinstance(host, Refusal) else Endpoint.of(host, default)
    port = parse_port(tail)
    if isinstance(port, Refusal):
        return port
    host = Host.parse(head)
    return host if isinstance(host, Refusal) else Endpoint.of(host, port)


def _host(fields: Fields, place: _Place, *, missing_is_fine: bool, form: Form) -> Refusal | None:
    values = [value for name, value in fields if name.replace(b"_", b"-") == b"host"]
    if len(values) > 1:
        return Refusal("duplicate_host", "a request has one Host field")
    if form == "tunnel":
        return None  # judged with the tunnel's own host by the caller
    if not values:
        return None if missing_is_fine else Refusal("duplicate_host", "a request has one Host field")
    if _authority(values[0], 443 if place.how == "connect" else 80) != place.endpoint:
        return Refusal("host_mismatch", "Host must name the same host and port as the target")
    return None


def _framing(fields: Fields, *, connect: bool) -> tuple[BodyKind, int] | Refusal:
    found = [(name, value) for name, value in fields if name.replace(b"_", b"-") in _FRAMING]
    if not found:
        return "none", 0
    if len(found) > 1 or connect or found[0][0] not in _FRAMING:
        return Refusal("smuggling", "a body has one length: one Content-Length, or one Transfer-Encoding, not both")
    name, value = found[0]
    if name == b"content-length":
        if _DIGITS.match(value):
            return "length", int(value)
        return Refusal("smuggling", "Content-Length is decimal digits")
    if value == b"chunked":
        return "chunked", 0
    return Refusal("smuggling", "Transfer-Encoding is chunked and nothing else")


def _connection(fields: Fields, form: Form) -> bool | Refusal:
    """Refuse fields that steer; returns whether the connection may be kept."""
    keep = True
    for name, value in fields:
        plain = name.replace(b"_", b"-")
        if steers(plain):
            return Refusal("forbidden_header", "a field may not choose the upstream, the path or the method")
        if plain in {b"connection", b"proxy-connection"}:
            for option in value.lower().split(b","):
                token = option.strip(b" \t")
                if token in _UPGRADES and form == "tunnel" and plain == b"connection":
                    continue  # upgrades are judged with the endpoint's rules
                if token not in {b"close", b"keep-alive"}:
                    return Refusal("forbidden_header", "Connection is close or keep-alive")
                keep = keep and token != b"close"
        if name == b"expect" and value.lower() != b"100-continue":
            return Refusal("bad_request", "Expect is 100-continue")
    return keep
