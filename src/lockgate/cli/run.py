"""`lockgate run`: a file, or stdin, in a sandbox."""

from __future__ import annotations

import codecs
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from lockgate.cli.common import ConfigPath, empty_scope, gate_of, load_config, load_scope
from lockgate.cli.output import Json, note, print_json
from lockgate.config import Config
from lockgate.config.files import open_named
from lockgate.contract.errors import ConfigError
from lockgate.contract.run import RunResult
from lockgate.contract.rungs import AUTO
from lockgate.gate import checks
from lockgate.gate.escape import escape

_STDIN: Final = "-"


def run(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="Python source; - reads it from stdin.")],
    *,
    config: ConfigPath = None,
    scope: Annotated[Path | None, typer.Option(help="Scope, TOML or JSON. Default: allows nothing.")] = None,
    env: Annotated[str | None, typer.Option(help="Package set; see `lockgate env list`.")] = None,
    rung: Annotated[str | None, typer.Option(help="Isolation rung, or auto; see `lockgate choose`.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds of wall clock.")] = None,
    bound: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Narrow a bound; repeatable.")] = None,
    export_to: Annotated[Path | None, typer.Option(help="Directory for exported files.")] = None,
    accept_shared_kernel: Annotated[
        bool, typer.Option("--accept-shared-kernel", help="Accept that the container rung shares the host's kernel.")
    ] = False,
    accept_weaker: Annotated[
        list[str] | None,
        typer.Option("--accept-weaker", metavar="WHAT", help="Accept what the rung lacks on this host; repeatable."),
    ] = None,
    accept_memory_rlimit: Annotated[
        bool, typer.Option("--accept-memory-rlimit", help="Accept the weaker memory bound of hosts without a cgroup.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Do not escape the program's output on a terminal.")] = False,
    as_json: Json = False,
) -> None:
    """Run Python in a sandbox that has no network and one way out.

    The program's stdout and stderr are passed on as they come: escaped on a terminal, byte for byte elsewhere.
    The exit code is the program's own; 124 wall clock, 137 any other bound.
    """
    settings = load_config(config)
    accepted = accept_shared_kernel or settings.execution.accept_shared_kernel
    if accept_memory_rlimit:
        settings = msgspec.structs.replace(
            settings, execution=msgspec.structs.replace(settings.execution, memory="rlimit")
        )
    weaker = checks.weaknesses(accept_weaker or ())
    # Refused before anything is started.
    if (rung or settings.execution.rung) != AUTO:
        checks.rung(rung or settings.execution.rung, accept_shared_kernel=accepted)
    bounds = checks.bounds(settings.execution.bounds, _bounds(bound or []), timeout)
    source = checks.script(_read(file, bounds.code), bounds.code)
    what = load_scope(scope) if scope is not None else empty_scope(bounds.wall + 120)
    show = _Show(raw=raw) if not as_json else None
    with (
        gate_of(_keep_warm(settings, rung, env), pool=1, accept=accepted, quiet=as_json) as gate,
        gate.run_scope(what) as opened,
    ):
        result = opened.code(
            source,
            rung=rung,
            env=env,
            bounds=_bounds(bound or []),
            timeout=timeout,
            on_bytes=show.take if show is not None else None,
            export_to=export_to,
            accept_weaker=weaker,
        )
    if show is None:
        print_json({**msgspec.to_builtins(result), "denials": msgspec.to_builtins(result.denials), "ok": result.ok})
    else:
        show.end()
        _tell(result)
    raise typer.Exit(result.exit_code & 0xFF)


def _keep_warm(settings: Config, rung: str | None, env: str | None) -> Config:
    """Have the one slot of this verb warmed on the rung, and with the package set, that will be used."""
    asked = {"rung": rung, "env": env}
    changes: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    return msgspec.structs.replace(settings, execution=msgspec.structs.replace(settings.execution, **changes))


def _read(file: str, cap: int) -> bytes:
    try:
        if file == _STDIN:
            return sys.stdin.buffer.read(cap + 1)
        with open_named(Path(file), "the program") as opened:
            return opened.read(cap + 1)
    except OSError as error:
        raise ConfigError(
            f"the program {escape(file)!r} cannot be read: {error.strerror}", next_step="name a file, or - for stdin"
        ) from None


def _bounds(pairs: list[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise ConfigError(
                f"--bound {pair[:80]!r} is not NAME=NUMBER", next_step="write --bound memory=67108864"
            ) from None
    return found


class _Show:
    """Passes output on while it comes; on a terminal escaped, in whole characters whatever the chunks cut."""

    def __init__(self, *, raw: bool) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {fd: decoder("replace") for fd in (1, 2) if not raw and os.isatty(fd)}
        self._ends_open = False
        self._write = _write

    def take(self, stream: str, data: bytes) -> None:
        """Take a chunk."""
        self._pass(1 if stream == "stdout" else 2, data, last=False)
        self._ends_open = not data.endswith(b"\n") if data else self._ends_open

    def end(self) -> None:
        """Show what is left of a cut character, and end an open line on a terminal."""
        for fd in self._decoders:
            self._pass(fd, b"", last=True)
        if self._ends_open and os.isatty(1):
            self._write(1, b"\n")

    def _pass(self, fd: int, data: bytes, *, last: bool) -> None:
        decoder = self._decoders.get(fd)
        self._write(fd, data if decoder is None else escape(decoder.decode(data, last), keep_lines=True).encode())


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _tell(result: RunResult) -> None:
    """Say beside the output what the output does not say."""
    error = result.error
    if error is not None and error.name != "SystemExit":
        for line in (error.traceback.strip() or f"{error.name}: {error.message}").splitlines():
            note(line, style="red")
    if result.text and result.text != "None":
        note(f"value: {result.text}")
    for name, dropped in result.truncated.items():
        if dropped:
            note(f"{name}: {dropped} bytes more were dropped", style="yellow")
    for call in result.denials:
        note(f"denied: {call.operation}: {call.reason} ({call.audit_id})", style="yellow")
    for export in result.exports:
        note(f"exported: {export.name}  {export.size} bytes  sha256 {export.sha256}")
    if result.killed_by is not None:
        note(f"ended by the bound: {result.killed_by}", style="bold yellow")
