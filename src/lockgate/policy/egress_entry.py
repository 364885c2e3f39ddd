"""One entry of the egress list: read, or refused with a reason.

Rule 1: the checks stand in a fixed order: blank, star alone, URL, port; place of the star, grammar. The first failure
        gives the reason.
Rule 2: an internationalised name is converted once, here; at request time there are A-labels only.
Rule 3: loopback, link-local and metadata addresses cannot be listed at all.
"""

from __future__ import annotations

import ipaddress
import re
from importlib import import_module
from typing import Any, Final, NamedTuple, NoReturn

from lockgate.contract.errors import ConfigError
from lockgate.policy import addresses
from lockgate.policy.egress_reasons import LoadReason
from lockgate.policy.host import Host, Refusal, parse_port

_SHOWN: Final = 80
_PRIVATE_NETS: Final = tuple(
    ipaddress.ip_network(net) for net in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")
)
# Names that lead to the machine itself or to its cloud's metadata, whatever a resolver says.
_NEVER: Final = addresses.METADATA_NAMES
# Special-use and customary private domains (RFC 6762, RFC 8375, the ICANN resolution on .internal).
PRIVATE_TLDS: Final = ("internal", "local", "localdomain", "lan", "intranet", "private", "corp", "home", "home.arpa")
_IDN: Final = "an internationalised name needs the extra: pip install 'lockgate[idn]', or write the xn-- form"


class EgressConfigError(ConfigError):
    """An entry of the `[egress]` table is wrong or too broad; `reason` is a stable class, `entry` what was written."""

    def __init__(self, message: str, *, next_step: str, reason: LoadReason, entry: str = "") -> None:
        super().__init__(message, next_step=next_step)
        self.reason: LoadReason = reason
        self.entry = entry


class Entry(NamedTuple):
    """One parsed entry: `host` is None for a wildcard over `parent`; port 0 = every port (denials alone)."""

    text: str
    host: Host | None
    parent: str
    port: int


def parse_entry(text: str, *, port_needed: bool = True) -> Entry:
    """Read `host:port` or `*.host:port` of the list.

    Raises:
        EgressConfigError: it is neither.

    """
    if not text.strip():
        refuse("empty_entry", "an entry is blank", "remove it; an empty list denies all", text)
    host, colon, port = text.rpartition(":")
    if text.endswith("]") or not colon:
        host, colon, port = text, "", ""
    if host.strip("*.") == "" and "*" in host:
        refuse("too_broad", f"{quoted(text)} takes in everything", "name the hosts", text)
    if re.search(r"[/\\@?#]", text):
        refuse("not_host_port", f"{quoted(text)} is a URL or part of one", "write host:port alone", text)
    if not port and (port_needed or colon):
        refuse("port_required", f"{quoted(text)} has no port", "write host:443", text)
    star, name = False, host
    if "*" in host:
        if not host.startswith("*.") or "*" in host[2:]:
            refuse("wildcard_position", f"{quoted(text)}: a star is the whole first label", "write *.host:port", text)
        star, name = True, host[2:]
    found = Host.parse(_to_ascii(text, name))
    if isinstance(found, Refusal):
        if ":" in name and "[" not in name:
            refuse("bad_host", f"{quoted(text)}: an IPv6 address stands in brackets", "write [2001:db8::1]:443", text)
        reason: LoadReason = "ip_literal_or_ambiguous" if found.reason == "ip_literal_or_ambiguous" else "bad_host"
        refuse(reason, f"{quoted(text)}: {found.detail}", "write the plain name", text)
    number = 0
    if port:
        given = parse_port(port.encode("utf-8", "replace"))
        if isinstance(given, Refusal):
            refuse("bad_port", f"{quoted(text)}: {given.detail}", "write host:443", text)
        number = given
    if star:
        if found.kind != "name":
            refuse("wildcard_position", f"{quoted(text)}: an address has no labels", "write the address alone", text)
        return Entry(text, None, found.text, number)
    return Entry(text, found, "", number)


def _to_ascii(text: str, name: str) -> bytes:
    if name.isascii():
        return name.encode()
    try:
        idna: Any = import_module("idna")
    except ImportError:
        refuse("idn_needs_extra", f"{quoted(text)}: {_IDN}", "install the extra, or write the xn-- form", text)
    try:
        labels = [one.encode() if one.isascii() else idna.alabel(one) for one in name.split(".")]
    except (idna.IDNAError, UnicodeError):
        refuse("bad_host", f"{quoted(text)} is no internationalised name (RFC 5891)", "write its xn-- form", text)
    return b".".join(labels)


def check_public(text: str, host: Host) -> None:
    """Refuse addresses and names of private domains.

    Raises:
        EgressConfigError: it is one.

    """
    if host.kind != "name" or under(host.text, PRIVATE_TLDS):
        refuse(
            "private_needs_flag",
            f"{quoted(text)} is an address or a private name",
            f'list it as private = [{{ host = "{text}", addresses = [...] }}]',
            text,
        )


def under(name: str, parents: tuple[str, ...]) -> bool:
    """Whether `name` is one of `parents` or below it."""
    return any(name == parent or name.endswith("." + parent) for parent in parents)


def pin(text: str, written: str) -> bytes:
    """Return a pinned address, packed.

    Raises:
        EgressConfigError: it is none, or one that cannot be listed.

    """
    try:
        address = ipaddress.ip_address(written)
    except ValueError:
        refuse("bad_host", f"{quoted(text)} pins {quoted(written)}, which is no address", "write an IP address", text)
    packed = address.packed
    refused = addresses.refused(packed)
    if refused is None:
        return packed
    inside = any(address.version == net.version and address in net for net in _PRIVATE_NETS)
    if not inside or packed in addresses.METADATA:
        what = f"{quoted(text)} pins {quoted(written)} ({refused.why})"
        refuse("never_listable", what, "such addresses cannot be listed", text)
    return packed


def check_listable(text: str, host: Host) -> None:
    """Refuse names of this machine and of a cloud's metadata service.

    Raises:
        EgressConfigError: it is one.

    """
    if host.text in _NEVER or host.text == "localhost" or host.text.endswith(".localhost"):
        refuse("never_listable", f"{quoted(text)} names this machine or its metadata service", "leave it out", text)


def quoted(text: str) -> str:
    """Return what was written as an error may show it: bounded and without a character that acts on a terminal."""
    shown = text[:_SHOWN] + ("…" if len(text) > _SHOWN else "")
    return '"' + "".join(c if c.isprintable() else "?" for c in shown) + '"'


def refuse(reason: LoadReason, message: str, step: str, entry: str = "") -> NoReturn:
    """Raise the error of an entry."""
    raise EgressConfigError(message, next_step=step, reason=reason, entry=entry)
