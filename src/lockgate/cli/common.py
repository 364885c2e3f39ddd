"""What several verbs share: the configuration, scopes, arguments, the Gate behind a verb."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from lockgate import config as configuration
from lockgate.cli.output import progress
from lockgate.config import Config
from lockgate.config.files import open_named
from lockgate.contract.errors import ConfigError
from lockgate.gate.start import default_audit_path
from lockgate.gate.sync import Gate
from lockgate.policy import Scope

ConfigPath = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Configuration; else lockgate.toml or \\[tool.lockgate] of this directory."),
]
SCOPE_BYTES: Final = 1024 * 1024


def load_config(path: Path | None, *, required: bool = False) -> Config:
    """Return the configuration of a verb.

    Raises:
        ConfigError: it is wrong, or there is none and the verb needs one.

    """
    found = path if path is not None else configuration.find()
    if found is not None:
        return configuration.load(found)
    if required:
        return configuration.load(Path.cwd())  # says what is missing and what to do
    return configuration.from_dict({"audit": {"path": default_audit_path()}}, Path.cwd())


def audit_path(path: Path | None, config: Path | None) -> Path:
    """Return the audit file that a verb is about."""
    return path if path is not None else Path(load_config(config).audit.path)


@contextmanager
def gate_of(config: Config, *, pool: int, accept: bool, quiet: bool) -> Generator[Gate]:
    """Open a Gate with `pool` warm slots for the time of one verb."""
    sized = msgspec.structs.replace(config, execution=msgspec.structs.replace(config.execution, pool=pool))
    gate = Gate(sized, accept_shared_kernel=accept)
    with progress("starting broker and supervisor", quiet=quiet):
        gate.start()
    try:
        yield gate
    finally:
        gate.close()


def load_scope(path: Path) -> Scope:
    """Read a scope, TOML or JSON by the name's ending.

    Raises:
        ConfigError: it cannot be read. ScopeError: it is malformed.

    """
    text = read_text(path, "the scope")
    return Scope.from_json(text) if path.suffix == ".json" else Scope.from_toml(text)


def read_text(path: Path, what: str) -> str:
    """Read a UTF-8 file of at most 1 MiB.

    Raises:
        ConfigError: it cannot be read, is larger, or is not UTF-8.

    """
    try:
        with open_named(path, what) as file:
            raw = file.read(SCOPE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{what} {str(path)!r} cannot be read: {error.strerror}", next_step="name a file that exists"
        ) from None
    if len(raw) > SCOPE_BYTES:
        raise ConfigError(f"{what} {str(path)!r} is over 1 MiB", next_step="name a smaller file")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{what} {str(path)!r} is not UTF-8 (byte {error.start})", next_step="save it as UTF-8"
        ) from None


def empty_scope(seconds: float) -> Scope:
    """Return a scope that allows nothing, for the person at this terminal."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = f"uid-{os.getuid()}"
    return Scope(user=user, agent="lockgate-cli", tenant="local", expires=seconds, allow={})


def arguments(pairs: list[str], raw: str | None) -> dict[str, Any]:
    """Return an operation's arguments from NAME=VALUE (JSON, else text) and from a JSON object.

    Raises:
        ConfigError: one is neither.

    """
    found: dict[str, Any] = {}
    if raw is not None:
        try:
            given = json.loads(raw)
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict):
            raise ConfigError("--args is no JSON object", next_step="""write --args '{"order_id": "ord_1"}'""")
        found.update(given)  # pyright: ignore[reportUnknownArgumentType]
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"{pair[:80]!r} is not NAME=VALUE", next_step="write order_id=ord_1")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    return found
