"""What a person asks the alerter's sinks for: a test, and telling old denials again. Runs in a process of its own.

Rule 1: nothing here touches the spool: a test and a replay are told to the sinks directly, once, and the answer is
        printed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import msgspec

from lockgate import config as configuration
from lockgate.alerts.dedupe import Alert
from lockgate.alerts.formats import sample
from lockgate.alerts.sinks import build
from lockgate.contract.errors import ConfigError

_encode = msgspec.json.Encoder().encode


def send(config: str, names: list[str], alerts: Iterator[Alert] | None = None) -> int:
    """Tell each alert (default: one test alert) to the sinks of these names (default: all); print what came of it.

    Returns:
        0 when every sink took every alert, else 1.

    Raises:
        ConfigError: there is no such sink.

    """
    loaded = configuration.load(config)
    sinks = build(loaded.alerts.sinks, loaded.secrets, timeout=loaded.alerts.timeout)
    for name in names:
        if name not in sinks:
            raise ConfigError(
                f"there is no sink {name[:80]!r}",
                next_step="use one of: " + (", ".join(sinks) or "none is configured; write [alerts.sinks.NAME]"),
            )
    failed = 0
    for alert in alerts if alerts is not None else iter([sample()]):
        for name in names or list(sinks):
            outcome = sinks[name].send(alert)
            failed |= outcome.result != "delivered"
            line = {"sink": name, "uid": alert.uid, "result": outcome.result, "problem": outcome.problem}
            sys.stdout.write(_encode(line).decode() + "\n")
            sys.stdout.flush()
    return failed
