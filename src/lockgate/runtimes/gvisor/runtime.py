"""The gvisor rung: a system call of the code is answered by a kernel in user space, which the host confines in turn.

Rule 1: only a runsc that passed its boots on this kernel with this image is used; one failure refuses it.
Rule 2: a runsc older than the release this rung relies on is a weakness that somebody must accept ("old runtime").
Rule 3: whatever is missing on this host is named, with its fix; nothing is left out in silence.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any, Final

from lockgate.contract.bounds import Bounds, MiB
from lockgate.contract.errors import CannotIsolate, HostFault
from lockgate.contract.run import Rung
from lockgate.contract.rungs import Boundary, GvisorChoices, Weakness
from lockgate.runtimes import forked, stores
from lockgate.runtimes.container import plan
from lockgate.runtimes.framed import FramedMachine
from lockgate.runtimes.gvisor import binary, bundle, image, selftest
from lockgate.runtimes.gvisor.machine import GvisorMachine
from lockgate.runtimes.protocol import Nature, TemplateSpec, Unavailable
from lockgate.runtimes.single import boots

START_SECONDS: Final = 90.0
PROBE_SECONDS: Final = 10.0
_ROOT_STORE: Final = stores.SYSTEM / "gvisor"
_READ: Final = 1 << 20


class GvisorTemplate(forked.ForkedTemplate):
    """A template whose machines are boxes restored from it, or booted like it where it cannot be saved."""

    def _make(self, bounds: Bounds) -> FramedMachine:
        return GvisorMachine(bounds)


class GvisorRuntime:
    """`runtimes.protocol.Runtime` for the gvisor rung.

    Args:
        choices: what the operator configured.
        restore: False boots every box cold; figures and tests ask for it.
        settings: for the guest's first program. Tests and the attack suite's controls give some; nothing else does.

    """

    rung: Rung = "gvisor"
    boundary: Boundary = "user-space kernel"
    nature: Nature = Nature(
        fixed=("disk", "inodes", "processes"),
        tasks=48,  # sentry, its helpers and ours; a run's own processes are the sentry's, not the host's
        overhead=64 * MiB,
        overhead_tasks=192,
        maps_files=True,
        life=3600.0,  # hash seed and address layout are those of the template
    )

    def __init__(
        self,
        choices: GvisorChoices | None = None,
        *,
        restore: bool = True,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self._choices = choices or GvisorChoices()
        self._restore = restore
        self._settings = settings or {}

    @property
    def store(self) -> Path:
        """Where images, verdicts and the unpacked runsc are."""
        return Path(self._choices.store) if self._choices.store is not None else default_store()

    def runsc(self) -> binary.Runsc:
        """Return the runsc that would be used.

        Raises:
            CannotIsolate: there is none, or it may not be used.

        """
        copies = [unpacked_at(one) for one in (self.store, default_store(), _ROOT_STORE)]
        return binary.inspect(
            binary.locate(self._choices.runsc, next((one for one in copies if one.is_file()), copies[0]))
        )

    def start(self, spec: TemplateSpec) -> GvisorTemplate:
        """Start a template and wait until machines can be made from it, with a deadline.

        Raises:
            CannotIsolate: the host lacks a piece; names it and the fix.
            HostFault: a step failed that should not fail here.

        """
        _check_host(spec)
        runsc = self.runsc()
        with contextlib.ExitStack() as owned:
            packed = image.find_or_build(self.store / "images", spec.tree)
            owned.callback(packed.close)
            self._trust(runsc, packed, spec, again=False)
            # Read by us, so that the pages are charged to us: a box that is charged for them is not killed when it runs
            # out of memory, the kernel takes the image away from it and gives it back, page by page.
            for path in (packed.path, Path(runsc.path)):
                _read(path)
            kept = contextlib.ExitStack()
            template = self._launch(runsc, packed, spec, restore=self._restore, owned=kept)
            kept.enter_context(owned.pop_all())
            return template

    def check(self, *, again: bool = False) -> dict[str, Any]:
        """Return what the boots of the self-test showed; run them if there is no verdict yet, or `again`.

        Raises:
            CannotIsolate: the runsc may not be used.

        """
        spec = TemplateSpec()
        _check_host(spec)
        runsc = self.runsc()
        packed = image.find_or_build(self.store / "images", None)
        with contextlib.closing(packed):
            return self._trust(runsc, packed, spec, again=again)

    def _trust(self, runsc: binary.Runsc, packed: image.Image, spec: TemplateSpec, *, again: bool) -> dict[str, Any]:
        verdict = None if again else selftest.cached(self.store, runsc, packed)
        if verdict is not None:
            return verdict
        with image.locked(self.store / "lock"):  # who waited here finds the verdict of who did not
            return (None if again else selftest.cached(self.store, runsc, packed)) or selftest.run(
                self.store, runsc, packed, lambda: self._launch(runsc, packed, spec, restore=False), again=again
            )

    def _launch(
        self,
        runsc: binary.Runsc,
        packed: image.Image,
        spec: TemplateSpec,
        *,
        restore: bool,
        owned: contextlib.ExitStack | None = None,
    ) -> GvisorTemplate:
        work = self.store / "work"
        work.mkdir(mode=0o700, parents=True, exist_ok=True)
        root = os.getuid() == 0
        order = {
            "root": root,
            "runsc": runsc.path,
            "flags": list(bundle.flags(rootless=not root)),
            "work": str(work),
            "config": json.dumps(bundle.config(packed.path)),
            "modules": bundle.modules({"preload": list(spec.preload), **self._settings}),
            "restore": restore and root,  # a rootless runsc restores nothing
        }
        argv = [plan.interpreter(), "-I", "-S", str(Path(__file__).with_name("launcher.py"))]
        parent = forked.launch(argv, json.dumps(order).encode(), START_SECONDS, _explained)
        parent.facts.update(runsc=runsc.version, go=runsc.go, sha256=runsc.sha256, image=packed.key)
        weakness: Weakness | None = "old runtime" if runsc.old else None
        template = GvisorTemplate(self.rung, self.boundary, parent, owned or contextlib.ExitStack(), weakness)
        if runsc.old:
            template.lacks = f"runsc {runsc.version} is older than release {binary.MINIMUM}"
        return template

    def probe(self) -> Unavailable | None:
        """Boot one machine for real, run one line in it, and look; None when it works."""
        return boots(
            lambda: self.start(TemplateSpec()),
            PROBE_SECONDS,
            lambda _failed: "run `lockgate gvisor check --again`; if it agrees, report these words",
        )


def default_store() -> Path:
    """Return this user's store, found without reading the environment."""
    return stores.of_this_user("gvisor") or Path("/nonexistent")


def unpacked_at(store: Path) -> Path:
    """Return where `fetch` puts its copy."""
    return store / "runsc"


def _check_host(spec: TemplateSpec) -> None:
    if os.uname().machine not in bundle.ARCHITECTURES:
        raise CannotIsolate(
            f"the gvisor rung was not tested on {os.uname().machine}", next_step="use an x86_64 machine for it"
        )
    if spec.memory_by_rlimit:
        raise CannotIsolate(
            "the gvisor rung needs memory and pids control groups: nothing else bounds the sentry as a whole",
            next_step="give the supervisor a delegated cgroup (systemd: Delegate=yes), or mount the controllers",
        )


def _read(path: Path) -> None:
    buffer = bytearray(_READ)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _explained(step: str, code: int, detail: str) -> CannotIsolate | HostFault:
    """Turn a failed step into the missing piece and its fix, where the errno tells."""
    if step == "start" and code in {errno.EPERM, errno.EACCES, errno.ENOSPC}:
        return CannotIsolate(
            f"the namespaces that the gvisor rung needs cannot be made here ({detail})",
            next_step="as root: have CAP_SYS_ADMIN, be in no unprivileged container; as a plain user: allow "
            "user namespaces (user.max_user_namespaces above 0, no kernel.apparmor_restrict_unprivileged_userns)",
        )
    if step.startswith("preload"):
        return HostFault(
            f"the template of the gvisor rung failed at {step}: {detail}",
            next_step="build the package set with other --preload names; some modules need what no sandbox has",
        )
    return HostFault(f"the gvisor rung failed at {step}: {detail}", next_step="run `lockgate gvisor check --again`")
