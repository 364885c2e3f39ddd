"""The main job, end to end: stage a deployment, let Atlas handle two tickets, check everything, say what happened.

    python examples/atlas/demo.py [--json] [--keep] [--rung RUNG] [--sabotage WHAT]

Rule 1: it exits 0 only when every check of `judge.py` holds: 1 when one fails, 3 when this host cannot isolate.
Rule 2: nothing stays: the state directory is fresh and removed, every process is waited for, also after an error.
Rule 3: `--sabotage` breaks one thing on purpose. It is how you see that the checks can fail.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import secrets
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import rungs
import show
import tickets
from judge import Check, Record, judge, planted
from reaper_unsafe import take_over_orphans
from traces import Watcher, descriptors, mounts

from lockgate.gate.escape import escape

HERE: Final = Path(__file__).resolve().parent
DEADLINE: Final = 60.0  # seconds for both tickets
SABOTAGE: Final = ("leak", "row", "process", "ledger")


def stage(state: Path, sabotage: str | None) -> dict[str, str]:
    """Make the deployment, and plant secrets where such workers have them. Returns those of the environment."""
    subprocess.run([sys.executable, HERE / "seed.py", state], check=True, timeout=30, stdin=subprocess.DEVNULL)
    credentials = state / "home" / ".aws" / "credentials"
    credentials.parent.mkdir(parents=True)
    credentials.write_text(f"[default]\naws_secret_access_key = sk-synthetic-cloud-{secrets.token_hex(12)}\n")
    environment = {
        "DATABASE_URL": f"postgres://atlas:sk-synthetic-db-{secrets.token_hex(12)}@db.example/orders",
        "PAYMENTS_KEY": f"sk-synthetic-payments-{secrets.token_hex(12)}",
        "OTEL_TOKEN": f"sk-synthetic-otel-{secrets.token_hex(12)}",
    }
    if sabotage == "leak":  # an operation that hands out what it should not
        operations = state / "operations.py"
        text = operations.read_text()
        leaky = text.replace(
            "Order(**dict(zip(keys, row, strict=True)))",
            "Order(**{**dict(zip(keys, row, strict=True)), 'note': Path(__file__).with_name('home')"
            ".joinpath('.aws', 'credentials').read_text().split()[-1]})",
        )
        if leaky == text:
            raise SystemExit("operations.py changed: the sabotage has nothing to replace")
        operations.write_text(leaky)
    return environment


@contextmanager
def payments(state: Path, printed: list[bytes], rung: str) -> Iterator[int]:
    """Run the payments service on a free port; it ends with the block, and with us."""
    keys = state / "keys" / "public.json"
    argv: list[str | Path] = [HERE / "payments.py", "--public-key", keys, "--ledger", state / "ledger.db"]
    service = subprocess.Popen(
        [sys.executable, "-W", "ignore", *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={},
        cwd=state,
    )
    assert service.stdout is not None  # noqa: S101 - asked for above
    try:
        timer = threading.Timer(20, service.kill)
        timer.start()
        line = service.stdout.readline()
        timer.cancel()
        if not line.strip().isdigit():
            raise SystemExit("the payments service did not start. Next step: pip install 'lockgate[atlas]'")
        port = int(line)
        text = (HERE / "lockgate.toml").read_text().replace("127.0.0.1:8417", f"127.0.0.1:{port}")
        accepted = json.dumps(rungs.ACCEPTED if rung == "gvisor" else ())
        text = text.replace('rung = "container"', f'rung = "{rung}"\naccept_weaker = {accepted}')
        (state / "lockgate.toml").write_text(text)
        yield port
    finally:
        try:
            printed.append(service.communicate(timeout=10)[0])
        except subprocess.TimeoutExpired:
            service.kill()
            service.wait()


def without_token(port: int) -> int:
    """Ask the payments service for a refund the way a stranger would; return the status."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        body = json.dumps({"order_id": "ord_5120", "amount": 100})
        connection.request("POST", "/v1/refunds", body, {"Idempotency-Key": "ab" * 16})
        return connection.getresponse().status
    finally:
        connection.close()


def lines(fd: int, process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """Yield what a process prints, line by line, until it closes its output or ends.

    Not until the end of the pipe alone: something that it left behind could hold the pipe open for ever.
    """
    kept = b""
    while True:
        readable, _, _ = select.select([fd], [], [], 0.1)
        if not readable and process.poll() is not None:
            return
        if readable:
            data = os.read(fd, 1 << 16)
            if not data:
                return
            *whole, kept = (kept + data).split(b"\n")
            yield from (line for line in whole if line)


def run_agent(state: Path, environment: dict[str, str], port: int, sabotage: str | None, status: Any) -> Record:
    """Start Atlas, follow it and everything it starts, and return what happened."""
    facts = {"state": str(state), "home": str(state / "home"), "port": str(port), "source": str(HERE)}
    take_over_orphans()
    before = [("mounts", mounts()), ("descriptors of the demo", descriptors())]
    agent = subprocess.Popen(
        [sys.executable, HERE / "agent.py", state, json.dumps(facts), sabotage or ""],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**environment, "HOME": str(state / "home"), "PATH": os.defpath},
        cwd=state,
    )
    assert agent.stdout is not None  # noqa: S101 - asked for above
    assert agent.stderr is not None  # noqa: S101
    printed: dict[str, bytes] = {"the agent's output": b"", "the agent's errors": b""}
    events: list[dict[str, Any]] = []
    timer = threading.Timer(DEADLINE, agent.kill)
    timer.daemon = True
    errors = threading.Thread(
        target=lambda: printed.update({"the agent's errors": agent.stderr.read() if agent.stderr else b""}), daemon=True
    )
    with Watcher(agent.pid) as watcher:
        try:
            timer.start()
            errors.start()
            for line in lines(agent.stdout.fileno(), agent):
                printed["the agent's output"] += line
                event = msgspec.json.decode(line)
                events.append(event)
                status(event)
            agent.wait()
        finally:  # also when somebody pressed ^C: nothing goes on without us
            timer.cancel()
            agent.kill()
            agent.wait()
            left = watcher.left()
            watcher.end()
    errors.join(5)
    agent.stdout.close()
    agent.stderr.close()
    after = [mounts(), descriptors()]
    counts = [(name, was, now) for (name, was), now in zip(before, after, strict=True)]
    closed = [one["descriptors"] for one in events if one["event"] == "closed"]
    counts += [("descriptors of the agent", was, now) for was, now in closed]
    return Record(state, events, printed, {}, left, counts, len(watcher.seen), len(watcher.cgroups))


def break_it(state: Path, sabotage: str | None) -> None:
    """Change the record afterwards, as somebody with the file in hand would."""
    if sabotage == "row":
        with sqlite3.connect(state / "audit.db") as db:
            db.execute("DELETE FROM rows WHERE seq = (SELECT seq FROM audit WHERE phase = 'denied' LIMIT 1)")
        db.close()
    if sabotage == "ledger":
        with sqlite3.connect(state / "ledger.db") as db:
            db.execute(
                "INSERT INTO refunds(key, order_id, amount, user, agent, run, at) VALUES ('x','ord_5120',1,'','','',0)"
            )
        db.close()


def main(argv: list[str] | None = None) -> int:
    """Run the demo; see the module's text."""
    parser = argparse.ArgumentParser(
        prog="lockgate demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout instead of text")
    parser.add_argument("--keep", action="store_true", help="keep the state directory and say where it is")
    parser.add_argument("--sabotage", choices=SABOTAGE, help="break one thing, to see that the checks can fail")
    parser.add_argument("--rung", choices=("container", *rungs.ORDER), help="use this one; default: the strongest here")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what follows is cleaned up as after ^C
    state = Path(tempfile.mkdtemp(prefix="lockgate-atlas-"))
    try:
        return play(state, json_only=options.json, sabotage=options.sabotage, asked=options.rung)
    except KeyboardInterrupt:
        return 130
    finally:
        if options.keep:
            print(f"state kept in {state}", file=sys.stderr)
        else:
            shutil.rmtree(state)


def play(state: Path, *, json_only: bool, sabotage: str | None, asked: str | None) -> int:
    """Run and judge; return the exit code."""
    began = time.monotonic()
    console = show.console(quiet=json_only)
    with console.status("staging a database, keys and a payments service") as spinner:
        environment = stage(state, sabotage)
        rung, stronger = (asked, None) if asked else rungs.strongest(state, spinner.update)

        def status(event: dict[str, Any]) -> None:
            if event["event"] == "ready":
                console.print(show.opening(event["facts"], stronger))
            elif "ticket" in event:
                spinner.update(f"ticket {event['ticket']}: {show.safe(event.get('name', 'answer'))}")

        spinner.update("starting broker, supervisor and audit writer")
        said: list[bytes] = []
        with payments(state, said, rung) as port:
            record = run_agent(state, environment, port, sabotage, status)
            record.unauthorized = without_token(port)
        record.printed["the payments service"] = b"".join(said)
        break_it(state, sabotage)
        failure = next(iter(record.of("failed")), None)
        if failure is not None or not record.of("closed"):
            return gave_up(record, failure, json_only=json_only)
        record.secrets = planted(state, environment)
        rows = record.rows()
        parts = [show.ticket_one(record), show.ticket_two(record), show.denials(rows), show.audit(rows)]
        for part in parts:
            console.print(part)
        record.printed["this screen"] = console.export_text(clear=False).encode()
        checks = judge(record)
    console.print(show.verdict(checks, time.monotonic() - began))
    if json_only:
        print(document(record, checks).decode())
    return 0 if all(check.held for check in checks) else 1


def gave_up(record: Record, failure: dict[str, Any] | None, *, json_only: bool) -> int:
    """The agent did not get to its end: say why and what to do."""
    errors = record.printed["the agent's errors"].decode(errors="replace")[-2000:]
    fallback: dict[str, Any] = {"message": "the agent ended early. Next step: look at its errors above", "exit_code": 1}
    found = failure or fallback
    if json_only:
        print(json.dumps({"ok": False, "error": found}))
    else:
        print(escape(errors, keep_lines=True) + f"\nerror: {show.safe(found['message'], 600)}", file=sys.stderr)
    return int(found["exit_code"]) or 1


def document(record: Record, checks: list[Check]) -> bytes:
    """Everything the text says, for programs."""
    attempts = []
    results = record.results(2)
    for one in tickets.ATTEMPTS:
        held, got = one.got(results)
        attempts.append({"name": one.name, "goal": one.goal, "held": held, "got": got})
    rows = record.rows()
    return msgspec.json.encode(
        {
            "ok": all(check.held for check in checks),
            "facts": record.of("ready")[0]["facts"],
            "accept_shared_kernel": record.of("ready")[0]["facts"]["rung"] == "container",
            "answers": {str(one["ticket"]): one["text"] for one in record.of("answer")},
            "attempts": attempts,
            "denials": [row for row in rows if row.phase == "denied"],
            "rows": rows,
            "checks": checks,
        }
    )


if __name__ == "__main__":
    sys.exit(main())
