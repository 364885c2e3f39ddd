"""Planted secrets come out nowhere: answers, rows, logs, /proc (C6; reports 13 to 15, 27 to 29, 33)."""

from __future__ import annotations

import base64
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker_client import OPERATIONS, SECRET, Backend, Broker, broker, payments_config
from lockgate.secrets.leaks import needles

PLANTED = "sk-synthetic-planted-7d21c0ffee"
HOWS = [
    "raw",
    "base64",
    "hex",
    "raise",
    "exit",
    "refused",
    "unreachable",
    "no backend",
    "thread",
    "big",
    "wrong",
    "print",
]


@pytest.fixture(scope="module")
def payments() -> Iterator[Backend]:
    one = Backend()
    yield one
    one.close()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, payments: Backend) -> Iterator[Broker]:
    base = tmp_path_factory.mktemp("secrets")
    operations = OPERATIONS.replace("SECRET", PLANTED)
    with broker(base, operations=operations, config=payments_config(base, payments.url)) as one:
        yield one


def signing_key(live: Broker) -> str:
    text = (live.base / "secrets.toml").read_text()
    return text.partition("'''")[2].partition("'''")[0]


def everything(live: Broker) -> bytes:
    """Every byte that this broker wrote anywhere, but the files that are the secrets' home and the operator's code."""
    live.rows()  # flush
    kept = {"secrets.toml", "operations.py"}
    files = [path for path in live.base.rglob("*") if path.is_file() and path.name not in kept]
    assert {"audit.db", "broker.log"} <= {path.name for path in files}
    return b"".join(path.read_bytes() for path in files)


def hits(data: bytes, secret: str) -> list[bytes]:
    return [needle for needle in needles(secret) if needle in data]


def test_a_planted_secret_comes_out_nowhere(live: Broker, payments: Backend) -> None:
    """Each way an operation can fail, and each way a provider can misbehave, with the secret in its mouth."""
    answers: list[bytes] = []
    run = live.open_run({"tell": {}, "fetch": {}, "pay": {}, "smuggle": {}, "write_badly": {}})
    channel = live.attach(run.ticket)
    for how in HOWS:
        reply = live.tool(run.run, "tell", text=how)
        answers.append(msgspec.json.encode(reply))
        answers.append(msgspec.json.encode(channel.call("tell", text=how)))
    payments.body = f'{{"error":"{PLANTED}","key":"{SECRET}"}}'.encode()
    payments.headers = {
        "WWW-Authenticate": f'Bearer realm="https://x/?key={PLANTED}"',
        "Location": f"http://{PLANTED}@x/",
    }
    for amount, (mode, status) in enumerate(
        (("answer", 401), ("answer", 302), ("answer", 500), ("garbage", 0), ("reset", 0)), 1
    ):
        payments.mode, payments.status = mode, status
        answers.append(msgspec.json.encode(channel.call("fetch", order_id="ord_1")))
        answers.append(msgspec.json.encode(channel.call("pay", order_id="ord_1", amount=amount)))
    answers.append(msgspec.json.encode(channel.call("smuggle", order_id="ord_1")))
    answers.append(msgspec.json.encode(channel.call("write_badly", text="raise")))
    closed = live.detach(run.ticket)
    answers.append(msgspec.json.encode(closed))
    tokens = [
        line.split()[-1].decode()
        for request in payments.requests
        for line in request.split(b"\r\n")
        if line.lower().startswith(b"authorization:")
    ]
    assert len(tokens) == 10
    data = everything(live) + b"".join(answers)
    for secret in (PLANTED, SECRET, signing_key(live), *tokens):
        assert hits(data, secret) == []
    assert b'"smuggle"' in data  # the negative control: what we look through is what was said
    assert hits(data + base64.b64encode(b"x" + PLANTED.encode() + b"y"), PLANTED)
    assert hits(data + tokens[0].encode(), tokens[0])


def test_a_result_with_a_token_is_withheld_and_says_so(live: Broker) -> None:
    """Report 14: encodings too. The control is the same result without the token."""
    run = live.open_run({"tell": {}})
    for how in ("raw", "base64", "hex"):
        assert live.tool(run.run, "tell", text=how).reason == "result_blocked"
    assert live.tool(run.run, "tell", text="harmless").reason is None
    rows = live.rows(run=run.run, phase="outcome", status="result_blocked")
    assert [row.detail["why"] for row in rows] == ["holds a live lease"] * 3
    assert all(row.lease_id for row in rows)


def test_no_call_returns_a_secret(live: Broker) -> None:
    """Report 13: what the registry offers has no field for one, and the agent's link has no message for one."""
    from lockgate.contract import wire

    names = {
        field
        for kind in (wire.AgentToBroker.__args__ + wire.BrokerToAgent.__args__)
        for field in kind.__struct_fields__
    }
    assert not names & {"secret", "token", "credential", "key", "password", "lease"}
    run = live.open_run({})
    for name in ("get_secret", "host.secret", "host.token", "mint", "secrets"):
        assert live.tool(run.run, name, name="signing").reason == "not_available"


def look(pid: int) -> dict[str, str]:
    """What another process of our own user can see of `pid`."""
    code = f"""
import os
for what in ("environ", "mem", "maps", "fd", "cmdline", "cwd", "root", "exe", "stack", "auxv"):
    path = "/proc/{pid}/" + what
    try:
        if what in ("cwd", "root", "exe", "fd"):
            os.readlink(path + "/0" * (what == "fd"))
        else:
            with open(path, "rb") as file:
                print(what, "read", file.read(100 if what != "mem" else 0).hex())
                continue
        print(what, "read")
    except OSError as error:
        print(what, type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def assert_hidden(seen: dict[str, str], control: dict[str, str]) -> None:
    for what in ("environ", "mem", "maps", "fd", "cwd", "root", "exe", "auxv"):
        assert seen[what] == "PermissionError", what
        assert control[what].startswith("read"), what  # the negative control: a process that is dumpable


def test_another_process_of_our_user_sees_nothing(tmp_path: Path) -> None:
    """Report 15: dumpable 0 hides environ, mem and fd from a process without CAP_SYS_PTRACE (proc(5), ptrace(2)).

    All three (broker, the one that looks, the control) run with our uid and without capabilities, also under root.
    """
    done = subprocess.run(
        [sys.executable, "-c", _PLAIN, str(Path(__file__).parents[2]), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert_hidden(*msgspec.json.decode(done.stdout.splitlines()[-1]))


_PLAIN = """
import json, os, subprocess, sys, time
from pathlib import Path
from lockgate.kernel import caps_unsafe
tests, base = sys.argv[1:]
if os.geteuid() == 0:
    caps_unsafe.drop_all()
sys.path[:0] = [tests, tests + "/security/exfil"]
from broker_client import broker
from test_broker_secrets import look
with broker(Path(base)) as one:
    beside = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        time.sleep(0.2)
        print(json.dumps([look(one.process.pid), look(beside.pid)]))
    finally:
        beside.kill()
        beside.wait()
"""


def test_the_broker_has_no_environment_no_core_and_no_children(live: Broker) -> None:
    """C6, report 4: an empty environment; no secret and no reference in argv (report 37)."""
    run = live.open_run({"tell": {}})
    told = msgspec.json.decode(msgspec.json.decode(live.tool(run.run, "tell", text="environment").ok)["text"])
    assert set(told) <= {"LC_CTYPE"}  # set by the interpreter itself
    for how, wanted in (("fork", "fork 1"), ("exec", "exec 1"), ("execve", "execve 1"), ("listen", "listen 1")):
        assert msgspec.json.decode(live.tool(run.run, "tell", text=how).ok) == {"text": wanted}
    argv = Path(f"/proc/{live.process.pid}/cmdline").read_bytes()
    assert b"lockgate.broker" in argv
    assert b"signing" not in argv
    status = Path(f"/proc/{live.process.pid}/status").read_text()
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status
    assert resource.prlimit(live.process.pid, resource.RLIMIT_CORE) == (0, 0) if os.geteuid() == 0 else True
    assert live.ready.facts["dumpable"] is False


def test_every_thread_is_confined(live: Broker) -> None:
    run = live.open_run({"get_order": {}})
    channel = live.attach(run.ticket)
    channel.call("get_order", order_id="ord_1")
    tasks = list(Path(f"/proc/{live.process.pid}/task").iterdir())
    assert len(tasks) >= 4
    assert all("Seccomp:\t2" in (task / "status").read_text() for task in tasks)
    live.detach(run.ticket)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda path: path.chmod(0o644), "open to its group or to others"),
        (
            lambda path: (path.rename(path.with_name("moved")), path.symlink_to(path.with_name("moved"))),
            "cannot be opened",
        ),
        (lambda path: path.unlink(), "cannot be opened"),
    ],
)
def test_a_secret_that_is_not_safely_kept_is_not_used(
    tmp_path: Path, payments: Backend, change: Any, says: str
) -> None:
    payments.requests.clear()
    config = payments_config(tmp_path, payments.url)
    change(tmp_path / "secrets.toml")
    with broker(tmp_path, config=config) as one:
        run = one.open_run({"fetch": {}})
        assert one.tool(run.run, "fetch", order_id="ord_1").reason == "backend_failed"
        assert [row.detail["error"] for row in one.rows(status="not_sent")] == ["SecretUnavailable"]
        assert says not in (tmp_path / "broker.log").read_text()
    assert payments.requests == []
