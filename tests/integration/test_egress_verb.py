"""`lockgate egress run` as a program: exit codes, signals, terminals, streams, what is left when it is killed (E1)."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import pwd
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from egress_fixtures import ENV
from lockgate.audit import reader
from lockgate.cli.app import guarded
from lockgate.egress import launch
from lockgate.policy.egress_spec import EgressSpec

SECONDS = 100
Verb = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def verb(tmp_path: Path) -> Iterator[Verb]:
    """Start the verb; what is still there at the end of the test is killed."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*argv: str, options: tuple[str, ...] = (), **popen: Any) -> subprocess.Popen[bytes]:
        place = [] if "--gateway" in options else ["--audit", str(tmp_path / f"rows-{len(started)}.db")]
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        how |= {"env": ENV, "cwd": tmp_path, **popen}
        command = [sys.executable, "-m", "lockgate", "egress", "run", *place, *options, "--", *argv]
        started.append(subprocess.Popen(command, **how))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], SECONDS)[0], "it said nothing"
    return process.stdout.readline()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{one}/task").glob("*/children"):
                found += [int(child) for child in task.read_text().split()]
    return found


def gone(pids: list[int]) -> bool:
    return not [pid for pid in pids if _state(pid) not in ("", "Z")]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("argv", "code"),
    [(("sh", "-c", "kill -TERM $$"), 143), (("no-such-program",), 127)],
)
def test_the_exit_code_is_the_command_s(verb: Verb, argv: tuple[str, ...], code: int) -> None:
    process = verb(*argv)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == code, err
    assert out == b""
    if code == 127:
        assert b"no-such-program" in err
        assert b"next step" in err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--allow", "pypi.org:443"), "registry"),
        (("--allow", "*"), "next step"),
        (("--env", "novalue"), "NAME=VALUE"),
        (("--device", "/dev/no-such-device"), "no-such-device"),
        (("--gateway", "/nonexistent", "--allow", "a.partner.example:443"), "--gateway"),
        (("--gateway", "/nonexistent"), "no egress gateway at '/nonexistent'"),
        (("--gateway", "/nonexistent"), "egress serve --directory"),
        (("--user", "no-such-user"), "next step"),
    ],
)
def test_a_mistake_is_named_before_anything_starts(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, options: tuple[str, ...], says: str
) -> None:
    place = [] if "--gateway" in options else ["--audit", str(tmp_path / "rows.db")]
    code = guarded(["egress", "run", *place, *options, "--", "sh", "-c", "echo started"])
    out, err = capfd.readouterr()
    assert code in (1, 2), err
    assert says in err
    assert "next step" in err
    assert "started" not in out
    assert not list(tmp_path.iterdir())


def test_a_network_connection_is_no_stream_for_it(verb: Verb) -> None:
    """E1: an inherited socket has another namespace, so it would be a way out."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        process = verb("cat", stdin=client)
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 2
    assert b"stdin is a network connection" in err


def test_the_environment_is_what_was_declared(verb: Verb) -> None:
    """C6: names on the list, `--pass`, `--env`, and ours; secrets of the caller are not among them."""
    env = {**ENV, "OPENAI_API_KEY": "sk-synthetic-1", "GREETING": "hello", "LANG": "C.UTF-8"}
    process = verb(
        sys.executable, "-I", "-c", "import json, os; print(json.dumps(dict(os.environ)))",
        options=("--pass", "GREETING", "--env", "LEVEL=debug", "--no-decoys", "--proxy-port", "4128"), env=env,
    )  # fmt: skip
    out, err = process.communicate(timeout=SECONDS)
    found = json.loads(out)
    assert process.returncode == 0, err
    assert "OPENAI_API_KEY" not in found
    assert (found["GREETING"], found["LEVEL"], found["LANG"]) == ("hello", "debug", "C.UTF-8")
    assert found["https_proxy"] == "http://127.0.0.1:4128"
    ours = {"PATH", "HOME", "GREETING", "LEVEL", "LANG", "NODE_USE_ENV_PROXY", "LC_CTYPE"}
    assert {name for name in found if "proxy" not in name.lower()} - ours == {"NODE_USE_ENV_PROXY"} - ours


def test_a_signal_is_passed_on_and_the_report_says_how_it_ended(verb: Verb) -> None:
    process = verb("sh", "-c", "trap 'exit 9' TERM; echo ready; while :; do sleep 0.1; done", options=("--json",))
    assert line(process) == b"ready\n"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 9
    said = json.loads(err.splitlines()[-1])
    assert (said["exit_code"], said["ended_by"], said["signal"]) == (9, "command", None)
    assert Path(said["audit"]).exists()


def test_control_c_reaches_the_command_once(verb: Verb) -> None:
    """At a terminal the whole foreground group gets it; the verb stays to report, and passes nothing on twice."""
    ours, theirs = pty.openpty()
    source = (
        "import signal, sys, time\ncount = 0\n"
        "def taken(*_):\n    global count\n    count += 1\n"
        "signal.signal(signal.SIGINT, taken)\nprint('ready', sys.stdin.isatty(), flush=True)\n"
        "end = time.monotonic() + 60\n"
        "while not count and time.monotonic() < end: time.sleep(0.05)\n"
        "time.sleep(1)\nprint('count', count, flush=True)"
    )
    process = verb(
        sys.executable, "-I", "-c", source, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=_own_terminal,
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    sent = False
    try:
        while b"count" not in seen or not seen.endswith(b"\n"):
            assert select.select([ours], [], [], SECONDS)[0], seen
            seen += os.read(ours, 4096)
            if b"ready True" in seen and not sent:
                os.write(ours, b"\x03")
                sent = True
        assert b"count 1" in seen, seen
        assert process.wait(SECONDS) == 0
    finally:
        os.close(ours)


def _own_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.parametrize("how", ["the verb", "the gateway"])
def test_when_one_is_killed_nothing_goes_on(verb: Verb, how: str) -> None:
    """E1: the command never outlives its gateway, nor the gateway its command; no socket, mount or process stays."""
    source = f"import time; print('ready', flush=True); time.sleep(600)  # {secrets.token_hex(8)}"
    place = Path(tempfile.mkdtemp(prefix="lg-"))  # short: a socket's path has 107 bytes
    try:
        process = verb(
            sys.executable, "-I", "-c", source, options=("--json",), env={**ENV, "TMPDIR": str(place)}
        )  # fmt: skip
        assert line(process) == b"ready\n"
        all_of_it = family(process.pid)
        assert len(all_of_it) >= 6, "verb, gateway, writer, two of the namespace, command"
        gateway = next(pid for pid in all_of_it if b"lockgate.egress\0--settings" in _words(pid))
        assert list(place.rglob("control")), "the control: this is where its sockets are"
        os.kill(process.pid if how == "the verb" else gateway, signal.SIGKILL)
        until(lambda: gone(all_of_it), "something lives on")
        if how == "the gateway":
            _, err = process.communicate(timeout=SECONDS)
            assert process.returncode == 137
            assert json.loads(err.splitlines()[-1])["ended_by"] == "gateway_failed"
        until(lambda: not list(place.iterdir()), "its directory is left")
    finally:
        shutil.rmtree(place)


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_gateway_that_runs_already_is_used(verb: Verb, tmp_path: Path) -> None:
    """Several commands share one gateway, one policy and one audit file; each is a run of its own."""
    spec = EgressSpec(allow=("api.partner.example:443",))
    with launch.start(spec, tmp_path / "shared.db", directory=tmp_path / "gw", nameservers=("127.0.0.1@1",)) as gateway:
        source = (
            "import socket\ntry: socket.getaddrinfo('evil.test', 1)\nexcept OSError: print('no')\n"
            "print(socket.gethostbyname('api.partner.example'))"
        )
        places = (gateway.directory, gateway.control)
        runs = [verb(sys.executable, "-I", "-c", source, options=("--gateway", one, "--json")) for one in places]
        said = []
        for process in runs:
            out, err = process.communicate(timeout=SECONDS)
            assert out.split() == [b"no", b"198.18.0.1"], err
            said.append(json.loads(err.splitlines()[-1])["run"])
    rows = [row for row in reader.tail(tmp_path / "shared.db", 100) if row.verdict == "deny"]
    assert {row.run for row in rows} == set(said)
    assert {row.detail["destination"] for row in rows} == {"evil.test"}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_root_can_give_the_command_to_a_user(verb: Verb) -> None:
    source = (
        "import json, os\n"
        "print(json.dumps([os.getuid(), os.getgid(), os.environ['USER'], os.access('/root', os.R_OK)]))"
    )
    process = verb("/usr/bin/python3", "-I", "-c", source, options=("--user", "nobody"), cwd="/")
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    nobody = pwd.getpwnam("nobody")
    assert json.loads(out) == [nobody.pw_uid, nobody.pw_gid, "nobody", False]


def test_a_denial_is_alerted_to_the_sinks_of_the_configuration(verb: Verb, tmp_path: Path) -> None:
    """E4: the list and the sinks of one file; a question for another name, from row to alert."""
    (tmp_path / "lockgate.toml").write_text(
        '[egress]\nallow = ["api.partner.example:443"]\n[alerts.sinks.file]\nkind = "file"\npath = "alerts.jsonl"\n'
    )
    source = (
        "import socket\nprint(socket.gethostbyname('api.partner.example'))\n"
        "try: socket.getaddrinfo('evil.test', 1)\nexcept OSError: print('no')"
    )
    process = verb(sys.executable, "-I", "-c", source)
    out, err = process.communicate(timeout=SECONDS)
    assert out.split() == [b"198.18.0.1", b"no"], err
    alerts = [json.loads(one) for one in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert alerts
    assert {one["status_detail"] for one in alerts} == {"not_allowed"}
    assert {one["class_uid"] for one in alerts} == {4003}


FLOOD = """
import os, socket, struct, sys
def ask(name, ident):
    head = struct.pack("!HHHHHH", ident, 0x100, 1, 0, 0, 0)
    return head + b"".join(bytes([len(one)]) + one for one in name.split(b".")) + struct.pack("!BHH", 0, 1, 1)
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
answered = 0
for number in range(20):
    sock.settimeout(30 if number < 5 else 0.3)
    sock.sendto(ask(b"n%d.evil.test" % number, number), ("127.0.0.1", 53))
    try:
        answered += len(sock.recv(600)) > 0
    except OSError:
        pass
sock.settimeout(30)
sock.sendto(ask(b"api.partner.example", 99), ("127.0.0.1", 53))
good = sock.recv(600)
damaged = []
for path in sys.argv[1:]:
    try:
        os.unlink(path)
        damaged.append(path)
    except OSError:
        pass
    try:
        with open(path, "w") as file:
            file.write("x" * 4096)
    except OSError:
        pass
print(answered, good[:2] == struct.pack("!H", 99), damaged)
"""


def test_questions_and_rows_are_bounded_and_the_rows_are_out_of_reach(verb: Verb, tmp_path: Path) -> None:
    """E4: a flood of names costs a bounded number of rows; the same user's command cannot take them away."""
    (tmp_path / "lockgate.toml").write_text(
        '[egress]\nallow = ["api.partner.example:443"]\n[egress.limits]\nrequests = 5\n'
    )
    rows = tmp_path / "rows-0.db"
    process = verb(sys.executable, "-I", "-c", FLOOD, str(rows), f"{rows}-wal")
    out, err = process.communicate(timeout=SECONDS)
    assert out.decode().split("\n")[0] == "5 True []", err
    found = [row.reason for row in reader.tail(rows, 100) if row.verdict == "deny"]
    assert found == ["not_allowed"] * 5 + ["request_budget"]
    assert reader.verify(rows).ok


UNIX = """
import errno, os, socket, sys
def attempt(path):
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
        return "connected"
    except OSError as error:
        return errno.errorcode[error.errno]
own = sys.argv[2]
server = socket.socket(socket.AF_UNIX)
server.bind(own)
server.listen()
print(attempt(sys.argv[1]), attempt(own))
os.unlink(own)
"""


def test_sockets_of_others_stay_covered_where_its_own_are_allowed(verb: Verb) -> None:
    """E1: browsers and forking servers need AF_UNIX; what others have bound is still no way out, unless it is named."""
    place = Path(tempfile.mkdtemp(prefix="lg-"))
    theirs = place / "theirs"
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(theirs))
            server.listen()
            said = []
            for option in (("--unix-sockets",), ("--unix-socket", str(theirs))):
                process = verb(sys.executable, "-I", "-c", UNIX, str(theirs), str(place / "own"), options=option)
                out, err = process.communicate(timeout=SECONDS)
                assert process.returncode == 0, err
                said.append(out.split())
        assert said == [[b"ECONNREFUSED", b"connected"], [b"connected", b"connected"]]
    finally:
        shutil.rmtree(place)
