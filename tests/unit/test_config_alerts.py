"""`[alerts]` of the configuration: where alerts go is the operator's, and no key stands in the file (E4, E6, B5)."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockgate import config
from lockgate.contract.errors import ConfigError

SECRETS = '[secrets.k]\nref = "file:keys.toml#k"\n'


def load(text: str) -> config.Config:
    return config.load_text(SECRETS + text, "/srv/lockgate")


def sink(kind: str, **keys: object) -> str:
    lines = [
        f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}" for name, value in keys.items()
    ]
    return "\n".join([f'[alerts.sinks.s]\nkind = "{kind}"', *lines, ""])


HTTPS = "https://alerts.corp.example/lockgate"
KEY = "secret k"


@pytest.mark.parametrize(
    "text",
    [
        sink("file", path="a.jsonl"),
        sink("file", path="a.cef", format="cef"),
        sink("webhook", url=HTTPS, key=KEY),
        sink("webhook", url="https://alerts.corp.example:8443/a/b", key=KEY, private=True, at_least="critical"),
        sink("webhook", url="http://127.0.0.1:8080/x", key=KEY, loopback_http=True),
        sink("webhook", url="http://[::1]:8080/x", key=KEY, loopback_http=True),
        sink("webhook", url="https://10.0.0.5/x", key=KEY, private=True),
        sink("slack", url="secret k"),
        sink("slack", key=KEY, channel="C0123456789"),
        sink("pagerduty", key=KEY),
        sink("otlp", url="https://otel.example/v1/logs"),
        '[alerts]\nmetrics = "127.0.0.1:9464"\n',
        '[alerts]\ntextfile = "x.prom"\nwindow = 60\nescalate = 3\nqueue = 100\n',
    ],
)
def test_what_may_stand_there(text: str) -> None:
    loaded = load(text)
    assert loaded.alerts.wanted
    assert config.load_text("", "/srv").alerts.wanted is False


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (sink("file"), "needs path"),
        (sink("webhook", url=HTTPS), "needs key"),
        (sink("webhook", key=KEY), "needs url"),
        (sink("otlp"), "needs url"),
        (sink("pagerduty"), "needs key"),
        (sink("slack"), "is a secret"),
        (sink("slack", url="https://hooks.chat.example/services/T0/B0/SECRETPART"), "is a secret"),
        (sink("slack", key=KEY), "without channel"),
        (sink("slack", key=KEY, channel="<!here>"), "is no channel"),
        (sink("file", path="x", url=HTTPS), "takes no url"),
        (sink("webhook", url=HTTPS, key="SECRETPART-literal"), "literal keys are refused"),
        (sink("webhook", url=HTTPS, key="secret other"), "names no entry"),
        (sink("webhook", url="http://alerts.corp.example/SECRETPART", key=KEY), "is not https"),
        (sink("webhook", url="http://alerts.corp.example/x", key=KEY, loopback_http=True), "than loopback"),
        (sink("webhook", url="http://10.0.0.1/x", key=KEY, loopback_http=True), "than loopback"),
        (sink("webhook", url="https://user:SECRETPART@alerts.example/", key=KEY), "is refused (userinfo)"),
        (sink("webhook", url="https://alerts.example/?key=SECRETPART", key=KEY), "has a query"),
        (sink("webhook", url="https://alerts.example/a/../b", key=KEY), "two ways"),
        (sink("webhook", url="https://127.0.0.1\\@evil.test/", key=KEY), "is refused"),
        (sink("webhook", url="https://169.254.169.254/x", key=KEY, private=True), "may not be dialled"),
        (sink("webhook", url="https://10.0.0.1/x", key=KEY), "may not be dialled"),
        (sink("webhook", url="https://127.0.0.1/x", key=KEY), "may not be dialled"),
        (sink("webhook", url="https://[::ffff:10.0.0.1]/x", key=KEY, private=True), "may not be dialled"),
        ('[alerts]\nmetrics = "9464"\n', "not address:port"),
        ('[alerts]\nmetrics = "localhost:9464"\n', "not address:port"),
        ("[alerts]\nwindow = 0\n", "outside 1"),
        ("[alerts]\nqueue = 1\n", "outside 10"),
        (sink("webhok", url=HTTPS), "one of its choices"),
        ("[alerts.sinks.s]\nkindd = 1\n", "sinks.s.kindd'"),
        ("[alerts.sinks.'a b']\nkind = 'file'\n", "is no name"),
    ],
)
def test_what_may_not_and_no_error_quotes_a_value(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)
    said = str(caught.value)
    assert words in said
    assert "SECRETPART" not in said


def test_paths_are_relative_to_the_file_and_json_is_the_same() -> None:
    loaded = load(sink("file", path="logs/a.jsonl") + '[alerts]\ntextfile = "m.prom"\n')
    assert loaded.alerts.sinks["s"].path == "/srv/lockgate/logs/a.jsonl"
    assert loaded.alerts.textfile == "/srv/lockgate/m.prom"


def test_a_lent_key_needs_a_key_and_a_field_name(tmp_path: Path) -> None:
    backend = '[backends.m]\nurl = "https://m.example"\nminter = "key"\n'
    assert load(backend + 'key = "secret k"\nheader = "x-api-key"\n').backends["m"].header == "x-api-key"
    for wrong in ("", 'key = "secret k"\nheader = "X-Api-Key: v"\n', 'key = "secret k"\nheader = "a\\r\\nb"\n'):
        with pytest.raises(ConfigError):
            load(backend + wrong)
    path = tmp_path / "lockgate.toml"
    path.write_text(SECRETS + backend + 'key = "secret k"\n')
    assert config.load(path).backends["m"].minter == "key"
