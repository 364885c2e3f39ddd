"""One reading of one request: JSON that two parsers could read in two ways is refused before anything acts on it.

Rule 1: every byte is accounted for. What decodes and encodes to the same bytes again has no duplicate key, no white
        space and no second spelling; anything else is counted: the length of an object is the sum of its keys and
        values, and a duplicate key, which every decoder drops silently, leaves bytes over.
Rule 2: a request is {"id":n,"op":"name","args":{...}}, in this order and spelling. Nothing is guessed from key case.
Rule 3: what fails here is a protocol violation (the run is killed); a wrong type in well-formed arguments is not, and
        is answered by the operation's own decoder.

RFC 8259 section 4 leaves duplicate names to the reader; six Python parsers keep the last one silently.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from lockgate.contract.errors import GuestProtocolError

MAX_DEPTH: Final = 64
MAX_OP: Final = 64  # characters of an operation's name
MAX_ID: Final = 2**53
_BRACE: Final = ord("{")
_NESTED: Final = frozenset(b"{[")
_KNOWN: Final = 1024  # names that need no second look; a bound, since names come from hostile code
_plain: Final[set[str]] = set()
_SHALLOW: Final = 2 * MAX_DEPTH  # bytes that cannot nest deeper


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    id: Annotated[int, msgspec.Meta(ge=1, le=MAX_ID)]
    op: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_OP)]
    args: dict[str, Any]


_request: Final = msgspec.json.Decoder(_Request).decode
_any: Final = msgspec.json.Decoder(Any).decode
_object: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_array: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode
_encode: Final = msgspec.json.Encoder().encode
_MALFORMED: Final = (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError)


def _refuse(why: str) -> GuestProtocolError:
    return GuestProtocolError(why, next_step="the run is killed; see its audit rows")


def decode_request(body: bytes) -> tuple[int, str, bytes]:
    """Return (id, operation, JSON of the arguments object) of one frame body.

    Raises:
        GuestProtocolError: not exactly one well-formed request; the text holds nothing of the body.

    """
    try:
        request = _request(body)
        if (len(body) > _SHALLOW and _deep(body)) or _encode(request) != body:
            _account(body, 0)
            if not body.startswith(b'{"id":%d,"op":"' % request.id):
                raise _refuse("a request has another order of keys")
    except _MALFORMED:
        raise _refuse("a request is not of the form {id, op, args}") from None
    op = request.op
    if op not in _plain:
        if not op.isascii() or not op.isprintable() or "{" in op:
            raise _refuse("an operation's name is not plain ASCII")
        if len(_plain) < _KNOWN:
            _plain.add(op)
    return request.id, op, body[body.index(b"{", 1) : -1]  # the second brace: there is none in a name


def check_unique_keys(raw: bytes) -> None:
    """Refuse JSON that has duplicate keys, white space, escaped keys, lone surrogates or too deep nesting.

    Raises:
        GuestProtocolError: it has.

    """
    try:
        found = _any(raw)
        if (len(raw) > _SHALLOW and _deep(raw)) or _encode(found) != raw:
            _account(raw, 0)
    except _MALFORMED:
        raise _refuse("JSON is not well-formed") from None


def _deep(raw: bytes) -> bool:
    """Whether there are brackets enough to nest too deep; then they are followed."""
    return raw.count(b"{") + raw.count(b"[") > MAX_DEPTH


def _account(raw: bytes | msgspec.Raw, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise _refuse(f"values are nested deeper than {MAX_DEPTH}")
    first = memoryview(raw)[0]
    if first == _BRACE:
        # Two braces; per pair two quotes and a colon; a comma between pairs.
        pairs = _object(raw)
        values = list(pairs.values())
        expected = 1 + sum(map(len, values)) + sum(len(key.encode()) + 4 for key in pairs) if pairs else 2
        what = "an object has duplicate keys, white space or escaped keys"
    elif first in _NESTED:
        values = _array(raw)
        expected = 1 + sum(map(len, values)) + len(values) if values else 2
        what = "an array holds white space"
    else:
        if depth == 0 and raw != bytes(raw).strip(b" \t\r\n"):
            raise _refuse("a value has white space around it")
        return
    if expected != len(raw):
        raise _refuse(what)
    for value in values:
        if memoryview(value)[0] in _NESTED:
            _account(value, depth + 1)
