"""C5: every row names user, agent and run, and no text can keep a row from being written."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockgate.audit import rows
from lockgate.audit.rows import ROW_BYTES, Row, argument_hash, clip, decode, encode, stamp

WHO = {"user": "u1", "agent": "support", "run": "run_1"}


def row(**fields: Any) -> Row:
    return Row(**{"phase": "denied", **WHO, **fields})


@pytest.mark.parametrize("missing", ["user", "agent", "run"])
def test_a_row_that_names_nobody_is_refused_where_it_is_made_and_where_it_is_read(missing: str) -> None:
    with pytest.raises(ValueError, match="user, agent and run"):
        row(**{missing: ""})
    with pytest.raises(TypeError):
        Row(phase="denied", **{name: value for name, value in WHO.items() if name != missing})  # type: ignore[arg-type]
    body = json.loads(stamp(encode(row()), "s-1", 1.0, 2.0))
    for changed in ({**body, missing: ""}, {**body, missing: None}, {k: v for k, v in body.items() if k != missing}):
        with pytest.raises(msgspec.ValidationError):
            decode(json.dumps(changed).encode())


def test_every_field_comes_back() -> None:
    full: dict[str, Any] = {
        "phase": "outcome", "tenant": "t1", "via": "code", "rung": "container", "shared_kernel": True,
        "weakness": "emulated",
        "operation": "refund", "effect": "write", "verdict": "allow", "rule": "refund.amount.at_most",
        "path": "/amount", "reason": "amount 900 <= 5000", "visible": "busy", "scope_hash": "a" * 64,
        "args_hash": "b" * 64, "args": {"order_id": "ord_1"}, "idempotency_key": "c" * 64, "grant_id": "g1",
        "approver": "p1", "lease_id": "jti-1", "status": "ok", "result_bytes": 12, "truncated": 3, "duration": 0.25,
        "ref": "s-1", "detail": {"exit_code": 0, "killed_by": None, "ok": True},
    }  # fmt: skip
    full |= WHO
    assert set(full) == set(Row.__struct_fields__), "a new field belongs into this test"
    back = decode(stamp(encode(Row(**full)), "abcdef012345-7", 12.5, 3.25))
    assert {name: getattr(back, name) for name in full} == full
    assert (back.id, back.source, back.number, back.at, back.mono) == ("abcdef012345-7", "abcdef012345", 7, 12.5, 3.25)
    assert rows.unstored(back) == Row(**full)
    assert rows.unstored(back, phase="unknown").phase == "unknown"


def test_the_id_stands_first_in_the_stored_bytes() -> None:
    assert stamp(encode(row()), "src-1", 1.0, 2.0).startswith(b'{"id":"src-1",')


@pytest.mark.parametrize(
    "fields",
    [
        {"operation": "x" * 1_000_000},
        {"operation": "\x00" * 1_000_000},
        {"operation": "\ud800get_order"},
        {"reason": "\U0001f600" * 100_000},
        {"args": {"k" * 100_000: "v" * 100_000}},
        {"args": {str(n): "v" * 1000 for n in range(1000)}},
        {"args": {"deep": [[["x" * 100_000]]]}},
        {"args": {"odd": object()}},
        {"detail": {str(n): "v" * 1000 for n in range(1000)}},
        dict.fromkeys(("operation", "reason", "rule", "path", "status", "tenant", "scope_hash"), "\x01" * 70000),
    ],
    ids=lambda fields: "+".join(fields)[:20],
)
def test_hostile_text_is_clipped_and_said_so_never_refused(fields: dict[str, Any]) -> None:
    body = encode(row(**fields))
    assert len(body) <= ROW_BYTES
    back = decode(stamp(body, "s-1", 1.0, 2.0))
    assert (back.user, back.agent, back.run) == ("u1", "support", "run_1")
    assert back.detail["clipped"] is True


def test_the_worst_row_still_fits() -> None:
    worst = "\x01" * 10_000  # six bytes of JSON a character
    texts = [f.name for f in msgspec.structs.fields(Row) if f.name not in {"phase", "via", "effect", "verdict"}]
    fields: dict[str, Any] = {
        name: worst for name in texts if name not in {"args", "detail", "shared_kernel", "result_bytes", "truncated"}
    }
    fields["duration"] = 1.0
    many = {f"{n:05d}{worst}": worst for n in range(100)}
    assert len(encode(Row(**{"phase": "denied", **fields, "args": many, "detail": many}))) <= ROW_BYTES


def test_an_ordinary_row_is_not_touched() -> None:
    assert "clipped" not in decode(stamp(encode(row(reason="x" * 5000)), "s-1", 1.0, 2.0)).detail


@given(st.text(alphabet=st.characters(exclude_categories=()), max_size=600), st.integers(16, 300))
def test_clipped_text_is_short_and_encodable(text: str, limit: int) -> None:
    cut = clip(text, limit)
    assert len(cut) <= limit
    cut.encode()
    if text.isascii() and len(text) <= limit:
        assert cut == text


def test_the_argument_hash_needs_the_key_and_the_operation() -> None:
    base = argument_hash(b"k" * 32, "refund", b'{"amount":1}')
    assert len(base) == 64
    others = {
        argument_hash(b"j" * 32, "refund", b'{"amount":1}'),
        argument_hash(b"k" * 32, "credit", b'{"amount":1}'),
        argument_hash(b"k" * 32, "refund", b'{"amount":2}'),
    }
    assert base not in others
    assert len(others) == 3
