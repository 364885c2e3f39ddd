"""`lockgate.toml`: what an operator decides, as one typed value.

Rule 1: an unknown key is an error that names the nearest valid key and the line.
Rule 2: a literal secret is an error that names the key. No error of this file ever carries a value.
Rule 3: bounds are checked against the ceilings; callers can only narrow what stands here.
Rule 4: relative paths are relative to the file, so the same file means the same thing from every directory.
Rule 5: `load_text` is pure. `to_json` holds what was validated, and `load` reads it back: that is how the broker
        gets exactly the configuration that the agent process checked.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, cast

import msgspec

from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import ConfigError, LockgateError
from lockgate.contract.run import Rung

FILE_NAME: Final = "lockgate.toml"
MAX_BYTES: Final = 1024 * 1024
RUNGS: Final[tuple[Rung, ...]] = ("container", "gvisor", "microvm", "wasm")
SCHEMES: Final = ("file", "cred", "k8s")
_NAME: Final = re.compile(r"\A[A-Za-z][A-Za-z0-9_-]{0,63}\Z")
_ENV: Final = re.compile(r"\A[a-z0-9][a-z0-9._-]{0,63}\Z")
_TARGET: Final = re.compile(r"\A[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*\Z")
_KEY_REF: Final = re.compile(r"\Asecret ([A-Za-z][A-Za-z0-9_-]{0,63})\Z")


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every table of the file."""


class Audit(_Table, frozen=True, kw_only=True):
    """`[audit]`. `path`: the database, absolute once loaded."""

    path: str = "audit.db"


class Execution(_Table, frozen=True, kw_only=True):
    """`[execution]`: what a run gets when the call does not say.

    Attributes:
        rung: the isolation rung.
        accept_shared_kernel: whether hostile code may run on a rung that shares the host's kernel (X3).
        memory: "cgroup", or "rlimit" to accept the weaker fallback on hosts without a memory cgroup (X6).
        env: name of the package set, or None for the standard library alone.
        pool: warm slots to keep.
        env_store: directory of package sets, absolute once loaded; None = the user's data directory.
        cgroup: a delegated cgroup v2 directory for runs, absolute once loaded; None = look for one.
        bounds: ceilings of every run under this configuration.

    """

    rung: Rung = "container"
    accept_shared_kernel: bool = False
    memory: Literal["cgroup", "rlimit"] = "cgroup"
    env: str | None = None
    pool: int = 4
    env_store: str | None = None
    cgroup: str | None = None
    bounds: Bounds = Bounds()


class Secret(_Table, frozen=True, kw_only=True):
    """`[secrets.NAME]`. `ref`: where the broker finds it, never the value."""

    ref: str


class Backend(_Table, frozen=True, kw_only=True):
    """`[backends.NAME]`: a service that operations call, and how tokens for it are minted.

    Attributes:
        minter: the kind of minter, None = this backend needs no token.
        key: `secret NAME`, the signing key.
        issuer: the `iss` claim. audience: the `aud` claim.
        ttl: lifetime of one token in seconds, at most 60.
        url: where the service listens.

    """

    minter: Literal["jwt"] | None = None
    key: str | None = None
    issuer: str | None = None
    audience: str | None = None
    ttl: float = 30.0
    url: str | None = None

    @property
    def key_name(self) -> str | None:
        """The NAME in `key = "secret NAME"`."""
        found = _KEY_REF.match(self.key or "")
        return found[1] if found else None


class Broker(_Table, frozen=True, kw_only=True):
    """`[broker]`.

    Attributes:
        user: the user it becomes when started as root, None = stay. Secrets' files must then be that user's.
        approval_wait: seconds a call waits for a person before it is told `approval_required`.

    """

    user: str | None = None
    approval_wait: float = 10.0


class Render(_Table, frozen=True, kw_only=True):
    """`[render]`: which URL may be live in what a person is shown (E5), and the caps of one message.

    Attributes:
        links: prefix rules for links, such as "https://docs.example.com/*".
        images: prefix rules for images, without a query.
        exact: URLs that may live as they are, "mailto:help@example.com" too.
        canaries: planted values; a message that holds one is withheld and its run is closed.
        max_images: live images of one message.
        max_urls: distinct live URLs of one message.
        max_run_urls: distinct live URLs of all messages of one run.
        max_bytes: bytes of one message; what is beyond is dropped with a marker.
        check_every: the self-check runs on every n-th message; 1 is every one, 0 is never.

    """

    links: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    canaries: tuple[str, ...] = ()
    max_images: int = 3
    max_urls: int = 10
    max_run_urls: int = 64
    max_bytes: int = 262144
    check_every: int = 1


class Config(_Table, frozen=True, kw_only=True):
    """The whole configuration. `base` is the absolute directory that relative paths were resolved against.

    Attributes:
        operations: `module:attribute` of the sealed registry, imported by the broker alone, from `base`.

    """

    operations: str | None = None
    audit: Audit = Audit()
    execution: Execution = Execution()
    broker: Broker = Broker()
    secrets: dict[str, Secret] = {}
    backends: dict[str, Backend] = {}
    render: Render = Render()
    base: str = "/"

    def to_json(self) -> bytes:
        """Return the validated configuration as JSON that `load` takes back unchanged."""
        return msgspec.json.encode(self)


# Every key a person may write, by table. `base` is ours: it says where the file stood.
_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "": tuple(name for name in Config.__struct_fields__ if name != "base"),
    "audit": Audit.__struct_fields__,
    "execution": Execution.__struct_fields__,
    "execution.bounds": Bounds.__struct_fields__,
    "broker": Broker.__struct_fields__,
    "secrets.*": Secret.__struct_fields__,
    "backends.*": Backend.__struct_fields__,
    "render": Render.__struct_fields__,
}
_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "execution.rung": RUNGS,
    "execution.memory": ("cgroup", "rlimit"),
    "minter": ("jwt",),
}


def load(path: str | Path) -> Config:
    """Read a configuration file, or the directory that holds one, or what `Config.to_json` wrote.

    Raises:
        ConfigError: there is no such file, it is not UTF-8, or its content is wrong.

    """
    where = Path(path)
    if where.is_dir():
        found = find(where)
        if found is None:
            raise ConfigError(
                f"there is no {FILE_NAME} in {str(where)!r}",
                next_step=f"write one, or put [tool.lockgate] into its pyproject.toml, or name a {FILE_NAME}",
            )
        where = found
    try:
        with where.open("rb") as file:
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
        tool = tomllib.loads(project.read_text("utf-8")).get("tool")
    except (OSError, ValueError):  # ValueError: not UTF-8, or not TOML, and then it is no configuration of ours
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
    except (tomllib.TOMLDecodeError, RecursionError) as error:
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
    return from_dict(data, base, where=_Where(name, text, prefix))


class _Where:
    """Says in which file and line a key stands."""

    def __init__(self, name: str, text: str = "", prefix: str = "") -> None:
        self.name, self._text, self._prefix = name, text, prefix

    def __call__(self, path: str) -> str:
        line = line_of(self._text, self._prefix + path)
        return f"{self.name} line {line}" if line else self.name


def line_of(text: str, path: str) -> int | None:
    """Return the line of a TOML text where the table `path` begins or the key `path` is assigned; best effort."""
    table = ""
    for number, raw in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[+([^\[\]]+)\]+\s*(#.*)?$", raw)
        if header:
            table = re.sub(r"[\s\"']", "", header[1])
            if table == path:
                return number
            continue
        key = re.match(r"\s*([\w.\"' -]+?)\s*=", raw)
        if key:
            full = re.sub(r"[\s\"']", "", key[1])
            full = f"{table}.{full}" if table else full
            if full == path or path.startswith(full + "."):
                return number
    return None


def from_dict(data: Mapping[str, Any], base: str | Path, *, where: _Where | None = None) -> Config:
    """Return the configuration that `data` (the shape of the file) holds; pure.

    Raises:
        ConfigError: as `load_text`.

    """
    place = where or _Where("the configuration")
    _check_literals(data, place)
    _check_keys(data, "", place)
    try:
        config = msgspec.convert(dict(data), Config)
    except msgspec.ValidationError as error:
        raise _type_error(str(error), data, place) from None
    except ConfigError as error:  # a bound: its message has a number, which is no secret
        raise ConfigError(f"{place('execution.bounds')}: {error.message}", next_step=error.next_step) from None
    return _resolved(_checked(config, place), Path(base), place)


def _from_json(raw: bytes) -> Config:
    try:
        return msgspec.json.decode(raw, type=Config)
    except msgspec.DecodeError:
        raise ConfigError(
            "the configuration is not TOML and not one that lockgate wrote", next_step=f"name a {FILE_NAME}"
        ) from None


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return `did you mean "x"` for the nearest of `valid`, else the list of all."""
    names = list(valid)
    close = difflib.get_close_matches(name, names, 1, 0.5)
    return f'did you mean "{close[0]}"?' if close else "use one of: " + ", ".join(names)


def _check_literals(data: Mapping[str, Any], place: _Where) -> None:
    """Refuse values where references belong, before anything else could put them into an error."""
    secrets = data.get("secrets")
    if secrets is None:
        return
    if not isinstance(secrets, Mapping):
        raise ConfigError(f"{place('secrets')}: secrets is not a table", next_step="write [secrets.NAME] with a ref")
    for name, entry in cast("Mapping[str, Any]", secrets).items():
        path = f"secrets.{name}"
        step = f'write [secrets.{_shown(name)}] with ref = "file:///path#key", and take the value out of this file'
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{place(path)}: {_shown(path)} is a literal secret", next_step=step)
        table = cast("Mapping[str, Any]", entry)
        for key in table:
            if key != "ref":
                raise ConfigError(
                    f"{place(f'{path}.{key}')}: {_shown(path)} may hold a ref only, and {_shown(key)!r} is not one",
                    next_step=step,
                )
        ref = table.get("ref")
        if not isinstance(ref, str) or ref.partition(":")[0] not in SCHEMES:
            raise ConfigError(
                f"{place(f'{path}.ref')}: {_shown(path)}.ref is not a reference (literal secrets are refused)",
                next_step=step,
            )


def _check_keys(data: Mapping[str, Any], table: str, place: _Where) -> None:
    parts = table.split(".")
    kind = f"{parts[0]}.*" if parts[0] in ("secrets", "backends") and len(parts) == 2 else table
    valid = _KEYS.get(kind)
    for key, value in data.items():
        path = f"{table}.{key}" if table else key
        if valid is not None and key not in valid:
            raise ConfigError(f"{place(path)}: there is no key {_shown(path)!r}", next_step=nearest(key, valid))
        if valid is None and not _NAME.match(key):
            raise ConfigError(
                f"{place(path)}: {_shown(key)!r} is no name", next_step="use letters, digits, _ and -, a letter first"
            )
        if isinstance(value, Mapping) and (path in _KEYS or path in ("secrets", "backends") or valid is None):
            _check_keys(cast("Mapping[str, Any]", value), path, place)


def _type_error(message: str, data: Mapping[str, Any], place: _Where) -> ConfigError:
    """Rewrite a validation error: msgspec names the place, but quotes a wrong choice's value."""
    found = re.search(r"at `\$\.?([\w.\[\]<>-]*)`", message)
    path = found[1] if found else ""
    if path in ("backends[...]", "secrets[...]") or "[...]" in path:
        path = path.replace("[...]", ".*")
    choices = _CHOICES.get(path) or _CHOICES.get(path.rpartition(".")[2])
    if message.startswith("Invalid enum value") and choices:
        value: Any = data
        for part in path.split("."):
            value = cast("Mapping[str, Any]", value).get(part) if isinstance(value, Mapping) else None
        hint = nearest(value if isinstance(value, str) else "", choices)
        return ConfigError(f"{place(path)}: {path} has a value that is not one of its choices", next_step=hint)
    what = message.split(" - at ", maxsplit=1)[0] if not message.startswith("Invalid") else "has a wrong value"
    return ConfigError(f"{place(path)}: {path or 'the configuration'}: {what}", next_step="correct the type")


def _checked(config: Config, place: _Where) -> Config:
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
        if not 0 < backend.ttl <= 60:
            raise ConfigError(f"{place(f'{path}.ttl')}: {path}.ttl is outside 0..60 s", next_step="give at most 60")
        if backend.url is not None and not re.match(r"\Ahttps?://[^@\s?#\x00-\x20]+\Z", backend.url):
            raise ConfigError(
                f"{place(f'{path}.url')}: {path}.url is not http(s)://host[:port]/path without user, query or fragment",
                next_step="take credentials out of the URL; they are minted per call",
            )
    return config


def _check_render(table: Render, place: _Where) -> None:
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


def _resolved(config: Config, base: Path, place: _Where) -> Config:
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

    execution = config.execution
    given = {"env_store": execution.env_store, "cgroup": execution.cgroup}
    execution = msgspec.structs.replace(
        execution,
        **{key: None if path is None else absolute(path, f"execution.{key}") for key, path in given.items()},
    )
    return msgspec.structs.replace(
        config,
        audit=Audit(path=absolute(config.audit.path, "audit.path")),
        execution=execution,
        secrets={name: Secret(ref=reference(name, entry.ref)) for name, entry in config.secrets.items()},
        base=str(base),
    )


def _shown(text: str) -> str:
    """A key as an error may show it: bounded, and without a character that could act on a terminal."""
    clean = "".join(c if c.isprintable() else "?" for c in text[:80])
    return clean if len(text) <= 80 else clean + "..."
