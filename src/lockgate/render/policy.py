"""Which URL may live, where it may have come from, and what is said of the ones that may not.

Rule 1: a URL lives when it is under an operator's rule, or is byte for byte one that was known before the model spoke:
        from the operator, from the user's own message, or from a result field that was declared URL-safe.
Rule 2: an image loads without a click, so the user's own message does not make one live.
Rule 3: a denial names the host defanged and the sink; never the path, the query or the label (they may be the secret).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from typing import Any, Final, Literal, cast

import msgspec

from lockgate.contract.errors import ConfigError
from lockgate.policy.url import Url, UrlRule
from lockgate.render.bounds import MAX_BYTES
from lockgate.render.visible import WIDE_PUNCTUATION

Sink = Literal[
    "markdown", "html", "text", "terminal", "log", "slack", "discord", "teams", "email", "github", "jira", "csv",
    "json", "svg", "xml", "ipynb", "office", "latex", "header", "yaml",
]  # fmt: skip
Origin = Literal["operator", "user", "field"]
_ORIGINS: Final = ("operator", "user", "field")
_MESSAGE_URL: Final = re.compile(rf"https://[^\s<>\"'`{WIDE_PUNCTUATION}]+")
_EXACT: Final = re.compile(r"[a-z][a-z0-9+.-]{0,31}:[!#-;=?-\[\]_a-z~]{1,2000}\Z", re.IGNORECASE)
_NEVER: Final = frozenset(
    {"javascript", "vbscript", "data", "blob", "file", "about", "view-source", "filesystem", "jar"}
)


class Denial(msgspec.Struct, frozen=True):
    """Something that would have reached out and does not, for the caller's audit row and alert.

    Attributes:
        reason: stable class, such as "url_not_allowed", "bad_scheme", "cap_images", "canary", "self_check".
        sink: where it would have been shown.
        kind: "link", "image", "markup", "text" or "file".
        host: the destination's host, defanged, or None when there is no canonical one.
        severity: "high", or "critical" for a canary and for a failed self-check.

    """

    reason: str
    sink: str
    kind: Literal["link", "image", "markup", "text", "file"]
    host: str | None = None
    severity: Literal["medium", "high", "critical"] = "high"


class Rendered(msgspec.Struct, frozen=True):
    """What may be shown.

    Attributes:
        text: the safe output; JSON text for sinks whose output is a structure (`data` decodes it).
        denials: in the order they were found.
        truncated: bytes of input that were dropped.
        fell_back: whether it is the plain form, because the rich one was too complex or failed its self-check.

    """

    text: str
    denials: tuple[Denial, ...] = ()
    truncated: int = 0
    fell_back: bool = False

    @property
    def data(self) -> Any:
        """The decoded structure of a sink such as slack or teams."""
        return msgspec.json.decode(self.text)

    @property
    def withheld(self) -> bool:
        """Whether nothing was shown because a canary was inside; the run must be killed."""
        return any(denial.reason == "canary" for denial in self.denials)


class RenderPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The operator's part of the URL policy, and the caps of one message.

    Attributes:
        links: prefix rules for links, such as "https://docs.example.com/*".
        images: prefix rules for images; declare no query there.
        exact: URLs that may live as they are, of any scheme that cannot execute ("mailto:help@example.com").
        canaries: planted values that must never be shown.
        max_images: live images of one message.
        max_urls: distinct live URLs of one message.
        max_run_urls: distinct live URLs of all messages of one run.
        max_bytes: bytes of one message (UTF-8); what is beyond is dropped with a marker.
        check_every: the self-check runs on every n-th message; 1 is every one, 0 is never.

    """

    links: tuple[UrlRule, ...] = ()
    images: tuple[UrlRule, ...] = ()
    exact: tuple[str, ...] = ()
    canaries: tuple[str, ...] = ()
    max_images: int = 3
    max_urls: int = 10
    max_run_urls: int = 64
    max_bytes: int = MAX_BYTES
    check_every: int = 1

    def __post_init__(self) -> None:
        rules: tuple[object, ...] = (*self.links, *self.images)
        if any(type(rule) is not UrlRule for rule in rules):
            raise ConfigError("a URL rule is no UrlRule", next_step="use RenderPolicy.of() for rules written as text")
        for url in self.exact:
            check_exact(url)
        if min(self.max_images, self.max_urls, self.max_run_urls, self.check_every) < 0 or self.max_bytes < 1:
            raise ConfigError("a render cap is negative", next_step="give zero or more; max_bytes at least 1")
        if any(len(canary) < 8 for canary in self.canaries):
            raise ConfigError("a canary is shorter than 8 characters", next_step="plant at least 128 random bits")

    @classmethod
    def of(cls, *, links: Iterable[str] = (), images: Iterable[str] = (), **rest: Any) -> RenderPolicy:
        """Make a policy of rules written as text: `https://host/prefix/*`, `host` or `host:port`.

        Raises:
            ConfigError: a rule or a cap is wrong.

        """
        for name, many in {"links": links, "images": images, **rest}.items():
            if isinstance(many, str):
                raise ConfigError(f"{name} is one text", next_step=f'write a list: {name} = ["..."]')
        return cls(links=tuple(map(_rule, links)), images=tuple(map(_rule, images)), **rest)

    @classmethod
    def load(cls, text: str) -> RenderPolicy:
        """Read the `[render]` table of a TOML file, or the whole file when it has none.

        Raises:
            ConfigError: it is no TOML, has an unknown key or a wrong value.

        """
        try:
            data: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"the policy is no TOML: {error}", next_step="mend the file") from None
        table: Any = data.get("render", data)
        if not isinstance(table, dict):
            raise ConfigError("[render] is no table", next_step="write [render] and keys below it")
        known = set(cls.__struct_fields__)
        for key in table:  # pyright: ignore[reportUnknownVariableType]
            if key not in known:
                raise ConfigError(
                    f"unknown key {key!r} in [render]", next_step="use one of " + ", ".join(sorted(known))
                )
        try:
            return cls.of(**cast("dict[str, Any]", table))
        except (TypeError, AttributeError):
            raise ConfigError(
                "a value in [render] has a wrong type", next_step="lists of text, and whole numbers"
            ) from None


class Provenance:
    """URLs that were known before the model spoke, byte for byte. One per run.

    Args:
        operator: URLs of the operator's configuration.

    """

    __slots__ = ("_known",)

    def __init__(self, operator: Iterable[str] = ()) -> None:
        self._known: dict[str, set[Origin]] = {}
        for url in [operator] if isinstance(operator, str) else operator:
            self.add(url, "operator")

    def add(self, url: str, origin: Origin) -> None:
        """Remember one URL; what is not canonical https ASCII is never live and is not kept.

        Raises:
            ConfigError: `url` is no text, or there is no such origin.

        """
        if not isinstance(url, str) or origin not in _ORIGINS:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                "a known URL is no text, or has no origin", next_step="give text, and one of " + ", ".join(_ORIGINS)
            )
        if isinstance(Url.parse(url.encode("utf-8", "replace")), Url):
            self._known.setdefault(url, set()).add(origin)

    def add_message(self, text: str) -> None:
        """Remember the URLs that stand in the user's own message, trailing punctuation off."""
        for match in _MESSAGE_URL.finditer(text):
            url = match[0].rstrip(".,;:!?*_~|")
            while url.endswith((")", "]")) and url.count(url[-1]) > url.count({")": "(", "]": "["}[url[-1]]):
                url = url[:-1].rstrip(".,;:!?*_~|")
            self.add(url, "user")

    def origins(self, url: str) -> frozenset[Origin]:
        """Return where a URL was known from; empty when it was not."""
        return frozenset(self._known.get(url, ()))

    def __len__(self) -> int:
        return len(self._known)


def check_exact(url: str) -> None:
    """Refuse an operator's exact URL that a program would execute, or that is not plain ASCII.

    Raises:
        ConfigError: with the next step.

    """
    scheme = url.partition(":")[0].lower()
    if not _EXACT.match(url) or scheme in _NEVER or "\\" in url:
        raise ConfigError(f"{url[:80]!r} can never be a live URL", next_step="list https or mailto URLs in plain ASCII")
    if scheme in {"http", "https"} and not isinstance(Url.parse(url.encode(), ("https",)), Url):
        raise ConfigError(f"{url[:80]!r} is no canonical https URL", next_step="write it as https://host/path")


def _rule(text: object) -> UrlRule:
    if not isinstance(text, str):
        raise ConfigError("a URL rule is no text", next_step='write "https://host/prefix/*"')
    rule = UrlRule.parse(text)
    if rule.scheme != "https":
        raise ConfigError(f"{text!r} is not https", next_step="rendered URLs are https")
    return rule
