"""`lockgate microvm build`: settle VMM, accelerator and kernel for this host, and make images and snapshots of them.

Rule 1: an accelerator is settled by a boot of the real kernel and image on it, never by the presence of /dev/kvm.
Rule 2: without a word of the operator only hardware virtualisation is settled. An emulated rung must be asked for.
Rule 3: what is made is named for everything that went into it; the same parts are never made twice.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import msgspec

from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import CannotIsolate, HostFault, LockgateError
from lockgate.runtimes import forked, ids
from lockgate.runtimes.container import plan as container_plan
from lockgate.runtimes.container.template import STDLIB_PRELOAD
from lockgate.runtimes.digests import sha256
from lockgate.runtimes.microvm import cage, image, kernels, layout
from lockgate.runtimes.microvm.firecracker import binary as fc
from lockgate.runtimes.microvm.firecracker import jail
from lockgate.runtimes.microvm.store import (
    Choice,
    KernelInfo,
    Progress,
    SnapshotInfo,
    Store,
    check_file,
    digest_of,
    sparse_sha256,
)
from lockgate.runtimes.microvm.vmm import GUEST_RESERVE, Accel, Guest, Name, Plan
from lockgate.runtimes.protocol import TemplateSpec

AccelChoice = Literal["auto", "kvm", "tcg"]
VmmChoice = Literal["auto", "firecracker", "qemu"]
BOOT_SECONDS: Final[dict[Accel, float]] = {"kvm": 10.0, "tcg": 90.0}
LEASE_SECONDS: Final[dict[Accel, float]] = {"kvm": 1.0, "tcg": 15.0}
_APPEND: Final = (
    "quiet panic=-1 reboot=t random.trust_cpu=on rdinit=/init 8250.nr_uarts=0 sysctl.vm.panic_on_oom=1 audit=0"
)
_ACPI_APPEND: Final = "ipv6.disable=1 nokaslr"
# An emulated machine has no timer that a clock could be measured against, and nothing to mitigate.
_TCG_APPEND: Final = "lpj=1500000 no_timer_check mitigations=off tsc_early_khz={khz}"
_GHZ: Final = re.compile(r"@ ([0-9.]+)GHz")
_MHZ: Final = re.compile(r"cpu MHz\s*: ([0-9.]+)")
_VERSION: Final = re.compile(r"version (\d+\.\d+\S*)")
_BLOCKED: Final = {errno.EPERM, errno.EACCES, errno.ENOSPC, errno.EINVAL}
_NO_QEMU: Final = "apt-get install --no-install-recommends qemu-system-x86 seabios"


def tsc_khz() -> int:
    """Return the rate of this host's time stamp counter, which an emulated guest reads as its own, as far as known."""
    text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    nominal = _GHZ.search(text)
    if nominal:
        return round(float(nominal[1]) * 1e6)
    present = _MHZ.search(text)
    return round(float(present[1]) / 100) * 100_000 if present else 2_000_000


def find_qemu(configured: str | None) -> tuple[str, str, str]:
    """Return (path, version, SHA-256) of the QEMU to use.

    Raises:
        CannotIsolate: there is none, or others may write it.

    """
    # Debian's smaller qemu-system-x86_64-microvm has no filter of its own (-sandbox): it is never taken unasked.
    found = configured or shutil.which("qemu-system-x86_64", path=layout.PATH)
    if found is None or not Path(found).is_file():
        raise CannotIsolate("there is no QEMU on this host", next_step=_NO_QEMU)
    real = Path(found).resolve()
    info = real.stat()
    if info.st_mode & 0o022 or info.st_uid not in {0, os.getuid()}:
        raise CannotIsolate(f"others may write {real}", next_step="install QEMU as root, from the distribution")
    words = kernels.run([str(real), "--version"], 30.0, cwd=Path("/"), what="asking QEMU its version", fix=_NO_QEMU)
    version = _VERSION.search(words)
    return str(real), version[1] if version else "unknown", sha256(real)


def append_for(kernel: KernelInfo, accel: Accel, vmm: Name = "qemu") -> str:
    """Return the kernel's command line. It is readable inside: there is no path and no name of this host in it."""
    parts = [_APPEND]
    if kernel.acpi:
        parts.append(_ACPI_APPEND)
    if accel == "tcg":
        parts.append(_TCG_APPEND.format(khz=tsc_khz()))
    if vmm == "firecracker":
        parts.append("-- vsock")  # what follows `--` is init's: this machine has virtio sockets and no ports
    return " ".join(parts)


class Builder:
    """Makes what is missing in one store.

    Args:
        settings: for the guest's agent; only tests and the attack suite's controls give any.

    """

    def __init__(
        self, store: Store, progress: Progress = lambda _text: None, settings: dict[str, object] | None = None
    ) -> None:
        self.store = store
        self.progress = progress
        self.settings = settings or {}

    # ---- the operator's command ----------------------------------------------------------------------------------
    def settle(
        self,
        *,
        kernel: str = "debian",
        modules: Path | None = None,
        accel: AccelChoice = "auto",
        vmm: VmmChoice = "auto",
        qemu: str | None = None,
        firecracker: str | None = None,
        memory: int = Bounds().memory,
    ) -> tuple[Choice, SnapshotInfo]:
        """Build everything for runs without a package set, boot it, and make it this host's choice.

        Raises:
            CannotIsolate: a tool is missing, or no accelerator boots the kernel. HostFault: a step failed.

        """
        with self.store.building() as work:
            init = container_plan.guest_directory() / "microvm" / "init.c"
            info = kernels.add(self.store, work, kernel, init=init, progress=self.progress, modules=modules)
        tried: list[str] = []
        for name, one in self._order(vmm, accel, firecracker):
            try:
                if one == "kvm" and not os.access("/dev/kvm", os.R_OK | os.W_OK):
                    raise CannotIsolate("this user cannot open /dev/kvm", next_step="load kvm, join the group kvm")
                choice = self._choice(name, one, info, memory, qemu=qemu, firecracker=firecracker)
                snapshot = self.snapshot(choice, TemplateSpec())[2]
            except LockgateError as error:
                tried.append(f"{name} {one}: {error.message}")
                continue
            with self.store.building() as work:
                self.store.write("choice.json", choice, work)
            return choice, snapshot
        raise CannotIsolate(
            f"no machine booted ({'; '.join(tried)})",
            next_step="use a host whose KVM boots a stock kernel; for development and CI, not as a boundary: "
            "lockgate microvm build --accel tcg"
            if accel != "tcg"
            else "look at the words above; another kernel may boot: --kernel debian",
        )

    def _order(self, vmm: VmmChoice, accel: AccelChoice, firecracker: str | None) -> tuple[tuple[Name, Accel], ...]:
        """Return what to try: with no word of the operator Firecracker where it is installed, then QEMU, on KVM."""
        one: Accel = "tcg" if accel == "tcg" else "kvm"
        if vmm == "firecracker" and one == "tcg":
            raise CannotIsolate(
                "Firecracker emulates nothing", next_step="--vmm qemu --accel tcg, which is no boundary"
            )
        if vmm != "auto" or one == "tcg":
            return ((vmm if vmm != "auto" else "qemu", one),)
        try:
            fc.find(self.store.root / "bin", firecracker)
        except CannotIsolate:
            return (("qemu", one),)
        return (("firecracker", one), ("qemu", one))

    def _choice(
        self, vmm: Name, accel: Accel, kernel: KernelInfo, memory: int, *, qemu: str | None, firecracker: str | None
    ) -> Choice:
        jailer = ""
        if vmm == "firecracker":
            jail.need_root()
            pair = fc.find(self.store.root / "bin", firecracker)
            binary, jailer, version, digest = (
                pair.firecracker,
                pair.jailer,
                pair.version,
                sha256(Path(pair.firecracker)),
            )
        else:
            binary, version, digest = find_qemu(qemu)
        return Choice(
            vmm=vmm,
            accel=accel,
            binary=binary,
            jailer=jailer,
            version=version,
            sha256=digest,
            kernel=kernel,
            memory=memory,
            append=append_for(kernel, accel, vmm),
        )

    # ---- parts ---------------------------------------------------------------------------------------------------
    def root_image(self, spec: TemplateSpec) -> Path:
        """Return the root image for a package set, made if it is not there yet."""
        preload = [*STDLIB_PRELOAD.split(), *spec.preload]
        settings = {"preload": preload, "packages": spec.tree is not None, **self.settings}
        recipe = image.Recipe(settings, spec.tree)

        def made(work: Path) -> Path:
            tree = work / "root"
            tree.mkdir()
            self.progress("laying out the root file system")
            recipe.lay_out(tree)
            return tree

        return self._image(f"root-{recipe.key}", made)

    def package_image(self, tree: str) -> Path:
        """Return the image of a package set's tree, made if it is not there yet."""
        # A set's directory is named for its content and never changes (X11).
        return self._image(f"set-{digest_of(tree)[:32]}", lambda _work: Path(tree))

    def _image(self, name: str, made: Callable[[Path], Path]) -> Path:
        """Return the image that the link `name` leads to; make it, named for its content, if there is none."""
        link = self.store.root / "images" / name
        for _ in range(2):
            with contextlib.suppress(OSError):
                return check_file(link.resolve(strict=True), "an image")
            with self.store.building() as work:
                if link.exists():
                    continue
                packed = work / "image.erofs"
                image.pack(made(work), packed)
                final = self.store.root / "images" / f"{sha256(packed)[:32]}.erofs"
                self.store.publish(packed, final)
                link.unlink(missing_ok=True)
                link.symlink_to(final.name)
        return check_file(link.resolve(strict=True), "an image")

    def snapshot(self, choice: Choice, spec: TemplateSpec) -> tuple[Plan, str, SnapshotInfo]:
        """Return (a plan to serve from, the snapshot's key, its facts); boot and freeze a machine if there is none.

        Raises:
            CannotIsolate: the machine does not boot here. HostFault: the same, for reasons of this host.

        """
        vmlinux, archive = self.store.kernel(choice.kernel.key)
        root = self.root_image(spec)
        packages = None if spec.tree is None else self.package_image(spec.tree)
        guest = Guest(
            kernel=str(vmlinux),
            initrd=str(archive),
            root=str(root),
            packages=None if packages is None else str(packages),
            memory=choice.memory + GUEST_RESERVE,
            append=choice.append,
            acpi=choice.kernel.acpi,
        )
        key = digest_of(
            choice.vmm, choice.accel, choice.sha256, choice.kernel.key, root.name, packages.name if packages else "",
            str(guest.memory), guest.append, cpu_identity() if choice.accel == "kvm" else "",
        )[:32]  # fmt: skip
        place = self.store.root / "snapshots" / key
        plan = Plan(
            mode="serve",
            vmm=choice.vmm,
            binary=choice.binary,
            accel=choice.accel,
            guest=guest,
            state=str(place / "state"),
            ram=str(place / "ram"),
            base=0,
            seconds=BOOT_SECONDS[choice.accel],
            lease_seconds=LEASE_SECONDS[choice.accel],
            jailer=choice.jailer,
            yard=str(self.store.root / "fc"),
            view=cage.view(choice.binary) if choice.vmm == "qemu" else (),
        )
        known = self.store.snapshot(key)
        if known is not None:
            return plan, key, known[2]
        return plan, key, self._freeze(plan, key, place)

    def _freeze(self, plan: Plan, key: str, place: Path) -> SnapshotInfo:
        with self.store.building() as work, contextlib.ExitStack() as owned:
            known = self.store.snapshot(key)
            if known is not None:  # another builder was first
                return known[2]
            self.progress(f"booting a machine ({plan.accel}), and freezing it when its agent is ready")
            made = work / "snapshot"
            made.mkdir()
            cold = msgspec.structs.replace(plan, mode="boot", ram=str(made / "ram"), state=str(made / "state"))
            parent = launch(cold, owned, plan.seconds + 60.0)
            parent.ctl.close()
            os.close(parent.lifeline)
            parent.process.wait()
            info = SnapshotInfo(
                key=key,
                ram_sha256=sparse_sha256(made / "ram"),
                state_sha256=sha256(made / "state"),
                memory=plan.guest.memory,
                facts=parent.facts,
            )
            (made / "snapshot.json").write_bytes(msgspec.json.format(msgspec.json.encode(info), indent=1))
            # Its address layout and hash seed are those of every machine: nobody else need know them. Firecracker opens
            # its links as the user that its jail has, so there the directory is what nobody else may enter.
            made.chmod(0o700)
            self.store.publish(made, place, 0o400 if plan.vmm == "qemu" else 0o444)
        return info

    def verify(self, key: str) -> bool:
        """Whether a snapshot's files still hash to what was recorded when they were made."""
        known = self.store.snapshot(key)
        if known is None:
            return False
        ram, state, info = known
        return sparse_sha256(ram) == info.ram_sha256 and sha256(state) == info.state_sha256


def launch(plan: Plan, owned: contextlib.ExitStack, seconds: float) -> forked.Parent:
    """Start a loader with a claim on host ids where there are some to give."""
    base = ids.claim(owned) if ids.is_host_root() else 0
    argv = [sys.executable, "-I", "-m", "lockgate.runtimes.microvm.loader"]
    return forked.launch(argv, msgspec.json.encode(msgspec.structs.replace(plan, base=base)), seconds, explained)


def explained(step: str, code: int, detail: str) -> CannotIsolate | HostFault:
    """Turn a failed step of a loader into the missing piece and its fix."""
    if step == "boot":
        return CannotIsolate(
            f"the guest did not boot: {detail}",
            next_step="where hardware boots no stock kernel: lockgate microvm build --accel tcg (emulated: no wall)",
        )
    if step in {"unshare", "maps", "clone"} and code in _BLOCKED:
        return CannotIsolate(
            f"a VMM cannot be caged on this host ({step}: {detail})",
            next_step="allow user namespaces (kernel.unprivileged_userns_clone=1), or run the supervisor as root",
        )
    if step.startswith("open"):
        return CannotIsolate(
            f"a part of the machine cannot be opened ({step}: {detail})", next_step="lockgate microvm build"
        )
    return HostFault(f"the microvm loader failed at {step}: {detail}", next_step="run `lockgate doctor`")


def cpu_identity() -> str:
    """Return what a snapshot with the host's own CPU depends on: model and microcode (proc_cpuinfo(5))."""
    text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    wanted = ("vendor_id", "cpu family", "model\t", "stepping", "microcode", "flags")
    lines = [line for line in text.partition("\n\n")[0].splitlines() if line.startswith(wanted)]
    return digest_of(*lines)
