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
from lockgate.alerts.alerter import Alerter
from lockgate.contract.errors import HostFault, LockgateError
from lockgate.kernel import process_unsafe


def main(argv: list[str] | None = None) -> int:
    """Run the process; returns its exit code."""
    parser = argparse.ArgumentParser(prog="lockgate.alerts", description="Started by a Gate; not for people.")
    parser.add_argument("--config", required=True, help="the configuration")
    parser.add_argument("--audit", type=Path, required=True, help="the audit file to follow")
    parser.add_argument("--life", type=int, default=-1, help="inherited socket: says ready, and ends us when it closes")
    parser.add_argument("--source", default="", help="names this log in metrics")
    options = parser.parse_args(argv)
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    process_unsafe.no_new_privileges()
    process_unsafe.set_dumpable(0)
    if options.life >= 0:
        os.set_inheritable(options.life, False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # it ends when whoever started it has, and not before
    return serve(options.config, options.audit.absolute(), life=options.life, source=options.source)


def serve(config: str | Path, audit: Path, *, life: int = -1, source: str = "") -> int:
    """Follow `audit` until `life` ends, or until a signal; returns the exit code."""
    ended = threading.Event()
    try:
        alerter = Alerter(configuration.load(config), audit, source=source)
    except (LockgateError, sqlite3.Error, OSError) as error:
        if not isinstance(error, LockgateError):
            error = HostFault(f"the alerter could not start ({type(error).__name__})", next_step="look at the disk")
        if life < 0:
            raise error from None
        _say(life, {"error": error.message, "next_step": error.next_step})
        return 1
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
