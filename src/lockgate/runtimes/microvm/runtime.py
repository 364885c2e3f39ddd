"""The microvm rung: one virtual machine a run, cloned from a snapshot, behind a VMM in a cage.

Rule 1: which VMM and which accelerator is the operator's choice at `lockgate microvm build`; nothing here falls to a
        weaker one. What was built for hardware virtualisation does not start without it (X3).
Rule 2: an emulated machine is no boundary: its template says so (`weakness`), and no code goes to it unaccepted.
Rule 3: a machine is loaded and paused when it is warm. It runs for one lease, after the handshake, and is killed.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import CannotIsolate, HostFault
from lockgate.contract.run import Rung
from lockgate.contract.rungs import Boundary, MicrovmChoices
from lockgate.runtimes import forked
from lockgate.runtimes.framed import FramedMachine
from lockgate.runtimes.microvm.machine import MicrovmMachine
from lockgate.runtimes.microvm.store import Store, default_store
from lockgate.runtimes.microvm.vmm import GUEST_RESERVE, VMM_RESERVE, VMM_TASKS
from lockgate.runtimes.protocol import Nature, TemplateSpec, Unavailable
from lockgate.runtimes.single import run_once

START_SECONDS: Final = 60.0
PROBE_SECONDS: Final = 30.0


class MicrovmTemplate(forked.ForkedTemplate):
    """A snapshot and the loader that clones it."""

    memory = 0

    def _make(self, bounds: Bounds) -> FramedMachine:
        if bounds.memory > self.memory:
            raise CannotIsolate(
                f"a run may ask for {bounds.memory >> 20} MiB here, but machines were built for {self.memory >> 20}",
                next_step=f"lockgate microvm build --memory {-(-bounds.memory >> 20)}, or lower memory in "
                "[execution.bounds]",
            )
        return MicrovmMachine(bounds)


class MicrovmRuntime:
    """`runtimes.protocol.Runtime` for the microvm rung.

    Args:
        choices: what the operator configured.
        settings: for the guest's agent. Tests and the attack suite's controls give some; nothing else does.

    """

    rung: Rung = "microvm"
    boundary: Boundary = "hardware"
    nature: Nature = Nature(
        fixed=(),
        holds_memory="size of the machine",
        tasks=VMM_TASKS,
        overhead=GUEST_RESERVE + VMM_RESERVE,
        overhead_tasks=VMM_TASKS,
    )

    def __init__(self, choices: MicrovmChoices | None = None, *, settings: dict[str, object] | None = None) -> None:
        self._choices = choices or MicrovmChoices()
        self._settings = settings

    @property
    def store(self) -> Store:
        """Where kernels, images and snapshots are."""
        return Store(Path(self._choices.store) if self._choices.store is not None else default_store())

    def start(self, spec: TemplateSpec) -> MicrovmTemplate:
        """Start a loader on the snapshot for `spec`, which is made first if it is not there yet.

        Raises:
            CannotIsolate: nothing was built, or what was built does not run here; names it and the fix.
            HostFault: a step failed that should not fail here.

        """
        from lockgate.runtimes.microvm import build  # noqa: PLC0415 - supervisors of other rungs do not pay for it

        store = self.store
        choice = store.choice()
        plan, _key, info = build.Builder(store, settings=self._settings).snapshot(choice, spec)
        with contextlib.ExitStack() as owned:
            parent = build.launch(plan, owned, START_SECONDS)
            emulated = choice.accel == "tcg"
            parent.facts.update(info.facts, kernel=choice.kernel.source, qemu=choice.version, sha256=choice.sha256)
            template = MicrovmTemplate(
                self.rung,
                "emulated" if emulated else self.boundary,
                parent,
                owned.pop_all(),
                "emulated" if emulated else None,
            )
            template.memory = choice.memory
            return template

    def probe(self) -> Unavailable | None:
        """Boot one machine for real, run one line in it, and look; None when it works. Verdicts are kept by hashes."""
        from lockgate.runtimes.microvm import verdicts  # noqa: PLC0415 - as above

        try:
            choice = self.store.choice()
        except CannotIsolate as error:
            return Unavailable(missing=error.message, fix=error.next_step)
        known = verdicts.look(self.store, choice)
        if known is not None and known.usable:
            return None
        missing = self.boot()
        verdicts.keep(self.store, choice, missing)
        return missing

    def boot(self) -> Unavailable | None:
        """Boot one machine and run one line in it, whatever was seen before; None when it works."""
        try:
            template = self.start(TemplateSpec())
        except (CannotIsolate, HostFault) as error:
            return Unavailable(missing=error.message, fix=error.next_step)
        try:
            outcome = run_once(template, b"6*7", Bounds(wall=PROBE_SECONDS), patience=PROBE_SECONDS)
        except (CannotIsolate, HostFault) as error:
            return Unavailable(missing=error.message, fix=error.next_step)
        finally:
            template.close()
        if outcome.result is not None and outcome.result.value == b"42":
            return None
        failed = outcome.failed
        return Unavailable(
            missing="a machine that answers"
            + (f" ({failed.step}: {failed.detail})" if failed is not None else " in time"),
            fix="run `lockgate microvm build` again; if it agrees, report these words",
        )
