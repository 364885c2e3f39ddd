"""Cases about the first bytes inside a tunnel.

Rule 1: `Reader` is that of the gateway process; bytes of a client, their pieces and a clock are made up.
Rule 2: the CONNECT comes first: what it may not reach never gets as far as a handshake.
"""

from __future__ import annotations

import re
from typing import Any, Final

from lockgate.corpus import tls
from lockgate.corpus.case import Got, bytes_of, got, listed, raw_of, unescaped
from lockgate.corpus.network import endpoint_of
from lockgate.egress import client_hello
from lockgate.policy.egress import Ask, EgressPolicy
from lockgate.policy.host import Refusal

_NUMBERS: Final = {"a": 1, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "ten": 10, "a few": 3, "single": 1}
_WORD: Final = re.compile(r"(?i)\b(" + "|".join(_NUMBERS) + r")\b(?=\s+(?:single\s+)?(?:bytes?|records?|s\b|seconds?))")
_PACE: Final = re.compile(
    r"(\d+)\s*bytes?\s*(?:per|every|each|/|at a time,? every)\s*([\d.]+)?\s*(ms|milliseconds?|s|sec|seconds?)\b"
)
_STALL: Final = re.compile(
    r"(?i)never|stall|nothing|no bytes|incomplete|half|truncat|stop|partial|hang|silen|wait|cut|paus|delay"
)
_PER_RECORD: Final = re.compile(r"(\d+)\s*bytes?\s*(?:per|in each|each|/)\s*(?:tls\s*)?record")
_PER_WRITE: Final = re.compile(r"(\d+)\s*bytes?\s*(?:per|in each|each|/)\s*(?:tcp\s*)?(?:segment|packet|write|chunk)")
_BYTES: Final = re.compile(r"(?i)bytes|raw|data|payload|hello|first|sent|sends|stream|content|opening|prefix|proto")
_PAUSES: Final = ("delay", "pause", "pace", "stall")
_SIZES: Final = ("size", "bytes_total", "padding", "length", "hello_size", "total")
_HELLO_FACTS: Final = frozenset(
    ("connect", "host", "port", "target", "sni", "sni_hex", "sni_b64", "sni_repr", "extensions", "fragments",
     "alpn", "note", "mode", "name_type", "version", "tls_version", *_SIZES, *_PAUSES)
)  # fmt: skip


def tls_client_hello(policy: EgressPolicy, given: dict[str, Any]) -> Got:
    """The first bytes inside a tunnel, with their pace."""
    place = endpoint_of(given)
    if isinstance(place, Refusal):
        return got(place)
    verdict = policy.decide(Ask(place))
    if not verdict.allow:
        return got(verdict)
    chunks, pause = _chunks(given)
    opened = given.get("intercepted", policy.rules_for(place) is not None)
    reader = client_hello.Reader(place, 0.0, intercepted=bool(opened))
    now = 0.0
    for chunk in chunks:
        now += pause
        answer = reader.feed(chunk, now)
        if answer is not None:
            return got(answer if isinstance(answer, Refusal) else None)
    late = reader.tick(reader.deadline)  # nothing more comes
    return got(late)


def _chunks(given: dict[str, Any]) -> tuple[list[bytes], float]:
    fragments = given.get("fragments", " ".join(f"{one} {given[one]}" for one in _PAUSES if one in given))
    words = _WORD.sub(lambda found: str(_NUMBERS[found[1].lower()]), str(fragments))
    pace = _PACE.search(words)
    pause = 0.0
    if pace is not None:
        pause = float(pace[2] or 1) / (1000 if pace[3][0] == "m" else 1)
    data = _first_bytes(given)
    if data is None:
        message = _message(given)
        message = bytes((_octet(given, "handshake_type", message[0]), *message[1:]))
        data = b"".join(tls.records(message, _record_size(fragments, words, len(message))))
        data = bytes((_octet(given, "record_type", data[0]), *data[1:]))
    if pace is None and _STALL.search(words):
        sent = re.search(r"(\d+)\s*bytes?", words)
        data = data[: int(sent[1]) if sent else len(data) // 2]
    write = _PER_WRITE.search(words)
    step = int(pace[1]) if pace is not None else int(write[1]) if write is not None else len(data)
    step = step or len(data) or 1
    return [data[at : at + step] for at in range(0, len(data), step)], pause


def _first_bytes(given: dict[str, Any]) -> bytes | None:
    """Return what the client sends when that is written out; whatever else has no meaning here is it, too."""
    for key, value in given.items():
        name = re.sub(r"_(?:hex|b64|base64)\Z", "", key)
        if (
            key in _HELLO_FACTS
            or not isinstance(value, str)
            or (name in {"protocol", "proto"} and value[:3].lower() == "tls")
        ):
            continue
        if "sni" not in given or _BYTES.search(name) or name == "not_tls":
            return raw_of(given, name)
    return b"SSH-2.0-x\r\n" if given.get("not_tls") is True or given.get("tls") is False else None


def _record_size(fragments: Any, words: str, size: int) -> int:
    """Return how many bytes of the handshake a record holds; a number alone is that of the records."""
    each = _PER_RECORD.search(words)
    if each is not None:
        return max(int(each[1]), 1)
    count = re.search(r"(\d+)\s*(?:tls\s*)?(?:records|fragments|parts)", words)
    if count is not None or (isinstance(fragments, int) and not isinstance(fragments, bool)):
        return max(-(-size // max(int(count[1]) if count is not None else int(fragments), 1)), 1)
    return 1 if "record" in words else 2**14


def _message(given: dict[str, Any]) -> bytes:
    names: list[bytes] | None = None
    if any(f"sni{suffix}" in given for suffix in ("_hex", "_b64")):
        names = [raw_of({**given, "sni_hex": one}, "sni") or b"" for one in listed(given.get("sni_hex"))]
    elif given.get("sni", given.get("sni_repr")) is not None:
        names = [bytes_of(unescaped(str(one))) for one in listed(given.get("sni", given.get("sni_repr")))]
    hiding = [name for name in ("ech", "esni") if given.get(name)]
    return tls.client_hello(
        names,
        [*listed(given.get("extensions", [])), *hiding],
        padding=_size(given),
        name_type=_octet(given, "name_type", 0),
    )


def _octet(given: dict[str, Any], name: str, default: int) -> int:
    value = given.get(name, default)
    return value & 0xFF if isinstance(value, int) else default


def _size(given: dict[str, Any]) -> int:
    for name in _SIZES:
        value = given.get(name)
        found = re.match(r"(\d+)\s*(KiB|KB|k)?", str(value)) if value is not None else None
        if found is not None:
            return int(found[1]) * (1024 if found[2] else 1)
    return 0
