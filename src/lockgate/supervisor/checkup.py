"""What the doctor runs in a machine, and the rows that come of it."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable
from typing import Any, Final

import msgspec

from lockgate.contract import wire
from lockgate.contract.run import Rung


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One bound or wall: whether it holds, by what, what was seen, and the fix if it does not."""

    name: str
    holds: bool
    by: str
    saw: str
    fix: str = ""


class Probe(msgspec.Struct, frozen=True):
    """A run that attacks a bound; `judge` makes its rows.

    Attributes:
        warm: begin once a machine is warm. other: of another rung than the one that the report is about.

    """

    code: str
    bounds: dict[str, float]
    judge: Callable[[wire.Finished], list[Row]]
    warm: bool = False
    other: Rung | None = None


class Inside(msgspec.Struct, frozen=True):
    """What only one rung has: a program that asks from inside, and the judge of its value and the machine's facts."""

    code: str
    judge: Callable[[Any, dict[str, Any]], list[Row]]


SPIN: Final = "while True: pass"
HOG_IN_CHILD: Final = (
    "import os, time\nif os.fork() == 0:\n    x = []\n    while True: x.append(bytearray(1 << 20))\ntime.sleep(20)"
)
HOG: Final = "x = []\nwhile True: x.append(bytearray(1 << 20))"
FORKS: Final = (
    "import os, time\nn = 1\ntry:\n    while n < 1000:\n        if os.fork() == 0:\n            time.sleep(20)\n"
    "        n += 1\nexcept OSError: pass\nn"
)
TWO_SPINS: Final = "import os\nos.fork()\nwhile True: pass"
DISK: Final = """
n = 0
try:
    with open('big', 'wb') as f:
        while True: n += f.write(b'x' * 65536)
except OSError: pass
n
"""
FILES: Final = "m = 0\ntry:\n    while m < 100000:\n        open(f'f{m}', 'w').close(); m += 1\nexcept OSError: pass\nm"
FLOOD: Final = "import os\nb = b'x' * 65536\nwhile True: os.write(1, b)"
_CONTAINER: Final = """
import mmap, os, socket
def refused(f):
    try: f()
    except (OSError, ValueError) as e: return e.errno if isinstance(e, OSError) else -1
    return 0
[refused(lambda: socket.socket()), refused(lambda: mmap.mmap(-1, 4096, prot=7)), len(os.listdir('/proc')),
 sorted(set(os.environ) - {'HOME', 'TMPDIR', 'LC_CTYPE'}), refused(lambda: open('/usr/x', 'w')),
 refused(lambda: os.pidfd_open(1) and os.setns(0, 0) if hasattr(os, 'setns') else os.chroot('/'))]
"""


def median_ms(times: list[float]) -> float | None:
    """Return the median of seconds in milliseconds; None of none."""
    return round(statistics.median(times) * 1000, 3) if times else None


def mdwe(facts: dict[str, Any]) -> str:
    """Return what keeps mappings from becoming executable."""
    return "PR_SET_MDWE" if facts.get("mdwe") else "seccomp (no PR_SET_MDWE on this kernel)"


def value(finished: wire.Finished) -> Any:
    """Return a run's value, None when it is no JSON."""
    try:
        return msgspec.json.decode(finished.value)
    except msgspec.DecodeError:
        return None


def saw(finished: wire.Finished) -> str:
    """Return how a run ended, in words."""
    if finished.killed_by is not None:
        return f"killed by {finished.killed_by} after {finished.usage.wall:.2f} s"
    if finished.error is not None:
        return f"{finished.error.name} inside after {finished.usage.wall:.2f} s"
    return f"it ended by itself after {finished.usage.wall:.2f} s"


def kill_row(name: str, killed_by: str, by: str, finished: wire.Finished) -> Row:
    """Return the row of a bound that kills: `killed_by` is the reason that must have been given."""
    held = finished.killed_by == killed_by
    return Row(name=name, holds=held, by=by, saw=saw(finished), fix="" if held else "report this: it holds everywhere")


def _container_walls(value: Any, facts: dict[str, Any]) -> list[Row]:
    try:
        network, exec_gain, proc, environment, write, namespace = value
    except (TypeError, ValueError):
        return [Row(name="seccomp", holds=False, by="", saw="nothing of what was asked", fix="report this")]
    rows = [
        ("userns", facts.get("userns") in {"root", "rootless"}, f"{facts.get('userns')} id map", "fresh per run"),
        ("landlock", bool(facts.get("landlock")), f"ABI {facts.get('landlock')}", f"write to /usr: errno {write}"),
        ("mdwe", exec_gain != 0, mdwe(facts), f"writable and executable mapping: errno {exec_gain}"),
        ("seccomp", namespace != 0, f"{facts.get('filter')} instructions", f"setns or chroot: errno {namespace}"),
        ("network", network != 0, "seccomp and an empty net namespace", f"socket(): errno {network}"),
        ("proc cover", proc == 0, "no procfs in the tree", f"{proc} entries in /proc"),
        ("environment", not environment, "cleared by the guest runner", f"{len(environment)} variables"),
    ]
    return [
        Row(name=name, holds=holds, by=by, saw=saw, fix="" if holds else "use a newer kernel (6.3 or later)")
        for name, holds, by, saw in rows
    ]


_GVISOR: Final = """
import mmap, os, socket
def refused(f):
    try: f()
    except (OSError, ValueError) as e: return e.errno if isinstance(e, OSError) else -1
    return 0
lib = os.path.dirname(os.__file__)
def mapped():
    with open(lib + '/os.py', 'rb') as file: mmap.mmap(file.fileno(), 4096, prot=5, flags=2)
[os.uname().release, os.getuid(), refused(lambda: socket.socket()), refused(mapped), sorted(os.listdir('/')),
 len(os.listdir('/proc')), refused(lambda: open('/usr/x', 'w')), refused(lambda: os.chroot('/'))]
"""


def _gvisor_walls(value: Any, facts: dict[str, Any]) -> list[Row]:
    try:
        kernel, uid, network, mapping, tree, proc, write, chroot = value
    except (TypeError, ValueError):
        return [Row(name="sentry", holds=False, by="", saw="nothing of what was asked", fix="report this")]
    own = kernel != platform.release() and kernel == facts.get("kernel")
    rows = [
        ("sentry", own, "a kernel of its own answers", f"kernel {kernel} inside, {platform.release()} outside"),
        ("ids and capabilities", uid == 65534 and chroot != 0, "given up inside too", f"chroot: errno {chroot}"),
        ("exec mappings", mapping != 0, f"{facts.get('filter')} instructions inside", f"errno {mapping}"),
        ("network", network != 0, "no interface, and the filter inside", f"socket(): errno {network}"),
        ("tree", write != 0 and "sys" not in tree, "one read-only image", ", ".join(map(str, tree))[:100]),
        ("proc cover", proc == 0, "no procfs in the tree", f"{proc} entries in /proc"),
        ("files", True, f"inodes counted by {facts.get('inodes')}", "by the sentry itself, or by init while code runs"),
    ]
    return [
        Row(name=name, holds=bool(holds), by=by, saw=saw, fix="" if holds else "run `lockgate gvisor check --again`")
        for name, holds, by, saw in rows
    ]


_WASM: Final = """
import os, sys
def missing(f):
    try: f()
    except (ImportError, OSError, AttributeError, RuntimeError): return True
    return False
def socket_made():
    import socket
    socket.socket()
[sys.platform, missing(socket_made), missing(lambda: __import__('ctypes').CDLL(None)), missing(lambda: os.fork()),
 sorted(set(os.environ) - {'HOME', 'TMPDIR', 'LC_CTYPE'}), missing(lambda: open('/x', 'w'))]
"""


def _wasm_walls(value: Any, facts: dict[str, Any]) -> list[Row]:
    try:
        platform, socket, native, fork, environment, write = value
    except (TypeError, ValueError):
        return [Row(name="guest", holds=False, by="", saw="nothing of what was asked", fix="report this")]
    whole = facts.get("userns") in {"root", "rootless"} and facts.get("landlock") and facts.get("filter")
    parts = f"Landlock ABI {facts.get('landlock')}, {facts.get('filter')} instructions, ids: {facts.get('userns')}"
    rows = [
        (
            "guest",
            platform == "wasi" and native and fork,
            "no system calls",
            f"{platform}: no native code, no processes",
        ),
        ("outer wall", whole, "Landlock, seccomp, namespaces, an id of its own", parts),
        ("new code", facts.get("mdwe") or facts.get("filter"), mdwe(facts), "none is mapped once the engine stands"),
        ("network", socket, "no such import of the guest", "socket(): refused"),
        ("tree", write, "in the worker's memory", "write to /: refused"),
        ("environment", not environment, "made for the run", f"{len(environment)} variables"),
    ]
    return [
        Row(
            name=name,
            holds=bool(holds),
            by=by,
            saw=saw,
            fix="" if holds else "use Linux 5.13 or newer with Landlock and user namespaces",
        )
        for name, holds, by, saw in rows
    ]


_MICROVM: Final = """
import os, socket
def refused(f):
    try: f()
    except OSError as e: return e.errno
    return 0
[os.uname().release, os.getuid(), os.getpid(), refused(lambda: socket.socket()), sorted(os.listdir('/dev')),
 len(os.listdir('/proc')), refused(lambda: open('/usr/x', 'w')), refused(lambda: os.chroot('/'))]
"""


def _microvm_walls(value: Any, facts: dict[str, Any]) -> list[Row]:
    try:
        kernel, uid, pid, network, devices, proc, write, chroot = value
    except (TypeError, ValueError):
        return [Row(name="guest", holds=False, by="", saw="nothing of what was asked", fix="report this")]
    hardware = facts.get("accel") == "kvm"
    vmm = f"{facts.get('vmm')}, {facts.get('accel')}"
    again = "run `lockgate microvm check`"
    rows = [
        (
            "guest kernel",
            kernel != platform.release(),
            "its own",
            f"{kernel} inside, {platform.release()} outside",
            again,
        ),
        (
            "hardware boundary",
            hardware,
            vmm if hardware else "none",
            vmm if hardware else f"{vmm}: the emulator's code is the only wall",
            "a host whose KVM boots a stock kernel, then: lockgate microvm build",
        ),
        ("ids and capabilities", uid == 65534 and chroot != 0, "given up inside too", f"chroot: errno {chroot}", again),
        ("processes", pid == 1, "a pid namespace in the guest", f"the code is process {pid}", again),
        ("network", network != 0, "no interface, and the filter inside", f"socket(): errno {network}", again),
        ("devices", len(devices) <= 4, "a /dev of its own", ", ".join(map(str, devices))[:100], again),
        ("tree", write != 0, "one read-only image", f"write to /usr: errno {write}", again),
        ("proc cover", proc == 0, "no procfs in the tree", f"{proc} entries in /proc", again),
    ]
    return [
        Row(name=name, holds=bool(holds), by=by, saw=saw, fix="" if holds else fix)
        for name, holds, by, saw, fix in rows
    ]


INSIDE: Final[dict[Rung, Inside]] = {
    "container": Inside(_CONTAINER, _container_walls),
    "gvisor": Inside(_GVISOR, _gvisor_walls),
    "microvm": Inside(_MICROVM, _microvm_walls),
    "wasm": Inside(_WASM, _wasm_walls),
}
"""A rung that is not here is asked the attack suite alone."""
