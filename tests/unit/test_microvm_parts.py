"""The parts of the microvm rung that need no machine: kernels, archives, QMP, command lines, the store."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import stat
import struct
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockgate.cli import doctor
from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import CannotIsolate, ConfigError, HostFault
from lockgate.runtimes.microvm import build, initrd, kconfig, kernelimage, kernels, qemu, store, verdicts
from lockgate.runtimes.microvm.qmp import LINE_BYTES, Qmp, QmpError
from lockgate.runtimes.microvm.runtime import MicrovmTemplate
from lockgate.runtimes.microvm.vmm import Guest, Plan
from lockgate.runtimes.protocol import Unavailable
from lockgate.supervisor import checkup

ELF = b"\x7fELF" + bytes(60)


def bzimage(payload: bytes, *, said: int | None = None) -> bytes:
    """A bzImage with one setup sector, as boot.rst lays it out."""
    head = bytearray(1024)
    head[0x1F1] = 1
    head[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", head, 0x248, 0, len(payload) if said is None else said)
    return bytes(head) + payload


def lz4(*blocks: bytes) -> bytes:
    return b"\x02\x21\x4c\x18" + b"".join(struct.pack("<I", len(one)) + one for one in blocks) + struct.pack("<I", 64)


@pytest.mark.parametrize(
    "payload",
    [
        gzip.compress(ELF) + bytes(4),
        lzma.compress(ELF) + bytes(4),
        lzma.compress(ELF, format=lzma.FORMAT_ALONE) + bytes(4),
        lz4(bytes([0xF0, 64 - 15]) + ELF),
        lz4(bytes([0x5F]) + ELF[:5] + struct.pack("<H", 1) + bytes([59 - 4 - 15]) + b"\0"),  # a match over itself
    ],
    ids=["gzip", "xz", "lzma", "lz4 literals", "lz4 match"],
)
def test_a_kernel_comes_out_of_what_distributions_ship(payload: bytes) -> None:
    assert kernelimage.vmlinux(bzimage(payload))[:4] == ELF[:4]
    assert kernelimage.vmlinux(ELF) == ELF


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"#!/bin/sh\n",
        bytes(4096),
        bzimage(b"\x28\xb5\x2f\xfdxxxx"),
        bzimage(gzip.compress(b"no kernel") + bytes(4)),
        bzimage(gzip.compress(ELF)[:10]),
        bzimage(gzip.compress(ELF), said=1 << 30),
        bzimage(lz4(b"\xff")),
        bzimage(lz4(bytes([0x10]) + b"x" + struct.pack("<H", 9) + b"\0")),  # reaches back before its block
        bzimage(b"\x02\x21\x4c\x18" + struct.pack("<I", 1 << 31) + bytes(64)),
    ],
)
def test_what_is_no_kernel_is_a_typed_refusal(data: bytes) -> None:
    with pytest.raises(CannotIsolate, match="kernel image"):
        kernelimage.vmlinux(data)


@given(st.binary(max_size=300))
def test_any_bytes_as_lz4_end(data: bytes) -> None:
    """Truncated, looping or lying streams raise; none hangs or returns more than its blocks can hold."""
    try:
        out = kernelimage.lz4_legacy(b"\x02\x21\x4c\x18" + data)
    except (ValueError, IndexError):
        return
    assert len(out) <= 255 * len(data)


def test_an_archive_is_what_the_kernel_reads(tmp_path: Path) -> None:
    made = initrd.build(b"\x7fELFinit", [("a.ko", b"A" * 5), ("b.ko", b"B")])
    assert made == initrd.build(b"\x7fELFinit", [("a.ko", b"A" * 5), ("b.ko", b"B")])  # byte for byte
    entries = {}
    at = 0
    while True:
        assert made[at : at + 6] == b"070701"
        fields = [int(made[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        name = made[at + 110 : at + 110 + fields[11] - 1].decode()
        body = at + 110 + fields[11]
        body += -body % 4
        if name == "TRAILER!!!":
            break
        entries[name] = (fields[1], made[body : body + fields[6]])
        at = body + fields[6]
        at += -at % 4
    assert len(made) % 512 == 0
    assert entries["modules"][1] == b"/m/a.ko\n/m/b.ko\n"  # in the order in which they can be loaded
    assert entries["init"] == (stat.S_IFREG | 0o755, b"\x7fELFinit")
    assert entries["m/a.ko"][1] == b"AAAAA"


def test_modules_come_with_what_they_need(tmp_path: Path) -> None:
    def module(name: str, *needs: str) -> None:
        (tmp_path / f"{name}.ko").write_bytes(b"\0ELF\0depends=" + ",".join(needs).encode() + b"\0rest")

    (tmp_path / "modules.builtin").write_text("kernel/drivers/block/virtio_blk.ko\n")
    module("virtio_mmio", "virtio-ring", "virtio")
    module("virtio-ring", "virtio")
    module("virtio")
    module("virtio_console", "virtio")
    module("erofs")
    order = [one.name for one in initrd.module_files(tmp_path)]
    assert order == ["virtio.ko", "virtio-ring.ko", "virtio_mmio.ko", "virtio_console.ko", "erofs.ko"]
    (tmp_path / "erofs.ko").unlink()
    with pytest.raises(CannotIsolate, match="no driver erofs"):
        initrd.module_files(tmp_path)
    (tmp_path / "erofs.ko.xz").write_bytes(b"")
    with pytest.raises(CannotIsolate, match="is packed"):
        initrd.module_files(tmp_path)


# ---- QMP ---------------------------------------------------------------------------------------------------------
GREETING = b'{"QMP": {"version": {}, "capabilities": []}}\n'


def test_a_conversation_is_asked_and_answered_in_order() -> None:
    one = Qmp()
    assert one.feed(GREETING) == [("greeting", None)]
    assert json.loads(one.ask("getfd", fdname="state")) == {"execute": "getfd", "arguments": {"fdname": "state"}}
    one.ask("stop")
    assert one.feed(b'{"timestamp": {}, "event": "STOP"}\n{"return": {}}\n{"ret') == [("getfd", {})]
    assert one.feed(b'urn": {"a": 1}}\n') == [("stop", {"a": 1})]


@pytest.mark.parametrize(
    "data",
    [
        b"no json\n",
        b"[]\n",
        b'{"return": {}}\n',  # nobody asked
        GREETING + GREETING,
        b"x" * (LINE_BYTES + 1),
        b'{"error": {"desc": "no"}}\n',
    ],
)
def test_a_vmm_that_breaks_its_protocol_is_given_up(data: bytes) -> None:
    with pytest.raises(QmpError):
        Qmp().feed(data)


def test_a_refused_command_names_itself() -> None:
    one = Qmp()
    one.ask("migrate-incoming")
    with pytest.raises(QmpError, match="migrate-incoming: no such thing"):
        one.feed(b'{"error": {"class": "GenericError", "desc": "no such thing"}}\n')


def answer(monitor: qemu.Monitor, value: object) -> list[str]:
    """Feed one answer; return the commands it leads to."""
    more = monitor.feed(json.dumps({"return": value}).encode() + b"\n")
    return [json.loads(line)["execute"] for line in more.splitlines()]


def test_a_clone_is_loaded_and_stays_paused() -> None:
    monitor = qemu.Monitor(cold=False)
    assert b"qmp_capabilities" in monitor.feed(GREETING)
    assert answer(monitor, {}) == ["migrate-set-capabilities"]
    assert answer(monitor, {}) == ["migrate-incoming"]
    assert answer(monitor, {}) == ["query-status"]
    assert answer(monitor, {"status": "inmigrate"}) == ["query-status"]
    assert not monitor.loaded
    assert answer(monitor, {"status": "paused"}) == []
    assert monitor.loaded
    assert json.loads(monitor.resume())["execute"] == "cont"


def test_a_clone_that_runs_by_itself_is_given_up() -> None:
    """X10: what is LOADED has run nothing; a machine that is anything but paused is not that."""
    monitor = qemu.Monitor(cold=False)
    monitor.feed(GREETING)
    for value in ({}, {}, {}):
        answer(monitor, value)
    with pytest.raises(QmpError, match="running, not paused"):
        answer(monitor, {"status": "running"})


def test_a_snapshot_that_fails_is_an_error() -> None:
    monitor = qemu.Monitor(cold=True)
    monitor.feed(GREETING)
    answer(monitor, {})
    answer(monitor, {})
    assert monitor.ready
    monitor.receive_state()
    assert answer(monitor, {}) == ["stop"]
    assert answer(monitor, {}) == ["migrate"]
    assert answer(monitor, {}) == ["query-migrate"]
    assert answer(monitor, {"status": "active"}) == ["query-migrate"]
    with pytest.raises(QmpError, match="the snapshot failed: failed out of luck"):
        answer(monitor, {"status": "failed", "error-desc": "out of luck"})


# ---- the command line --------------------------------------------------------------------------------------------
def plan(accel: str = "tcg", **changes: object) -> Plan:
    fields: dict[str, object] = {"packages": None, "acpi": True, **changes}
    guest = Guest(kernel="/k", initrd="/i", root="/r", memory=256 << 20, append="quiet", **fields)  # type: ignore[arg-type]
    return Plan(
        mode="serve", vmm="qemu", binary="/usr/bin/qemu", accel=accel, guest=guest, state="/s", ram="/m", base=0,
        seconds=1.0, lease_seconds=1.0,
    )  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize("accel", ["tcg", "kvm"])
@pytest.mark.parametrize("cold", [True, False])
def test_the_vmm_is_started_with_nothing_that_leads_out(accel: str, cold: bool) -> None:
    """X4, X8: no network device, no serial line, no shared folder, no path of this host, its own sandbox on."""
    argv = qemu.program(plan(accel, packages="/p"), cold=cold)
    text = " ".join(argv)
    assert "-nodefaults" in argv
    assert "-no-user-config" in argv
    assert argv[argv.index("-serial") + 1] == "none"
    assert argv[argv.index("-sandbox") + 1].startswith("on,obsolete=deny,elevateprivileges=deny,spawn=deny")
    for word in ("netdev", "virtio-net", "virtfs", "9p", "fsdev", "vsock", "usb", "vnc", "gdb", "-s ", "tcp:", "unix:"):
        assert word not in text
    files = [word for word in argv if "/" in word and word != "/usr/bin/qemu"]
    assert all("/proc/self/fd/" in word for word in files)
    assert all("readonly=on" in word for word in argv if word.startswith("id=") and "format=raw" in word)
    assert ("share=on" in text) == cold  # a clone's memory is its own
    assert ("-incoming" in argv) == (not cold)
    assert f"-accel {accel}" in text


def test_an_accelerator_is_what_was_asked_and_never_another() -> None:
    """X3: no list of accelerators, which QEMU would fall through."""
    for accel in ("tcg", "kvm"):
        argv = qemu.program(plan(accel), cold=False)
        asked = [argv[at + 1] for at, word in enumerate(argv) if word == "-accel"]
        assert [one.partition(",")[0] for one in asked] == [accel]
        assert ":" not in asked[0]


def test_the_command_line_of_the_kernel_names_nothing_of_this_host() -> None:
    """X8: it can be read inside."""
    info = store.KernelInfo(key="k", source="s", release="r", acpi=True)
    for accel in ("tcg", "kvm"):
        line = build.append_for(info, accel)  # type: ignore[arg-type]
        assert "/" not in line.replace("rdinit=/init", "")
        assert os.uname().nodename not in line.replace("=", " ").split()
        assert "sysctl.vm.panic_on_oom=1" in line  # X6: a guest without memory ends as a whole
        assert "8250.nr_uarts=0" in line
        assert "console=" not in line
    assert "mitigations" not in build.append_for(info, "kvm")
    assert build.append_for(info, "kvm", "firecracker").endswith(" -- vsock")  # the last word is init's


# ---- the store ---------------------------------------------------------------------------------------------------
def choice(accel: str = "tcg", **changes: object) -> store.Choice:
    info = store.KernelInfo(key="k", source="s", release="r", acpi=True)
    made = store.Choice(
        vmm="qemu", accel=accel, binary="/q", version="7", sha256="0" * 64, kernel=info, memory=1 << 28, append="quiet"
    )  # type: ignore[arg-type]
    return msgspec.structs.replace(made, **changes)


def test_nothing_built_is_a_refusal_with_the_command(tmp_path: Path) -> None:
    """X3, X11: what is missing is built by an operator's command, never at run time."""
    with pytest.raises(CannotIsolate) as caught:
        store.Store(tmp_path / "none").choice()
    assert caught.value.next_step == "build it with: lockgate microvm build"
    (tmp_path / "choice.json").write_text("{}")
    with pytest.raises(CannotIsolate, match="another version"):
        store.Store(tmp_path).choice()


def test_a_store_that_others_can_write_is_refused(tmp_path: Path) -> None:
    place = store.Store(tmp_path)
    with place.building() as work:
        place.write("choice.json", choice(), work)
    assert place.choice() == choice()
    (tmp_path / "choice.json").chmod(0o666)
    with pytest.raises(CannotIsolate, match="somebody else"):
        place.choice()


def test_one_builder_at_a_time_and_what_a_dead_one_left_goes(tmp_path: Path) -> None:
    place = store.Store(tmp_path)
    with place.building() as first:
        (first / "half").write_text("x")
        with pytest.raises(HostFault, match="did not end within"), place.building(0.1):
            pass
        assert (first / "half").exists()
    (tmp_path / "tmp" / "left-over").mkdir()
    with place.building():
        assert not (tmp_path / "tmp" / "left-over").exists()
    assert not any((tmp_path / "tmp").iterdir())


def test_a_snapshot_s_hash_sees_a_changed_byte_and_not_a_hole(tmp_path: Path) -> None:
    """Whether zeros are stored or a hole is the file system's business."""
    sparse, dense, other = (tmp_path / name for name in ("sparse", "dense", "other"))
    with sparse.open("wb") as file:
        file.truncate(8 << 20)
        file.seek(5 << 20)
        file.write(b"x")
    dense.write_bytes(sparse.read_bytes())
    assert store.sparse_sha256(sparse) == store.sparse_sha256(dense)
    data = bytearray(dense.read_bytes())
    data[(5 << 20) + 1] = 1
    other.write_bytes(data)
    assert store.sparse_sha256(other) != store.sparse_sha256(dense)
    other.write_bytes(dense.read_bytes() + b"\0")
    assert store.sparse_sha256(other) != store.sparse_sha256(dense)


def test_a_verdict_is_bound_to_what_it_was_seen_with(tmp_path: Path) -> None:
    """X3: another VMM, kernel, command line or accelerator is asked anew; a bad verdict saves no boot."""
    place = store.Store(tmp_path)
    assert verdicts.look(place, choice()) is None
    kept = verdicts.keep(place, choice(), None)
    assert (kept.usable, kept.boundary) == (True, False)  # it answered, and it is emulated
    assert verdicts.look(place, choice()) == kept
    for changed in ({"sha256": "1" * 64}, {"append": "other"}, {"accel": "kvm"}):
        assert verdicts.look(place, choice(**changed)) is None
    bad = verdicts.keep(place, choice("kvm"), Unavailable(missing="an answer", fix="another host"))
    assert (bad.usable, bad.boundary, bad.fix) == (False, False, "another host")
    assert verdicts.keep(place, choice("kvm"), None).boundary


# ---- the rest ----------------------------------------------------------------------------------------------------
def test_a_kernel_configuration_is_held_to_what_was_asked() -> None:
    good = "".join(f"CONFIG_{name}=y\n" for name in kconfig.ON)
    kernels.check_config(good)
    for line in ("CONFIG_MODULES=y\n", "CONFIG_INET=y\n", "CONFIG_USER_NS=y\n", "CONFIG_BPF_SYSCALL=y\n"):
        with pytest.raises(HostFault, match="is on"):
            kernels.check_config(good + line)
    with pytest.raises(HostFault, match="EROFS_FS is off"):
        kernels.check_config(good.replace("CONFIG_EROFS_FS=y\n", ""))
    assert not set(kconfig.ON) & {*kconfig.OFF, *kconfig.MUST_BE_OFF}


def test_a_machine_that_is_too_small_is_a_refusal_with_the_command() -> None:
    """X6: a run never gets less memory than it was promised."""
    template = MicrovmTemplate.__new__(MicrovmTemplate)
    template.memory = 128 << 20
    with pytest.raises(CannotIsolate) as caught:
        template._make(Bounds())
    assert "lockgate microvm build --memory 256" in caught.value.next_step


@pytest.mark.parametrize("source", ["/nonexistent/vmlinux", "/nonexistent/linux.deb"])
def test_a_kernel_that_is_not_there_is_named(tmp_path: Path, source: str) -> None:
    place = store.Store(tmp_path)
    with place.building() as work, pytest.raises(ConfigError, match="there is no kernel"):
        kernels.add(place, work, source, init=Path("/nonexistent"), progress=lambda _text: None)


def test_a_package_that_is_no_kernel_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "thing_1.deb"
    package.write_bytes(b"no archive")
    place = store.Store(tmp_path / "store")
    with place.building() as work, pytest.raises((HostFault, CannotIsolate)):
        kernels.add(place, work, str(package), init=Path("/nonexistent"), progress=lambda _text: None)


def test_the_doctor_calls_an_emulated_machine_no_boundary() -> None:
    """X3: in its rows and in the column of boundaries."""
    seen = ["6.1.0-guest", 65534, 1, 97, ["null", "random", "urandom", "zero"], 0, 30, 1]
    for accel, holds in (("tcg", False), ("kvm", True)):
        rows = {row.name: row for row in checkup.INSIDE["microvm"].judge(seen, {"vmm": "qemu", "accel": accel})}
        assert rows["hardware boundary"].holds is holds
        assert all(row.holds for name, row in rows.items() if name != "hardware boundary")
    assert not checkup.INSIDE["microvm"].judge(None, {})[0].holds
    broken = [os.uname().release, 0, 7, 0, ["kvm"] * 5, 3, 0, 0]  # negative control: nothing of it holds
    assert not any(row.holds for row in checkup.INSIDE["microvm"].judge(broken, {}))
    assert doctor._boundary({"boundary": "emulated", "weakness": "emulated"}) == "none: emulated"
    assert doctor._boundary({"boundary": "hardware", "weakness": None}) == "hardware"
