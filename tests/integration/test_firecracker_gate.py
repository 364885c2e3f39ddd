"""A run of a Gate on a machine of Firecracker: warm pool, lease, handshake, a brokered call, kill, clean-up.

The guest is the smallest one (guest/microvm/vsk), which plays the agent: it runs no Python, makes one call of the
broker and returns the first bytes of its lease's entropy. Linux and Python on Firecracker need a KVM that boots a stock
kernel.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gate_fixtures import gate_home, gate_scope
from lockgate.audit import reader
from lockgate.contract.bounds import Bounds
from lockgate.contract.rungs import MicrovmChoices
from lockgate.gate.sync import Gate
from lockgate.runtimes.digests import sha256
from lockgate.runtimes.microvm.firecracker import binary
from lockgate.runtimes.microvm.runtime import MicrovmRuntime
from lockgate.runtimes.microvm.store import Choice, KernelInfo, Store
from lockgate.runtimes.protocol import TemplateSpec
from lockgate.runtimes.single import run_once

VSK = Path(__file__).parents[2] / "guest" / "microvm" / "vsk" / "build.sh"
MiB = 1024 * 1024
SECONDS = 60.0
NARROW = Bounds(memory=32 * MiB)


def _kvm() -> bool:
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR))
    except OSError:
        return False
    return True


pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="Firecracker's jailer needs root"),
    pytest.mark.skipif(not _kvm(), reason="there is no /dev/kvm that opens"),
]


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    """A store whose choice is Firecracker and the smallest guest, as `lockgate microvm build` would write one."""
    with tempfile.TemporaryDirectory(prefix="fc") as folder:  # pytest's own make paths too long for a socket
        made = Store(Path(folder))
        pair = binary.fetch(made.root / "bin")
        place = made.root / "kernels" / "vsk"
        place.mkdir(parents=True)
        subprocess.run([str(VSK), str(place / "vmlinux")], check=True, timeout=SECONDS)
        (place / "initrd").write_bytes(b"none" * 1024)
        info = KernelInfo(key="vsk", source="the smallest guest", release="", acpi=False)
        (place / "kernel.json").write_bytes(msgspec.json.encode(info))
        for one in place.iterdir():
            one.chmod(0o444)
        with made.building() as work:
            choice = Choice(
                vmm="firecracker", accel="kvm", binary=pair.firecracker, jailer=pair.jailer, version=pair.version,
                sha256=sha256(Path(pair.firecracker)), kernel=info, memory=64 * MiB, append="quiet",
            )  # fmt: skip
            made.write("choice.json", choice, work)
        yield made


def test_each_run_is_another_clone_with_entropy_of_its_own(store: Store) -> None:
    """X1, X10: template, clone, lease, handshake and result; what the runtime owns is gone afterwards."""
    asked: list[bytes] = []

    def broker(body: bytes) -> bytes:
        asked.append(body)
        return b'{"id":1,"ok":{"text":"hello"}}'

    template = MicrovmRuntime(MicrovmChoices(store=str(store.root))).start(TemplateSpec())
    try:
        assert (template.boundary, template.weakness) == ("hardware", None)
        outcomes = [run_once(template, b"1", NARROW, broker=broker, patience=SECONDS) for _ in range(6)]
    finally:
        template.close()
    values = [outcome.result.value for outcome in outcomes if outcome.result is not None]
    assert len(set(values)) == 6, outcomes
    assert len(asked) == 6
    deadline = time.monotonic() + SECONDS
    while (left := list((store.root / "fc").glob("*/firecracker/*"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def test_a_run_of_a_gate_is_brokered_and_on_record(store: Store, tmp_path: Path) -> None:
    """X1, C2, C5: the supervisor's pool, the channel bound by ticket, authorize(), and rows that name the rung."""
    path = gate_home(tmp_path)
    text = path.read_text().replace('rung = "container"', 'rung = "microvm"')
    text = text.replace("wall = 20.0", f"wall = 20.0\nmemory = {32 * MiB}")
    path.write_text(f'{text}\n[execution.microvm]\nstore = "{store.root}"\n')
    with Gate(path) as gate, gate.run_scope(gate_scope()) as run:
        results = [run.code("unread") for _ in range(3)]
        denied = gate.run_scope(gate_scope(shout={}))
        with denied as narrow:
            refused = narrow.code("unread")
    for result in results:
        assert (result.rung, result.weakness, result.killed_by) == ("microvm", None, None)
        assert isinstance(result.value, str)
        assert [(call.operation, call.verdict) for call in result.calls] == [("echo", "allow")]
    assert len({result.value for result in results}) == 3
    assert [call.reason for call in refused.denials] == ["not_available"]
    rows = list(reader.tail(tmp_path / "audit.db", 100))
    assert {row.rung for row in rows if row.operation == "echo"} == {"microvm"}
    assert not any(row.shared_kernel for row in rows)
