"""What the loader needs of a virtual machine monitor, and what a host can be told about one.

Rule 1: a `Verdict` comes from something that was booted; that a binary or /dev/kvm is there proves nothing.
Rule 2: only hardware virtualisation is a boundary. An emulator is functional, named so, and never a fallback.
"""

from __future__ import annotations

from typing import Final, Literal, Protocol

import msgspec

Accel = Literal["kvm", "tcg"]
Name = Literal["qemu", "firecracker"]

MiB: Final = 1024 * 1024
# Beside the memory of a run, in the guest: kernel, agent, page tables, the page cache of what it imports.
GUEST_RESERVE: Final = 160 * MiB
# Beside the guest's memory, on the host: the VMM, and the emulator's cache of translated code.
VMM_RESERVE: Final = 192 * MiB
VMM_TASKS: Final = 32


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a VMM on this host.

    Attributes:
        usable: machines boot and answer. boundary: by hardware, so that hostile code may run in them.
        reason: what was seen. fix: what would make it usable; empty when it is.
        provenance: the binary's path, version and SHA-256.

    """

    usable: bool
    boundary: bool
    reason: str
    fix: str
    vmm: Name
    accel: Accel
    provenance: str = ""


class Guest(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine is made of: files of the store, named for their content.

    Attributes:
        kernel: ELF vmlinux. initrd: init and modules. root: EROFS image. packages: a second one, or None.
        memory: bytes of guest RAM. append: the kernel's command line. acpi: whether the kernel finds devices by it.

    """

    kernel: str
    initrd: str
    root: str
    packages: str | None
    memory: int
    append: str
    acpi: bool


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a loader is started with.

    Attributes:
        mode: "boot" makes a snapshot from a cold boot and ends; "serve" makes machines from a snapshot.
        binary: the VMM. state: the device state. ram: the memory of the snapshot; both are written in mode "boot".
        base: the first of the host ids that machines get, 0 for a supervisor that is not root.
        seconds: the longest cold boot. lease_seconds: the longest wait for the handshake.
        jailer: Firecracker's. yard: directory of its cages.
        view: (path here, path in the cage) of all that the VMM's process sees of this host: itself and its libraries.

    """

    mode: Literal["boot", "serve"]
    vmm: Name
    binary: str
    accel: Accel
    guest: Guest
    state: str
    ram: str
    base: int
    seconds: float
    lease_seconds: float
    jailer: str = ""
    yard: str = ""
    view: tuple[tuple[str, str], ...] = ()


class Monitor(Protocol):
    """The conversation with the process of one machine, sans-I/O: bytes in, bytes out.

    Attributes:
        loaded: whether the machine holds the snapshot and waits, paused.
        saved: whether its snapshot was written.

    """

    loaded: bool
    saved: bool

    def feed(self, data: bytes) -> bytes:
        """Take what the VMM said; return what to send to it now. Raises when it refused or broke the protocol."""
        ...

    def resume(self) -> bytes:
        """Return what makes a loaded machine run."""
        ...


class Vmm(Protocol):
    """A VMM as the loader drives it."""

    def program(self, plan: Plan, *, cold: bool) -> tuple[str, ...]:
        """Return the argv of one machine; its descriptors have fixed numbers in its cage."""
        ...

    def monitor(self, *, cold: bool) -> Monitor:
        """Return the conversation with a process that was just started."""
        ...
