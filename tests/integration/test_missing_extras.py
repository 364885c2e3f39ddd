"""What is not installed is said before anything starts, with the command that brings it (C6)."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lockgate import config
from lockgate.broker import backends
from lockgate.contract.errors import ConfigError
from lockgate.egress import launch
from lockgate.policy.egress_load import spec_of_text
from lockgate.verify import Verifier

WITH_URL = '[backends.payments]\nurl = "http://127.0.0.1:1"\n'
MINTING = """
[secrets.signing]
ref = "file:keys/signing.toml#payments"
[backends.payments]
minter = "jwt"
key = "secret signing"
issuer = "atlas-broker"
audience = "payments"
"""
INTERCEPTED = """[egress]
allow = ["api.partner.example:443"]
endpoint = [{ host = "api.partner.example:443", rules = [{ method = ["GET"], path = "/v1/*" }] }]
"""


@pytest.mark.parametrize(
    ("text", "module", "extra"), [(WITH_URL, "httpx", "http"), (MINTING, "joserfc", "jwt")], ids=["http", "jwt"]
)
def test_a_broker_does_not_start_without_what_its_backends_need(
    text: str, module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C4: inside a call it would be a write whose outcome nobody knows."""
    loaded = config.load_text(text, str(tmp_path))
    assert set(backends.build(loaded)) == {"payments"}
    monkeypatch.setattr(backends, "find_spec", lambda name: None if name == module else find_spec(name))
    with pytest.raises(ConfigError, match=f"backends.payments .* {module} is not installed") as caught:
        backends.build(loaded)
    assert caught.value.next_step == f"pip install 'lockgate[{extra}]'"


def test_a_service_that_cannot_check_tokens_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "joserfc.jwk", None)
    with pytest.raises(ConfigError) as caught:
        Verifier(issuer="atlas-broker", audience="payments", key="")
    assert caught.value.next_step == "pip install 'lockgate[jwt]'"


def test_a_gateway_that_cannot_intercept_says_so_to_who_starts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = (
        "import sys; sys.modules['cryptography'] = None; from lockgate.egress.process import main; sys.exit(main())"
    )
    spawn: Any = launch._spawn

    def bare(argv: list[str], fds: tuple[int, ...], output: int) -> subprocess.Popen[bytes]:
        if "lockgate.egress" in argv:
            argv = [sys.executable, "-I", "-c", without, *argv[4:]]
        started: subprocess.Popen[bytes] = spawn(argv, fds, output)
        return started

    monkeypatch.setattr(launch, "_spawn", bare)
    with pytest.raises(ConfigError) as caught, launch.start(spec_of_text(INTERCEPTED), tmp_path / "rows.db"):
        pass
    assert caught.value.next_step == "pip install 'lockgate[intercept]'"
