"""`lockgate egress run -- CMD`: one command, and the gateway as its only way out.

Rule 1: stdin, stdout and stderr are the command's; what this verb has to say goes to stderr, before and after it.
Rule 2: the environment is read by name, for names on a list or named by `--pass`, and only to be handed on.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from lockgate.alerts.start import start_alerter
from lockgate.cli.common import ConfigPath, load_config
from lockgate.cli.output import note
from lockgate.config import Config
from lockgate.contract.errors import ConfigError
from lockgate.egress import confine, launch
from lockgate.egress.client import Control
from lockgate.egress.confined import Command, Confined, Identity
from lockgate.egress.process import CONTROL
from lockgate.gate.start import config_file, state_directory
from lockgate.policy.egress import EgressPolicy
from lockgate.policy.egress_reasons import SENTENCES


def ambient(names: tuple[str, ...]) -> dict[str, str]:
    """Return the variables of this process that have one of the names, to hand them on."""
    # The one place of this package that reads the environment: PATH and TERM are known to nobody else.
    return {name: os.environ[name] for name in names if name in os.environ}  # noqa: TID251


def run_command(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD [ARG]...", help="The command and its arguments.")],
    *,
    config: ConfigPath = None,
    allow: Annotated[list[str] | None, typer.Option(metavar="HOST:PORT", help="Allow this too; repeatable.")] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Let through what the list alone would deny, and record it.")
    ] = False,
    gateway: Annotated[
        Path | None,
        typer.Option("--gateway", help="Directory of a gateway that `egress serve` runs; else one is started."),
    ] = None,
    audit: Annotated[
        Path | None, typer.Option("--audit", help="Audit file of the gateway that is started here.")
    ] = None,
    nameserver: Annotated[
        list[str] | None,
        typer.Option("--nameserver", metavar="ADDRESS[@PORT]", help="Whom the gateway asks; default: the system's."),
    ] = None,
    ca_file: Annotated[
        Path | None, typer.Option("--ca-file", help="More trust anchors for intercepted destinations, PEM.")
    ] = None,
    agent: Annotated[str, typer.Option("--agent", help="Named in the rows.")] = "egress-run",
    tool: Annotated[str, typer.Option("--tool", help="Named in the rows; default: the command's name.")] = "",
    user: Annotated[str | None, typer.Option("--user", help="Run the command as this user (root only).")] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="Set a variable; repeatable.")
    ] = None,
    passed: Annotated[
        list[str] | None, typer.Option("--pass", metavar="NAME", help="Pass a variable on; repeatable.")
    ] = None,
    unix_sockets: Annotated[
        bool,
        typer.Option("--unix-sockets", help="Allow sockets of the file system; those others have bound stay covered."),
    ] = False,
    unix_socket: Annotated[
        list[str] | None,
        typer.Option("--unix-socket", metavar="PATH", help="Leave this one reachable; its server is a way out."),
    ] = None,
    device: Annotated[list[str] | None, typer.Option("--device", help="Show this device node too; repeatable.")] = None,
    decoys: Annotated[
        bool, typer.Option("--decoys/--no-decoys", help="Plant values that nobody uses; one that leaves ends the run.")
    ] = True,
    routed: Annotated[
        bool, typer.Option("--routed/--no-routed", help="Lead clients without a proxy setting to the gateway too.")
    ] = True,
    proxy_port: Annotated[
        int, typer.Option("--proxy-port", min=1024, max=65535, help="Where the proxy listens inside.")
    ] = confine.PROXY_PORT,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document about the run on stderr, at its end.")
    ] = False,
) -> None:
    """Run a command in a network namespace that holds loopback, a proxy that is the gateway, and its own DNS.

    Nothing else has a route: UDP, QUIC, ICMP, other resolvers, raw IPv6. A client that ignores the proxy is led to the
    gateway too. The exit code is the command's own; 128 and the signal when one killed it; 137 when the gateway ended
    the run.
    """
    settings = load_config(config)
    spec = settings.egress
    if allow or report:
        mode = "report" if report else spec.mode
        spec = msgspec.structs.replace(spec, allow=(*spec.allow, *(allow or ())), mode=mode)
    if gateway is not None and (config is not None or allow or report or nameserver or ca_file or audit):
        raise ConfigError(
            "--gateway names a gateway that has its policy and its audit file already",
            next_step="leave out --config, --allow, --report, --nameserver, --ca-file and --audit",
        )
    for one in device or ():
        if not one.startswith("/dev/") or not Path(one).exists():
            raise ConfigError(f"--device {one[:100]!r} is not there", next_step="name a node under /dev")
    servers = tuple(str(Path(one).absolute()) for one in unix_socket or ())
    for one in servers:
        if not Path(one).is_socket():
            raise ConfigError(f"--unix-socket {one[:100]!r} is no socket", next_step="name one that a server has bound")
    uid, gid, home = _user(user)
    names = (*confine.INHERITED, *(confine.variable_name(one) for one in passed or ()))
    inherited = ambient(names)
    declared = {name: inherited[name] for name in passed or () if name in inherited}
    declared |= home | confine.declared_variables(env or ())
    name = os.fsencode(Path(command[0]).name).decode("utf-8", "backslashreplace")[:100]
    who = Identity(user=_login(), agent=agent, run=f"run_{secrets.token_hex(8)}", tool=tool or name)
    with contextlib.ExitStack() as stack:
        if gateway is not None:
            control, place = _control(gateway), None
        else:
            place = audit or _audit_file(who.run)
            last = stack.enter_context(contextlib.ExitStack())  # ends behind the gateway, and tells its last rows
            trusted = str(ca_file.absolute()) if ca_file is not None else None
            started = stack.enter_context(launch.start(spec, place, nameservers=nameserver or None, ca_file=trusted))
            if settings.alerts.wanted:
                _alerter(settings, place, last)
            control = started.control
            for warning in EgressPolicy.of(spec).warnings:
                note(f"warning: {warning.entry}: {warning.text}", style="yellow")
        what = Command(
            argv=tuple(command),
            env=inherited,
            declared=declared,
            port=proxy_port,
            routed=routed,
            unix=unix_sockets or bool(servers),
            servers=servers,
            uid=uid,
            gid=gid,
            devices=tuple(device or ()),
            covers=(*_ours(place), str(Path(control).parent)),
            decoys=decoys,
        )
        with Control(control) as connection:
            done = Confined(what, who, connection).run()
    if as_json:
        body = {**msgspec.to_builtins(done), "audit": str(place) if place is not None else None}
        sys.stderr.write(msgspec.json.encode(body).decode() + "\n")
    elif done.ended_by != "command":
        note(f"the run was ended: {SENTENCES.get(done.ended_by, (done.ended_by,))[0]}", style="bold yellow")  # type: ignore[call-overload]
    raise typer.Exit(done.exit_code)


def _ours(rows: Path | None) -> list[str]:
    """Return what the command, which may be the same user, must not write: our state and the rows of this run."""
    found = [str(path) for path in rows.parent.glob(rows.name + "*")] if rows is not None else []
    with contextlib.suppress(ConfigError):
        found.append(str(state_directory()))
    return found


def _alerter(settings: Config, rows: Path, stack: contextlib.ExitStack) -> None:
    """Have the denials of this run alerted by a process of its own, which ends with `stack`."""
    sealed = config_file(settings)
    stack.callback(os.close, sealed)
    alerter = start_alerter(sealed, rows, source="egress")
    stack.callback(alerter.close)
    alerter.wait_ready()


def _control(gateway: Path) -> str:
    """Return the control socket of a gateway's directory, or the path itself when it is one."""
    return str(gateway / CONTROL) if gateway.is_dir() else str(gateway)


def _user(name: str | None) -> tuple[int, int, dict[str, str]]:
    """Return ids and variables of the user to become; -1 = stay."""
    if name is None:
        return -1, -1, {}
    if os.geteuid() != 0:
        raise ConfigError("--user is for root", next_step="leave it out: the command runs as you")
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        raise ConfigError(f"there is no user {name[:64]!r}", next_step="name one of the password database") from None
    return found.pw_uid, found.pw_gid, {"HOME": found.pw_dir, "USER": name, "LOGNAME": name, "SHELL": found.pw_shell}


def _login() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid-{os.getuid()}"


def _audit_file(run: str) -> Path:
    """Return a file for the rows of one run: a gateway that is started for it has an audit writer of its own."""
    directory = state_directory() / "egress"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{str(directory)!r} cannot be made: {error.strerror}", next_step="name a file: --audit rows.db"
        ) from None
    return directory / f"{run}.db"
