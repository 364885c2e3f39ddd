"""The alerter process: `python -I -m lockgate.alerts --config FILE --audit FILE [--life FD] [--source NAME]`.

Rule 1: it holds the keys of its sinks and nothing else: no scope, no operation, no key of a backend is read here.
Rule 2: it only reads the audit log. If it dies, every denial is still on the disk, and the next one goes on from there.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sqlite3
import sys
import threading
from pathlib import Path

import msgspec

from lockgate import config as configuration
from lockgate.alerts import tools
from lockgate.alerts.alerter import Alerter
from lockgate.alerts.replay import replay
from lockgate.contract.errors import HostFault, LockgateError
from lockgate.kernel import process_unsafe


def main(argv: list[str] | None = None) -> int:
    """Run the process; returns its exit code."""
    parser = argparse.ArgumentParser(prog="lockgate.alerts", description="Started by a Gate; not for people.")
    parser.add_argument("--config", required=True, help="the configuration")
    parser.add_argument("--audit", type=Path, required=True, help="the audit file")
    parser.add_argument("--life", type=int, default=-1, help="inherited socket: says ready, and ends us when it closes")
    parser.add_argument("--source", default="", help="names this log in metrics")
    parser.add_argument("--send", choices=("test", "replay"), help="tell the sinks directly, print the answers, end")
    parser.add_argument("--sink", action="append", default=[], help="with --send: only this sink")
    parser.add_argument("--after", type=int, default=0, help="with --send replay: rows behind this one")
    parser.add_argument("--run", default=None, help="with --send replay: rows of this run")
    options = parser.parse_args(argv)
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    process_unsafe.no_new_privileges()
    process_unsafe.set_dumpable(0)
    if options.life >= 0:
        os.set_inheritable(options.life, False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # it ends when whoever started it has, and not before
    if options.send is not None:
        return _send(options)
    return serve(options.config, options.audit.absolute(), life=options.life, source=options.source)


def _send(options: argparse.Namespace) -> int:
    try:
        alerts = None
        if options.send == "replay":
            alerts = replay(options.audit.absolute(), after=options.after, run=options.run)
        return tools.send(options.config, options.sink, alerts)
    except LockgateError as error:
        said = {"error": error.message, "next_step": error.next_step}
        sys.stdout.write(msgspec.json.encode(said).decode() + "\n")
        return error.exit_code


def serve(config: str | Path, audit: Path, *, life: int = -1, source: str = "") -> int:
    """Follow `audit` until `life` ends, or until a signal; returns the exit code."""
    ended = threading.Event()
    try:
        alerter = Alerter(configuration.load(config), audit, source=source)
    except (LockgateError, sqlite3.Error, OSError) as error:
        failed = error
        if not isinstance(failed, LockgateError):
            failed = HostFault(f"the alerter could not start ({type(error).__name__})", next_step="look at the disk")
        if life < 0:
            sys.stderr.write(f"error: {failed.message}\nnext step: {failed.next_step}\n")
        else:
            _say(life, {"error": failed.message, "next_step": failed.next_step})
        return failed.exit_code
    if life >= 0:
        _say(life, {"ready": True, "pid": os.getpid()})
    else:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda _number, _frame: ended.set())
    try:
        alerter.run(life, ended.is_set)
    finally:
        alerter.close()
    return 0


def _say(fd: int, message: dict[str, object]) -> None:
    try:
        os.write(fd, msgspec.json.encode(message) + b"\n")
    except OSError:
        sys.stderr.write("lockgate-alerter: nobody listens any more\n")
