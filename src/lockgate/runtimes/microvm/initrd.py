"""The initramfs: our init, and the modules that a distribution's kernel needs to find its disk and its ports.

Rule 1: the same input gives the same bytes: fixed times, owners and order.
Rule 2: only modules are taken that the drivers below need, in the order in which the kernel can load them.

Sources: Documentation/driver-api/early-userspace/buffer-format.rst (newc); modules.dep(5).
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from lockgate.contract.errors import CannotIsolate

# What the guest needs. A kernel that has them built in names them in modules.builtin instead.
DRIVERS: Final = ("virtio_mmio", "virtio_blk", "virtio_console", "erofs")
# What a VMM without ports needs beside them; loaded on its word only, since code must find no such socket elsewhere.
VSOCK: Final = ("vmw_vsock_virtio_transport",)
_BLOCK: Final = 512


def cpio(files: Iterable[tuple[str, int, bytes]]) -> bytes:
    """Return an archive of (name, mode, content) as the kernel unpacks it at boot."""
    out = bytearray()
    for number, (name, mode, content) in enumerate([*files, ("TRAILER!!!", 0, b"")], start=1):
        encoded = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(encoded), 0)
        out += b"070701" + b"".join(b"%08x" % field for field in fields) + encoded
        out += b"\0" * (-len(out) % 4) + content
        out += b"\0" * (-len(out) % 4)
    out += b"\0" * (-len(out) % _BLOCK)
    return bytes(out)


def build(init: bytes, modules: list[tuple[str, bytes]], vsock: list[tuple[str, bytes]] | None = None) -> bytes:
    """Return the initramfs with `init` and the kernel modules, which init loads in this order.

    Args:
        vsock: further ones that it loads only where the machine has virtio sockets in the place of ports.

    """
    files: list[tuple[str, int, bytes]] = [
        # The kernel opens its console before it starts init; without the node there are no descriptors 0 to 2.
        ("dev", stat.S_IFDIR | 0o755, b""),
        ("init", stat.S_IFREG | 0o755, init),
    ]
    for listing, group in (("modules", modules), ("modules.vsock", vsock or [])):
        if group:
            names = "".join(f"/m/{name}\n" for name, _ in group)
            files.append((listing, stat.S_IFREG | 0o600, names.encode()))
    if modules:
        files.append(("m", stat.S_IFDIR | 0o700, b""))
        files += [(f"m/{name}", stat.S_IFREG | 0o600, content) for name, content in (*modules, *(vsock or []))]
    return cpio(files)


def _name(path: str) -> str:
    return Path(path).name.split(".ko", 1)[0].replace("-", "_")


def module_files(tree: Path, drivers: tuple[str, ...] = DRIVERS) -> list[Path]:
    """Return the module files of `drivers` below a `/lib/modules/VERSION` directory, dependencies first.

    The dependencies are read from the files themselves (their `depends=` strings): a package that was only unpacked
    has no modules.dep.

    Raises:
        CannotIsolate: the kernel has a driver neither built in nor as a module.

    """
    builtin = {_name(line) for line in (tree / "modules.builtin").read_text("utf-8").splitlines() if line}
    found = {_name(path.name): path for path in tree.rglob("*.ko*")}
    order: list[Path] = []
    visiting: set[str] = set()

    def visit(name: str) -> None:
        if name in builtin or name in visiting:
            return
        path = found.get(name)
        if path is None:
            raise CannotIsolate(
                f"this kernel has no driver {name}",
                next_step="use Debian's cloud kernel, or build one with: lockgate microvm build --kernel source",
            )
        if path.suffix != ".ko":
            raise CannotIsolate(
                f"the module {path.name} is packed",
                next_step="use a kernel with plain modules, or one with these drivers built in",
            )
        visiting.add(name)
        for needed in depends(path.read_bytes()):
            visit(needed)
        order.append(path)

    for driver in drivers:
        visit(driver)
    return order


def depends(module: bytes) -> list[str]:
    """Return the modules that a module names in its `depends=` string."""
    at = module.find(b"\0depends=")
    if at < 0:
        return []
    text = module[at + 9 : module.index(b"\0", at + 1)].decode("ascii", "replace")
    return [one.replace("-", "_") for one in text.split(",") if one]
