"""The egress gateway beside a direct connection, a bare asyncio relay, squid and mitmproxy.

Everything runs in a network namespace with public addresses on its loopback, so the gateway is the process that runs in
production: real nameserver, vetting, peer check, rows on disk. The bare relay checks nothing: it looks the name up with
the C library, as `asyncio.open_connection` does, and copies. Beside it the same relay for an address, without look-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import emit, row
from egress_client import hello
from lockgate.egress import launch
from lockgate.egress.client import Control
from lockgate.egress.preface import preface
from lockgate.kernel import netlink
from lockgate.policy.egress_load import spec_of_text

ADDRESS = "93.184.216.34"
HOST = "api.allowed.example"
PORT = 8443
CHUNK = 1 << 20
TICKS = os.sysconf("SC_CLK_TCK")


# ---- the parts, each a process of its own -----------------------------------------------------------------------
def source() -> None:
    """Reads 8 bytes behind the hello's length, then sends that many bytes; 0 = echo one line."""
    listener = socket.create_server((ADDRESS, PORT), backlog=1024)
    block = memoryview(b"x" * CHUNK)

    def one(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            data = b""
            while len(data) < 5 or len(data) < 5 + int.from_bytes(data[3:5]) + 8:
                part = sock.recv(65536)
                if not part:
                    return
                data += part
            left = int.from_bytes(data[-8:])
            while left > 0:
                left -= sock.send(block[: min(left, CHUNK)])

    while True:
        sock, _ = listener.accept()
        threading.Thread(target=one, args=(sock,), daemon=True).start()


def nameserver() -> None:
    """Answers every A question with the address, and AAAA with nothing."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 53))
    tail = b"\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4" + socket.inet_aton(ADDRESS)
    while True:
        query, peer = sock.recvfrom(512)
        wanted = query[-4:-2] == b"\0\1"
        sock.sendto(
            query[:2]
            + b"\x84\0\0\1"
            + (b"\0\1" if wanted else b"\0\0")
            + b"\0\0\0\0"
            + query[12:]
            + (tail if wanted else b""),
            peer,
        )


def bare(path: str) -> None:
    """An asyncio streams relay that checks nothing."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.write_eof()

    serving: set[Any] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        try:
            await relay(reader, writer)
        finally:
            serving.discard(asyncio.current_task())

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        host, _, port = head.split(b" ")[1].decode().rpartition(":")
        up, down = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await writer.drain()
        await asyncio.gather(pump(reader, down), pump(up, writer))
        down.close()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_unix_server(serve, path, backlog=1024)
        await server.serve_forever()

    asyncio.run(run())


# ---- measuring --------------------------------------------------------------------------------------------------
def cpu(pids: list[int]) -> float:
    """Seconds of CPU of some processes."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


class Way:
    """One way to the source."""

    def __init__(self, name: str, pids: list[int], opener: Any) -> None:
        self.name = name
        self.pids = pids
        self.open = opener

    def setup(self) -> float:
        """Seconds from nothing to an accepted CONNECT."""
        began = time.perf_counter()
        sock = self.open()
        took = time.perf_counter() - began
        sock.close()
        return took

    def transfer(self, size: int) -> tuple[float, float]:
        """Bytes a second, and CPU seconds of the relay for each GB."""
        sock = self.open()
        sock.sendall(hello(HOST) + size.to_bytes(8))
        before = cpu(self.pids)
        began = time.perf_counter()
        buffer = bytearray(CHUNK)
        got = 0
        while got < size:
            count = sock.recv_into(buffer)
            if not count:
                raise SystemExit(f"{self.name}: the transfer ended after {got} bytes")
            got += count
        took = time.perf_counter() - began
        used = cpu(self.pids) - before
        sock.close()
        return size / took, used / (size / 1e9)


def through(kind: str, place: Any, first: bytes, target: str) -> Any:
    """Return an opener that says `first` and a CONNECT."""

    def opener() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
        sock.settimeout(60)
        sock.connect(place)
        sock.sendall(first + f"CONNECT {target}:{PORT} HTTP/1.1\r\nHost: {target}:{PORT}\r\n\r\n".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            part = sock.recv(4096)
            if not part:
                raise SystemExit(f"no answer: {head!r}")
            head += part
        if b" 200 " not in head:
            raise SystemExit(head.decode())
        return sock

    return opener


def direct() -> socket.socket:
    """Connect without anything between."""
    sock = socket.create_connection((ADDRESS, PORT))
    sock.settimeout(60)
    return sock


def others(folder: Path, started: list[subprocess.Popen[bytes]]) -> list[Way]:
    """Start squid and mitmproxy where they are installed."""
    ways: list[Way] = []
    squid = shutil.which("squid")
    if squid is not None:
        conf = folder / "squid.conf"
        conf.write_text(
            f"http_port 127.0.0.1:3128\nacl ok dstdomain {HOST} {ADDRESS}\nacl ports port {PORT}\n"
            f"http_access allow ok ports\nhttp_access deny all\ncache deny all\naccess_log none\ncache_log /dev/null\n"
            f"pid_filename {folder}/squid.pid\n"
            f"dns_nameservers 127.0.0.1\nhosts_file {folder}/hosts\ncoredump_dir {folder}\nworkers 1\n"
        )
        (folder / "hosts").write_text(f"{ADDRESS} {HOST}\n")
        folder.chmod(0o755)
        process = subprocess.Popen([squid, "-N", "-f", str(conf)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        started.append(process)
        if wait_port(3128):
            ways.append(Way("squid", [process.pid], through("tcp", ("127.0.0.1", 3128), b"", HOST)))
    mitm = shutil.which("mitmdump")
    if mitm is not None:
        process = subprocess.Popen(
            [mitm, "-q", "--listen-host", "127.0.0.1", "-p", "3129", "--set", f"confdir={folder}/mitm",
             "--ignore-hosts", ".*"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        started.append(process)
        if wait_port(3129):
            ways.append(Way("mitmproxy", [process.pid], through("tcp", ("127.0.0.1", 3129), b"", ADDRESS)))
    return ways


def wait_port(port: int) -> bool:
    """Wait until somebody listens there."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        time.sleep(0.1)
    return False


def descriptors(pid: int) -> int:
    """How many a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def many(way: Way, pid: int, count: int) -> tuple[float, float]:
    """Hold `count` tunnels at once, then close them: descriptors for each one, and what is left of them."""
    before = descriptors(pid)
    held = []
    for _ in range(count):
        sock = way.open()
        sock.sendall(hello(HOST) + (1).to_bytes(8))
        held.append(sock)
    for sock in held:
        if sock.recv(1) != b"x":
            raise SystemExit("a tunnel carries nothing")
    peak = descriptors(pid)
    for sock in held:
        sock.close()
    settle(pid, before)
    return (peak - before) / count, descriptors(pid) - before


def settle(pid: int, fds: int) -> None:
    """Wait until the descriptors of closed connections are gone; kept pipes may stay."""
    deadline = time.monotonic() + 30
    while descriptors(pid) > fds and time.monotonic() < deadline:
        time.sleep(0.1)


def rss(pid: int) -> float:
    """Resident MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1048576


def soak(way: Way, pid: int, count: int) -> tuple[float, float]:
    """Open, use and close `count` tunnels: descriptors and MiB that have grown."""

    def one() -> None:
        sock = way.open()
        sock.sendall(hello(HOST) + (1).to_bytes(8))
        sock.recv(1)
        sock.close()

    before = descriptors(pid)
    for _ in range(min(3000, count)):
        one()
    settle(pid, before + 8)
    fds, memory = descriptors(pid), rss(pid)
    for _ in range(count):
        one()
    settle(pid, fds)
    return descriptors(pid) - fds, rss(pid) - memory


def main() -> None:
    """Measure, in a namespace of our own."""
    size = int(sys.argv[1]) if len(sys.argv) > 2 else 1 << 30
    soaked = int(sys.argv[2]) if len(sys.argv) > 3 else 50_000
    (Path(sys.argv[-1]) / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    subprocess.run(["mount", "--bind", f"{sys.argv[-1]}/resolv.conf", "/etc/resolv.conf"], check=True)
    netlink.loopback_up()
    netlink.deliver_here(socket.inet_aton(ADDRESS), 32)
    spec = spec_of_text(
        f'[egress]\nallow = ["{HOST}:{PORT}"]\n[egress.limits]\nconnections = 3000\nrequests = 100000000\n'
        "bytes_out = 100000000000\n"
    )
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        folder = Path(place)
        started: list[subprocess.Popen[bytes]] = []

        def end() -> None:
            for process in started:
                process.terminate()
                process.wait(20)

        stack.callback(end)
        relay_path = str(folder / "bare")
        for part, *rest in (("source",), ("nameserver",), ("bare", relay_path)):
            started.append(subprocess.Popen([sys.executable, __file__, f"--{part}", *rest]))
        gateway = stack.enter_context(
            launch.start(spec, folder / "rows.db", nameservers=("127.0.0.1",), output=2, idle=3600.0)
        )
        control = stack.enter_context(Control(gateway.control))
        opened = control.open(user="bench", agent="bench", run="bench")
        deadline = time.monotonic() + 30
        while not os.path.exists(relay_path) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        ours = Way("lockgate", [gateway.pid], through("unix", gateway.data, preface(opened.token), HOST))
        streams = Way("asyncio streams", [started[2].pid], through("unix", relay_path, b"", HOST))
        blind = Way("asyncio streams, no look-up", [started[2].pid], through("unix", relay_path, b"", ADDRESS))
        ways = [Way("direct", [], direct), streams, blind, ours, *others(folder, started)]

        rates: dict[str, list[float]] = {way.name: [] for way in ways}
        costs: dict[str, list[float]] = {way.name: [] for way in ways}
        setups: dict[str, list[float]] = {way.name: [] for way in ways}
        for turn in range(6):
            for way in ways:
                rate, cost = way.transfer(size)
                if turn:
                    rates[way.name].append(rate)
                    costs[way.name].append(cost)
        for turn in range(550):
            for way in ways:
                took = way.setup()
                if turn >= 50:
                    setups[way.name].append(took)
        for way in ways:
            print(
                f"# {way.name}: {statistics.median(rates[way.name]) / 1e9:.2f} GB/s, "
                f"{statistics.median(costs[way.name]):.3f} CPU s/GB, "
                f"CONNECT p50 {statistics.median(setups[way.name]) * 1e6:.0f} us",
                file=sys.stderr,
            )
        name = "lockgate"
        each, left = many(ours, gateway.pid, 1000)
        fds, memory = soak(ours, gateway.pid, soaked)
        emit(
            row("F60", rates[name], unit="B/s", bar=1.8, reference="asyncio streams relay",
                against=rates["asyncio streams"], at_most=False),
            row("F60-direct", rates[name], unit="B/s", bar=0.45, reference="direct connection",
                against=rates["direct"], at_most=False),
            row("F61", costs[name], unit="s/GB", bar=0.30, reference="asyncio streams relay",
                against=costs["asyncio streams"]),
            row("F62", setups[name], unit="s", bar=1.2, reference="bare asyncio relay",
                against=setups["asyncio streams"]),
            row("F62-address", setups[name], unit="s", bar=3.0, reference="bare asyncio relay, no look-up",
                against=setups["asyncio streams, no look-up"]),
            row("F63", [each], unit="fds", bar=2.1, reference="one of 1,000 tunnels held at once"),
            row("F63-after", [left], unit="fds", bar=40.0, reference="left when they are closed"),
            row("F64-fds", [fds], unit="fds", bar=10.0, reference=f"grown in {soaked:,} tunnels"),
            row("F64-memory", [memory], unit="MiB", bar=4.0, reference=f"grown in {soaked:,} tunnels"),
        )  # fmt: skip


if __name__ == "__main__":
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    if part == "--source":
        source()
    elif part == "--nameserver":
        nameserver()
    elif part == "--bare":
        bare(sys.argv[2])
    elif "--inside" in sys.argv:
        sys.argv.remove("--inside")
        main()
    else:
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        with tempfile.TemporaryDirectory() as scratch:
            argv = [
                "unshare",
                "--net",
                "--mount",
                *user,
                "--",
                sys.executable,
                __file__,
                *sys.argv[1:],
                "--inside",
                scratch,
            ]
            raise SystemExit(subprocess.run(argv, check=False).returncode)
