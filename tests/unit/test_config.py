"""`lockgate.toml`: unknown keys, literal secrets, bounds, paths (C4, C6)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockgate.config import Config, Render, Secret, find, from_dict, line_of, load, load_text
from lockgate.contract.errors import ConfigError
from lockgate.render import RenderPolicy

SECRET = "sk-synthetic-0123456789abcdef"
FULL = """
operations = "operations:ops"

[audit]
path = "logs/audit.db"

[execution]
pool = 3
env_store = "../envs"

[execution.bounds]
wall = 5

[broker]
approval_wait = 2

[secrets.payments_key]
ref = "file:keys/signing.toml#payments"

[backends.payments]
minter = "jwt"
key = "secret payments_key"
issuer = "atlas"
audience = "payments"
url = "http://127.0.0.1:8417"
"""


def refused(text: str, name: str = "lockgate.toml") -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_text(text, "/etc/app", name=name)
    return caught.value


def test_paths_are_relative_to_the_file():
    config = load_text(FULL, "/etc/app")
    assert config.audit.path == "/etc/app/logs/audit.db"
    assert config.execution.env_store == "/etc/envs"
    assert config.secrets["payments_key"].ref == "file:///etc/app/keys/signing.toml#payments"
    assert config.base == "/etc/app"
    assert config.execution.bounds.wall == 5.0
    assert config.backends["payments"].key_name == "payments_key"


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        ('\n[execution]\nrunge = "x"', 3, '"rung"'),
        ("[executions]\npool = 1", 1, '"execution"'),
        ("[execution.bounds]\n\nwal = 9", 3, '"wall"'),
        ("[backends.p]\nminte = 1", 2, '"minter"'),
        ("[broker]\nusr = 1", 2, '"user"'),
        ("[render]\nlink = []", 2, '"links"'),
        ("base = '/x'", 1, "use one of|did you mean"),
    ],
)
def test_an_unknown_key_names_the_line_and_the_nearest(text: str, line: int, hint: str):
    error = refused(text)
    assert f"line {line}:" in error.message
    assert any(part in error.next_step for part in hint.split("|"))


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        ('[execution]\naccept_weaker = ["old"]', 2, "use one of: emulated, no outer wall, old runtime"),
        ('[execution]\nrung = "kontainer"', 2, 'did you mean "container"?'),
        ('[egress]\nmodel = [{ host = "api.vendor.example:443", api = "other" }]', 2, "use one of: anthropic, openai"),
    ],
)
def test_a_wrong_choice_names_the_line_and_the_choices(text: str, line: int, hint: str):
    error = refused(text)
    assert f"line {line}:" in error.message
    assert error.next_step == hint


@pytest.mark.parametrize(
    "text",
    [
        f'[secrets]\nNAME = "{SECRET}"',
        f'[secrets.NAME]\nref = "{SECRET}"',
        f'[secrets.NAME]\nvalue = "{SECRET}"',
        f'[secrets.NAME]\nref = "file:///x#y"\nvalue = "{SECRET}"',
        f'secrets = "{SECRET}"',
        f'[backends.p]\nkey = "{SECRET}"',
        f'[backends.p]\nminter = "{SECRET}"',
        f'[backends.p]\nurl = "https://u:{SECRET}@host/"',
        f'[backends.p]\nurl = "https://host/?key={SECRET}"',
        f'[backends.p]\npassword = "{SECRET}"',
        f'[backends]\np = "{SECRET}"',
        f'api_key = "{SECRET}"',
        f'[render]\nlinks = ["http://{SECRET}/"]',
        f'[render]\nexact = ["javascript:{SECRET}"]',
        f'[render]\nmax_urls = "{SECRET}"',
        f'[execution]\nrung = "{SECRET}"',
        f'[execution]\nenv = "{SECRET}\\n"',
        f'operations = "{SECRET}"',
        f"[broker]\napproval_wait = '{SECRET}'",
        f"x = {SECRET}",
    ],
)
def test_a_literal_secret_is_refused_and_never_quoted(text: str):
    """C6: no error carries a value, whatever key it stands under."""
    error = refused(text)
    assert SECRET not in str(error)
    assert SECRET not in repr(error.args)
    assert error.__cause__ is None


def test_the_secret_s_key_is_named():
    assert "secrets.NAME" in refused(f'[secrets]\nNAME = "{SECRET}"').message


@pytest.mark.parametrize(
    "text",
    [
        "[execution.bounds]\nwall = 99999",
        "[execution.bounds]\nwall = -1",
        "[execution.bounds]\nmemory = 0",
        "[execution.bounds]\nmemory = 1.5",
        "[execution]\npool = 1001",
        "[execution]\npool = true",
        "[backends.p]\nttl = 61",
        '[backends.p]\nminter = "jwt"',
        '[backends.p]\nkey = "secret nobody"',
        '[audit]\npath = ""',
        '[audit]\npath = "a\\u0000b"',
        'operations = "no colon"',
        "[[execution]]\npool = 1",
        "[broker]\napproval_wait = nan",
        "[backends.'a b']\nttl = 1",
        '[render]\nlinks = ["http://plain.example/*"]',
        '[render]\nimages = ["*"]',
        '[render]\nexact = ["data:text/html,x"]',
        '[render]\ncanaries = ["short"]',
        "[render]\nmax_images = -1",
        "[render]\nmax_bytes = 0",
        '[render]\nlinks = "https://docs.example.com/*"',
        "a = = 1",
    ],
)
def test_what_is_wrong_is_refused_with_a_next_step(text: str):
    assert refused(text).next_step


def test_what_the_render_guard_would_refuse_is_refused_here_with_its_line():
    """E5: a rule that can never be live is no silent gap; the same text beside it that can be is taken."""
    rules = 'links = ["https://docs.example.com/*", "{}"]'
    assert load_text("[render]\n" + rules.format("wiki.example.com"), "/x").render.links[1] == "wiki.example.com"
    error = refused("\n[render]\n" + rules.format("http://wiki.example.com/*"))
    assert "line 3: number 2 of render.links" in error.message


def test_the_defaults_of_the_table_are_those_of_the_guard():
    policy = RenderPolicy()
    assert msgspec.structs.asdict(Render()) == msgspec.structs.asdict(policy)


def test_pyproject_table_and_its_lines():
    config = load_text("[tool.lockgate.execution]\npool = 9", "/x", name="pyproject.toml")
    assert config.execution.pool == 9
    error = refused("[tool.other]\n[tool.lockgate.execution]\npol = 9", "pyproject.toml")
    assert "line 3" in error.message
    assert "[tool.lockgate]" in refused("[tool.other]", "pyproject.toml").message


def test_the_file_wins_over_pyproject(tmp_path: Path):
    assert find(tmp_path) is None
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert find(tmp_path) is None
    (tmp_path / "pyproject.toml").write_text("[tool.lockgate.execution]\npool = 1\n")
    assert load(tmp_path).execution.pool == 1
    (tmp_path / "lockgate.toml").write_text("[execution]\npool = 2\n")
    assert load(tmp_path).execution.pool == 2


def test_files_that_cannot_be_read_are_typed(tmp_path: Path):
    for content in (b"\xff\xfe", b"{ not json", b"x" * (1024 * 1024 + 1)):
        path = tmp_path / "lockgate.toml"
        path.write_bytes(content)
        with pytest.raises(ConfigError):
            load(path)
    with pytest.raises(ConfigError):
        load(tmp_path / "missing.toml")
    with pytest.raises(ConfigError):
        load(tmp_path / "lockgate.toml" / "below")


def test_what_was_validated_is_what_is_handed_over(tmp_path: Path):
    config = load_text(FULL, tmp_path)
    (tmp_path / "handed").write_bytes(config.to_json())
    assert load(tmp_path / "handed") == config


@pytest.mark.parametrize(
    "data",
    [
        {"secrets": {"a": {"ref": SECRET}}},
        {"secrets": {"a": SECRET}},
        {"backends": {"a": {"minter": "key", "key": SECRET}}},
        {"backends": {"a": {"url": f"https://u:{SECRET}@h/"}}},
        {"execution": {"pool": -7}},
        {"execution": {"bounds": {"wall": -5}}},
        {"execution": {"pol": 1}},
    ],
)
def test_a_file_of_json_is_held_to_the_same_rules(tmp_path: Path, data: dict[str, object]):
    """C4, C6: anybody can write the form in which a configuration is handed over."""
    (tmp_path / "lockgate.toml").write_bytes(msgspec.json.encode(data | {"base": str(tmp_path)}))
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["{}", '{"base":"x"}', '{"base":5}', '{"base":"/x","base":"/y"}', ' {"base":"/x"}', '{"base": "/x"}']
)
def test_json_that_lockgate_did_not_write_is_refused(tmp_path: Path, text: str):
    (tmp_path / "c").write_text(text)
    with pytest.raises(ConfigError):
        load(tmp_path / "c")


def test_a_named_pipe_is_refused_and_nobody_waits_for_its_writer(tmp_path: Path):
    """The control: the pipe of a shell, which has its writer, is read."""
    os.mkfifo(tmp_path / "c.toml")
    with pytest.raises(ConfigError, match="named pipe"):
        load(tmp_path / "c.toml")
    (tmp_path / "project").mkdir()
    os.mkfifo(tmp_path / "project" / "pyproject.toml")
    assert find(tmp_path / "project") is None
    read, write = os.pipe()
    try:
        os.write(write, b"[execution]\npool = 3\n")
        os.close(write)
        assert load(f"/proc/self/fd/{read}").execution.pool == 3
    finally:
        os.close(read)


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, None, 5, b"x"])
def test_what_is_no_path_is_typed(path: Any):
    with pytest.raises(ConfigError):
        load(path)


@pytest.mark.parametrize(
    "data",
    [
        {5: 5}, {"execution": {5: 5}}, {"secrets": {None: {"ref": "file:x"}}}, {"secrets": {5: 5}}, None, [], 5,
        {"execution": {"pool": 10**400}}, {"execution": {"bounds": {"wall": 10**400}}},
    ],
)  # fmt: skip
def test_data_of_another_form_is_typed(data: Any):
    with pytest.raises(ConfigError):
        from_dict(data, "/x")


@pytest.mark.parametrize("number", ["9" * 5000, "9" * 400])
def test_a_number_of_any_length_is_typed(number: str):
    for key in ("pool", "bounds.wall", "bounds.memory"):
        with pytest.raises(ConfigError):
            load_text(f"[execution]\n{key} = {number}\n", "/x")


def test_line_of_finds_tables_and_keys():
    text = "[a]\n\n[allow.refund.args.amount] # x\nat_most = 5\nx.y = 1\n"
    assert line_of(text, "allow.refund.args.amount.at_most") == 4
    assert line_of(text, "allow.refund.args.amount") == 3
    assert line_of(text, "allow.nothing") is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [
        "operations",
        "audit",
        "execution",
        "bounds",
        "broker",
        "secrets",
        "backends",
        "ref",
        "rung",
        "pool",
        "path",
        "x",
        "",
    ]
)
TREES = st.recursive(VALUES, lambda inner: st.dictionaries(KEYS, inner, max_size=4), max_leaves=12)


def assert_config_or_typed(make: Callable[[], Config]) -> None:
    """Anything else than these two would escape here."""
    with contextlib.suppress(ConfigError):
        assert make().base == "/x"


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(KEYS, TREES, max_size=4))
def test_any_data_is_a_config_or_a_typed_error(data: dict[str, object]):
    assert_config_or_typed(lambda: from_dict(data, "/x"))


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda raw: raw.decode("latin-1")))
def test_any_text_is_a_config_or_a_typed_error(text: str):
    assert_config_or_typed(lambda: load_text(text, "/x"))


def test_no_field_of_the_configuration_can_hold_a_value_of_a_secret():
    """A secret has a reference and nothing else: a new field here needs a new decision."""
    assert Secret.__struct_fields__ == ("ref",)
    assert msgspec.json.decode(load_text(FULL, "/x").to_json())["secrets"] == {
        "payments_key": {"ref": "file:///x/keys/signing.toml#payments"}
    }
