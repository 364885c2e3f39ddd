"""What the values of the configuration must be, and what its relative paths mean.

Rule 1: relative paths are relative to the file, so the same file means the same thing from every directory.
Rule 2: no error carries a value that could be a secret.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import msgspec

from lockgate.config.places import Where
from lockgate.config.tables import Alerts, Audit, Config, Render, Secret
from lockgate.contract.errors import ConfigError, LockgateError
from lockgate.contract.rungs import GvisorChoices
from lockgate.policy.egress_spec import EgressSpec

_ENV: Final = re.compile(r"\A[a-z0-9][a-z0-9._-]{0,63}\Z")
_FIELD: Final = re.compile(r"\A[a-z][a-z0-9-]{0,63}\Z")
_TARGET: Final = re.compile(r"\A[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*\Z")


def checked(config: Config, place: Where) -> Config:
    """Return `config`, or raise ConfigError for the first value that cannot be meant."""
    if config.operations is not None and not _TARGET.match(config.operations):
        raise ConfigError(
            f"{place('operations')}: operations is not of the form module:attribute",
            next_step='write operations = "operations:ops"',
        )
    if not 0 <= config.execution.pool <= 1000:
        raise ConfigError(f"{place('execution.pool')}: pool is outside 0..1000", next_step="give a count of warm slots")
    if config.execution.env is not None and not _ENV.match(config.execution.env):
        raise ConfigError(f"{place('execution.env')}: env is no name", next_step="see: lockgate env list")
    if not 0 <= config.broker.approval_wait <= 3600:
        raise ConfigError(
            f"{place('broker.approval_wait')}: approval_wait is outside 0..3600 s", next_step="give seconds"
        )
    if config.render != Render():
        _check_render(config.render, place)
    if config.alerts != Alerts():
        from lockgate.config.alerting import check_alerts  # noqa: PLC0415 - only a file with [alerts] pays for it

        check_alerts(config, place)
    if config.egress != EgressSpec():
        from lockgate.policy.egress import EgressPolicy  # noqa: PLC0415 - only a file with [egress] pays for it

        try:
            EgressPolicy.of(config.egress)
        except ConfigError as error:
            raise ConfigError(f"{place('egress')}: {error.message}", next_step=error.next_step) from None
    for name, backend in config.backends.items():
        path = f"backends.{name}"
        if backend.key is not None and backend.key_name not in config.secrets:
            raise ConfigError(
                f"{place(f'{path}.key')}: {path}.key does not name an entry of [secrets] (literal keys are refused)",
                next_step='write key = "secret NAME" and a table [secrets.NAME]',
            )
        if backend.minter == "jwt" and not (backend.key and backend.issuer and backend.audience):
            raise ConfigError(
                f"{place(path)}: {path} mints jwt tokens, so it needs key, issuer and audience",
                next_step="give all three",
            )
        if backend.minter == "key" and not backend.key:
            raise ConfigError(
                f"{place(path)}: {path} lends a stored key, so it needs key",
                next_step='write key = "secret NAME" and a table [secrets.NAME]',
            )
        if backend.header is not None and (backend.minter != "key" or not _FIELD.match(backend.header)):
            raise ConfigError(
                f'{place(f"{path}.header")}: {path}.header is no field name, or the minter is not "key"',
                next_step='write header = "x-api-key" beside minter = "key"',
            )
        if not 0 < backend.ttl <= 60:
            raise ConfigError(f"{place(f'{path}.ttl')}: {path}.ttl is outside 0..60 s", next_step="give at most 60")
        if backend.url is not None and not re.match(r"\Ahttps?://[^@\s?#\x00-\x20]+\Z", backend.url):
            raise ConfigError(
                f"{place(f'{path}.url')}: {path}.url is not http(s)://host[:port]/path without user, query or fragment",
                next_step="take credentials out of the URL; they are minted per call",
            )
    return config


def _check_render(table: Render, place: Where) -> None:
    """Have the render guard read its rules now: a rule that it would refuse is an error of this file."""
    from lockgate.render.policy import RenderPolicy  # noqa: PLC0415 - only a file with [render] pays for it

    for key in ("links", "images", "exact"):
        for number, rule in enumerate(getattr(table, key), 1):
            try:
                RenderPolicy.of(**{key: (rule,)})
            except LockgateError as error:  # its message quotes the rule
                raise ConfigError(
                    f"{place(f'render.{key}')}: number {number} of render.{key} can never be live",
                    next_step=error.next_step,
                ) from None
    try:
        RenderPolicy.of(**msgspec.structs.asdict(table))
    except ConfigError as error:
        raise ConfigError(f"{place('render')}: {error.message}", next_step=error.next_step) from None


def resolved(config: Config, base: Path, place: Where) -> Config:
    """Return `config` with every path absolute; `base`: directory that relative ones are taken from."""

    def absolute(path: str, key: str) -> str:
        if not path or "\0" in path:
            raise ConfigError(f"{place(key)}: {key} is not a path", next_step="give a path")
        return os.path.normpath(base / path)

    def reference(name: str, ref: str) -> str:
        scheme, _, rest = ref.partition(":")
        key = f"secrets.{name}.ref"
        if scheme != "file":
            return ref
        path, hash_, fragment = rest.removeprefix("//").partition("#")
        return f"file://{absolute(path, key)}{hash_}{fragment}"

    alerts = config.alerts
    if alerts != Alerts():
        alerts = msgspec.structs.replace(
            alerts,
            sinks={
                name: msgspec.structs.replace(
                    sink,
                    **{
                        key: None if path is None else absolute(path, f"alerts.sinks.{name}.{key}")
                        for key, path in (("path", sink.path), ("ca", sink.ca))
                    },
                )
                for name, sink in alerts.sinks.items()
            },
            textfile=None if alerts.textfile is None else absolute(alerts.textfile, "alerts.textfile"),
        )
    execution = config.execution
    given = {"env_store": execution.env_store, "cgroup": execution.cgroup}
    execution = msgspec.structs.replace(
        execution,
        **{key: None if path is None else absolute(path, f"execution.{key}") for key, path in given.items()},
    )
    if execution.gvisor != GvisorChoices():
        given = {"runsc": execution.gvisor.runsc, "store": execution.gvisor.store}
        chosen = msgspec.structs.replace(
            execution.gvisor,
            **{key: None if path is None else absolute(path, f"execution.gvisor.{key}") for key, path in given.items()},
        )
        execution = msgspec.structs.replace(execution, gvisor=chosen)
    if execution.microvm.store is not None:
        store = absolute(execution.microvm.store, "execution.microvm.store")
        execution = msgspec.structs.replace(execution, microvm=msgspec.structs.replace(execution.microvm, store=store))
    if execution.wasm.store is not None:
        store = absolute(execution.wasm.store, "execution.wasm.store")
        execution = msgspec.structs.replace(execution, wasm=msgspec.structs.replace(execution.wasm, store=store))
    return msgspec.structs.replace(
        config,
        audit=Audit(path=absolute(config.audit.path, "audit.path")),
        execution=execution,
        secrets={name: Secret(ref=reference(name, entry.ref)) for name, entry in config.secrets.items()},
        alerts=alerts,
        base=str(base),
    )
