"""From a file, a text or a mapping to one typed configuration, or to an error that names the place."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from lockgate.config.checks import checked, resolved
from lockgate.config.files import open_named
from lockgate.config.keys import check_keys, check_literals, type_error
from lockgate.config.places import Where
from lockgate.config.tables import Config
from lockgate.contract.errors import ConfigError

FILE_NAME: Final = "lockgate.toml"
MAX_BYTES: Final = 1024 * 1024


def load(path: str | Path) -> Config:
    """Read a configuration file, or the directory that holds one, or what `Config.to_json` wrote.

    Raises:
        ConfigError: there is no such file, it is not UTF-8, or its content is wrong.

    """
    try:
        where = Path(path)
        directory = where.is_dir()
    except (TypeError, ValueError, OSError):  # no path, a NUL in it, or a name that is too long
        raise ConfigError("that is no path of a configuration", next_step=f"name a {FILE_NAME}") from None
    if directory:
        found = find(where)
        if found is None:
            raise ConfigError(
                f"there is no {FILE_NAME} in {str(where)!r}",
                next_step=f"write one, or put [tool.lockgate] into its pyproject.toml, or name a {FILE_NAME}",
            )
        where = found
    try:
        with open_named(where, "the configuration") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"the configuration {str(where)!r} cannot be read: {error.strerror}",
            next_step="name a file that exists and that this user may read",
        ) from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{str(where)!r} is over {MAX_BYTES} bytes", next_step="name a configuration file")
    if raw.startswith(b"{"):  # no TOML document begins so
        return _from_json(raw)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{str(where)!r} is not UTF-8 (byte {error.start})", next_step="save the file as UTF-8"
        ) from None
    return load_text(text, Path(os.path.abspath(where)).parent, name=where.name)  # noqa: PTH100 - no symlink is followed


def find(directory: str | Path = ".") -> Path | None:
    """Return the configuration of `directory`: its `lockgate.toml`, else a `pyproject.toml` with `[tool.lockgate]`."""
    own = Path(directory) / FILE_NAME
    if own.is_file():
        return own
    project = Path(directory) / "pyproject.toml"
    try:
        with open_named(project, "the configuration") as file:
            tool = tomllib.loads(file.read(MAX_BYTES).decode("utf-8")).get("tool")
    # Not ours: no file, not UTF-8, not TOML, or larger than any configuration.
    except (OSError, ValueError, RecursionError, ConfigError):
        return None
    return project if isinstance(tool, dict) and "lockgate" in tool else None


def load_text(text: str, base: str | Path, *, name: str = FILE_NAME) -> Config:
    """Return the configuration in `text`; pure. `base`: absolute directory; `name`: shown in errors.

    A `name` of `pyproject.toml` takes the table `[tool.lockgate]`.

    Raises:
        ConfigError: the text is not TOML, has an unknown key, a literal secret, or a bound above its ceiling.

    """
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also an int of more digits than Python reads
        place = re.search(r"\(at line \d+, column \d+\)|\(at end of document\)", str(error))
        raise ConfigError(
            f"{name} is not valid TOML {place[0] if place else ''}".rstrip(), next_step="correct that place"
        ) from None
    prefix = ""
    if name == "pyproject.toml":
        tool = data.get("tool")
        inner = cast("dict[str, Any]", tool).get("lockgate") if isinstance(tool, dict) else None
        if not isinstance(inner, dict):
            raise ConfigError(f"{name} has no table [tool.lockgate]", next_step=f"add it, or name a {FILE_NAME}")
        data, prefix = cast("dict[str, Any]", inner), "tool.lockgate."
    return from_dict(data, base, where=Where(name, text, prefix))


def from_dict(data: Mapping[str, Any], base: str | Path, *, where: Where | None = None) -> Config:
    """Return the configuration that `data` (the shape of the file) holds; pure.

    Raises:
        ConfigError: as `load_text`.

    """
    place = where or Where("the configuration")
    if not isinstance(data, Mapping) or not _texts(data):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"{place.name}: it is no table of names", next_step="write what lockgate.toml would hold")
    check_literals(data, place)
    check_keys(data, "", place)
    try:
        config = msgspec.convert(dict(data), Config)
    except msgspec.ValidationError as error:
        raise type_error(str(error), data, place) from None
    except (OverflowError, UnicodeError):
        raise ConfigError(f"{place.name}: a number or a text is out of range", next_step="correct it") from None
    except ConfigError as error:  # a bound: its message has a number, which is no secret
        raise ConfigError(f"{place('execution.bounds')}: {error.message}", next_step=error.next_step) from None
    return resolved(checked(config, place), Path(base), place)


def _texts(data: object) -> bool:
    """Whether every key is a text, at every depth."""
    if not isinstance(data, Mapping):
        return True
    table = cast("Mapping[object, object]", data)
    return all(isinstance(key, str) and _texts(value) for key, value in table.items())


def _from_json(raw: bytes) -> Config:
    """Read what `Config.to_json` wrote. Anybody can write such a file, so it is held to every rule of one in TOML."""
    place = Where("the configuration")
    try:
        data = msgspec.json.decode(raw, type=dict[str, Any])
        base = data.pop("base", "")
    except (msgspec.DecodeError, RecursionError):
        data, base = {}, ""
    if not isinstance(base, str) or not base.startswith("/") or msgspec.json.encode(data | {"base": base}) != raw:
        raise ConfigError(
            "the configuration is not TOML and not one that lockgate wrote", next_step=f"name a {FILE_NAME}"
        )
    return from_dict(data, base, where=place)
