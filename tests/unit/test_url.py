"""`Url` and `UrlRule`: one reading, whoever reads (E2, E6)."""

from __future__ import annotations

from urllib.parse import urlsplit

import ada_url
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockgate.contract.errors import ConfigError
from lockgate.policy.host import Refusal
from lockgate.policy.url import Url, UrlRule, canonical_path, first_refusal, holds_url


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"https://a.example", "https://a.example/"),
        (b"HTTPS://A.Example:443/X?y=Z#w", "https://a.example/X?y=Z#w"),
        (b"https://a.example.:8443/p", "https://a.example:8443/p"),
        (b"https://[::1]:444/", "https://[::1]:444/"),
        (b"https://a.example/?", "https://a.example/?"),
    ],
)
def test_a_good_url_is_canonical(raw: bytes, text: str) -> None:
    url = Url.parse(raw)
    assert isinstance(url, Url)
    assert url.text == text
    assert Url.parse(text.encode()) == url


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"http://a.example/", "bad_scheme"),
        (b"javascript:alert(1)", "bad_scheme"),
        (b"//a.example/", "bad_url"),
        (b"/a", "bad_url"),
        (b"https:/a.example/", "bad_url"),
        (b"https:a.example", "bad_url"),
        (b"https:///a.example", "bad_url"),
        (b"https:////a.example", "bad_url"),
        (b"https://a.example//b", "bad_url"),
        (b"https://a.example\\@b.example/", "bad_url"),
        (b"https://a.example@b.example/", "userinfo"),
        (b"https://a.example:443@b.example/", "userinfo"),
        (b"https://a.example:0443/", "bad_url"),
        (b"https://a.example:/", "bad_url"),
        (b"https://a.example:+443/", "bad_url"),
        (b"https://2130706433/", "bad_url"),
        (b"https://a.ex\tample/", "bad_url"),
        ("https://ex\u00e4mple/".encode(), "bad_url"),
        (b"https://a%2eexample/", "bad_url"),
        (b"https://a.example/" + b"x" * 2048, "bad_url"),
        (b"https://a.example/{x}", "bad_url"),
        (b"https://xn--zz--zzz.example/", "bad_url"),
    ],
)
def test_a_doubtful_url_is_refused(raw: bytes, reason: str) -> None:
    refusal = Url.parse(raw)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == reason


RULE = UrlRule.parse("https://hooks.partner.example/in/*", query=("v",))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://hooks.partner.example/in/a", None),
        ("https://hooks.partner.example/in", None),
        ("https://hooks.partner.example/in/a?v=1", None),
        ("https://hooks.partner.example/inside", "arg_path_not_allowed"),
        ("https://hooks.partner.example/in/../out", "path_not_canonical"),
        ("https://hooks.partner.example/in/%2e%2e/out", "path_not_canonical"),
        ("https://hooks.partner.example/in/a%2fb", "path_not_canonical"),
        ("https://hooks.partner.example/in/%252e", "path_not_canonical"),
        ("https://hooks.partner.example/in/a;b", "path_not_canonical"),
        ("https://hooks.partner.example/in/a#x", "fragment"),
        ("https://hooks.partner.example/in/a?w=1", "arg_query_not_declared"),
        ("https://hooks.partner.example/in/a?v=1;w=1", "arg_query_not_declared"),
        ("https://hooks.partner.example/in/a?", "arg_query_not_declared"),
        ("https://hooks.partner.example/in/a?v=https://b.example", "nested_url"),
        ("https://hooks.partner.example/in/a?v=https%3A%2F%2Fb.example", "nested_url"),
        ("https://hooks.partner.example/in/a?v=%2568ttps%253A%252F%252Fb.example", "nested_url"),
        ("https://hooks.partner.example:444/in/a", "arg_host_not_allowed"),
        ("https://xhooks.partner.example/in/a", "arg_host_not_allowed"),
        ("https://hooks.partner.example.b.example/in/a", "arg_host_not_allowed"),
    ],
)
def test_a_rule_is_exact(url: str, reason: str | None) -> None:
    parsed = Url.parse(url.encode())
    assert isinstance(parsed, Url)
    refusal = first_refusal(parsed, (RULE,))
    assert (None if refusal is None else refusal.reason) == reason


@pytest.mark.parametrize(
    "text", ["", "*", "a b", "https://a.example/x?y", "https://a.example/a*b", "ftp://a.example", "a.example/*/b"]
)
def test_a_bad_rule_is_a_load_error(text: str) -> None:
    with pytest.raises(ConfigError):
        UrlRule.parse(text)


def test_nested_urls_are_seen_after_two_decodings() -> None:
    assert holds_url("x=//b.example")
    assert holds_url("x=%2f%2fb.example")
    assert holds_url("x=%252f%252fb.example")
    assert holds_url("javascript:alert(1)")
    assert not holds_url("x=10:30&y=a/b")
    # WHATWG: a special scheme leads elsewhere without slashes, and TAB, CR and LF inside a URL do not count.
    for text in ("u=http:b.example", "u=HTTPS%3Ab.example", "u=/%09/b.example", "u=ht%0atps:/b.example", "u=ws:x"):
        assert holds_url(text), text
    for text in ("q=graph:x", "at=urn:isbn", "q=https", "q=http+status", "t=a%09b"):
        assert not holds_url(text), text
    assert canonical_path("/a/b.c~d_e-f")
    assert not canonical_path("/a/./b")


_bits = st.sampled_from(
    [
        "https",
        "HTTPS",
        "http",
        ":",
        "//",
        "/",
        "\\",
        "@",
        "a.example",
        "b.example",
        ":443",
        ":0443",
        ":80",
        "[::1]",
        "127.1",
        "#",
        "?",
        "%2f",
        "%00",
        "\t",
        "\r\n",
        " ",
        "0x7f.1",
        "..",
        ".",
        ";",
        "&",
        "x=1",
        "[",
        "]",
        "\u3002",
        "\uff0f",
        "xn--bcher-kva",
    ]
)


@given(
    st.one_of(
        st.lists(_bits, max_size=10).map("".join), st.lists(_bits, max_size=8).map(lambda x: "https://" + "".join(x))
    )
)
@settings(max_examples=2000, deadline=None)
def test_no_accepted_url_leads_elsewhere(text: str) -> None:
    """E2: both other parsers name our host and port, from the raw bytes as from the canonical ones."""
    url = Url.parse(text.encode())
    if not isinstance(url, Url):
        return
    for form in (text, url.text):
        split = urlsplit(form)
        other = ada_url.URL(form)
        assert (split.hostname or "").removesuffix(".") == url.host.text.strip("[]")
        assert (split.port or 443) == url.port
        assert other.hostname.removesuffix(".") == url.host.text
        assert int(other.port or 443) == url.port
        assert not other.username
        assert not split.username


@pytest.mark.parametrize(
    "part",
    [
        "%c0%ae%c0%ae", "%c0%af", "%e0%80%af", "%f0%80%80%ae", "%c1%9c", "%ff", "%ed%a0%80", "a%ef%bc%8fb",
        "%ef%bc%8e%ef%bc%8e", "%e2%80%a5", "%ef%bc%85%32%65", "x%0d%0aHost:b", "x%09", "x%1f", "x%7F", "x%00",
    ],
)  # fmt: skip
def test_what_some_servers_decode_to_a_separator_is_no_canonical_path(part: str) -> None:
    """E6: overlong UTF-8, compatibility forms and control characters; ordinary escapes stay."""
    assert not canonical_path(f"/v1/{part}/x")


@pytest.mark.parametrize("part", ["%C3%BC", "a%20b", "%e6%97%a5%e6%9c%ac", "%F0%9F%98%80", "a%2Bb", "%28x%29"])
def test_an_escaped_name_is_a_canonical_path(part: str) -> None:
    assert canonical_path(f"/v1/{part}/x")
