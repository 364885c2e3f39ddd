"""One reading of one request: JSON that two parsers could read in two ways is refused before any reads it.

Rule 1: every byte of an object is accounted for by its keys and values. A duplicate key is dropped by the decoder and
        leaves bytes over; so do white space and an escaped key, which our guest never writes.
Rule 2: a request is {"id":n,"op":"name","args":{...}}, in this order and spelling. Nothing is guessed from key case.
Rule 3: what fails here is a protocol violation (the run is killed); a wrong type in well-formed arguments is not, and
        is answered by the operation's own decoder.

RFC 8259 section 4 leaves duplicate names to the reader; six Python parsers keep the last one silently.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from lockgate.contract.errors import GuestProtocolError

MAX_DEPTH: Final = 16
MAX_OP: Final = 64  # bytes of an operation's name
MAX_ID: Final = 2**53
_FRAME: Final = len(b'{"id":,"op":,"args":}')
_PREFIX: Final = b'{"id":'
_BRACE: Final = ord("{")
_NESTED: Final = frozenset(b"{[")


class _Envelope(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    id: msgspec.Raw
    op: msgspec.Raw
    args: msgspec.Raw


_envelope: Final = msgspec.json.Decoder(_Envelope)
_integer: Final = msgspec.json.Decoder(int)
_text: Final = msgspec.json.Decoder(str)
_object: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array: Final = msgspec.json.Decoder(list[msgspec.Raw])
_any: Final = msgspec.json.Decoder(Any)


def _refuse(why: str) -> GuestProtocolError:
    return GuestProtocolError(why, next_step="the run is killed; see its audit rows")


def decode_request(body: bytes) -> tuple[int, str, bytes]:
    """Return (id, operation, JSON of the arguments object) of one frame body.

    Raises:
        GuestProtocolError: not exactly one well-formed request; the text holds nothing of the body.

    """
    try:
        envelope = _envelope.decode(body)
        args = bytes(envelope.args)
        if len(envelope.id) + len(envelope.op) + len(args) + _FRAME != len(body) or not body.startswith(_PREFIX):
            raise _refuse("a request has duplicate keys, white space or another order of keys")
        number = _integer.decode(envelope.id)
        op = _text.decode(envelope.op)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise _refuse("a request is not of the form {id, op, args}") from None
    if not 0 < number <= MAX_ID:
        raise _refuse("a request id is out of range")
    # Names are ASCII without escapes, so the bytes on the wire are the name and nothing else.
    if len(envelope.op) != len(op) + 2 or not 0 < len(op) <= MAX_OP or not op.isascii() or not op.isprintable():
        raise _refuse("an operation name is empty, too long or not plain ASCII")
    if not args.startswith(b"{"):
        raise _refuse("the arguments are not an object")
    check_unique_keys(args)
    return number, op, args


def check_unique_keys(raw: bytes) -> None:
    """Refuse JSON that has duplicate keys, white space, escaped keys, lone surrogates or too deep nesting.

    Raises:
        GuestProtocolError: it has.

    """
    try:
        _any.decode(raw)  # the whole is well-formed, strings included: the accounting below reads only the skeleton
        if raw[:1] in (b"{", b"["):
            _account(raw, 0)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise _refuse("the arguments are not well-formed JSON") from None


def _account(raw: bytes | msgspec.Raw, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise _refuse(f"the arguments are nested deeper than {MAX_DEPTH}")
    if memoryview(raw)[0] == _BRACE:
        # Two braces; per pair two quotes and a colon; a comma between pairs.
        pairs = _object.decode(raw)
        values = list(pairs.values())
        expected = 1 + sum(map(len, values)) + sum(len(key.encode()) + 4 for key in pairs) if pairs else 2
        what = "an object has duplicate keys, white space or escaped keys"
    else:
        values = _array.decode(raw)
        expected = 1 + sum(map(len, values)) + len(values) if values else 2
        what = "an array holds white space"
    if expected != len(raw):
        raise _refuse(what)
    for value in values:
        if memoryview(value)[0] in _NESTED:
            _account(value, depth + 1)
