"""One canonical absolute URL, and rules for it.

Rule 1: `Url.parse(bytes)` is the only way to a `Url`; odd bytes are refused before any parser runs, and two other
        parsers must then read the same scheme, host and port.
Rule 2: the authority is `Host` and port of `policy.host`; userinfo does not exist.
Rule 3: a rule (`UrlRule`) names hosts exactly, prefixes on a segment boundary and query names one by one. What is not
        declared is refused.
Rule 4: pure. Redirects are new URLs and pass the same rules again.
"""

from __future__ import annotations

import re
import unicodedata
from importlib import import_module
from typing import Any, Final, final
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

import msgspec

from lockgate.contract.errors import ConfigError
from lockgate.policy.host import Endpoint, Host, Refusal, _Frozen, _set, parse_port

DEFAULT_PORTS: Final = {"https": 443, "http": 80, "wss": 443, "ws": 80}
MAX_BYTES: Final = 2048

# Visible ASCII without the characters that parsers drop, mend or take for a delimiter.
_BYTES: Final = re.compile(rb"[\x21\x23-\x3b\x3d\x3f-\x5b\x5d\x5f\x61-\x7a\x7e]{1,2048}\Z")
_SCHEME: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*):")
_SHAPE: Final = re.compile(r"//(?P<authority>[^/?#]+)(?P<path>/[^?#]*)?(?:\?(?P<query>[^#]*))?(?:\#(?P<fragment>.*))?")
# Not an escape, an escaped separator, dot or percent sign, an escaped control character.
_ENCODED: Final = re.compile(r"%(?![0-9A-Fa-f]{2})|%(?:2[eEfF]|5[cC]|25|[01][0-9A-Fa-f]|7[fF])")
# What servers that fold compatibility characters read as a separator, a dot or a percent sign.
_FOLDED: Final = re.compile(r"[./\\%]")
# The special schemes of WHATWG URL lead elsewhere without a slash; browsers drop TAB, CR and LF inside a URL.
_NESTED: Final = re.compile(
    rb"(?i)(?:[a-z][a-z0-9+.-]{1,19}:[/\\]|(?<![:/])[/\\]{2}"
    rb"|\b(?:data|javascript|vbscript|blob|mailto|https?|wss?|ftp):)"
)
_DELETED: Final = b"\t\r\n"


@final
class Url(_Frozen):
    """A canonical URL.

    Attributes:
        text: scheme and host in lower case, the default port left out, the rest byte for byte.
        scheme: in lower case.
        host: canonical.
        port: the explicit or the scheme's own.
        path: begins with a slash.
        query: without the question mark; None when there is none.
        fragment: without the hash sign; None when there is none.

    """

    __slots__ = ("fragment", "host", "path", "port", "query", "scheme", "text")
    text: str
    scheme: str
    host: Host
    port: int
    path: str
    query: str | None
    fragment: str | None

    @classmethod
    def parse(cls, raw: bytes, schemes: tuple[str, ...] = ("https",)) -> Url | Refusal:
        """Read an absolute URL (RFC 3986, as WHATWG URL also reads it), or say why it is none.

        Args:
            raw: 1 to 2,048 bytes.
            schemes: allowed ones, in lower case; each must have a default port.

        """
        if not _BYTES.match(raw):
            return Refusal("bad_url", 'a URL is 1 to 2048 visible ASCII bytes without \\ " < > ^ { | } and backtick')
        text = raw.decode("ascii")
        head = _SCHEME.match(text)
        if head is None:
            return Refusal("bad_url", "a URL begins with its scheme")
        scheme = head[1].lower()
        if scheme not in schemes:
            return Refusal("bad_scheme", "the scheme is not declared")
        match = _SHAPE.fullmatch(text, head.end())
        if match is None or (match["path"] or "").startswith("//"):
            return Refusal("bad_url", "a URL has exactly two slashes and then its host")
        authority = match["authority"]
        if "@" in authority:
            return Refusal("userinfo", "a URL holds no user name")
        endpoint = _authority(authority, scheme)
        if isinstance(endpoint, Refusal):
            return Refusal("bad_url", endpoint.detail)
        self = object.__new__(cls)
        _set(self, "scheme", scheme)
        _set(self, "host", endpoint.host)
        _set(self, "port", endpoint.port)
        _set(self, "path", match["path"] or "/")
        _set(self, "query", match["query"])
        _set(self, "fragment", match["fragment"])
        shown = endpoint.host.text if endpoint.port == DEFAULT_PORTS[scheme] else str(endpoint)
        tail = "" if self.query is None else f"?{self.query}"
        tail += "" if self.fragment is None else f"#{self.fragment}"
        _set(self, "text", f"{scheme}://{shown}{self.path}{tail}")
        return self if _others_agree(text, self) else _DISAGREE

    @property
    def endpoint(self) -> Endpoint:
        """Host and port."""
        return Endpoint.of(self.host, self.port)

    @property
    def query_names(self) -> tuple[str, ...]:
        """The names in the query, undecoded, in their order; some servers end a pair at a semicolon, too."""
        if not self.query:
            return ()
        return tuple(part.partition("=")[0] for part in re.split(r"[&;]", self.query))

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Url {self.text}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Url) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


_DISAGREE: Final = Refusal("parser_disagreement", "two URL parsers read different destinations from it")


def HttpsUrl(raw: bytes) -> Url | Refusal:  # noqa: N802
    """Read an https URL: `Url.parse` with its default scheme."""
    return Url.parse(raw)


def canonical_path(path: str) -> bool:
    """Whether a path means the same to every server: no dot segment, empty segment, encoded slash, dot or percent.

    Nor anything that some servers decode to one of these: overlong UTF-8 (RFC 3629 section 3), compatibility forms.
    """
    if _ENCODED.search(path) or "//" in path or "\\" in path or ";" in path:
        return False
    if "%" in path and not _plain_octets(path):
        return False
    return not any(segment in {".", ".."} for segment in path.split("/"))


def _plain_octets(path: str) -> bool:
    try:
        others = [one for one in unquote_to_bytes(path).decode("utf-8") if not one.isascii()]
    except UnicodeDecodeError:
        return False
    return not any(_FOLDED.search(unicodedata.normalize("NFKC", one)) for one in others)


def holds_url(text: str) -> bool:
    """Whether another absolute or protocol-relative URL is inside, as written or after one or two decodings."""
    data = text.encode("ascii", "replace")
    for _ in range(3):
        if _NESTED.search(data.translate(None, _DELETED)):
            return True
        decoded = unquote_to_bytes(data.replace(b"+", b" "))
        if decoded == data:
            return False
        data = decoded
    return False


class UrlRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which URLs an argument, a redirect or a link may be.

    Attributes:
        host: canonical text of the host, exact.
        port: exact.
        prefix: path prefix that begins with a slash and ends on a segment boundary.
        query: declared query names.
        scheme: exact.

    """

    host: str
    port: int = 443
    prefix: str = "/"
    query: tuple[str, ...] = ()
    scheme: str = "https"

    @classmethod
    def parse(cls, text: str, *, query: tuple[str, ...] = ()) -> UrlRule:
        """Read `host`, `host:port`, `https://host/prefix/` or `https://host/prefix/*`.

        Raises:
            ConfigError: it is none of these, or its host is not canonical.

        """
        raw = text if "://" in text else f"https://{text}"
        whole, star, rest = raw.partition("*")
        url = Url.parse(whole.encode(), ("https", "http"))
        if rest or (star and not whole.endswith("/")):
            url = Refusal("bad_url", "a star stands at the end, after a slash")
        elif isinstance(url, Url) and (
            url.query is not None or url.fragment is not None or not canonical_path(url.path)
        ):
            url = Refusal("bad_url", "a prefix has a canonical path, no query and no fragment")
        if isinstance(url, Refusal):
            raise ConfigError(
                f"{text!r} is no URL rule: {url.detail}", next_step="write host:port or https://host/prefix/*"
            )
        return cls(url.host.text, url.port, url.path, tuple(query), url.scheme)

    def refuse(self, url: Url) -> Refusal | None:
        """Say why `url` is outside this rule, or None. The first failure of the documented order is the reason."""
        if url.scheme != self.scheme or url.host.text != self.host or url.port != self.port:
            return Refusal("arg_host_not_allowed", "its host is not declared")
        if url.fragment is not None:
            return Refusal("fragment", "a fragment is not declared")
        if not canonical_path(url.path):
            return Refusal("path_not_canonical", "its path can be read in two ways")
        if not under(url.path, self.prefix):
            return Refusal("arg_path_not_allowed", "its path is outside the declared prefix")
        if holds_url(url.path) or (url.query is not None and holds_url(url.query)):
            return Refusal("nested_url", "another URL is inside it")
        if url.query is not None and not (url.query and set(url.query_names) <= set(self.query)):
            return Refusal("arg_query_not_declared", "a query name is not declared")
        return None


def first_refusal(url: Url, rules: tuple[UrlRule, ...]) -> Refusal | None:
    """Return None when one rule takes `url`; else the refusal of the rule that came furthest."""
    order = ("arg_host_not_allowed", "fragment", "path_not_canonical", "arg_path_not_allowed", "nested_url")
    furthest = Refusal("arg_host_not_allowed", "its host is not declared")
    for rule in rules:
        refusal = rule.refuse(url)
        if refusal is None:
            return None
        if furthest.reason in order and (
            refusal.reason not in order or order.index(refusal.reason) > order.index(furthest.reason)
        ):
            furthest = refusal
    return furthest


def under(path: str, prefix: str) -> bool:
    """Whether `path` is `prefix` or below it, on a segment boundary."""
    base = prefix.removesuffix("/")
    return path == base or path.startswith(base + "/")


def _authority(text: str, scheme: str) -> Endpoint | Refusal:
    head, colon, tail = text.rpartition(":")
    if not colon or text.endswith("]"):
        host = Host.parse(text.encode("ascii"))
        return host if isinstance(host, Refusal) else Endpoint.of(host, DEFAULT_PORTS[scheme])
    port = parse_port(tail.encode("ascii"))
    if isinstance(port, Refusal):
        return port
    host = Host.parse(head.encode("ascii"))
    return host if isinstance(host, Refusal) else Endpoint.of(host, port)


def _load_ada() -> Any:
    try:
        return import_module("ada_url").URL
    except ImportError:
        return None


_ada: Final[Any] = _load_ada()


def _others_agree(raw: str, url: Url) -> bool:
    try:
        split: SplitResult = urlsplit(raw)
        port = split.port
    except ValueError:
        return False
    host = (split.hostname or "").removesuffix(".")
    ours = url.host.text.strip("[]")
    if split.scheme != url.scheme or (port or DEFAULT_PORTS[url.scheme]) != url.port or split.username is not None:
        return False
    if url.host.kind == "ipv6":
        again = Host.parse(f"[{host}]".encode())
        if not isinstance(again, Host) or again != url.host:
            return False
    elif host != ours:
        return False
    if _ada is None:
        return True
    try:
        other = _ada(url.text)
    except ValueError:
        return False
    return (
        other.protocol == f"{url.scheme}:"
        and other.hostname.removesuffix(".") == url.host.text
        and int(other.port or DEFAULT_PORTS[url.scheme]) == url.port
        and not other.username
        and not other.password
    )
