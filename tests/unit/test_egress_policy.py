"""The allowlist: what loads, what it decides, and what it says (E1)."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockgate.contract.errors import ConfigError
from lockgate.policy import egress_entry, registries, suffix_data, suffixes, tenants
from lockgate.policy.egress import Ask, EgressPolicy, How
from lockgate.policy.egress_entry import EgressConfigError
from lockgate.policy.egress_learn import propose
from lockgate.policy.egress_reasons import CRITICAL, SENTENCES, EgressReason, LoadReason, severity
from lockgate.policy.host import Endpoint, Host, Refusal

LIST = [
    "api.partner.example:443",
    "*.pages.partner.example:443",
    "plain.partner.example:80",
    "api.partner.example:8443",
]


def at(text: str) -> Endpoint:
    found = Endpoint.parse(text.encode())
    assert isinstance(found, Endpoint), found
    return found


def name(text: str) -> Host:
    found = Host.parse(text.encode())
    assert isinstance(found, Host)
    return found


def policy(**table: Any) -> EgressPolicy:
    return EgressPolicy.from_data({"allow": LIST, **table})


def decide(loaded: EgressPolicy, text: str, how: How = "connect") -> tuple[bool, str, str | None]:
    verdict = loaded.decide(Ask(at(text), how))
    return verdict.allow, verdict.reason, verdict.rule


def refused(table: dict[str, Any]) -> str:
    with pytest.raises(EgressConfigError) as caught:
        EgressPolicy.from_data(table)
    assert caught.value.next_step
    return caught.value.reason


def test_the_entry_decides_and_is_named() -> None:
    loaded = policy()
    assert decide(loaded, "api.partner.example:443") == (True, "ok", "allow api.partner.example:443")
    assert decide(loaded, "a.pages.partner.example:443") == (True, "ok", "allow *.pages.partner.example:443")
    assert decide(loaded, "plain.partner.example:80", "http") == (True, "ok", "allow plain.partner.example:80")
    for other in (
        "pages.partner.example:443",
        "a.b.pages.partner.example:443",
        "api.partner.example:444",
        "x.test:443",
    ):
        assert decide(loaded, other) == (False, "not_allowed", None)


def test_port_80_is_asked_for_in_absolute_form_and_no_other_is() -> None:
    loaded = policy()
    assert decide(loaded, "plain.partner.example:80")[:2] == (False, "not_allowed")
    assert decide(loaded, "api.partner.example:443", "http")[:2] == (False, "not_allowed")


@pytest.mark.parametrize("table", [{}, {"allow": []}, {"mode": "enforce"}])
def test_an_empty_list_denies_all(table: dict[str, Any]) -> None:
    loaded = EgressPolicy.from_data(table)
    for text in ("api.partner.example:443", "localhost:443", "8.8.8.8:443", "[::1]:80"):
        assert not loaded.decide(Ask(at(text))).allow
        assert not loaded.decide(Ask(at(text), "http")).allow


def test_deny_beats_allow() -> None:
    loaded = policy(deny=["a.pages.partner.example", "api.partner.example:8443", "*.partner.example:80"])
    assert decide(loaded, "a.pages.partner.example:443") == (False, "not_allowed", "deny a.pages.partner.example")
    assert decide(loaded, "api.partner.example:8443") == (False, "not_allowed", "deny api.partner.example:8443")
    assert decide(loaded, "plain.partner.example:80", "http") == (False, "not_allowed", "deny *.partner.example:80")
    assert decide(loaded, "api.partner.example:443")[0]
    assert loaded.dns(name("a.pages.partner.example")).rule == "deny a.pages.partner.example"


def test_report_mode_softens_the_want_of_an_entry_alone() -> None:
    loaded = policy(mode="report", deny=["bad.test"])
    verdict = loaded.decide(Ask(at("new.test:443")))
    assert (verdict.allow, verdict.reported, verdict.reason) == (True, True, "not_allowed")
    for text in (
        "bad.test:443",
        "localhost:443",
        "x.localhost:443",
        "127.0.0.1:443",
        "[::1]:443",
        "169.254.169.254:443",
        "plain.partner.example:80",
    ):
        assert not loaded.decide(Ask(at(text))).allow


def test_a_private_entry_pins_its_addresses() -> None:
    loaded = EgressPolicy.from_data(
        {"private": [{"host": "git.corp.example:443", "addresses": ["10.0.0.5", "fd00::5"]}, {"host": "10.0.0.6:8443"}]}
    )
    assert decide(loaded, "git.corp.example:443") == (True, "ok", "private git.corp.example:443")
    assert decide(loaded, "10.0.0.6:8443")[0]
    assert decide(loaded, "10.0.0.6:443")[1] == "ip_literal_or_ambiguous"
    assert loaded.pinned(at("git.corp.example:443")) == {b"\x0a\x00\x00\x05", bytes.fromhex("fd" + "00" * 14 + "05")}
    assert loaded.pinned(at("10.0.0.6:8443")) == {b"\x0a\x00\x00\x06"}
    assert loaded.pinned(at("api.partner.example:443")) is None


def test_names_and_ports_for_the_responder() -> None:
    loaded = policy()
    assert loaded.names == {"api.partner.example", "plain.partner.example"}
    assert loaded.ports(name("api.partner.example")) == (443, 8443)
    assert loaded.ports(name("b.pages.partner.example")) == (443,)
    assert loaded.ports(name("x.test")) == ()
    assert loaded.dns(name("api.partner.example")).reason == "synthetic_answer"
    assert loaded.dns(name("a.pages.partner.example")).reason == "wildcard_dns_budget"
    assert loaded.dns(name("xn--bcher-kva.pages.partner.example")).reason == "not_allowed"
    assert loaded.dns(name("x.test")).reason == "not_allowed"


def test_the_build_profile_reads_registries_and_nothing_else() -> None:
    loaded = EgressPolicy.from_data({"profile": "build", "allow": ["pypi.org:443"]})
    rules = loaded.rules_for(at("pypi.org:443"))
    assert rules is not None
    assert [rule.method for rule in rules.rules] == [("GET", "HEAD")]
    assert refused({"profile": "build", "allow": ["*.pypi.org:443"]}) == "too_broad"


def test_endpoint_and_model_entries() -> None:
    rules = [{"method": ["GET"], "path": "/v1/*", "query": ["page"]}]
    loaded = policy(
        endpoint=[
            {"host": "api.partner.example:443", "rules": rules},
            {"host": "*.pages.partner.example:443", "rules": rules},
        ],
        model=[{"host": "api.anthropic.com:443", "api": "anthropic"}],
    )
    assert loaded.rules_for(at("api.partner.example:443")) is not None
    assert loaded.rules_for(at("q.pages.partner.example:443")) is not None
    assert loaded.rules_for(at("api.partner.example:8443")) is None
    assert loaded.model(at("api.anthropic.com:443")) == "anthropic"
    assert decide(loaded, "api.anthropic.com:443") == (True, "ok", "model api.anthropic.com:443")
    assert not loaded.warnings


@pytest.mark.parametrize(
    "rule",
    [
        {"method": [], "path": "/*"},
        {"method": ["get"], "path": "/*"},
        {"method": ["CONNECT"], "path": "/*"},
        {"method": ["GET"], "path": "v1/*"},
        {"method": ["GET"], "path": "/v1*"},
        {"method": ["GET"], "path": "/*/x"},
        {"method": ["GET"], "path": "/a/../b"},
        {"method": ["GET"], "path": "/a?b"},
        {"method": ["POST"], "path": "/ws", "websocket": True},
    ],
)
def test_a_rule_that_reads_two_ways_is_an_error(rule: dict[str, Any]) -> None:
    assert refused({"allow": LIST, "endpoint": [{"host": LIST[0], "rules": [rule]}]}) == "bad_endpoint_rule"


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"endpoint": [{"host": "api.partner.example:443", "rules": []}]}, "bad_endpoint_rule"),
        ({"endpoint": [{"host": "x.test:443", "rules": [{"method": ["GET"], "path": "/"}]}]}, "endpoint_without_entry"),
        ({"model": [{"host": "*.anthropic.com:443", "api": "anthropic"}]}, "too_broad"),
        ({"model": [{"host": "api.anthropic.com:80", "api": "anthropic"}]}, "bad_port"),
        ({"nat64_prefix": "64:ff9b::/97"}, "bad_config"),
        ({"nat64_prefix": "x"}, "bad_config"),
        ({"wildcard_dns": -1}, "bad_config"),
        ({"limits": {"requests": -1}}, "bad_config"),
        ({"private": [{"host": "10.0.0.6:443", "addresses": ["10.0.0.7"]}]}, "bad_config"),
        (
            {
                "private": [
                    {"host": "a.corp.example:443", "addresses": ["10.0.0.7"]},
                    {"host": "A.corp.example.:443", "addresses": ["10.0.0.8"]},
                ]
            },
            "bad_config",
        ),
        (
            {"model": [{"host": "m.example:443", "api": "anthropic"}, {"host": "m.example:443", "api": "openai"}]},
            "bad_config",
        ),
        (
            {
                "allow": ["a.example:443"],
                "endpoint": [
                    {"host": "a.example:443", "rules": [{"method": ["GET"], "path": "/a/*"}]},
                    {"host": "A.example:443", "rules": [{"method": ["GET"], "path": "/b/*"}]},
                ],
            },
            "bad_endpoint_rule",
        ),
        ({"private": [{"host": "pypi.org:443", "addresses": ["151.101.0.223"]}]}, "registry_at_runtime"),
        ({"private": [{"host": "*.corp.example:443", "addresses": ["10.0.0.7"]}]}, "too_broad"),
    ],
)
def test_other_errors_at_load(table: dict[str, Any], reason: str) -> None:
    assert refused({"allow": LIST, **table}) == reason


def test_a_text_that_is_no_policy() -> None:
    for text in ("allow = [", "[other]\n", "egress = 1"):
        with pytest.raises(ConfigError):
            EgressPolicy.load(text)
    assert EgressPolicy.load('[egress]\nallow = ["api.partner.example:443"]\n[audit]\npath = "x"\n').names


def test_the_hash_is_that_of_the_table() -> None:
    assert policy().hash == policy().hash
    assert policy().hash != policy(mode="report").hash
    assert len(policy().hash) == 64


def test_errors_show_no_control_characters() -> None:
    with pytest.raises(EgressConfigError) as caught:
        EgressPolicy.from_data({"allow": ["a\x1b[31m.example:443"]})
    assert "\x1b" not in str(caught.value)
    assert caught.value.entry == "a\x1b[31m.example:443"


def test_without_idna_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "idna", None)
    with pytest.raises(EgressConfigError, match=r"lockgate\[idn\]") as caught:
        egress_entry.parse_entry("bücher.example:443")
    assert caught.value.reason == "idn_needs_extra"


def test_suffixes() -> None:
    assert suffixes.suffix_section("co.uk") == "icann"
    assert suffixes.suffix_section("github.io") == "private"
    assert suffixes.suffix_section("www.ck") is None  # an exception of the list
    assert suffixes.suffix_section("anything.ck") == "icann"
    assert suffixes.wildcard_section("kawasaki.jp") == "icann"
    assert suffixes.wildcard_section("city.kawasaki.jp") is None
    assert suffixes.registrable("a.b.c.co.uk") == "c.co.uk"
    assert suffixes.registrable("a.b.partner.example") == "partner.example"
    assert suffixes.registrable("a.b.github.io") == "b.github.io"
    assert suffixes.below("a.b.example", "b.example")
    assert not suffixes.below("ab.example", "b.example")


@pytest.mark.parametrize(
    "entry",
    [
        "*.wordpress.com:443", "*.atlassian.net:443", "*.nip.io:443", "*.cloudapp.azure.com:443", "*.azure.com:443",
        "*.cloudflarestorage.com:443", "*.office.com:443", "*.storage.googleapis.com:443",
        "*.r2.cloudflarestorage.com:443",
    ],
)  # fmt: skip
def test_a_wildcard_over_customers_or_over_their_suffix_is_an_error(entry: str) -> None:
    """E1: a name that the wildcard matches may itself be the suffix under which anybody has a place."""
    with pytest.raises(egress_entry.EgressConfigError) as caught:
        EgressPolicy.from_data({"allow": [entry]})
    assert caught.value.reason == "multi_tenant_suffix"


@pytest.mark.parametrize(
    ("entry", "warned"),
    [
        ("b7.webhook.site:443", True), ("eo1.m.pipedream.net:443", True), ("prod-1.westus.logic.azure.com:443", True),
        ("t.ngrok-free.app:443", True), ("app.10-0-0-1.nip.io:443", True), ("sqs.eu-west-1.amazonaws.com:443", True),
        ("s3.eu-west-1.amazonaws.com:443", True),
        # one customer's own, and the loader asked for exactly that
        ("ours.s3.eu-west-1.amazonaws.com:443", False), ("ours.github.io:443", False), ("ours.workers.dev:443", False),
        ("ours.atlassian.net:443", False), ("api.partner.example:443", False),
    ],
)  # fmt: skip
def test_a_name_that_anybody_takes_for_an_hour_is_a_warning(entry: str, warned: bool) -> None:
    """E1: a catcher below its service is as open as the service; a customer's own bucket is not."""
    loaded = EgressPolicy.from_data({"allow": [entry]})
    assert [one.reason for one in loaded.warnings] == ["multi_tenant_host"] * warned


@pytest.mark.parametrize(
    ("place", "critical"),
    [
        ("169.254.169.254:80", True), ("169.254.170.2:443", True), ("[fd00:ec2::254]:443", True),
        ("[::ffff:169.254.169.254]:443", True), ("[64:ff9b::a9fe:a9fe]:443", True), ("[2002:a9fe:a9fe::]:443", True),
        ("100.100.100.200:443", True), ("metadata.google.internal:80", True), ("instance-data:443", True),
        ("127.0.0.1:443", False), ("[::1]:443", False), ("evil.test:443", False), ("8.8.8.8:443", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["enforce", "report"])
def test_a_metadata_service_is_critical_by_address_and_by_name(place: str, critical: bool, mode: str) -> None:
    """E1: the alert is never suppressed, though such a place is refused before anything is resolved."""
    found = EgressPolicy.from_data({"allow": ["api.partner.example:443"], "mode": mode}).decide(Ask(at(place)))
    assert found.critical is critical
    assert not found.allow or place == "evil.test:443"


@pytest.mark.parametrize(
    "table",
    [
        {"allow": "\ud800"}, {"\ud800": 1}, {"mode": "\ud800"}, {"allow": ["\ud800.example:443"]},
        {"model": [{"host": "a.example:443", "api": "anthropic", "operation": "\ud800"}]},
    ],
)  # fmt: skip
def test_half_a_surrogate_pair_is_a_config_error(table: dict[str, object]) -> None:
    """E1: JSON can hold it; every load error is typed."""
    with pytest.raises(egress_entry.EgressConfigError) as caught:
        EgressPolicy.from_data(table)
    assert caught.value.reason in {"bad_config", "bad_host"}


def test_the_tables_hold_canonical_names() -> None:
    words = [
        word for table in (registries.REGISTRIES, tenants.TENANTS) for text in table.values() for word in text.split()
    ]
    for word in words:
        found = Host.parse(word.removeprefix(".").encode())
        assert isinstance(found, Host), word
        assert found.text == word.removeprefix(".")
    rules = (suffix_data.ICANN + suffix_data.PRIVATE).split()
    assert len(rules) > 9000
    assert all(rule.isascii() and rule == rule.lower() for rule in rules)


def test_every_reason_has_a_sentence() -> None:
    assert set(SENTENCES) == set(EgressReason.__args__)  # type: ignore[attr-defined]
    assert set(SENTENCES) >= CRITICAL
    assert set(LoadReason.__args__)  # type: ignore[attr-defined]
    assert severity("canary") == 5
    assert severity("not_allowed") == 3
    assert severity("resolved_non_public", metadata=True) == 5


def test_a_proposal_takes_over_what_loads_clean() -> None:
    seen = ["api.partner.example:443"] * 3 + ["pypi.org:443", "docs.google.com:443", "not a host", "10.0.0.1:443"]
    seen += [f"h{i}.pages.partner.example:443" for i in range(4)]
    found = propose(seen)
    by_entry = {one.entry: one for one in found.candidates}
    assert by_entry["api.partner.example:443"].live
    assert by_entry["api.partner.example:443"].count == 3
    assert by_entry["pypi.org:443"].why == "registry_at_runtime"
    assert by_entry["docs.google.com:443"].why == "multi_tenant_host"
    assert by_entry["10.0.0.1:443"].why == "private_needs_flag"
    assert found.skipped == 1
    assert found.parents == (("pages.partner.example:443", 4),)
    loaded = EgressPolicy.load(found.to_toml())
    assert loaded.mode == "report"
    assert {"api.partner.example", "h0.pages.partner.example"} <= loaded.names
    assert not loaded.warnings


def test_a_hostile_log_cannot_write_rules() -> None:
    hostile = ['evil.test:443", "*.com:443', "evil.test:443\n]\nmode = 'off'", "*.evil.test:443", "a.test:443#"]
    found = propose([*hostile, "ok.partner.example:443"])
    assert found.skipped == len(hostile)
    assert EgressPolicy.load(found.to_toml()).names == {"ok.partner.example"}


_words = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        [*LIST, "*", "*.com:443", "a:443", "[::1]:443", "10.0.0.5:443", "a.example:x", "xn--a.example:443"]
    ),
)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["allow", "deny", "private", "endpoint", "model", "mode", "strict", "limits", "x"]),
        st.one_of(
            st.none(), st.booleans(), st.lists(_words, max_size=3), _words, st.lists(st.dictionaries(_words, _words))
        ),
        max_size=4,
    )
)
def test_any_table_loads_or_says_why(table: dict[str, Any]) -> None:
    """Loading is total: a policy, or one typed error; and no policy of it reaches loopback or metadata."""
    reason: str | None = None
    loaded = EgressPolicy.from_data({})
    try:
        loaded = EgressPolicy.from_data(table)
    except EgressConfigError as error:
        reason = error.reason
    assert reason is None or reason in LoadReason.__args__  # type: ignore[attr-defined]
    for place in ("127.0.0.1:443", "[::1]:443", "169.254.169.254:80", "localhost:443"):
        for how in ("connect", "http"):
            assert not loaded.decide(Ask(at(place), how)).allow  # type: ignore[arg-type]


def test_a_refusal_of_the_parser_is_none_of_the_list() -> None:
    assert isinstance(Endpoint.parse(b"a b:443"), Refusal)
