"""The model as an operation: against a server that the vendors' own clients understand (E1)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

import lockgate as lg
from lockgate.audit import reader
from lockgate.policy.host import Refusal
from lockgate.policy.model_rules import call_args, judge_model
from model_behind import model_home
from model_vendor import ANTHROPIC_KEY, OPENAI_KEY, WORDS, Vendor

SAID = "".join(WORDS)
ASK = json.dumps({"messages": [{"role": "user", "content": "What is the capital of France?"}]})


@pytest.fixture(scope="module")
def vendor() -> Iterator[Vendor]:
    made = Vendor()
    yield made
    made.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, vendor: Vendor) -> Path:
    return model_home(tmp_path_factory.mktemp("model"), vendor.url, "model_operations")


@pytest.fixture(scope="module")
def model_gate(home: Path) -> Iterator[lg.sync.Gate]:
    with lg.sync.Gate(home) as opened:
        yield opened


@pytest.fixture
def run(model_gate: lg.sync.Gate, vendor: Vendor) -> Iterator[lg.sync.Run]:
    vendor.mode, vendor.asked = "", []
    vendor.gate.set()
    allow: dict[str, Any] = {
        "anthropic_messages": lg.where(limit=lg.at_most(2000)),
        "openai_chat": {},
        "model_stream": {},
    }
    scope = lg.Scope(user="dana", agent="atlas", tenant="acme", expires=lg.minutes(5), allow=allow)
    with model_gate.run_scope(scope) as opened:
        yield opened


def test_the_vendors_own_clients_understand_the_server(vendor: Vendor) -> None:
    """The control of this file: the server speaks what the released clients speak, plain and streamed."""
    vendor.mode = ""
    one = anthropic.Anthropic(api_key=ANTHROPIC_KEY, base_url=vendor.url, max_retries=0)
    asked: dict[str, Any] = {"model": "claude-synthetic", "max_tokens": 9, **json.loads(ASK)}
    assert one.messages.create(**asked).content[0].text == SAID
    with one.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == SAID
    two = openai.OpenAI(api_key=OPENAI_KEY, base_url=f"{vendor.url}/v1", max_retries=0)
    chat: dict[str, Any] = {"model": "gpt-synthetic", **json.loads(ASK)}
    assert two.chat.completions.create(**chat).choices[0].message.content == SAID
    chunks = list(two.chat.completions.create(**chat, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAID
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(api_key="wrong", base_url=vendor.url, max_retries=0).messages.create(**asked)


@pytest.mark.parametrize("operation", ["anthropic_messages", "openai_chat"])
def test_an_answer_comes_back_and_the_key_is_ours(run: lg.sync.Run, vendor: Vendor, operation: str) -> None:
    """E1, C4: asked without a key, answered with ours, on the one path."""
    outcome = run.try_call(operation, model="m-synthetic", limit=100, body=ASK)
    assert outcome.ok
    assert SAID in outcome.value["body"]
    (asked,) = vendor.asked
    if operation == "anthropic_messages":
        assert asked.path == "/v1/messages"
        assert asked.fields["x-api-key"] == ANTHROPIC_KEY
        assert asked.fields["anthropic-version"]
        assert "authorization" not in asked.fields
        assert asked.json["max_tokens"] == 100
    else:
        assert asked.path == "/v1/chat/completions"
        assert asked.fields["authorization"] == f"Bearer {OPENAI_KEY}"
        assert asked.json["max_completion_tokens"] == 100
    assert asked.json["model"] == "m-synthetic"
    assert asked.json["messages"] == json.loads(ASK)["messages"]


@pytest.mark.parametrize("operation", ["anthropic_messages", "openai_chat"])
def test_a_stream_comes_as_it_is_written(run: lg.sync.Run, vendor: Vendor, operation: str) -> None:
    """E1: the first events are there before the vendor wrote the last; the whole is what the vendor's client reads."""
    vendor.gate.clear()
    first = run.try_call(operation, model="m", limit=9, body=ASK, stream=True).value
    assert first["events"]
    assert not first["done"]
    assert SAID not in first["events"]
    vendor.gate.set()
    events, piece = first["events"], first
    while not piece["done"]:
        piece = run.try_call("model_stream", stream=first["stream"]).value
        assert piece["events"] == "" or piece["events"].endswith("\n\n")  # whole events
        events += piece["events"]
    assert said(operation, events) == SAID
    assert run.try_call("model_stream", stream=first["stream"]).reason == "backend_failed"


def test_code_in_a_sandbox_streams(run: lg.sync.Run) -> None:
    """E1, X4: the same from inside, through the one channel."""
    result = run.code(
        f"""
import host, json
piece = host.call("anthropic_messages", model="m", limit=9, body={ASK!r}, stream=True)
events = piece["events"]
while not piece["done"]:
    piece = host.call("model_stream", stream=piece["stream"])
    events += piece["events"]
text = ""
for line in events.splitlines():
    if line.startswith("data: "):
        text += json.loads(line[6:]).get("delta", {{}}).get("text", "")
text
"""
    )
    assert result.value == SAID


def test_a_stream_is_its_runs_own(model_gate: lg.sync.Gate, run: lg.sync.Run, vendor: Vendor) -> None:
    """E1, lateral: the id of another run's stream is worth nothing."""
    vendor.gate.clear()
    first = run.try_call("openai_chat", model="m", limit=9, body=ASK, stream=True).value
    other = lg.Scope(user="eve", agent="x", tenant="t2", expires=lg.minutes(5), allow={"model_stream": {}})
    with model_gate.run_scope(other) as stranger:
        assert stranger.try_call("model_stream", stream=first["stream"]).reason == "backend_failed"
    vendor.gate.set()
    assert run.try_call("model_stream", stream=first["stream"]).ok


def test_a_stream_that_is_cut_off_is_a_failure(run: lg.sync.Run, vendor: Vendor) -> None:
    vendor.mode = "cut"
    outcome = run.try_call("anthropic_messages", model="m", limit=9, body=ASK, stream=True)
    for _ in range(20):
        if not outcome.ok:
            break
        assert not outcome.value["done"]
        outcome = run.try_call("model_stream", stream=outcome.value["stream"])
    assert outcome.reason == "backend_failed"


def test_an_event_without_an_end_is_not_kept(run: lg.sync.Run, vendor: Vendor) -> None:
    vendor.mode = "bomb"
    assert run.try_call("openai_chat", model="m", limit=9, body=ASK, stream=True).reason == "result_too_large"


@pytest.mark.parametrize(("mode", "reason"), [("refuse", "backend_failed"), ("huge", "result_too_large")])
def test_a_failure_is_typed_and_has_no_word_of_the_vendor(
    run: lg.sync.Run, vendor: Vendor, home: Path, mode: str, reason: str
) -> None:
    """C6: of the vendor's error only the status is kept."""
    vendor.mode = mode
    outcome = run.try_call("anthropic_messages", model="m", limit=9, body=ASK)
    assert outcome.reason == reason
    assert len(vendor.asked) == 1  # no retry
    rows = [row for row in reader.tail(home / "audit.db", 1000) if row.run == run.id]
    assert "sk-should-not-be-seen" not in "".join(map(repr, rows))


def test_no_redirect_is_followed(run: lg.sync.Run, vendor: Vendor) -> None:
    """E6: a redirect of the vendor's is a refusal; the key goes nowhere else."""
    other = Vendor()
    try:
        vendor.mode, vendor.elsewhere = "redirect", other.url
        assert run.try_call("openai_chat", model="m", limit=9, body=ASK).reason == "backend_failed"
        assert other.asked == []
    finally:
        other.close()


def test_a_key_that_comes_back_is_withheld(run: lg.sync.Run, vendor: Vendor) -> None:
    """C6: the credential is on loan until the reply was searched for it."""
    vendor.mode = "echo"
    assert run.try_call("openai_chat", model="m", limit=9, body=ASK).reason == "result_blocked"


def said(operation: str, events: str) -> str:
    """Return the words of a stream, as a client of the vendor puts them together."""
    text = ""
    for line in events.splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        data = json.loads(line.removeprefix("data: "))
        if operation == "anthropic_messages":
            text += data.get("delta", {}).get("text", "")
        else:
            text += data["choices"][0]["delta"].get("content", "")
    return text


def test_what_the_vendors_clients_send_is_allowed(vendor: Vendor) -> None:
    """E1, the other side: the rule knows what the released clients send for ordinary work, heads included."""
    vendor.mode, vendor.asked = "", []
    vendor.gate.set()
    image = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    tool = {
        "name": "get_order",
        "description": "d",
        "input_schema": {"type": "object", "properties": {}},
        "strict": True,
    }
    one = anthropic.Anthropic(api_key=ANTHROPIC_KEY, base_url=vendor.url, max_retries=0)
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "get_order", "input": {"a": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image", "source": image}]},
            {"type": "document", "title": "t", "source": {"type": "text", "media_type": "text/plain", "data": "x"}},
        ]},
    ]  # fmt: skip
    one.messages.create(
        model="claude-synthetic",
        max_tokens=2000,
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        messages=turns,
        tools=[tool, {"type": "bash_20250124", "name": "bash"}],  # type: ignore[list-item]
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024},
        stop_sequences=["x"],
        metadata={"user_id": "u"},
    )
    with one.messages.stream(model="claude-synthetic", max_tokens=9, messages=turns[:1]) as stream:
        stream.get_final_message()
    two = openai.OpenAI(api_key=OPENAI_KEY, base_url=f"{vendor.url}/v1", max_retries=0)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    function = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
    chat: list[Any] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [
            {"type": "text", "text": "x"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo=", "detail": "low"}},
            {"type": "file", "file": {"filename": "x.pdf", "file_data": "data:application/pdf;base64,JVBERg=="}},
        ]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]  # fmt: skip
    schema: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}, "strict": True}}
    two.chat.completions.create(
        model="gpt-synthetic", messages=chat, tools=[function], tool_choice="auto", response_format=schema,  # type: ignore[list-item]
        max_completion_tokens=9, temperature=0.5, seed=1, user="u", logit_bias={"50256": -100},
    )  # fmt: skip
    list(two.chat.completions.create(model="gpt-synthetic", messages=chat[:1], stream=True,
                                     stream_options={"include_usage": True}))  # fmt: skip
    assert len(vendor.asked) == 4
    for asked in vendor.asked:
        fields = [(name.encode(), value.encode()) for name, value in asked.fields.items()]
        api: Any = "anthropic" if asked.path == "/v1/messages" else "openai"
        refusal = judge_model(api, "POST", asked.path.encode(), fields, asked.body)
        assert isinstance(refusal, Refusal)
        assert refusal.reason == "foreign_credential"  # a client's key is refused, whoever's it is
        rest = [(name, value) for name, value in fields if name not in {b"authorization", b"x-api-key"}]
        assert judge_model(api, "POST", asked.path.encode(), rest, asked.body) is None
        args = call_args(api, asked.body, rest)
        assert {"model", "limit", "body", "stream"} <= set(args)
        again = {**json.loads(args["body"]), "model": args["model"]}
        assert again["messages"] == asked.json["messages"]
