"""A small internet in a network namespace: public addresses on its loopback, an authoritative DNS server, web servers.

`World(directory)` starts it as a program of its own (this file), so that nothing of it is in the tests' process:

    with World(tmp_path) as world:
        world.zone({"api.allowed.example": ["93.184.216.34"]})
        subprocess.run([*world.enter, "curl", ...])

Rule 1: real parts: dnspython answers on 127.0.0.1:5300 (UDP and TCP), trustme signs, http.server serves.
Rule 2: no packet leaves: the namespace has loopback only. It ends with the test's process, whatever happens to that.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import select
import shutil
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

DNS_PORT = 5300
NETWORK_4 = "93.184.216.0"
NETWORK_6 = "2606:2800:220:1::"
ADDRESS = "93.184.216.34"
ADDRESS_6 = "2606:2800:220:1::34"
TLS_PORTS = (443, 8443)
NAMES = ("*.allowed.example", "allowed.example", "*.wild.example", "*.partner.example", "evil.test", "*.evil.test")


class World:
    """The running world.

    Attributes:
        enter: argv prefix that runs a program in it.
        ca: PEM file of the authority that signed its servers.
        www: files of host H lie under www/H/.
        nameserver: what to give a gateway.

    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.www = directory / "www"
        self.www.mkdir(parents=True)
        self.ca = directory / "ca.pem"
        self.nameserver = f"127.0.0.1@{DNS_PORT}"
        self.zone({})
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        try:
            assert select.select([self._process.stdout], [], [], 60)[0], "the world did not come up"
            self.ready: dict[str, Any] = json.loads(self._process.stdout.readline())
        except BaseException:
            self.close()
            raise
        pid = str(self._process.pid)
        flags = ["-n"] if os.getuid() == 0 else ["-U", "-n", "--preserve-credentials"]
        self.enter = ["nsenter", "-t", pid, *flags]
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def zone(self, names: Mapping[str, Sequence[str]]) -> None:
        """Say what the DNS server knows: addresses of a name, or one "CNAME target"; "SERVFAIL"; else NXDOMAIN."""
        fresh = self.directory / "zone.new"
        fresh.write_text(json.dumps({name.lower(): list(values) for name, values in names.items()}))
        fresh.rename(self.directory / "zone.json")

    def queries(self) -> list[str]:
        """Every name that was asked for, with its type: "api.allowed.example A"."""
        return _lines(self.directory / "queries.log")

    def requests(self) -> list[str]:
        """Every HTTP request: "https api.allowed.example GET /path"."""
        return _lines(self.directory / "requests.log")

    def page(self, host: str, path: str, body: str | bytes) -> None:
        """Put a file on a server."""
        place = self.www / host / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(body.encode() if isinstance(body, str) else body)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


class _Log:
    """Appends lines; each write(2) is one line."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def __call__(self, line: str) -> None:
        os.write(self._fd, line.encode("ascii", "backslashreplace") + b"\n")


def _answer(wire: bytes, directory: Path, log: _Log) -> bytes | None:
    import dns.flags
    import dns.message
    import dns.rcode
    import dns.rdatatype
    import dns.rrset

    try:
        query = dns.message.from_wire(wire)
        question = query.question[0]
    except Exception:
        return None
    name = question.name.to_text(omit_final_dot=True).lower()
    kind = dns.rdatatype.to_text(question.rdtype)
    log(f"{name} {kind}")
    reply = dns.message.make_response(query)
    reply.flags |= dns.flags.AA | dns.flags.RA
    zone = json.loads((directory / "zone.json").read_text())
    for _ in range(8):
        values = zone.get(name)
        if values is None:
            reply.set_rcode(dns.rcode.NXDOMAIN)
            break
        if values == ["SERVFAIL"]:
            reply.set_rcode(dns.rcode.SERVFAIL)
            break
        if values and values[0].startswith("CNAME "):
            target = values[0].removeprefix("CNAME ")
            reply.answer.append(dns.rrset.from_text(name + ".", 1, "IN", "CNAME", target + "."))
            name = target
            continue
        wanted = [one for one in values if (":" in one) is (kind == "AAAA")] if kind in ("A", "AAAA") else []
        if wanted:
            reply.answer.append(dns.rrset.from_text(name + ".", 1, "IN", kind, *wanted))
        break
    return reply.to_wire()


def _serve_dns(directory: Path, log: _Log) -> None:
    class Udp(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            data, sock = self.request
            reply = _answer(data, directory, log)
            if reply is not None:
                sock.sendto(reply, self.client_address)

    class Tcp(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while len(head := self.rfile.read(2)) == 2:
                reply = _answer(self.rfile.read(int.from_bytes(head)), directory, log)
                if reply is None:
                    return
                self.wfile.write(len(reply).to_bytes(2) + reply)

    class UdpServer(socketserver.ThreadingUDPServer):
        daemon_threads = True

    class TcpServer(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True

    for server in (UdpServer(("127.0.0.1", DNS_PORT), Udp), TcpServer(("127.0.0.1", DNS_PORT), Tcp)):
        threading.Thread(target=server.serve_forever, daemon=True).start()


def _serve_web(directory: Path, log: _Log) -> None:
    import trustme

    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(directory / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    own = authority.issue_cert(*NAMES)
    own.configure_cert(context)
    own.private_key_and_cert_chain_pem.write_to_path(str(directory / "server.pem"))

    class Handler(http.server.SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def translate_path(self, path: str) -> str:
            host = self.headers.get("Host", "").partition(":")[0].lower()
            plain = path.partition("?")[0].lstrip("/")
            place = directory / "www" / host / plain
            return str(place if ".." not in plain and "/" not in host else directory / "nothing")

        def log_message(self, *args: object) -> None:
            pass

        def parse_request(self) -> bool:
            good = super().parse_request()
            if good:
                scheme = "https" if isinstance(self.connection, ssl.SSLSocket) else "http"
                log(f"{scheme} {self.headers.get('Host', '')} {self.command} {self.path}")
            return good

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128
        tls = False

        def finish_request(self, request: Any, client_address: Any) -> None:
            request.settimeout(60)
            if self.tls:
                try:
                    request = context.wrap_socket(request, server_side=True)
                except (OSError, ssl.SSLError):
                    return
            try:
                super().finish_request(request, client_address)
            except (OSError, ssl.SSLError):
                pass
            finally:
                if self.tls:
                    request.close()

    class SixServer(Server):
        address_family = socket.AF_INET6

        def server_bind(self) -> None:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            super().server_bind()

    for port in (80, *TLS_PORTS):
        for kind, address in ((Server, "0.0.0.0"), (SixServer, "::")):
            try:
                server = kind((address, port), Handler)
            except OSError:
                if kind is SixServer:
                    continue  # a kernel without IPv6
                raise
            server.tls = port != 80
            threading.Thread(target=server.serve_forever, daemon=True).start()


def _serve_quic(directory: Path) -> None:
    import asyncio

    from aioquic.asyncio import serve
    from aioquic.quic.configuration import QuicConfiguration

    configuration = QuicConfiguration(is_client=False, alpn_protocols=["h3"])
    configuration.load_cert_chain(str(directory / "server.pem"), str(directory / "server.pem"))
    up = threading.Event()

    async def forever() -> None:
        await serve("0.0.0.0", 443, configuration=configuration)
        up.set()
        await asyncio.Event().wait()

    threading.Thread(target=lambda: asyncio.run(forever()), daemon=True).start()
    assert up.wait(30)


def main() -> None:
    """Be the world until stdin ends."""
    from lockgate.kernel import netlink, process_unsafe

    directory = Path(sys.argv[1])
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        process_unsafe.unshare(process_unsafe.NEWNET)
    else:
        process_unsafe.unshare(process_unsafe.NEWUSER | process_unsafe.NEWNET)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    netlink.loopback_up()
    netlink.deliver_here(socket.inet_aton(NETWORK_4), 24)
    six = True
    try:
        netlink.deliver_here(socket.inet_pton(socket.AF_INET6, NETWORK_6), 64)
    except OSError:
        six = False
    _serve_dns(directory, _Log(directory / "queries.log"))
    _serve_web(directory, _Log(directory / "requests.log"))
    _serve_quic(directory)
    sys.stdout.write(json.dumps({"ipv6": six}) + "\n")
    sys.stdout.flush()
    while os.read(0, 4096):
        pass
    # Also where the tests were killed and cannot clean up themselves.
    shutil.rmtree(directory.parent if directory.parent.name.startswith("egress-world-") else directory)


if __name__ == "__main__":
    main()
