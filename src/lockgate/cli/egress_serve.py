"""`lockgate egress serve`: the gateway, until it is told to stop.

Rule 1: the gateway, its audit writer and the alerter are processes of their own; this one only waits.
Rule 2: it ends on SIGTERM and SIGINT, and when one of the others ended: without rows, or without a gateway, nothing
        may seem to run.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import msgspec
import typer

from lockgate.alerts.start import start_alerter
from lockgate.cli.common import ConfigPath, load_config
from lockgate.cli.output import Json, fields, note, print_json
from lockgate.contract.errors import ConfigError, HostFault
from lockgate.egress import launch
from lockgate.gate.start import config_file, state_directory
from lockgate.policy.egress import EgressPolicy


def serve(
    *,
    config: ConfigPath = None,
    directory: Annotated[
        Path | None, typer.Option("--directory", help="Where its sockets are made; for `egress run --gateway`.")
    ] = None,
    audit: Annotated[Path | None, typer.Option("--audit", help="File of its rows; a file has one writer.")] = None,
    nameserver: Annotated[
        list[str] | None,
        typer.Option("--nameserver", metavar="ADDRESS[@PORT]", help="Ask this one; default: those of the system."),
    ] = None,
    ca_file: Annotated[
        Path | None, typer.Option("--ca-file", help="More trust anchors for intercepted destinations, PEM.")
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Let through what the list alone would deny, and record it.")
    ] = False,
    connections: Annotated[int, typer.Option("--connections", min=1, help="Most connections at one time.")] = 4096,
    as_json: Json = False,
) -> None:
    """Run the egress gateway: two unix sockets, the allowlist, one audit row for each decision.

    Programs reach it through `lockgate egress run --gateway DIRECTORY -- CMD`. Ends on SIGTERM or Ctrl-C.
    """
    settings = load_config(config)
    spec = settings.egress
    if report:
        spec = msgspec.structs.replace(spec, mode="report")
    place = directory if directory is not None else _state() / "gateway"
    rows = audit if audit is not None else _state() / "egress.db"
    stop = os.eventfd(0, os.EFD_CLOEXEC)

    def stopped(number: int, frame: FrameType | None) -> None:
        del number, frame
        os.eventfd_write(stop, 1)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stopped)
    with contextlib.ExitStack() as stack:
        gateway = stack.enter_context(
            launch.start(
                spec,
                rows,
                directory=place,
                nameservers=nameserver,
                ca_file=None if ca_file is None else str(ca_file.absolute()),
                connections=connections,
                output=2,
            )
        )
        watched: dict[int, str] = {gateway.pidfd: "the egress gateway", gateway.writer_pidfd: "its audit writer"}
        if settings.alerts.wanted:
            sealed = config_file(settings)
            stack.callback(os.close, sealed)
            alerter = start_alerter(sealed, rows, source="egress")
            stack.callback(alerter.close)
            alerter.wait_ready()
            watched[alerter.pidfd] = "the alerter"
        policy = EgressPolicy.of(spec)
        _tell(gateway, policy, rows, as_json=as_json)
        poller = select.poll()
        for fd in (stop, *watched):
            poller.register(fd, select.POLLIN)
        ended = [watched[fd] for fd, _ in poller.poll() if fd in watched]
        if ended:
            raise HostFault(
                f"{' and '.join(ended)} ended by itself", next_step="see its last words above; start it again"
            )


def _tell(gateway: launch.Gateway, policy: EgressPolicy, rows: Path, *, as_json: bool) -> None:
    told: dict[str, Any] = {
        "directory": gateway.directory,
        "pid": gateway.pid,
        "mode": policy.mode,
        "profile": policy.profile,
        "policy": policy.hash,
        "rules": len(policy.rules),
        "audit": str(rows),
        "warnings": [msgspec.to_builtins(one) for one in policy.warnings],
    }
    if as_json:
        print_json(told)
        return
    fields([(name, value) for name, value in told.items() if name != "warnings"])
    for warning in policy.warnings:
        note(f"warning: {warning.entry}: {warning.text}", style="yellow")
    if not policy.rules:
        note("the list is empty, so everything is denied; add [egress] allow = [...]", style="yellow")


def _state() -> Path:
    path = state_directory()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{str(path)!r} cannot be made: {error.strerror}", next_step="name places: --directory and --audit"
        ) from None
    return path
