"""What stands behind the clients of model vendors in tests: a Gate whose operations are theirs, and a gateway."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lockgate as lg
from gate_fixtures import CONFIG
from lockgate.egress import launch
from lockgate.policy.egress_load import spec_of_text
from model_vendor import KEYS, OPERATIONS, Vendor, model_config

POLICY = """[egress]
allow = ["api.anthropic.com:443", "api.openai.com:443"]
model = [{ host = "api.anthropic.com:443", api = "anthropic" }, { host = "api.openai.com:443", api = "openai" }]
"""


def model_home(place: Path, url: str, operations: str, more: str = "") -> Path:
    """Write a configuration whose model operations ask `url`; `operations` names their module, for this home alone."""
    (place / f"{operations}.py").write_text(OPERATIONS)
    (place / "model-keys.toml").write_text(KEYS)
    (place / "model-keys.toml").chmod(0o600)
    text = CONFIG.replace("gate_test_operations", operations)
    (place / "lockgate.toml").write_text(text + model_config(url) + more)
    return place


@contextlib.contextmanager
def run_and_gateway(home: Path, vendor: Vendor, operations: str) -> Iterator[tuple[lg.sync.Run, launch.Gateway]]:
    """Open a run that may ask both vendors, and a gateway that takes its requests for them; rows in egress.db."""
    model_home(home, vendor.url, operations)
    allow: dict[str, Any] = {"anthropic_messages": {}, "openai_chat": {}, "model_stream": {}}
    scope = lg.Scope(user="u1", agent="atlas", tenant="t1", expires=lg.minutes(10), allow=allow)
    with (
        lg.sync.Gate(home) as gate,
        gate.run_scope(scope) as run,
        launch.start(spec_of_text(POLICY), home / "egress.db", nameservers=()) as gateway,
    ):
        yield run, gateway
