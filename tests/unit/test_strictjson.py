"""One reading of one request: what two parsers could read in two ways is refused (issue kinds of C3, X4; RFC 8259)."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockgate.contract import strictjson
from lockgate.contract.errors import GuestProtocolError
from lockgate.contract.strictjson import MAX_DEPTH, check_unique_keys, decode_request

LONG = "x" * 300  # beyond the length below which depth is not looked at


def compact(value: object) -> bytes:
    """What the guest writes."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def test_a_request_of_the_guest_is_read() -> None:
    args = {"order_id": "ord_1", "amount": 500, "text": 'quote " back \\ line \n é 日本 😀', "list": [1, {"a": None}]}
    body = compact({"id": 7, "op": "refund", "args": args})
    number, op, raw = decode_request(body)
    assert (number, op, json.loads(raw)) == (7, "refund", args)
    assert raw in body


def test_escapes_that_another_json_writer_uses_are_read_too() -> None:
    body = b'{"id":1,"op":"f","args":{"text":"\\u00e9\\/\\u0041","n":1e2,"big":18446744073709551616}}'
    assert decode_request(body) == (1, "f", body[24:-1])


def test_the_arguments_are_found_where_they_begin_and_nowhere_before() -> None:
    """A name that looks like arguments is a violation; one that looks a little like them is just a name."""
    assert decode_request(compact({"id": 1, "op": 'f","args":[', "args": {"b": 2}})) == (1, 'f","args":[', b'{"b":2}')
    with pytest.raises(GuestProtocolError):
        decode_request(compact({"id": 1, "op": 'f","args":{"a":1},"', "args": {"b": 2}}))


def test_names_are_remembered_up_to_a_bound() -> None:
    for number in range(1, 3000):
        assert decode_request(compact({"id": number, "op": f"op_{number}", "args": {}}))[1] == f"op_{number}"
    assert len(strictjson._plain) <= 1024


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"{}",
        b'{"id":1,"op":"f"}',
        b'{"id":1,"args":{},"op":"f"}',  # order
        b'{"op":"f","id":1,"args":{}}',
        b'{"ID":1,"op":"f","args":{}}',  # case
        b'{"id":1,"OP":"f","args":{}}',
        '{"id":1,"op":"f","param\u017f":{}}'.encode(),  # folds to s
        '{"id":1,"op":"f","args\u212a":{}}'.encode(),
        b'{"id":1,"op":"f","args":{},"x":1}',
        b'{"id":1,"id":2,"op":"f","args":{}}',
        b'{"id":2,"op":"g","op":"f","args":{}}',
        b'{"id":1,"op":"f","args":{"a":1},"args":{}}',
        b'{"\\u0069d":1,"op":"f","args":{}}',  # escaped key
        b'{"id":1,"op":"f","args":{} }',
        b' {"id":1,"op":"f","args":{}}',
        b'{"id":1,"op":"f","args":{}}\n',
        b'{"id":1,"op":"f","args":{}}{}',  # trailing bytes
        b'{"id":1, "op":"f","args":{}}',
        b'\xef\xbb\xbf{"id":1,"op":"f","args":{}}',  # BOM
        '{"id":1,"op":"f","args":{}}'.encode("utf-16"),
        b'{"id":1.0,"op":"f","args":{}}',
        b'{"id":1e0,"op":"f","args":{}}',
        b'{"id":true,"op":"f","args":{}}',
        b'{"id":"1","op":"f","args":{}}',
        b'{"id":0,"op":"f","args":{}}',
        b'{"id":-1,"op":"f","args":{}}',
        b'{"id":01,"op":"f","args":{}}',
        b'{"id":18446744073709551616,"op":"f","args":{}}',
        b'{"id":9007199254740993,"op":"f","args":{}}',
        b'{"id":1,"op":"","args":{}}',
        b'{"id":1,"op":"%b","args":{}}' % (b"f" * 65),
        b'{"id":1,"op":"f\\u0000","args":{}}',
        '{"id":1,"op":"f\u00e9","args":{}}'.encode(),
        b'{"id":1,"op":"f\\n","args":{}}',
        b'{"id":1,"op":null,"args":{}}',
        b'{"id":1,"op":"f","args":[]}',
        b'{"id":1,"op":"f","args":null}',
        b'{"id":1,"op":"f","args":"{}"}',
        b'{"id":1,"ok":{}}',  # shaped like a reply
        b'{"id":1,"op":"f","args":{"a":NaN}}',
        b'{"id":1,"op":"f","args":{"a":Infinity}}',
        b'{"id":1,"op":"f","args":{"a":-Infinity}}',
        b'{"id":1,"op":"f","args":{"a":"\\ud800"}}',  # lone surrogate
        b'{"id":1,"op":"f","args":{"a":"\xed\xa0\x80"}}',  # the same in bytes
        b'{"id":1,"op":"f","args":{"a":"\xff"}}',
        b'{"id":1,"op":"f","args":{"a":"\x00"}}',  # raw NUL
        b'{"id":1,"op":"f","args":{"a":1,}}',
        b"{'id':1,'op':'f','args':{}}",
        b'{"id":1,"op":"f","args":{"a":01}}',
        b'{"id":1,"op":"f","args":{"a":.5}}',
        b'{"id":1,"op":"f","args":{/**/}}',
        b'{"id":1,"op":"f","args":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
        b'{"id":1,"op":"f","args":{"a":' + b'{"a":' * 400 + b"1" + b"}" * 400 + b"}}",
    ],
)
def test_a_body_that_is_not_one_plain_request_is_a_violation(body: bytes) -> None:
    with pytest.raises(GuestProtocolError) as caught:
        decode_request(body)
    assert caught.value.__cause__ is None
    assert "f" * 20 not in str(caught.value), "an error may not quote the body"


@pytest.mark.parametrize("filler", ["", LONG], ids=["short", "long"])
@pytest.mark.parametrize(
    "args",
    [
        '{"a":1,"a":2}',
        '{"a":1,"a":1}',
        '{"a":1,"\\u0061":2}',
        '{"x":{"a":1,"a":2}}',
        '{"x":[{"a":1,"a":2}]}',
        '{"x":[[],[{"y":{"a":null,"b":1,"a":null}}]]}',
        '{"a" :1}',
        '{"a":[1, 2]}',
        '{"a":[ ]}',
        '{"a":{ }}',
        '{"\\u0062":1}',
        '{"é":1,"é":2}',
    ],
)
def test_duplicate_keys_are_refused_at_every_depth(args: str, filler: str) -> None:
    """msgspec itself keeps the last one silently: the check is what refuses (negative control)."""
    body = f'{{"id":1,"op":"f","args":{args[:-1]},"z":"{filler}"}}}}'.encode()
    assert isinstance(msgspec.json.decode(body), dict)
    with pytest.raises(GuestProtocolError):
        decode_request(body)


def test_depth_is_bounded_where_it_says() -> None:
    def nested(depth: int) -> bytes:
        return b"[" * depth + b"]" * depth

    check_unique_keys(nested(MAX_DEPTH + 1))
    with pytest.raises(GuestProtocolError, match="deeper"):
        check_unique_keys(nested(MAX_DEPTH + 2))
    check_unique_keys(b"[" + b"[]," * 500 + b"[]]")  # many brackets are not deep


@pytest.mark.parametrize("raw", [b" 1", b"1 ", b"\n", b"", b'"a" ', b"1 2"])
def test_white_space_around_a_value_is_refused(raw: bytes) -> None:
    with pytest.raises(GuestProtocolError):
        check_unique_keys(raw)


def oracle(raw: bytes) -> bool:
    """Whether the standard parser, made to look, finds no duplicate key."""

    def pairs(found: list[tuple[str, object]]) -> dict[str, object]:
        if len({key for key, _ in found}) != len(found):
            raise ValueError
        return dict(found)

    try:
        json.loads(raw, object_pairs_hook=pairs)
    except ValueError:
        return False
    return True


keys = st.sampled_from(["a", "b", "é", "ab", '"', "a\\", ""])
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.text(max_size=6)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.lists(st.tuples(keys, inner), max_size=4).map(tuple),
    max_leaves=12,
)


def write(value: object) -> str:
    """Encode; a tuple is an object given as pairs, which may repeat a key."""
    if isinstance(value, tuple):
        return "{" + ",".join(f"{json.dumps(key, ensure_ascii=False)}:{write(item)}" for key, item in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(write, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


@settings(max_examples=400, deadline=None)
@given(values)
def test_the_accounting_agrees_with_an_oracle_that_looks(value: object) -> None:
    raw = write(value).encode()
    plain = b'\\"' not in raw and b"\\\\" not in raw  # an escaped key is refused beside duplicates
    try:
        check_unique_keys(raw)
    except GuestProtocolError:
        assert not oracle(raw) or not plain
    else:
        assert oracle(raw)
