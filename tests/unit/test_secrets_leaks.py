"""Results are searched for live leases and their encodings (C6; report 14: base64 beats redaction)."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockgate.secrets import Lease
from lockgate.secrets.leaks import needles, scan

SECRET = 'sk-synthetic/+7"é\\q=9f8e7d6c'
PEM = "-----BEGIN PRIVATE KEY-----\nc3ludGhldGljLW5vdC1hLXJlYWwta2V5LWF0LWFsbA==\n-----END PRIVATE KEY-----\n"
RAW = SECRET.encode()

WAYS: dict[str, bytes] = {
    "raw": RAW,
    "base64 aligned": base64.b64encode(RAW),
    "base64 shifted by 1": base64.b64encode(b"x" + RAW + b"tail"),
    "base64 shifted by 2": base64.b64encode(b"xy" + RAW + b"tail"),
    "base64url": base64.urlsafe_b64encode(b"x" + RAW),
    "hex": RAW.hex().encode(),
    "HEX": RAW.hex().upper().encode(),
    "percent": quote(SECRET, safe="").encode(),
    "percent, lower case": quote(SECRET, safe="").replace("%2F", "%2f").replace("%22", "%22").encode().lower()
    if SECRET.islower()
    else "".join(f"%{byte:02x}" for byte in RAW).encode(),
    "json": json.dumps({"a": SECRET}).encode(),
    "json, not ASCII": json.dumps(SECRET, ensure_ascii=False).encode(),
    "json, slash escaped": json.dumps(SECRET).replace("/", "\\/").encode(),
    "json, all escaped": "".join(f"\\u{ord(char):04x}" for char in SECRET).encode(),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_live_lease_is_found_in_each_encoding(way: str) -> None:
    data = b'{"note":"before ' + WAYS[way] + b' after"}'
    with Lease(SECRET, purpose="test", ttl=30) as lease:
        assert scan(data)
        assert scan(data, [lease])
    assert not scan(data)  # the negative control: nothing is looked for any more
    assert not scan(data, [lease])


def test_a_line_of_a_key_is_found_without_its_frame() -> None:
    with Lease(PEM, purpose="test", ttl=30) as lease:
        assert scan(b"key: c3ludGhldGljLW5vdC1hLXJlYWwta2V5LWF0LWFsbA==", [lease])
        assert not scan(b"-----BEGIN PRIVATE KEY-----", [lease])


def test_innocent_text_is_not_found() -> None:
    with Lease(SECRET, purpose="test", ttl=30) as lease:
        assert not scan(json.dumps({"order": "ord_4417", "total": 9900}).encode() * 1000, [lease])


@given(
    st.text(min_size=12, max_size=60).filter(lambda t: len(t.strip().encode("utf-8", "replace")) > 12),
    st.binary(max_size=5),
    st.binary(max_size=5),
)
def test_every_alignment_of_base64_is_found(secret: str, before: bytes, after: bytes) -> None:
    raw = secret.encode("utf-8", "surrogatepass").strip()
    if b"\n" in raw or b"\r" in raw or len(raw) < 12:
        return
    found = needles(raw)
    assert any(needle in base64.b64encode(before + raw + after) for needle in found)
    assert any(needle in base64.urlsafe_b64encode(before + raw + after) for needle in found)
    assert any(needle in (before + raw + after) for needle in found)
    assert (
        any(needle in quote_plus(raw.decode("utf-8", "replace"), safe="").encode() for needle in found)
        or b" " in raw
        or b"\xed" in raw
    )
