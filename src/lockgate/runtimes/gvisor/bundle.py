"""The OCI bundle of a box, written by hand, and the flags that runsc is always given.

Rule 1: the box has no host directory, no host socket, no network and no host device: one image and one descriptor.
Rule 2: a flag that a runsc does not know is named and the binary refused: none is left out in silence.

Sources: OCI runtime specification 1.0.2 (config.md, config-linux.md); gVisor's `runsc flags`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from lockgate.runtimes.container import plan
from lockgate.runtimes.gvisor import layout

# Why each: systrap is the one platform that works everywhere a sandbox does; without directfs the sentry has no
# capabilities of the host; the root is read-only, so there is nothing to overlay; groups are lockgate's; without
# --oci-seccomp a list in the bundle is ignored without a word.
FLAGS: Final = (
    "--platform=systrap", "--network=none", "--directfs=false", "--overlay2=none", "--host-uds=none",
    "--host-fifo=none", "--ignore-cgroups", "--oci-seccomp", "--net-raw=false",
)  # fmt: skip
# The guest's first program needs these of the *sentry* until it gives them up, to lay out the run's tree and to become
# nobody. They mean nothing to the host.
_CAPABILITIES: Final = (
    "CAP_SYS_ADMIN", "CAP_MKNOD", "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_FOWNER", "CAP_DAC_OVERRIDE",
    "CAP_SYS_RESOURCE",
)  # fmt: skip
# What nothing in the box needs at any time, the first program included (defence in depth: its own filter comes later).
_REFUSED: Final = (
    "setns", "ptrace", "process_vm_readv", "process_vm_writev", "bpf", "perf_event_open", "add_key", "request_key",
    "keyctl", "io_uring_setup", "userfaultfd", "init_module", "finit_module", "kexec_load", "reboot", "swapon",
)  # fmt: skip
_OUR_PACKAGES: Final[tuple[str, ...]] = (
    "lockgate", "lockgate.kernel", "lockgate.runtimes", "lockgate.runtimes.gvisor",
)  # fmt: skip
_KERNEL_MODULES: Final = (
    "arch", "bpf", "caps_unsafe", "libraries_unsafe", "mounts_unsafe", "process_unsafe", "seccomp", "seccomp_unsafe",
    "syscalls_unsafe", "tables",
)  # fmt: skip
ARCHITECTURES: Final = {"x86_64": "SCMP_ARCH_X86_64"}
# All that a run has on its stack above the guest's own frames. `load` returns in a hardened worker only.
PROGRAM: Final = """
import sys
def load():
    import importlib.util, json, os
    def exactly(count):
        data = b""
        while len(data) < count:
            more = os.read(0, min(count - len(data), 1 << 16))
            if not more:
                os._exit(0)
            data += more
        return data
    files = json.loads(exactly(int.from_bytes(exactly(4), "big")))
    class Finder:
        sources = files["modules"]
        def find_spec(self, name, path=None, target=None):
            if name not in self.sources:
                return None
            return importlib.util.spec_from_loader(name, self, is_package=not self.sources[name])
        def create_module(self, spec):
            return None
        def exec_module(self, module):
            exec(compile(self.sources[module.__name__], "<boot>", "exec", dont_inherit=True), module.__dict__)
    sys.meta_path.insert(0, Finder())
    from lockgate.runtimes.gvisor import zygote
    return zygote.main(files["settings"], files["guest"])
serve, *ready = load()
del load
serve(*ready)
"""


def flags(*, rootless: bool) -> tuple[str, ...]:
    """Return what runsc is given before its verb."""
    return (*FLAGS, "--rootless") if rootless else FLAGS


def config(image: Path) -> dict[str, Any]:
    """Return config.json for boxes on `image`; the launcher adds the path of the (empty) root."""
    # One thread each: a library that starts threads in the template would make it slower to save, not to run.
    threads = [f"{name}_NUM_THREADS=1" for name in ("OPENBLAS", "OMP", "MKL", "NUMEXPR")]
    names = [{"names": list(_REFUSED), "action": "SCMP_ACT_ERRNO", "errnoRet": 1}]
    return {
        "ociVersion": "1.0.2",
        "hostname": layout.HOSTNAME,
        "annotations": {
            "dev.gvisor.spec.rootfs.source": str(image),
            "dev.gvisor.spec.rootfs.type": "erofs",
        },
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "cwd": "/",
            "noNewPrivileges": True,
            "args": [layout.PYTHON, "-I", "-S", "-B", "-X", "utf8", "-c", PROGRAM],
            "env": ["PATH=/usr/bin", "LANG=C.UTF-8", *threads],
            "capabilities": {kind: list(_CAPABILITIES) for kind in ("bounding", "effective", "permitted")},
            "rlimits": [{"type": "RLIMIT_CORE", "hard": 0, "soft": 0}],
        },
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
        "linux": {
            "namespaces": [{"type": one} for one in ("pid", "network", "ipc", "uts", "mount")],
            "seccomp": {
                "defaultAction": "SCMP_ACT_ALLOW",
                "architectures": list(ARCHITECTURES.values()),
                "syscalls": names,
            },
        },
    }


def modules(settings: dict[str, Any]) -> str:
    """Return what the first program reads before anything else: our modules and the guest's, as one JSON text."""
    package = Path(__file__).resolve().parents[2]
    sources: dict[str, str] = {one: "" for one in _OUR_PACKAGES}  # noqa: C420 - fromkeys would be typed by the names
    for name in _KERNEL_MODULES:
        sources[f"lockgate.kernel.{name}"] = (package / "kernel" / f"{name}.py").read_text(encoding="utf-8")
    for name in ("layout", "zygote"):
        sources[f"lockgate.runtimes.gvisor.{name}"] = (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    guest = {file.stem: file.read_text(encoding="utf-8") for file in sorted(plan.guest_directory().glob("*.py"))}
    return json.dumps({"modules": sources, "guest": guest, "settings": settings})
