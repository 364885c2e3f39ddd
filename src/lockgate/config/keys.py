"""Which keys a person may write, and what is said of one that nobody may.

Rule 1: an unknown key is an error that names the nearest valid key and the line.
Rule 2: a literal secret is an error that names the key, before anything else could put the value into an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, cast, get_args

from lockgate.config import tables
from lockgate.config.places import Where, nearest, shown
from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import ConfigError
from lockgate.contract.rungs import GvisorChoices, MicrovmChoices, Reaches, RungChoice, WasmChoices, Weakness
from lockgate.policy.egress_spec import EgressSpec, Limits, ModelApi

SCHEMES: Final = ("file", "cred", "k8s")
_NAME: Final = re.compile(r"\A[A-Za-z][A-Za-z0-9_-]{0,63}\Z")

# Every key a person may write, by table. `base` is ours: it says where the file stood.
_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "": tuple(name for name in tables.Config.__struct_fields__ if name != "base"),
    "audit": tables.Audit.__struct_fields__,
    "execution": tables.Execution.__struct_fields__,
    "execution.bounds": Bounds.__struct_fields__,
    "execution.gvisor": GvisorChoices.__struct_fields__,
    "execution.microvm": MicrovmChoices.__struct_fields__,
    "execution.wasm": WasmChoices.__struct_fields__,
    "broker": tables.Broker.__struct_fields__,
    "secrets.*": tables.Secret.__struct_fields__,
    "backends.*": tables.Backend.__struct_fields__,
    "render": tables.Render.__struct_fields__,
    "alerts": tables.Alerts.__struct_fields__,
    "alerts.sinks.*": tables.AlertSink.__struct_fields__,
    "egress": EgressSpec.__struct_fields__,
    "egress.limits": Limits.__struct_fields__,
}
_NAMED: Final = ("secrets", "backends", "alerts.sinks")
"""Tables whose keys are names that the person chose."""
_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "execution.rung": get_args(RungChoice),
    "execution.reaches": get_args(Reaches),
    "execution.memory": ("cgroup", "rlimit"),
    "execution.accept_weaker": get_args(Weakness),
    "minter": ("jwt", "key"),
    "kind": ("file", "webhook", "slack", "pagerduty", "otlp"),
    "format": ("ocsf", "cef"),
    "at_least": ("medium", "critical"),
    "egress.profile": ("runtime", "build"),
    "egress.mode": ("enforce", "report"),
    "egress.model.api": get_args(ModelApi),
}


def check_literals(data: Mapping[str, Any], place: Where) -> None:
    """Refuse values where references belong, before anything else could put them into an error."""
    secrets = data.get("secrets")
    if secrets is None:
        return
    if not isinstance(secrets, Mapping):
        raise ConfigError(f"{place('secrets')}: secrets is not a table", next_step="write [secrets.NAME] with a ref")
    for name, entry in cast("Mapping[str, Any]", secrets).items():
        path = f"secrets.{name}"
        step = f'write [secrets.{shown(name)}] with ref = "file:///path#key", and take the value out of this file'
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{place(path)}: {shown(path)} is a literal secret", next_step=step)
        table = cast("Mapping[str, Any]", entry)
        for key in table:
            if key != "ref":
                raise ConfigError(
                    f"{place(f'{path}.{key}')}: {shown(path)} may hold a ref only, and {shown(key)!r} is not one",
                    next_step=step,
                )
        ref = table.get("ref")
        if not isinstance(ref, str) or ref.partition(":")[0] not in SCHEMES:
            raise ConfigError(
                f"{place(f'{path}.ref')}: {shown(path)}.ref is not a reference (literal secrets are refused)",
                next_step=step,
            )


def check_keys(data: Mapping[str, Any], table: str, place: Where) -> None:
    """Raise ConfigError for a key of `table`, or of a table below it, that nobody reads."""
    outer = table.rpartition(".")[0]
    kind = f"{outer}.*" if outer in _NAMED else table
    valid = _KEYS.get(kind)
    for key, value in data.items():
        path = f"{table}.{key}" if table else key
        if valid is not None and key not in valid:
            raise ConfigError(f"{place(path)}: there is no key {shown(path)!r}", next_step=nearest(key, valid))
        if valid is None and not _NAME.match(key):
            raise ConfigError(
                f"{place(path)}: {shown(key)!r} is no name", next_step="use letters, digits, _ and -, a letter first"
            )
        if isinstance(value, Mapping) and (path in _KEYS or path in _NAMED or valid is None):
            check_keys(cast("Mapping[str, Any]", value), path, place)


def type_error(message: str, data: Mapping[str, Any], place: Where) -> ConfigError:
    """Rewrite a validation error: msgspec names the place, but quotes a wrong choice's value."""
    found = re.search(r"at `\$\.?([\w.\[\]<>-]*)`", message)
    path = found[1] if found else ""
    if path in ("backends[...]", "secrets[...]") or "[...]" in path:
        path = path.replace("[...]", ".*")
    listed = re.sub(r"\[\d+\]", "", path)
    choices = _CHOICES.get(listed) or _CHOICES.get(listed.rpartition(".")[2])
    if message.startswith("Invalid enum value") and choices:
        value: Any = data
        for part in path.split("."):
            value = cast("Mapping[str, Any]", value).get(part) if isinstance(value, Mapping) else None
        hint = nearest(value if isinstance(value, str) else "", choices)
        return ConfigError(f"{place(listed)}: {path} has a value that is not one of its choices", next_step=hint)
    what = message.split(" - at ", maxsplit=1)[0] if not message.startswith("Invalid") else "has a wrong value"
    return ConfigError(f"{place(listed)}: {path or 'the configuration'}: {what}", next_step="correct the type")
