"""What the name of an argument or of a result says, in whatever spelling it is written.

Rule 1: case, digits, underscores and words that were run together do not change what a name says: `tenantId`,
        `TENANT_ID`, `tenantid` and `tenant2` all say tenant.
Rule 2: a name outside ASCII can look like any other, so it is refused and not read.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Final

_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_IDENTITY: Final = ("user", "agent", "run", "principal")
_LEADS: Final = frozenset(
    {"the", "as", "for", "my", "our", "current", "acting", "effective", "real", "caller", "calling", "impersonated"}
)
_SUFFIXES: Final = frozenset(
    {"", "id", "ids", "name", "names", "key", "ref", "uuid", "uid", "guid", "slug", "handle", "login"}
)
_CREDENTIAL: Final = (
    "token", "credential", "secret", "password", "passwd", "passphrase", "apikey", "privatekey", "secretkey",
)  # fmt: skip
_CREDENTIALS: Final = frozenset({"bearer", "jwt", "pwd"})
_KEYS: Final = frozenset({"api", "private", "secret", "signing", "access", "encryption"})
_URLISH: Final = ("url", "uri", "href", "callback", "webhook", "endpoint")
_URL_WORDS: Final = frozenset({"url", "urls", "uri", "uris", "href", "hrefs"})
# A field that only names or describes a URL, such as `url_id`, sends nothing anywhere.
_ABOUT: Final = frozenset({"id", "ids", "name", "names", "key", "ref", "kind", "type", "hash", "status", "count"})
_PATHISH: Final = frozenset({"path", "file", "filename", "filepath", "dir", "directory", "folder"})


def words(name: str) -> list[str]:
    """Return the words of a name in lower case, without digits."""
    return [word.lower() for word in _WORD.findall(name)]


def says_identity(name: str) -> bool:
    """Whether a name says whose call it is: a tenant anywhere, or nothing but a user, an agent or a run."""
    joined = "".join(words(name))
    if "tenant" in joined.replace("lieutenant", "") or joined in {"onbehalfof", "impersonate"}:
        return True
    parts = words(name)
    while parts and parts[0] in _LEADS:
        parts = parts[1:]
    while len(parts) > 1 and parts[-1] in _SUFFIXES:
        parts = parts[:-1]
    whose = parts[0] if len(parts) == 1 else joined if len(parts) == 2 else ""
    return any(whose.startswith(word) and whose.removeprefix(word) in _SUFFIXES for word in _IDENTITY)


def says_credential(name: str) -> bool:
    """Whether a name says that a credential is in it."""
    parts = words(name)
    if any(part.removesuffix("s").endswith(_CREDENTIAL) or part in _CREDENTIALS for part in parts):
        return True
    return any(first in _KEYS and then in {"key", "keys"} for first, then in pairwise(parts))


def says_url(name: str) -> bool:
    """Whether a name says that its value is a destination (E6)."""
    parts = words(name) or [""]
    if parts[-1] in _ABOUT:
        return False
    last = {parts[-1], "".join(parts[-2:])}
    return any(word.removesuffix("s").endswith(_URLISH) for word in last) or not _URL_WORDS.isdisjoint(parts)


def says_path(name: str) -> bool:
    """Whether a name says that its value is a place in a file system."""
    parts = words(name) or [""]
    return not _PATHISH.isdisjoint(word.removesuffix("s") for word in (parts[-1], "".join(parts[-2:])))
