"""`lockgate egress explain` and `lockgate egress learn`: ask the list, and find out what it should hold.

Nothing is connected and nothing is resolved.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, cast

import msgspec
import typer

from lockgate import config as configuration
from lockgate.cli.common import ConfigPath, load_config, read_text
from lockgate.cli.output import Json, fields, note, print_json
from lockgate.config.files import open_named
from lockgate.contract.errors import ConfigError
from lockgate.policy.egress import Ask, EgressPolicy, How, Verdict
from lockgate.policy.egress_learn import propose
from lockgate.policy.egress_reasons import SENTENCES, EgressReason
from lockgate.policy.host import Endpoint, Host, Refusal
from lockgate.policy.url import Url

_LOG_BYTES: Final = 256 * 1024 * 1024
_SQLITE: Final = b"SQLite format 3\0"


def explain(
    destination: Annotated[str, typer.Argument(metavar="HOST:PORT", help="A destination, or an http(s):// URL.")],
    config: ConfigPath = None,
    as_json: Json = False,
) -> None:
    """Say whether a destination may be reached, and which rule decides."""
    found = configuration.find() if config is None else config
    policy = EgressPolicy.of(load_config(config).egress)
    how, endpoint = _asked(destination)
    if isinstance(endpoint, Refusal):
        verdict, names = Verdict(False, _reason(endpoint.reason), None, endpoint.detail), None
    else:
        verdict, names = policy.decide(Ask(endpoint, how)), policy.dns(endpoint.host)
    rules = None if isinstance(endpoint, Refusal) else policy.rules_for(endpoint)
    line = None if found is None else _line(found, verdict.rule)
    answer = {
        "destination": None if isinstance(endpoint, Refusal) else str(endpoint),
        "by": {"connect": "CONNECT and TLS", "http": "an absolute-form http request"}[how],
        "allow": verdict.allow,
        "reason": verdict.reason,
        "rule": verdict.rule,
        "detail": verdict.detail,
        "mode": policy.mode,
        "reported": verdict.reported,
        "intercepted": None if rules is None else [msgspec.to_builtins(rule) for rule in rules.rules],
        "model": None if rules is None else rules.model,
        "dns": None if names is None else names.reason,
        "warnings": _warnings(policy, verdict.rule),
        "policy": policy.hash,
        "line": line,
    }
    if as_json:
        print_json(answer)
        return
    sentence, step = SENTENCES[verdict.reason]
    fields(
        [
            ("destination", answer["destination"] or destination),
            ("asked by", answer["by"]),
            ("verdict", ("allow" if verdict.allow else "deny") + (" (report mode)" if verdict.reported else "")),
            ("rule", verdict.rule or "(no entry names it)"),
            ("reason", f"{verdict.reason}: {verdict.detail or sentence}"),
            ("next step", None if verdict.allow and not verdict.reported else step),
            ("each request", None if rules is None else _shown(rules.rules, rules.model)),
            ("warning", "; ".join(_warnings(policy, verdict.rule)) or None),
            ("name lookups", None if names is None else SENTENCES[names.reason][0]),
            ("file", f"{found}:{line}" if line else str(found) if found else "(no configuration: an empty list)"),
        ]
    )


def _warnings(policy: EgressPolicy, rule: str | None) -> list[str]:
    """Return what loading said about the entry that decided."""
    return [one.text for one in policy.warnings if rule == f"allow {one.entry}"]


def _shown(rules: tuple[Any, ...], model: str | None) -> str:
    if model is not None:
        return f"the generation call of {model} alone, with a credential from the broker"
    return "; ".join(f"{','.join(rule.method)} {rule.path}" for rule in rules)


def _asked(text: str) -> tuple[How, Endpoint | Refusal]:
    """Read `host:port` or a URL; port 80 is asked for in absolute form."""
    raw = text.encode("utf-8", "surrogateescape")
    if "://" in text:
        url = Url.parse(raw, ("https", "http"))
        if isinstance(url, Refusal):
            return "connect", url
        return ("http" if url.scheme == "http" else "connect"), url.endpoint
    endpoint = Endpoint.parse(raw)
    if isinstance(endpoint, Refusal) and endpoint.reason == "bad_target" and isinstance(Host.parse(raw), Host):
        raise ConfigError(f"{text!r} has no port", next_step=f"write {text}:443")
    port_80 = not isinstance(endpoint, Refusal) and endpoint.port == 80
    return ("http" if port_80 else "connect"), endpoint


def _reason(text: str) -> EgressReason:
    return text if text in SENTENCES else "bad_target"


def _line(file: Path, rule: str | None) -> int | None:
    """Return the line in which the entry of a rule is written, if that can be told."""
    entry = (rule or "").partition(" ")[2]
    if not entry or not file.is_file():
        return None
    for number, line in enumerate(read_text(file, "the configuration").splitlines(), 1):
        if f'"{entry}"' in line or f"'{entry}'" in line:
            return number
    return None


def learn(
    log: Annotated[Path, typer.Argument(help="Audit file of a gateway in report mode, or its rows as JSON lines.")],
    as_json: Json = False,
) -> None:
    """Propose a list from what report mode let through. Read it first: the log holds what the programs asked for."""
    proposal = propose(_destinations(log))
    if as_json:
        print_json({**msgspec.to_builtins(proposal), "toml": proposal.to_toml()})
        return
    if not proposal.candidates:
        note('the log holds nothing that report mode let through; run the gateway with mode = "report" first')
        return
    sys.stdout.write(proposal.to_toml())
    if proposal.skipped:
        note(f"{proposal.skipped} destinations were left out: they are no host:port, or too many")


def _destinations(log: Path) -> Iterator[str]:
    """Yield the destination of each row that was reported and not denied."""
    try:
        with open_named(log, "the log") as file:
            head = file.read(len(_SQLITE))
    except OSError as error:
        raise ConfigError(
            f"{str(log)!r} cannot be read: {error.strerror}", next_step="name the audit file of the gateway"
        ) from None
    if head == _SQLITE:
        from lockgate.audit import reader  # noqa: PLC0415 - only an audit file needs it

        for row in reader.every(log):
            if row.status == "reported":
                yield str((row.detail or {}).get("destination", ""))
        return
    with open_named(log, "the log") as file:
        text = file.read(_LOG_BYTES + 1)
    if len(text) > _LOG_BYTES:
        raise ConfigError(f"{str(log)!r} is over 256 MiB", next_step="split the file")
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError:
            raise ConfigError(
                f"{str(log)!r} line {number} is no row", next_step="give what `lockgate audit tail --jsonl` writes"
            ) from None
        if found.get("status") == "reported":
            detail = found.get("detail")
            yield str(cast("dict[str, Any]", detail).get("destination", "")) if isinstance(detail, dict) else ""
