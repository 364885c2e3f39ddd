"""The host side of Firecracker with the smallest guest: a jailed clone against a bare one, and what an idle one costs.

Root with a /dev/kvm that opens; elsewhere it says so and has no rows. The guest does nothing, so these are figures of
the host side alone: API, jailer, snapshot, vsock. As in a run of a Gate the machine is born in control groups that the
supervisor made before; having the jailer make them takes 12 ms more.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import emit, interleave, row
from lockgate.runtimes.microvm.firecracker import binary, jail, machine
from lockgate.runtimes.microvm.firecracker.api import Api, vsock
from lockgate.runtimes.microvm.firecracker.machine import Clone, Frozen, Recipe, Uids, freeze

VSK = Path(__file__).parents[1] / "guest" / "microvm" / "vsk" / "build.sh"
COUNT = 60
MiB = 1024 * 1024
SECONDS = 30.0
ECHO_PORT = 54
HIT = "bare Firecracker: resume by an HTTP client, vsock reply"
START = "bare Firecracker: process, snapshot load, resume"


class UnixHttp(http.client.HTTPConnection):
    """One request of a connection of its own, as curl --unix-socket makes it."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)


def call(path: str, method: str, target: str, body: dict[str, Any]) -> None:
    """Ask once, and close."""
    one = UnixHttp(path)
    one.request(method, target, json.dumps(body), {"Content-Type": "application/json"})
    answer = one.getresponse()
    if answer.status != 204:
        raise SystemExit(f"{target}: {answer.status} {answer.read(300)!r}")
    one.close()


def reply(path: str, pidfd: int) -> None:
    """Connect to the echo of the guest and wait for an answer."""
    with vsock(path, ECHO_PORT, pidfd, time.monotonic() + SECONDS) as stream:
        stream.sendall(b"x")
        stream.recv(2)


class Bare:
    """A clone that nobody jailed, from the same files."""

    def __init__(self, frozen: Frozen, binaries: binary.Binaries) -> None:
        self.folder = tempfile.mkdtemp(prefix="fb")
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            [binaries.firecracker, "--api-sock", f"{self.folder}/a"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self.folder,
        )  # fmt: skip
        self.pidfd = os.pidfd_open(self.process.pid)
        Api(f"{self.folder}/a", self.pidfd, time.monotonic() + SECONDS).close()
        memory = {"backend_type": "File", "backend_path": str(frozen.ram)}
        body = {"snapshot_path": str(frozen.state), "mem_backend": memory, "resume_vm": False}
        call(f"{self.folder}/a", "PUT", "/snapshot/load", body)
        self.loaded = time.perf_counter()

    def resume(self) -> None:
        """Let it run."""
        call(f"{self.folder}/a", "PATCH", "/vm", {"state": "Resumed"})

    def end(self) -> None:
        """Take it away."""
        self.process.kill()
        self.process.wait()
        os.close(self.pidfd)
        Path("/v.sock").unlink(missing_ok=True)  # where the snapshot says that its socket is
        shutil.rmtree(self.folder)


def main() -> None:
    """Print the rows."""
    if os.geteuid() != 0 or not os.access("/dev/kvm", os.R_OK | os.W_OK) or Path("/v.sock").exists():
        print("no rows: Firecracker's jailer needs root, and a /dev/kvm that opens", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory(prefix="fc") as folder:
        top = Path(folder)
        binaries = binary.fetch(top / "store")
        base, uids = jail.yard(top / "fc"), Uids()
        subprocess.run([str(VSK), str(top / "vsk.elf")], check=True)
        recipe = Recipe(top / "vsk.elf", "quiet", 128 * MiB)
        frozen = freeze(recipe, base, top / "t", binaries, uids=uids, seconds=SECONDS)
        starts: dict[str, list[float]] = {"jailed": [], "bare": []}
        private: list[float] = []

        def jailed() -> float:
            began = time.perf_counter()
            one = Clone(base, frozen, binaries, uids, grouped=False)
            loaded = time.perf_counter()
            rollup = Path(f"/proc/{one.jail.vmm()}/smaps_rollup").read_text()
            private.append(sum(int(size) for size in re.findall(r"Private_\w+: +(\d+)", rollup)) / 1024)
            resumed = time.perf_counter()
            one.start()
            ready = time.perf_counter()
            reply(one.jail.path(machine.VSOCK), one.jail.pidfd)
            took = time.perf_counter() - resumed
            starts["jailed"].append(loaded - began + ready - resumed)
            one.destroy()
            return took

        def bare() -> float:
            one = Bare(frozen, binaries)
            resumed = time.perf_counter()
            one.resume()
            ready = time.perf_counter()
            reply("/v.sock", one.pidfd)
            took = time.perf_counter() - resumed
            starts["bare"].append(one.loaded - one.began + ready - resumed)
            one.end()
            return took

        hits = interleave(COUNT, jailed, bare)
        jail.leave(base)
    emit(
        row("firecracker_pool_hit_jailed", hits[0], unit="s", bar=1.3, reference=HIT, against=hits[1]),
        row("firecracker_start_jailed", starts["jailed"], unit="s", bar=2.0, reference=START, against=starts["bare"]),
        row("firecracker_idle_private", private, unit="MiB", bar=5.0),
    )


if __name__ == "__main__":
    main()
