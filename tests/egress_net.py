"""A small internet of its own for the gateway: a network namespace with public addresses on its loopback.

In it run a nameserver (dnspython) that answers what the test says, TLS and plain HTTP servers that tell what they got,
servers on addresses that nobody may reach, and the real gateway with its audit writer. Only the gateway's unix sockets
lead in. Started as a script, this file is that inside; imported, it is the handle a test holds.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import queue
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

PUBLIC = "93.184.216.34"
OTHER = "93.184.216.35"
PUBLIC6 = "2606:2800:220:1::1"
PRIVATE = "10.0.0.5"
METADATA = "169.254.169.254"
NAMESERVER = "127.0.0.1@5300"
NAMES = ("api.allowed.example", "*.wild.example", "plain.example", "other.example", "git.corp.example", "evil.test")
POLICY = """[egress]
allow = ["api.allowed.example:443", "*.wild.example:443", "plain.example:80"]
"""


class World:
    """A running world.

    Args:
        folder: where the audit file and the certificates go.
        policy: TOML text.
        answers: name to addresses, for A and AAAA alike; a list of lists is one answer after the other.
        options: for `lockgate.egress.launch.start`.

    """

    def __init__(
        self, folder: Path, policy: str = POLICY, answers: dict[str, Any] | None = None, **options: Any
    ) -> None:
        unshare = shutil.which("unshare")
        if unshare is None:
            raise RuntimeError("unshare (util-linux) is missing")
        argv = [unshare, "--net"] + ([] if os.geteuid() == 0 else ["--user", "--map-root-user"])
        if os.geteuid() != 0 and subprocess.run([*argv, "true"], capture_output=True, check=False).returncode:
            import pytest  # not where this file runs as a script

            pytest.skip("a plain user may not make a user namespace here")
        self.folder = folder
        self.process = subprocess.Popen(
            [*argv, "--", sys.executable, "-I", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None,
        )
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            told = self.ask(op="start", folder=str(folder), policy=policy, answers=answers or {}, options=options)
        except BaseException:
            self.close()
            raise
        self.control: str = told["control"]
        self.data: str = told["data"]
        self.pid: int = told["pid"]
        self.writer_pid: int = told["writer_pid"]
        self.audit = folder / "egress.db"
        self.ca = folder / "world-ca.pem"

    def ask(self, **words: Any) -> Any:
        """Send one command and return its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words).encode() + b"\n")
        self.process.stdin.flush()
        try:
            line = self._lines.get(timeout=90)
        except queue.Empty:
            raise TimeoutError("the world does not answer") from None
        if not line:
            raise RuntimeError(f"the world ended with {self.process.wait(10)}")
        answer = json.loads(line)
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer["value"]

    def answers(self, name: str, *sets: list[str]) -> None:
        """Let the nameserver answer `name` with these sets of addresses, one after the other; the last one stays."""
        self.ask(op="answers", name=name, sets=list(sets))

    def alias(self, name: str, target: str) -> None:
        """Let the nameserver answer `name` with an alias and the addresses of `target`, in one answer."""
        self.ask(op="alias", name=name, target=target)

    def questions(self) -> list[tuple[str, str, str]]:
        """What the nameserver was asked so far: (name as sent, type, "udp" or "tcp")."""
        return [tuple(one) for one in self.ask(op="questions")]

    def got(self, place: str) -> dict[str, int]:
        """Connections and bytes that a server got: "https", "http", "other", "loopback", "private", "metadata"."""
        return self.ask(op="got", place=place)

    def rows(self) -> list[Any]:
        """All rows so far."""
        from egress_client import rows_until_now  # not where this file runs as a script

        return rows_until_now(self.control, self.audit)

    def close(self) -> None:
        """End everything in it."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(30)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(b"")


class Forwarder:
    """A proxy port on our own loopback that hands each connection to the gateway, as `egress run` does."""

    def __init__(self, data: str, token: str, *, copy: bool = False) -> None:
        self._data = data
        self._token = token
        self._copy = copy
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        from lockgate.egress.preface import preface

        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client, socket.socket(socket.AF_UNIX) as gateway, contextlib.suppress(OSError):
                gateway.connect(self._data)
                socket.send_fds(gateway, [preface(self._token)], [client.fileno()])

    def close(self) -> None:
        """Stop accepting."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# ---- inside -----------------------------------------------------------------------------------------------------
class _Nameserver:
    """Authoritative for everything: answers what the test says, NXDOMAIN for the rest."""

    def __init__(self) -> None:
        self.sets: dict[str, list[list[str]]] = {}
        self.aliases: dict[str, str] = {}
        self.seen: list[tuple[str, str, str]] = []
        self.turn: dict[tuple[str, str], int] = {}
        self.big = False
        self.mute: set[str] = set()
        self.fail: set[str] = set()

    def reply(self, wire: bytes, how: str) -> bytes | None:
        import dns.flags
        import dns.message
        import dns.rcode
        import dns.rdatatype
        import dns.rrset

        question = dns.message.from_wire(wire)
        name = question.question[0].name.to_text()
        kind = dns.rdatatype.to_text(question.question[0].rdtype)
        self.seen.append((name, kind, how))
        plain = name.rstrip(".").lower()
        if plain in self.mute:
            return None
        reply = dns.message.make_response(question)
        reply.flags |= dns.flags.AA
        if plain in self.fail:
            reply.set_rcode(dns.rcode.SERVFAIL)
            return reply.to_wire()
        if self.big and how == "udp":
            reply.flags |= dns.flags.TC
            return reply.to_wire()
        owner, hops = plain, 0
        while owner in self.aliases and hops < 20:
            reply.answer.append(dns.rrset.from_text(owner + ".", 60, "IN", "CNAME", self.aliases[owner] + "."))
            owner, hops = self.aliases[owner], hops + 1
        if owner not in self.sets:
            reply.set_rcode(dns.rcode.NXDOMAIN if owner == plain else dns.rcode.NOERROR)
            return reply.to_wire(max_size=65535)
        sets = self.sets[owner]
        turn = self.turn.get((owner, kind), 0)
        self.turn[owner, kind] = turn + 1
        chosen = [one for one in sets[min(turn, len(sets) - 1)] if (":" in one) == (kind == "AAAA")]
        if chosen:
            reply.answer.append(dns.rrset.from_text(owner + ".", 60, "IN", kind, *chosen))
        return reply.to_wire(max_size=65535)


class _Udp(asyncio.DatagramProtocol):
    def __init__(self, server: _Nameserver) -> None:
        self.server = server

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        reply = self.server.reply(data, "udp")
        if reply is not None:
            self.transport.sendto(reply, addr)


class _Echo:
    """Sends back what it gets, whatever it is; counts."""

    def __init__(self) -> None:
        self.got = {"connections": 0, "bytes": 0}
        self.seen: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.got["connections"] += 1
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                self.got["bytes"] += len(data)
                writer.write(data)
                await writer.drain()
        writer.close()


async def _probe(address: str, port: int) -> bool:
    """Whether somebody listens there: the control for "nobody was reached"."""
    try:
        _, writer = await asyncio.open_connection(address, port)
    except OSError:
        return False
    writer.close()
    return True


class _Http:
    """Answers HTTP/1.1 with what it got; counts."""

    def __init__(self) -> None:
        self.got = {"connections": 0, "bytes": 0, "requests": 0}
        self.seen: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.got["connections"] += 1
        try:
            while await self._one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        self.got["bytes"] += len(head)
        self.got["requests"] += 1
        self.seen.append(head.decode("latin-1"))
        lines = head[:-4].split(b"\r\n")
        method, path, _ = lines[0].decode("latin-1").split(" ")
        fields = {
            line.partition(b":")[0].decode("latin-1").lower(): line.partition(b":")[2].strip().decode("latin-1")
            for line in lines[1:]
        }
        body = await reader.readexactly(int(fields.get("content-length", "0")))
        self.got["bytes"] += len(body)
        keep = fields.get("connection", "").lower() != "close"
        if path.startswith("/ws") and fields.get("upgrade", "").lower() == "websocket":
            key = fields.get("sec-websocket-key", "") + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
            writer.write(
                f"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                f"Sec-WebSocket-Accept: {accept}\r\n\r\n".encode()
            )
            while data := await reader.read(65536):
                self.got["bytes"] += len(data)
                writer.write(data)
                await writer.drain()
            return False
        told = json.dumps({"method": method, "path": path, "fields": fields, "body": len(body)}).encode()
        status = "200 OK"
        more = ""
        if path.startswith("/big/"):
            told = b"x" * int(path.rpartition("/")[2])
        elif path.startswith("/redirect"):
            status, more = "302 Found", "Location: https://evil.test/\r\n"
        elif path.startswith("/forged"):
            more = "x-lockgate-reason: ok\r\n"
        if path.startswith("/chunked"):
            writer.write(f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n{more}\r\n".encode())
            for piece in (told[:7], told[7:]):
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        elif path.startswith("/until-close"):
            writer.write(f"HTTP/1.1 {status}\r\n\r\n".encode() + told)
            await writer.drain()
            return False
        elif path.startswith("/confused"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
        else:
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(told)}\r\n{more}\r\n".encode())
            if method != "HEAD":
                writer.write(told)
        await writer.drain()
        return keep


async def _inside() -> None:
    import trustme

    from lockgate.egress import launch
    from lockgate.kernel import netlink
    from lockgate.policy.egress_load import spec_of_text

    netlink.loopback_up()
    for address in (PUBLIC, OTHER, PRIVATE, METADATA):
        netlink.deliver_here(socket.inet_aton(address), 32)
    with contextlib.suppress(OSError):  # a host without IPv6
        netlink.deliver_here(socket.inet_pton(socket.AF_INET6, PUBLIC6), 128)
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    authority.issue_cert(*NAMES, PRIVATE).configure_cert(context)
    wrong = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("somebody-else.example").configure_cert(wrong)

    nameserver = _Nameserver()
    loop = asyncio.get_running_loop()
    await loop.create_datagram_endpoint(lambda: _Udp(nameserver), local_addr=("127.0.0.1", 5300))

    async def over_tcp(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            size = struct.unpack("!H", await reader.readexactly(2))[0]
            reply = nameserver.reply(await reader.readexactly(size), "tcp")
            if reply is not None:
                writer.write(struct.pack("!H", len(reply)) + reply)
                await writer.drain()
        writer.close()

    servers = [await asyncio.start_server(over_tcp, "127.0.0.1", 5300)]
    places: dict[str, Any] = {}
    for place, address, port, tls in (
        ("https", PUBLIC, 443, context),
        ("http", PUBLIC, 80, None),
        ("other", OTHER, 443, wrong),
        ("loopback", "127.0.0.1", 80, None),
        ("loopback-tls", "127.0.0.1", 443, context),
        ("metadata", METADATA, 80, None),
        ("metadata-tls", METADATA, 443, context),
        ("private", PRIVATE, 443, context),
    ):
        places[place] = _Http()
        servers.append(await asyncio.start_server(places[place].serve, address, port, ssl=tls, limit=1 << 20))
    places["echo"] = echo = _Echo()
    servers.append(await asyncio.start_server(echo.serve, PUBLIC, 8443, backlog=2048))
    lines = asyncio.StreamReader(limit=1 << 22)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    gateway: launch.Gateway | None = None
    try:
        while line := await lines.readline():
            words = json.loads(line)
            value: Any = None
            try:
                if words["op"] == "start":
                    folder = Path(words["folder"])
                    (folder / "world-ca.pem").write_bytes(authority.cert_pem.bytes())
                    for name, found in words["answers"].items():
                        nameserver.sets[name] = found if found and isinstance(found[0], list) else [found]
                    gateway = await asyncio.to_thread(
                        launch.start,
                        spec_of_text(words["policy"]),
                        folder / "egress.db",
                        nameservers=(NAMESERVER,),
                        ca_file=str(folder / "world-ca.pem"),
                        output=2,
                        **words["options"],
                    )
                    value = {
                        "control": gateway.control,
                        "data": gateway.data,
                        "pid": gateway.pid,
                        "writer_pid": gateway.writer_pid,
                    }
                elif words["op"] == "answers":
                    nameserver.sets[words["name"]] = words["sets"]
                    nameserver.turn.clear()
                elif words["op"] == "alias":
                    nameserver.aliases[words["name"]] = words["target"]
                elif words["op"] == "set":
                    setattr(
                        nameserver, words["what"], set(words["to"]) if isinstance(words["to"], list) else words["to"]
                    )
                elif words["op"] == "questions":
                    value = nameserver.seen
                elif words["op"] == "probe":
                    value = await _probe(words["address"], words["port"])
                elif words["op"] == "got":
                    value = places[words["place"]].got
                elif words["op"] == "seen":
                    value = places[words["place"]].seen
            except Exception as error:
                print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), flush=True)
                continue
            print(json.dumps({"value": value}), flush=True)
    finally:
        if gateway is not None:
            await asyncio.to_thread(gateway.close)
        for server in servers:
            server.close()


if __name__ == "__main__":
    asyncio.run(_inside())
