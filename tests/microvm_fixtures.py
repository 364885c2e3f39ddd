"""The stores of the microvm rung for tests, inside .venv: scripts/setup.sh makes the emulated one.

`pytest --kvm` (`make test-kvm`) runs the same tests on machines of the processor, from a store of their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockgate.contract.errors import CannotIsolate
from lockgate.contract.rungs import MicrovmChoices
from lockgate.runtimes.microvm.runtime import MicrovmRuntime, MicrovmTemplate
from lockgate.runtimes.microvm.store import Choice, Store
from lockgate.runtimes.protocol import TemplateSpec

# A guest for negative controls: no handshake, and a worker that gave up nothing. One snapshot serves all of them.
OPEN = {"handshake": False, "open": True}
VENV = Path(__file__).parents[1] / ".venv"
_chosen = {"store": VENV / "microvm", "emulated": True}


def use_kvm() -> None:
    """Run on hardware: `make test-kvm` built that store."""
    _chosen.update(store=VENV / "microvm-kvm", emulated=False)


def emulated() -> bool:
    return bool(_chosen["emulated"])


def choices(store: Path | None = None) -> MicrovmChoices:
    return MicrovmChoices(store=str(store or _chosen["store"]), allow_emulated=emulated())


def toml() -> str:
    """The table of a configuration that uses the store."""
    chosen = choices()
    return f'\n[execution.microvm]\nstore = "{chosen.store}"\nallow_emulated = {str(chosen.allow_emulated).lower()}\n'


@pytest.fixture(scope="session")
def microvm_choice() -> Choice:
    """What setup built here. As root it must be there: CI is root, and everything that it needs can be installed."""
    try:
        return Store(Path(_chosen["store"])).choice()
    except CannotIsolate as error:
        if os.geteuid() == 0:
            pytest.fail(f"the microvm rung was not built: {error}; run scripts/setup.sh dev")
        pytest.skip(f"the microvm rung: {error}")


@pytest.fixture(scope="module")
def microvm_template(microvm_choice: Choice) -> Iterator[MicrovmTemplate]:
    """A loader on the snapshot without a package set."""
    template = MicrovmRuntime(choices()).start(TemplateSpec())
    yield template
    template.close()
