"""The vendors' own clients behind the gateway: they hold no key, and their words arrive with ours (E1, C4)."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from egress_net import Forwarder
from lockgate.audit import reader
from lockgate.egress.bridge import Bridge
from lockgate.egress.client import Control
from model_behind import run_and_gateway
from model_vendor import ANTHROPIC_KEY, OPENAI_KEY, WORDS, Vendor

SAID = "".join(WORDS)
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]
NO_KEY: Any = {"Authorization": anthropic.omit, "X-Api-Key": anthropic.omit}


class Behind:
    """What stands behind the clients: a vendor, a Gate, a gateway and one run of both."""

    def __init__(self, home: Path, vendor: Vendor, opened: Any) -> None:
        self.home, self.vendor, self.opened = home, vendor, opened

    def http(self, sdk: Any, forwarder: Forwarder) -> Any:
        """Return the client that an SDK brings, told of the proxy and of the run's own authority."""
        context = ssl.create_default_context(cadata=self.opened.ca_pem)
        return sdk.DefaultHttpxClient(proxy=forwarder.url, verify=context, trust_env=False, timeout=60)


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    home = tmp_path_factory.mktemp("model-clients")
    vendor = Vendor()
    with run_and_gateway(home, vendor, "model_clients_operations") as (run, gateway), Bridge(run.try_call) as bridge:
        control = Control(gateway.control, broker=bridge.theirs)
        yield Behind(home, vendor, control.open(user="u1", agent="atlas", run="clients"))
        control.close()
    vendor.close()


def test_clients_without_a_key_ask_and_stream(behind: Behind) -> None:
    """E1: plain and streamed, both vendors, through CONNECT, interception, the bridge and the broker."""
    with Forwarder(behind.opened.data, behind.opened.token) as forwarder, behind.http(anthropic, forwarder) as http:
        one = anthropic.Anthropic(api_key=None, default_headers=NO_KEY, http_client=http, max_retries=0)
        assert one.messages.create(model="m", max_tokens=9, messages=MESSAGES).content[0].text == SAID  # type: ignore[union-attr]
        with one.messages.stream(model="m", max_tokens=9, messages=MESSAGES) as stream:
            assert "".join(stream.text_stream) == SAID
    with Forwarder(behind.opened.data, behind.opened.token) as forwarder, behind.http(openai, forwarder) as http:
        two = openai.OpenAI(api_key="none", default_headers={"Authorization": ""}, http_client=http, max_retries=0)
        assert two.chat.completions.create(model="m", messages=MESSAGES).choices[0].message.content == SAID
        chunks = list(two.chat.completions.create(model="m", messages=MESSAGES, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAID
    sent = {one.fields.get("x-api-key") or one.fields.get("authorization") for one in behind.vendor.asked}
    assert sent == {ANTHROPIC_KEY, f"Bearer {OPENAI_KEY}"}


def test_clients_with_a_key_or_a_tool_of_the_vendor_s_are_refused(behind: Behind) -> None:
    """E1, E4: a foreign key is never replaced, and what reaches out is refused; each with its row at the gateway."""
    before = len(behind.vendor.asked)
    tool: Any = {"type": "web_search_20250305", "name": "web_search"}
    for options, more, reason in (
        ({"api_key": "sk-synthetic-attacker"}, {}, "foreign_credential"),
        ({"api_key": None, "default_headers": NO_KEY}, {"tools": [tool]}, "server_side_tool"),
    ):
        arguments: dict[str, Any] = {**options}
        with Forwarder(behind.opened.data, behind.opened.token) as forwarder, behind.http(anthropic, forwarder) as http:
            one = anthropic.Anthropic(http_client=http, max_retries=0, **arguments)
            with pytest.raises(anthropic.PermissionDeniedError) as caught:
                one.messages.create(model="m", max_tokens=9, messages=MESSAGES, **more)  # type: ignore[call-overload]
            assert reason in json.dumps(caught.value.body)
        row = list(reader.tail(behind.home / "egress.db", 1000))[-1]
        assert (row.verdict, row.reason) == ("deny", reason)
        assert "attacker" not in repr(row)
    assert len(behind.vendor.asked) == before
