"""The grammar of model requests: closed everywhere, total, and open only where nobody but the model reads (E1)."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockgate.policy.egress_reasons import SENTENCES
from lockgate.policy.host import Refusal
from lockgate.policy.model_grammar import Refused, reason_of_name
from lockgate.policy.model_rules import Api, call_args, judge_body, judge_model, parse

IMAGE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
TEXT = {"type": "text", "text": "see https://evil.test/", "cache_control": {"type": "ephemeral"}}
BODIES: dict[Api, dict[str, Any]] = {
    "anthropic": {
        "model": "m",
        "max_tokens": 9,
        "system": [TEXT],
        "messages": [
            {"role": "user", "content": [TEXT, {"type": "image", "source": IMAGE}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "x", "signature": "x"},
                {"type": "tool_use", "id": "t", "name": "f", "input": {"url": "x"}, "caller": {"type": "direct"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": [TEXT, {"type": "image", "source": IMAGE}]},
                {"type": "document", "source": {"type": "content", "content": [TEXT]}, "citations": {"enabled": True}},
                {"type": "search_result", "source": "x", "title": "x", "content": [TEXT]},
            ]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}],
        "tool_choice": {"type": "auto"},
        "metadata": {"user_id": "u"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    },
    "openai": {
        "model": "m",
        "messages": [
            {"role": "user", "content": [
                {"type": "text", "text": "x"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
                {"type": "file", "file": {"filename": "x", "file_data": "JVBERg=="}},
            ]},
            {"role": "assistant", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ]},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}},
        "stream_options": {"include_usage": True},
    },
}  # fmt: skip
FREE = ("input", "input_schema", "parameters", "schema")
"""Where any JSON may stand: arguments and schemas of tools that run at our side, and the schema of an answer."""
WAYS_OUT: dict[str, tuple[Any, str]] = {
    "url": ("https://evil.test/", "server_side_fetch"),
    "image_uri": ("https://evil.test/", "server_side_fetch"),
    "file_id": ("file_evil", "foreign_file_id"),
    "webhook_url": ("https://evil.test/", "callback_denied"),
    "callback": ({"to": "x"}, "callback_denied"),
    "api_key": ("sk-synthetic", "foreign_credential"),
    "authorization": ("Bearer x", "foreign_credential"),
    "web_search": ({}, "server_side_tool"),
    "mcp_server": ({}, "server_side_tool"),
    "surprise": (1, "field_not_declared"),
    "scene": ({"source": {"type": "url", "at": "https://evil.test/"}}, "server_side_fetch"),
    "frames": ([{"clip": {"video_url": "https://evil.test/"}}], "server_side_fetch"),
    "facts": ({"words": ["https://evil.test/"], "url": None}, "field_not_declared"),
}


def objects(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every object in a body."""
    if isinstance(value, dict):
        yield path
        for name, inner in value.items():
            yield from objects(inner, (*path, name))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from objects(inner, (*path, number))


def planted(body: dict[str, Any], path: tuple[Any, ...], name: str, value: Any) -> dict[str, Any]:
    """Return a body with one field more at a place."""
    made = copy.deepcopy(body)
    at: Any = made
    for step in path:
        at = at[step]
    at[name] = value
    return made


def refused(api: Api, body: Any) -> str | None:
    found = judge_body(api, json.dumps(body).encode())
    return found.reason if isinstance(found, Refusal) else None


@pytest.mark.parametrize("api", ["anthropic", "openai"])
def test_a_way_out_is_refused_at_every_place(api: Api) -> None:
    """E1: one field more in any object of an ordinary request is refused as what its name says."""
    body = BODIES[api]
    assert refused(api, body) is None  # the control
    places = list(objects(body))
    assert len(places) > 15
    for path in places:
        for name, (value, reason) in WAYS_OUT.items():
            found = refused(api, planted(body, path, name, value))
            if any(step in FREE for step in path):
                assert found is None, (path, name)
            elif path and path[-1] == "image_url" and name == "url":
                assert found == "server_side_fetch"
            elif path and path[-1] == "file" and name == "file_id":
                assert found == "foreign_file_id"
            else:
                assert found == reason, (path, name)


@pytest.mark.parametrize("api", ["anthropic", "openai"])
def test_a_type_that_nobody_declared_is_refused_at_every_place(api: Api) -> None:
    """E1: what a vendor adds tomorrow."""
    body = BODIES[api]
    typed = [path for path in objects(body) if "type" in _at(body, path) and not any(step in FREE for step in path)]
    assert len(typed) > 4
    for path in typed:
        if path[-1] in {"cache_control", "tool_choice"} and api == "anthropic":
            continue  # a word there, that chooses nothing to fetch or run
        assert refused(api, planted(body, path, "type", "whatever_20301231")) is not None, path


def test_only_files_of_this_run() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f1"}}]}]}
    raw = json.dumps(body).encode()
    assert judge_body("anthropic", raw, frozenset({"f1"})) is None
    assert isinstance(judge_body("anthropic", raw, frozenset({"f2"})), Refusal)


def test_arguments_of_the_operation_hold_the_whole_request() -> None:
    raw = json.dumps({**BODIES["anthropic"], "stream": True}).encode()
    fields = [
        (b"anthropic-beta", b"context-1m-2025-08-07, output-128k-2025-02-19"),
        (b"anthropic-version", b"2023-06-01"),
    ]
    args = call_args("anthropic", raw, fields)
    assert (args["model"], args["limit"], args["stream"]) == ("m", 9, True)
    assert args["betas"] == ["context-1m-2025-08-07", "output-128k-2025-02-19"]
    assert args["version"] == "2023-06-01"
    assert {**json.loads(args["body"]), "model": "m", "max_tokens": 9} == BODIES["anthropic"]
    assert call_args("openai", json.dumps(BODIES["openai"]).encode())["limit"] == 16_384
    for wrong in (
        b"{}",
        b'{"model":1}',
        b'{"model":"m","max_tokens":true}',
        b'{"model":"m","max_tokens":9,"stream":1}',
    ):
        with pytest.raises(Refused):
            call_args("anthropic", wrong)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=8) | st.sampled_from(["url", "text", "tool_use"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["type", "content", "source", "messages", "tools", "url", "role", "x"]), inner, max_size=4
        )
    ),
    max_leaves=20,
)


@settings(deadline=None)
@given(json_values, st.sampled_from(["anthropic", "openai"]))
def test_the_judge_is_total(value: Any, api: Api) -> None:
    """Whatever JSON comes, the answer is a reason of the closed list or nothing."""
    found = refused(api, value)
    assert found is None or found in SENTENCES


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_bytes_that_are_read_are_read_in_one_way(raw: bytes) -> None:
    try:
        body = parse(raw)
    except Refused:
        return
    assert body == json.loads(raw)


@settings(deadline=None)
@given(st.text(max_size=80))
def test_every_name_has_a_reason(name: str) -> None:
    assert reason_of_name(name) in SENTENCES


@settings(deadline=None)
@given(st.binary(max_size=60), st.binary(max_size=30), st.binary(max_size=30))
def test_heads_are_judged_whatever_they_hold(target: bytes, name: bytes, value: bytes) -> None:
    judge_model("anthropic", "POST", target, [(name, value)], None)


def _at(body: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        body = body[step]
    return body
