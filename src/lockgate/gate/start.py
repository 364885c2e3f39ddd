"""What the children are told at start: the configuration as a sealed file, the supervisor's settings as JSON."""

from __future__ import annotations

import fcntl
import os
import pwd
from pathlib import Path

import msgspec

from lockgate.config import Config, Execution
from lockgate.contract.errors import ConfigError
from lockgate.contract.rungs import AUTO


def config_file(config: Config) -> int:
    """Return a descriptor of the validated configuration, sealed (memfd_create(2)): what was checked is read."""
    fd = os.memfd_create("lockgate-config", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, config.to_json())
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


def supervisor_settings(execution: Execution, *, accept_shared_kernel: bool) -> str:
    """Return the argv JSON of `lockgate.supervisor.settings.Settings`; there is no secret in it."""
    settings = {name: getattr(execution, name) for name in execution.__struct_fields__}
    settings["accept_shared_kernel"] = accept_shared_kernel
    del settings["reaches"]
    if execution.rung == AUTO:  # chosen at the first run; until then nothing is kept warm
        settings |= {"rung": "container", "pool": 0}
    return msgspec.json.encode(settings).decode()


def state_directory() -> Path:
    """Return the user's state directory of lockgate. From the password database: the environment is not read (C6)."""
    try:
        home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        raise ConfigError(
            f"the user {os.getuid()} has no entry in the password database, so there is no place for an audit log",
            next_step="name one: [audit] path in lockgate.toml",
        ) from None
    return Path(home) / ".local" / "state" / "lockgate"


def default_audit_path() -> str:
    """Return where rows go when no configuration says so; nothing is made yet."""
    return str(state_directory() / "audit.db")


def make_default_directory(audit_path: str) -> None:
    """Make the directory of `default_audit_path` (0700) if the rows go there; any other place is the operator's.

    Raises:
        ConfigError: it cannot be made.

    """
    where = Path(audit_path).parent
    try:
        if where != state_directory():
            return
    except ConfigError:  # no home, so the path was configured
        return
    try:
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{str(where)!r} cannot be made: {error.strerror}", next_step="name a place: [audit] path in lockgate.toml"
        ) from None


def log_file(path: str | Path | None) -> int:
    """Open the log of the children's output for appending, 0600; -1 for none.

    Raises:
        ConfigError: it cannot be opened.

    """
    if path is None:
        return -1
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"the log {str(path)!r} cannot be opened: {error.strerror}", next_step="name a file in a directory of yours"
        ) from None
