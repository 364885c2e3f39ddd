"""One canonical name for a place on the network.

Rule 1: `Host.parse(bytes)` is the only way to a `Host`; `Endpoint.parse(bytes)` and `Endpoint.of` the only ways to an
        `Endpoint`. Neither can be subclassed, copied into something else, unpickled or changed.
Rule 2: a name is either canonical or refused with a reason. Nothing is repaired, so that no two programs can read two
        destinations from it: odd bytes are refused before any parser runs.
Rule 3: equality is equality of the canonical bytes, and only those are ever sent on (letter case carries no data).
Rule 4: pure. No resolver is asked here; a name that was accepted says nothing about where it leads.
"""

from __future__ import annotations

import ipaddress
import re
import unicodedata
from typing import Final, Literal, NoReturn, final

import msgspec

Kind = Literal["name", "ipv4", "ipv6"]
HostReason = Literal["bad_host", "ip_literal_or_ambiguous", "bad_port", "bad_target"]

_GRAPHIC: Final = re.compile(rb"[\x21-\x7e]{1,255}\Z")
_LABEL: Final = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\Z")
_NUMERIC: Final = re.compile(r"(?:[0-9]+|0x[0-9a-f]*)\Z")
_OCTET: Final = r"(?:0|[1-9][0-9]{0,2})"
_IPV4: Final = re.compile(rf"{_OCTET}(?:\.{_OCTET}){{3}}\Z")
_PORT: Final = re.compile(r"[1-9][0-9]{0,4}\Z")
_NAME_BYTES: Final = 253
_MAX_PORT: Final = 65535


class Refusal(msgspec.Struct, frozen=True):
    """Why bytes are no destination. `reason` is a stable class, `detail` a fixed sentence without the input."""

    reason: str
    detail: str

    def __bool__(self) -> NoReturn:
        """Refuse truth tests: both answers would read as permission somewhere."""
        raise TypeError("use isinstance(..., Refusal): a refusal is neither true nor false")


class _Sealed(type):
    """Makes `Class(...)` a TypeError: construction goes through the parsers."""

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        del args, kwargs
        raise TypeError(f"{cls.__name__} has no constructor; use {cls.__name__}.parse(bytes)")


class _Frozen(metaclass=_Sealed):
    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        del value
        raise AttributeError(f"{type(self).__name__}.{name} cannot be changed")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be removed")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        del protocol
        raise TypeError(f"a {type(self).__name__} crosses a process as text and is parsed again")

    def __copy__(self) -> _Frozen:
        return self

    def __deepcopy__(self, memo: object) -> _Frozen:
        del memo
        return self


_set = object.__setattr__


@final
class Host(_Frozen):
    """A canonical host: a DNS name in lower-case ASCII, or an IP literal (IPv6 in brackets in `text`).

    Attributes:
        text: what is compared, shown and sent; the A-label for an internationalised name.
        kind: "name", "ipv4" or "ipv6".

    """

    __slots__ = ("kind", "text")
    text: str
    kind: Kind

    @classmethod
    def parse(cls, raw: bytes) -> Host | Refusal:
        """Read one host (RFC 1123 names, RFC 3986 IP literals), or say why it is none.

        Args:
            raw: 1 to 255 bytes, each 0x21 to 0x7E; an IPv6 address stands in brackets.

        """
        if not _GRAPHIC.match(raw):
            return Refusal("bad_host", "a host is 1 to 255 visible ASCII bytes")
        text = raw.decode("ascii").lower()
        if text[0] == "[":
            return _parse_ipv6(text)
        text = text.removesuffix(".")
        if not 1 <= len(text) <= _NAME_BYTES or not _NAME.match(text):
            return Refusal("bad_host", "a host name is dot-separated labels of letters, digits, _ and inner hyphens")
        labels = text.split(".")
        if _NUMERIC.match(labels[-1]):
            if _IPV4.match(text) and all(int(part) <= 255 for part in labels):
                return _make_host(text, "ipv4")
            return Refusal(
                "ip_literal_or_ambiguous", "a name that ends in a number is an address in four octets or none"
            )
        if "xn--" in text and not all(_real_punycode(label) for label in labels if label.startswith("xn--")):
            return Refusal("bad_host", "an xn-- label must be the Punycode of a lower-case, normalised name")
        return _make_host(text, "name")

    @property
    def packed(self) -> bytes | None:
        """The 4 or 16 bytes of an IP literal; None for a name."""
        if self.kind == "name":
            return None
        return ipaddress.ip_address(self.text.strip("[]")).packed

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of a name, leftmost first; an IP literal is one label."""
        return tuple(self.text.split(".")) if self.kind == "name" else (self.text,)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Host {self.text}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Host) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


@final
class Endpoint(_Frozen):
    """A canonical host and a port."""

    __slots__ = ("host", "port")
    host: Host
    port: int

    @classmethod
    def parse(cls, raw: bytes) -> Endpoint | Refusal:
        """Read `host:port` (RFC 9112 authority-form), or say why it is none."""
        head, colon, tail = raw.rpartition(b":")
        if not colon or not head or tail.endswith(b"]"):
            return Refusal("bad_target", "write host:port, with an IPv6 address in brackets")
        port = parse_port(tail)
        if isinstance(port, Refusal):
            return port
        host = Host.parse(head)
        return host if isinstance(host, Refusal) else cls.of(host, port)

    @classmethod
    def of(cls, host: Host, port: int) -> Endpoint:
        """Join a parsed host and a port number (1 to 65535).

        Raises:
            TypeError: `host` was not parsed.
            ValueError: `port` is out of range.

        """
        if type(host) is not Host:
            raise TypeError("an Endpoint is made of a parsed Host")
        if type(port) is not int or not 1 <= port <= _MAX_PORT:
            raise ValueError("a port is 1 to 65535")
        self = object.__new__(cls)
        _set(self, "host", host)
        _set(self, "port", port)
        return self

    def __str__(self) -> str:
        return f"{self.host.text}:{self.port}"

    def __repr__(self) -> str:
        return f"<Endpoint {self}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Endpoint) and self.port == other.port and self.host == other.host

    def __hash__(self) -> int:
        return hash((self.host.text, self.port))


def parse_port(raw: bytes) -> int | Refusal:
    """Read a port by regular expression: `int()` would take a sign, spaces, underscores and other digits."""
    text = raw.decode("latin-1")
    if _PORT.match(text) and int(text) <= _MAX_PORT:
        return int(text)
    return Refusal("bad_port", "a port is 1 to 65535 in decimal digits without a leading zero")


def _make_host(text: str, kind: Kind) -> Host:
    self = object.__new__(Host)
    _set(self, "text", text)
    _set(self, "kind", kind)
    return self


def _parse_ipv6(text: str) -> Host | Refusal:
    if text[-1] != "]" or "%" in text:
        return Refusal("bad_host", "brackets hold an IPv6 address without a zone")
    try:
        value = int(ipaddress.IPv6Address(text[1:-1]))
    except ValueError:
        return Refusal("bad_host", "brackets hold an IPv6 address without a zone")
    return _make_host(f"[{ipv6_text(value)}]", "ipv6")


def ipv6_text(value: int) -> str:
    """Write an IPv6 address as WHATWG URLs do (RFC 5952 without the dotted tail), the same on every Python."""
    groups = [f"{value >> shift & 0xFFFF:x}" for shift in range(112, -1, -16)]
    zeros = max(re.finditer(r"(?:\b0\b ?){2,}", " ".join(groups)), key=lambda m: len(m.group().split()), default=None)
    if zeros is None:
        return ":".join(groups)
    before = len(zeros.string[: zeros.start()].split())
    after = before + len(zeros.group().split())
    return ":".join(groups[:before]) + "::" + ":".join(groups[after:])


def _real_punycode(label: str) -> bool:
    """Whether an xn-- label is the one spelling of a non-ASCII, lower-case, normalised label (RFC 5891 section 5.4)."""
    try:
        decoded = label[4:].encode("ascii").decode("punycode")
        if decoded.isascii() or decoded.encode("punycode").decode("ascii") != label[4:]:
            return False
    except (UnicodeError, OverflowError, ValueError):
        return False
    # Two letters are valid though folding changes them (RFC 5892 section 2.6).
    folded = decoded.replace("\u00df", "").replace("\u03c2", "")
    return folded == unicodedata.normalize("NFKC", folded).casefold() and decoded.isprintable()
