"""The wasm rung: CPython as WebAssembly, one disposable worker a run, and an outer wall around the engine.

Rule 1: two walls. The guest has no system call at all; and the process that its engine runs in has lost everything
        that a defect of the engine could use (worker.py).
Rule 2: where the outer wall cannot stand whole the rung says so (`weakness`), and takes code only if that is accepted.
Rule 3: nothing is compiled here: what was not built is refused with the command that builds it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import CannotIsolate, HostFault
from lockgate.contract.run import Rung
from lockgate.contract.rungs import Boundary
from lockgate.runtimes import forked, ids
from lockgate.runtimes.framed import FramedMachine
from lockgate.runtimes.protocol import Nature, TemplateSpec, Unavailable
from lockgate.runtimes.single import boots
from lockgate.runtimes.wasm import artifacts, layout, packages
from lockgate.runtimes.wasm.machine import Wall, WasmMachine

START_SECONDS: Final = 60.0  # hashing 350 MB from a cold disk takes seconds
PROBE_SECONDS: Final = 10.0
# The zygote imports from where this process does, whatever started it.
_PROGRAM: Final = "import sys; sys.path[:] = %r; from lockgate.runtimes.wasm import zygote; zygote.main(sys.argv[1:])"
_ROOM: Final = 160 << 20  # the image, the worker's own overhead, and some: above what the group lets it touch


class WasmTemplate(forked.ForkedTemplate):
    """A zygote, and the workers forked from it.

    Attributes:
        wall: what must be seen of a worker before it counts as ready; None in controls.
        room: see `WasmMachine`.

    """

    wall: Wall | None = None
    room: int = 0

    def _make(self, bounds: Bounds) -> FramedMachine:
        return WasmMachine(bounds, self.wall, self.room)


class WasmRuntime:
    """`runtimes.protocol.Runtime` for the wasm rung.

    Args:
        arguments: switches of the zygote. Tests and controls give some (see zygote.py); nothing else does.
        store: where the built files are; None = this user's.

    """

    rung: Rung = "wasm"
    boundary: Boundary = "wasm"
    nature: Nature = Nature(
        fixed=(),
        sets=packages.OWN,
        forks=False,
        holds_memory="store limit",
        tasks=layout.WORKER_TASKS,
        overhead=layout.OVERHEAD_BYTES,
        overhead_tasks=layout.WORKER_TASKS,
    )

    def __init__(self, arguments: tuple[str, ...] = (), store: Path | None = None) -> None:
        self._arguments = arguments
        self._store = store

    def start(self, spec: TemplateSpec) -> WasmTemplate:
        """Start a zygote and wait until it is ready, with a deadline.

        Raises:
            CannotIsolate: something was not built, or cannot be had here; names it and the fix.
            HostFault: a step failed that should not fail here.

        """
        found = artifacts.find(packages.image_set(spec), self._store)
        packages.check(spec, found.packages)
        with contextlib.ExitStack() as owned:
            base = ids.claim(owned) if ids.is_host_root() else 0
            plan = {"artifacts": msgspec.to_builtins(found), "base": base, "arguments": self._arguments}
            argv = [sys.executable, "-I", "-S", "-c", _PROGRAM % (sys.path,)]
            parent = forked.launch(argv, msgspec.json.encode(plan), START_SECONDS, _explained)
            missing: list[str] = parent.facts.get("missing") or []
            template = WasmTemplate(
                self.rung, self.boundary, parent, owned.pop_all(), "no outer wall" if missing else None
            )
            template.lacks = "; ".join(missing)
            template.wall = None if self._arguments else _wall(parent.facts, base)
            template.room = _ROOM if spec.memory_by.startswith("cgroup") else 0
            return template

    def probe(self) -> Unavailable | None:
        """Boot one worker for real, run one line in it, and look; None when it works."""
        return boots(
            lambda: self.start(TemplateSpec()),
            PROBE_SECONDS,
            lambda _failed: "report these words: the step is refused on this host",
        )


def _wall(facts: dict[str, Any], base: int) -> Wall:
    own = os.geteuid()
    first = base + layout.FIRST_ID
    return Wall(range(first, base + layout.IDS_A_BLOCK) if facts.get("mode") == "root" else range(own, own + 1))


def _explained(step: str, code: int, detail: str) -> CannotIsolate | HostFault:
    """Turn a failed step into the missing piece and its fix, where the errno tells."""
    if step == "refused":
        said = json.loads(detail)
        kind = CannotIsolate if said["code"] == CannotIsolate.code else HostFault
        return kind(said["message"], next_step=said["next"])
    if code == errno.ENOSYS:
        return CannotIsolate(
            f"this kernel lacks a call that the wasm rung needs ({step}: {detail})", next_step="use Linux 5.13 or newer"
        )
    return HostFault(f"the zygote failed at {step}: {detail}", next_step="run `lockgate doctor`")
