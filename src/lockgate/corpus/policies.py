"""Reads the policy that a case assumes, as the cases write it: a line of prose with lists in it.

Rule 1: what is not understood gives no permission. A text in which nothing is understood is a failure of the case.
Rule 2: a name such as "P0 + ..." refers to the policy of that name in the same file, else to the one known here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from lockgate.corpus.case import unrunnable
from lockgate.policy.egress import EgressPolicy
from lockgate.policy.egress_entry import EgressConfigError

P0: Final = (
    "allow=[api.allowed.example:443, *.wild.example:443 (exactly one label), plain.example:80 (absolute-form http), "
    "xn--bcher-kva.example:443]; IP literals deny; non-public resolved IPs deny; all answers must be public; "
    "sandbox DNS synthetic (never forwards)"
)
_LIST: Final = re.compile(r"\b(allow|deny)\s*[=:]\s*\[([^\]]*(?:\[[0-9a-fA-F:.]*\][^\]]*)*)\]")
_PRIVATE: Final = re.compile(r"\bprivate\s*[=:]\s*\[([^\]]*)\]")
_COMMENT: Final = re.compile(r"\([^)]*\)")
_ENDPOINT: Final = re.compile(
    r"interception on (?P<host>[^\s,;]+)(?: with)?.*?\brules?:? "
    r"(?P<methods>[A-Z]+(?:\s*,\s*[A-Z]+)*)\s+(?P<path>/[^\s;,]*)"
)
_MODEL: Final = re.compile(r"model endpoint(?: only)?:?\s*(?P<host>[^\s,;]+).*?(?:POST\s+(?P<path>/[^\s,;]*))?")
_BASE: Final = re.compile(r"\s*(P[0-9A-Z]+)\s*[+,;]\s*(.*)", re.DOTALL)
_ONE: Final = re.compile(r"\b(allow|deny)s?\s+((?:\*\.)?[\w.-]+:[0-9]+)")
_FLAG: Final = re.compile(r"\b(profile|mode|nat64_prefix|wildcard_dns|strict)\s*[=:]\s*([\w:./-]+)")


class Policies:
    """The policies of one file."""

    def __init__(self, cases: Iterable[dict[str, Any]]) -> None:
        self._texts: dict[str, str] = {"P0": P0}
        self._made: dict[str, EgressPolicy] = {}
        for case in cases:
            name, text = case.get("policy"), case.get("policy_text")
            if isinstance(name, str) and isinstance(text, str) and not _BASE.match(text):
                self._texts[name] = text

    def of(self, case: dict[str, Any]) -> EgressPolicy:
        """Return the policy of a case.

        Raises:
            Unrunnable: nothing of it is understood, or it is none.

        """
        given = case.get("policy_text", case.get("policy", "P0"))
        if isinstance(given, dict):
            return _load(given)  # pyright: ignore[reportUnknownArgumentType]
        if not isinstance(given, str):
            unrunnable("policy_text is no text")
        if "[egress]" in given:
            try:
                return EgressPolicy.load(given)
            except EgressConfigError as error:
                unrunnable(f"its policy does not load: {error.reason}")
        text = self._texts.get(given, given)
        if text not in self._made:
            self._made[text] = _load(self._table(text, 4))
        return self._made[text]

    def _table(self, text: str, depth: int) -> dict[str, Any]:
        table: dict[str, Any] = {"allow": [], "deny": [], "private": [], "endpoint": [], "model": []}
        found = False
        base = _BASE.match(text)
        if base is not None and depth:
            known = self._texts.get(base[1])
            if known is None:
                unrunnable(f"there is no policy {base[1]}")
            table, text = self._table(known, depth - 1), base[2]
        for match in _LIST.finditer(text):
            entries = (_COMMENT.sub("", one).strip(" \t'\"") for one in match[2].split(","))
            table[match[1]] += [one for one in entries if one]
            found = True
        for match in _ONE.finditer(text):
            table[match[1]].append(match[2])
            found = True
        for match in _PRIVATE.finditer(text):
            table["private"] += [_private(one) for one in match[1].split(",") if one.strip()]
            found = True
        if (endpoint := _ENDPOINT.search(text)) is not None:
            table["endpoint"].append(_endpoint(endpoint))
            found = True
        elif (model := _MODEL.search(text)) is not None:
            api = "openai" if "/chat/completions" in text or "openai" in model["host"] else "anthropic"
            table["model"].append({"host": _with_port(model["host"]), "api": api})
            found = True
        for flag in _FLAG.finditer(text):
            value: Any = flag[2]
            found = True
            table[flag[1]] = value == "true" if flag[1] == "strict" else int(value) if value.isdigit() else value
        if not found and not re.search(r"(?i)\bdeny all\b|\bempty\b", text):
            unrunnable("its policy_text is not understood")
        return table


def _load(table: dict[str, Any]) -> EgressPolicy:
    try:
        return EgressPolicy.from_data(table)
    except EgressConfigError as error:
        unrunnable(f"its policy does not load: {error.reason}")


def _with_port(host: str) -> str:
    return host if re.search(r":[0-9]+\Z", host) else f"{host}:443"


def _endpoint(found: re.Match[str]) -> dict[str, Any]:
    methods = [one.strip() for one in found["methods"].split(",")]
    return {"host": _with_port(found["host"]), "rules": [{"method": methods, "path": found["path"]}]}


def _private(text: str) -> dict[str, Any]:
    """Read `host:port`, or `host:port -> address/address`."""
    host, _, addresses = _COMMENT.sub("", text).partition("->")
    entry: dict[str, Any] = {"host": host.strip(" '\"")}
    if addresses.strip():
        entry["addresses"] = [one for one in re.split(r"[\s/|]+", addresses) if one]
    return entry
