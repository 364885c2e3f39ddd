"""No accepted destination means another one to any program that could be handed it (E2).

Readers: urllib, http.client, httpx, ada-url, the socket module's own encoding, and uvloop, which cuts names at NUL and
at percent signs. Nothing here asks a resolver: numeric lookups alone.
"""

from __future__ import annotations

import asyncio
import http.client
import socket
import warnings
from urllib.parse import urlsplit

import ada_url
import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockgate.policy.host import Endpoint, Host
from lockgate.policy.url import Url

PIECES = [
    *("a", "api", "example", "xn--", "bcher-kva", "127", "0", "1", "01", "0x7f", "0x", "e", "256", "4294967295"),
    *(".", "..", "-", "_", "[", "]", "::", "::1", "::ffff:", ":", "@", "\\", "/", "?", "#", "%", "%00", "%2e", "%25"),
    *("\t", "\r\n", "\x00", " ", "\u3002", "\uff0e", "\u200b", "\u00ad", "\u212a", "\uff41", "localhost"),
    *("443", ":443", ":80", ":0443", ":+443"),
]
text = st.lists(st.sampled_from(PIECES), min_size=1, max_size=7).map("".join)


@settings(max_examples=250, deadline=None)
@given(text, st.sampled_from(["", ":443", ":8443", ":1"]))
@example("a.example.", ":443")
@example("[::FFFF:1.2.3.4]", ":443")
def test_an_endpoint_is_one_place_to_all(host: str, port: str) -> None:
    found = Endpoint.parse((host + port).encode("utf-8", "surrogatepass"))
    if not isinstance(found, Endpoint):
        return
    shown = str(found)
    assert Endpoint.parse(shown.encode()) == found
    bare = found.host.text.strip("[]")
    connection = http.client.HTTPConnection(shown)
    assert (connection.host, connection.port) == (bare, found.port)
    split = urlsplit(f"//{shown}")
    assert (split.hostname, split.port, split.username) == (bare, found.port, None)
    url = f"https://{shown}/"
    seen = ada_url.URL(url) if _readable(url) else None
    if seen is not None:
        assert (seen.hostname, int(seen.port or 443), seen.username) == (found.host.text, found.port, "")
    try:
        other = httpx.URL(url)
    except httpx.InvalidURL:
        return  # refusing is no other place
    assert (other.raw_host.decode().strip("[]"), other.port or 443) == (bare, found.port)


def _readable(url: str) -> bool:
    try:
        ada_url.URL(url)
    except ValueError:
        return False
    return True


@settings(max_examples=100, deadline=None)
@given(text)
@example("0x7f.1")
@example("127.0.0.1\x00.pages.partner.example")
@example("::ffff:127.0.0.1%x.pages.partner.example")
def test_no_name_is_an_address_to_an_event_loop(host: str) -> None:
    found = Host.parse(host.encode("utf-8", "surrogatepass"))
    if not isinstance(found, Host) or found.kind != "name":
        return
    try:
        encoded = found.text.encode("idna")  # what socket.connect does with text
    except UnicodeError:
        encoded = found.text.encode()
    assert encoded.decode() == found.text
    with pytest.raises(OSError, match=r".*"):
        socket.inet_pton(socket.AF_INET6, found.text)
    with pytest.raises(socket.gaierror):
        socket.getaddrinfo(found.text, 443, flags=socket.AI_NUMERICHOST)


def test_uvloop_reads_no_address_out_of_a_name() -> None:
    """The sheet's own forms are refused before a loop sees them; accepted names are no numbers to it either."""
    uvloop = pytest.importorskip("uvloop")
    hostile = (
        b"127.0.0.1\x00.a.example",
        b"::ffff:127.0.0.1%x.a.example",
        b"0x7f.1",
        b"127.1",
        b"017700000001",
        b"::1",
    )
    assert not any(isinstance(Host.parse(raw), Host) for raw in hostile)

    async def numeric(loop: asyncio.AbstractEventLoop, name: str) -> bool:
        try:
            await loop.getaddrinfo(name, 443, flags=socket.AI_NUMERICHOST)
        except (OSError, UnicodeError):
            return False
        return True

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop = uvloop.new_event_loop()
    try:
        for raw in (b"a.example", b"x127.0.0.1x.example", b"0x7f.1.example", b"e1.example", b"_x.example"):
            found = Host.parse(raw)
            assert isinstance(found, Host)
            assert not loop.run_until_complete(numeric(loop, found.text))
        # Negative control: it does read these, which is why it never gets them.
        assert loop.run_until_complete(numeric(loop, "127.0.0.1"))
    finally:
        loop.close()


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["https://", "https:/", "https:", "HTTPS://", "http://", "//"]),
    text,
    st.sampled_from(["", "/", "/a", "?b"]),
)
def test_a_url_is_one_place_to_all(scheme: str, host: str, tail: str) -> None:
    raw = scheme + host + tail
    found = Url.parse(raw.encode("utf-8", "surrogatepass"))
    if not isinstance(found, Url):
        return
    split = urlsplit(raw)
    assert (split.hostname or "").removesuffix(".") == found.host.text.strip("[]") or found.host.kind == "ipv6"
    assert (split.port or 443) == found.port
    other = httpx.URL(raw)
    assert (
        other.raw_host.decode().strip("[]").removesuffix(".") == found.host.text.strip("[]")
        or found.host.kind == "ipv6"
    )
    assert (other.port or 443) == found.port
    assert not other.userinfo
