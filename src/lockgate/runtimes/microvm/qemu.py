"""QEMU's microvm machine: command line, and the conversation that loads, resumes or snapshots it.

Rule 1: every file and every socket is an inherited descriptor. No path of the host is named that others could open.
Rule 2: no network device, no serial line, no shared folder, no monitor that a guest can reach; QEMU's own sandbox on.
Rule 3: a clone maps the snapshot's memory privately; the memory file is sealed against writing, whoever opens it.

Sources: qemu-system-x86_64(1); docs/system/i386/microvm.rst; docs/devel/migration.rst (x-ignore-shared); hw/char
virtio-serial-bus. QEMU's security policy (docs/system/security.rst) covers virtualisation, not TCG: see `vmm`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from lockgate.runtimes.microvm.qmp import Qmp, QmpError
from lockgate.runtimes.microvm.vmm import MiB, Plan

# The numbers that a VMM's descriptors have in its cage.
FDS: Final = {
    "control": 3, "call": 4, "monitor": 5, "ram": 6, "state": 7, "kernel": 8, "initrd": 9, "root": 10, "packages": 11,
}  # fmt: skip
_SANDBOX: Final = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
_TRANSLATION_MIB: Final = 64
_FINISHED: Final = "completed"
_UNDER_WAY: Final = ("setup", "active", "device", "none", "pre-switchover")


def _file(name: str) -> str:
    return f"/proc/self/fd/{FDS[name]}"


def program(plan: Plan, *, cold: bool) -> tuple[str, ...]:
    """Return the argv of one machine.

    Args:
        cold: boot the kernel on shared memory, for a snapshot; else wait for the snapshot's state.

    """
    guest = plan.guest
    accel = "kvm" if plan.accel == "kvm" else f"tcg,thread=single,tb-size={_TRANSLATION_MIB}"
    machine = "microvm,memory-backend=ram," + ("acpi=on,rtc=on,ioapic2=off" if guest.acpi else "acpi=off")
    drives: list[str] = []
    for name in ("root", *(("packages",) if guest.packages is not None else ())):
        drives += ["-drive", f"id={name},file={_file(name)},format=raw,if=none,readonly=on,file.locking=off"]
        drives += ["-device", f"virtio-blk-device,drive={name}"]
    ports: list[str] = []
    for number, name in enumerate(("control", "call"), start=1):
        ports += ["-chardev", f"socket,id={name},fd={FDS[name]}"]
        ports += ["-device", f"virtserialport,chardev={name},name=lockgate.{number - 1},nr={number}"]
    share = "on" if cold else "off"
    return (
        plan.binary,
        "-M", machine,
        "-accel", accel,
        "-cpu", "host" if plan.accel == "kvm" else "max",
        "-m", f"{guest.memory // MiB}M",
        "-smp", "1",
        "-object", f"memory-backend-file,id=ram,size={guest.memory},mem-path={_file('ram')},share={share}",
        "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "none", "-parallel", "none",
        "-chardev", f"socket,id=monitor,fd={FDS['monitor']}", "-mon", "chardev=monitor,mode=control",
        "-device", "virtio-serial-device,max_ports=3", *ports,
        "-kernel", _file("kernel"), "-initrd", _file("initrd"), *drives,
        "-append", guest.append,
        "-sandbox", _SANDBOX,
        *(() if cold else ("-incoming", "defer")),
    )  # fmt: skip


class Monitor:
    """The conversation with one VMM, sans-I/O.

    Args:
        cold: it boots by itself; else it is loaded from the state descriptor and stays paused.

    Attributes:
        ready: whether commands may be asked.
        loaded: whether it holds the snapshot and waits, paused.
        saved: whether the snapshot was written.

    """

    def __init__(self, *, cold: bool) -> None:
        self._qmp = Qmp()
        self._cold = cold
        self.ready = False
        self.loaded = False
        self.saved = False

    def feed(self, data: bytes) -> bytes:
        """Take what the VMM said; return what to send to it now.

        Raises:
            QmpError: it broke the protocol, refused a command, or could not load or save.

        """
        return b"".join(self._next(command, answer) for command, answer in self._qmp.feed(data))

    def _next(self, command: str, answer: Any) -> bytes:
        ask = self._qmp.ask
        match command:
            case "greeting":
                return ask("qmp_capabilities")
            case "qmp_capabilities":
                wanted = [{"capability": "x-ignore-shared", "state": True}]
                return ask("migrate-set-capabilities", capabilities=wanted)
            case "migrate-set-capabilities":
                self.ready = True
                return b"" if self._cold else ask("migrate-incoming", uri=f"fd:{FDS['state']}")
            case "getfd":
                return ask("stop")
            case "migrate-incoming" | "query-status":
                if command == "query-status" and _text(answer, "status") != "inmigrate":
                    if _text(answer, "status") != "paused":
                        raise QmpError(f"a loaded machine is {_text(answer, 'status')}, not paused")
                    self.loaded = True
                    return b""
                return ask("query-status")
            case "stop":
                return ask("migrate", uri="fd:state")
            case "migrate" | "query-migrate":
                if command == "query-migrate" and _text(answer, "status") == _FINISHED:
                    self.saved = True
                    return ask("quit")
                if command == "query-migrate" and _text(answer, "status") not in _UNDER_WAY:
                    raise QmpError(f"the snapshot failed: {_text(answer, 'status')} {_text(answer, 'error-desc')}")
                return ask("query-migrate")
            case _:
                return b""

    def resume(self) -> bytes:
        """Return what makes a loaded machine run. Its answer is not waited for: the guest's own tells."""
        return self._qmp.ask("cont")

    def receive_state(self) -> bytes:
        """Return the first of the two commands of a snapshot; the state's descriptor must go with it (SCM_RIGHTS)."""
        return self._qmp.ask("getfd", fdname="state")


def _text(answer: Any, name: str) -> str:
    try:
        return str(msgspec.convert(answer, dict[str, Any]).get(name, ""))[:300]
    except msgspec.ValidationError:
        return ""
