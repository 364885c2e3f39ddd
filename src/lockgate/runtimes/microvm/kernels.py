"""Where a kernel comes from: the operator's own, Debian's package, or a small one built here from Debian's source.

Rule 1: nothing is downloaded but by the operator's build command, through apt, which checks signatures.
Rule 2: what a package holds is unpacked, never installed; nothing of it is run on this host.
Rule 3: a kernel of ours is checked line by line after its configuration: an option that came back on is an error.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

import msgspec

from lockgate.contract.errors import CannotIsolate, ConfigError, HostFault
from lockgate.runtimes.microvm import initrd, kernelimage, layout
from lockgate.runtimes.microvm.kconfig import MUST_BE_OFF, OFF, ON, fragment
from lockgate.runtimes.microvm.store import KernelInfo, Progress, Store, digest_of

DOWNLOAD_SECONDS: Final = 600.0
COMPILE_SECONDS: Final = 3 * 3600.0
_META: Final = "linux-image-cloud-amd64"
_SOURCE: Final = re.compile(r"\Alinux-source-(\d+\.\d+)\Z")
_RELEASE: Final = re.compile(rb"Linux version (\S{1,64})")
_ACPI: Final = b"ACPI: Core revision"
_INIT_FLAGS: Final = """-Os -s -static -nostdlib -ffreestanding -fno-pie -no-pie -fno-stack-protector
-fno-asynchronous-unwind-tables -fcf-protection=none -Wl,--build-id=none -Wall -Wextra -Werror"""


def tool(name: str, package: str) -> str:
    """Return the path of a program that a build needs.

    Raises:
        CannotIsolate: it is not installed.

    """
    found = shutil.which(name, path=layout.PATH)
    if found is None:
        raise CannotIsolate(
            f"{name} is missing: the microvm rung cannot be built", next_step=f"apt-get install {package}"
        )
    return found


def run(argv: list[str], seconds: float, *, cwd: Path, what: str, fix: str) -> str:
    """Run a build tool with nothing of this process's environment; return what it printed.

    Raises:
        HostFault: it failed, or did not end in time.

    """
    environment = {"PATH": layout.PATH, "LC_ALL": "C.UTF-8", "HOME": str(cwd)}
    try:
        done = subprocess.run(
            argv, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise HostFault(f"{what} did not end within {seconds:g} s", next_step=fix) from None
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
        raise HostFault(f"{what} failed: {' / '.join(lines[-3:])[:500]}", next_step=fix)
    return done.stdout.decode("utf-8", "replace")


def compile_init(source: Path, work: Path) -> bytes:
    """Compile init, statically and without a C library."""
    out = work / "init"
    argv = [tool("gcc", "gcc"), *_INIT_FLAGS.split(), "-o", str(out), str(source)]
    run(argv, 120.0, cwd=work, what="compiling init", fix="apt-get install gcc binutils")
    return out.read_bytes()


def add(
    store: Store, work: Path, source: str, *, init: Path, progress: Progress, modules: Path | None = None
) -> KernelInfo:
    """Put the kernel that `source` names into the store.

    Args:
        source: "debian", "source", a .deb file, or a vmlinux or bzImage.
        init: the C file of init.
        modules: the /lib/modules/VERSION directory of a kernel given by path that has drivers as modules.

    Raises:
        ConfigError: there is no such file. CannotIsolate: a tool or a driver is missing, or the image is none.
        HostFault: a step failed.

    """
    words = source
    if source == "debian":
        progress("getting Debian's cloud kernel")
        image, modules, words = unpack_deb(_download(work), work)
    elif source == "source":
        image, modules, words = build_small(store, work, progress), None, "small kernel, built from Debian's source"
    elif source.endswith(".deb"):
        image, modules, words = unpack_deb(_existing(source), work)
    else:
        image = _existing(source)
        words = f"the operator's {image.name}"
    progress("unpacking the kernel")
    kernel = kernelimage.vmlinux(image.read_bytes())
    if not kernelimage.has_pvh(kernel):
        raise CannotIsolate(
            "this kernel has no PVH entry, which QEMU needs to boot it without firmware",
            next_step="use one with CONFIG_PVH=y: lockgate microvm build --kernel debian",
        )
    progress("compiling init")
    program = compile_init(init, work)
    files = [] if modules is None else initrd.module_files(modules)
    more: list[Path] = []
    with contextlib.suppress(CannotIsolate):  # a kernel without virtio sockets serves where the machine has ports
        more = [] if modules is None else initrd.module_files(modules, (*initrd.DRIVERS, *initrd.VSOCK))[len(files) :]
    groups = [[(file.name, file.read_bytes()) for file in group] for group in (files, more)]
    archive = initrd.build(program, *groups)
    found = _RELEASE.search(kernel)
    info = KernelInfo(
        key=digest_of(kernel, archive)[:32],
        source=words,
        release=found[1].decode("ascii", "replace") if found else "unknown",
        acpi=_ACPI in kernel,
    )
    made = work / "kernel"
    made.mkdir()
    (made / "vmlinux").write_bytes(kernel)
    (made / "initrd").write_bytes(archive)
    (made / "kernel.json").write_bytes(msgspec.json.encode(info))
    store.publish(made, store.root / "kernels" / info.key)
    return info


def _existing(path: str) -> Path:
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"there is no kernel {path!r}", next_step="name a file, or: debian, source")
    return file.resolve()


def _download(work: Path) -> Path:
    """Get the package that Debian's cloud kernel of today is in."""
    cache, get = tool("apt-cache", "apt"), tool("apt-get", "apt")
    fix = "run apt-get update, or give a file: lockgate microvm build --kernel linux-image-*-cloud-amd64*.deb"
    listing = run([cache, "depends", _META], 60.0, cwd=work, what=f"looking for {_META}", fix=fix)
    names = re.findall(r"Depends: (linux-image-[\w.+-]+)", listing)
    if not names:
        raise CannotIsolate(f"this system's package lists have no {_META}", next_step=fix)
    run([get, "download", names[0]], DOWNLOAD_SECONDS, cwd=work, what=f"getting {names[0]}", fix=fix)
    return next(work.glob("*.deb"))


def unpack_deb(package: Path, work: Path) -> tuple[Path, Path, str]:
    """Return (kernel, its modules, words) of a Debian kernel package, unpacked below `work`."""
    place = work / "deb"
    place.mkdir()
    argv = [tool("dpkg-deb", "dpkg"), "-x", str(package), str(place)]
    run(argv, 300.0, cwd=work, what=f"unpacking {package.name}", fix="free space in the store")
    images = sorted((place / "boot").glob("vmlinu[xz]-*"))
    trees = [*(place / "lib/modules").glob("*"), *(place / "usr/lib/modules").glob("*")]
    if len(images) != 1 or len(trees) != 1:
        raise CannotIsolate(
            f"{package.name} is no Debian kernel package", next_step="give linux-image-*-cloud-amd64*.deb"
        )
    return images[0], trees[0], f"Debian's {package.name.partition('_')[0]}"


# ---- our own -----------------------------------------------------------------------------------------------------
def build_small(store: Store, work: Path, progress: Progress) -> Path:
    """Build the small kernel from the linux-source package of this system, or take the one built before.

    Raises:
        CannotIsolate: the source or a tool is missing. HostFault: a step failed, or an option is not as it must be.

    """
    archives = sorted(Path("/usr/src").glob("linux-source-*.tar.xz"))
    if not archives:
        raise CannotIsolate(
            "there is no kernel source in /usr/src",
            next_step="apt-get install linux-source flex bison bc libelf-dev xz-utils gcc make",
        )
    archive = archives[-1]
    compiler = run(
        [tool("gcc", "gcc"), "--version"], 60.0, cwd=work, what="gcc", fix="apt-get install gcc"
    ).splitlines()[0]
    info = archive.stat()
    key = digest_of(archive.name, str(info.st_size), str(int(info.st_mtime)), fragment(), compiler)[:32]
    done = store.root / "small" / key / "vmlinux"
    if done.is_file():
        return done
    for name, package in (("make", "make"), ("flex", "flex"), ("bison", "bison"), ("bc", "bc"), ("xz", "xz-utils")):
        tool(name, package)
    progress(f"unpacking {archive.name}")
    fix = "apt-get install flex bison bc libelf-dev xz-utils gcc make; the tree takes 2 GB in the store"
    run(["tar", "-xJf", str(archive)], 1800.0, cwd=work, what="unpacking the kernel source", fix=fix)
    tree = next(path for path in work.iterdir() if path.is_dir() and path.name.startswith("linux-source"))
    identity = ("KBUILD_BUILD_TIMESTAMP=@0", "KBUILD_BUILD_USER=lockgate", "KBUILD_BUILD_HOST=lockgate")
    make = [tool("make", "make"), "-s", f"-j{os.cpu_count() or 1}", *identity]
    progress("configuring the small kernel")
    run([*make, "tinyconfig"], 600.0, cwd=tree, what="make tinyconfig", fix=fix)
    with (tree / ".config").open("a") as file:
        file.write(fragment())
    run([*make, "olddefconfig"], 600.0, cwd=tree, what="make olddefconfig", fix=fix)
    check_config((tree / ".config").read_text("utf-8"))
    progress("compiling the small kernel (many minutes)")
    run(["nice", *make, "vmlinux"], COMPILE_SECONDS, cwd=tree, what="compiling the kernel", fix=fix)
    run(["strip", "--strip-debug", "vmlinux"], 300.0, cwd=tree, what="strip", fix="apt-get install binutils")
    done.parent.mkdir(parents=True, exist_ok=True)
    temporary = done.with_suffix(".new")
    shutil.copyfile(tree / "vmlinux", temporary)
    temporary.replace(done)
    return done


def check_config(text: str) -> None:
    """Hold a finished configuration to what was asked: options come back on through others that select them.

    Raises:
        HostFault: names the first options that are not as they must be.

    """
    on = {line.partition("=")[0].removeprefix("CONFIG_") for line in text.splitlines() if line.startswith("CONFIG_")}
    wrong = [f"{name} is off" for name in ON if name not in on]
    wrong += [f"{name} is on" for name in (*OFF, *MUST_BE_OFF) if name in on]
    if wrong:
        raise HostFault(
            f"the kernel's configuration came out different: {', '.join(wrong[:8])}",
            next_step="report this with the version of linux-source; the Debian kernel serves meanwhile",
        )
