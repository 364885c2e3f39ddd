"""The store of the microvm rung for tests: made by scripts/setup.sh, inside .venv, of emulated machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockgate.contract.errors import CannotIsolate
from lockgate.contract.rungs import MicrovmChoices
from lockgate.runtimes.microvm.store import Choice, Store

MICROVM_STORE = Path(__file__).parents[1] / ".venv" / "microvm"
CHOICES = MicrovmChoices(store=str(MICROVM_STORE), allow_emulated=True)
TOML = f'\n[execution.microvm]\nstore = "{MICROVM_STORE}"\nallow_emulated = true\n'


@pytest.fixture(scope="session")
def microvm_choice() -> Choice:
    """What setup built here. As root it must be there: CI is root, and everything that it needs can be installed."""
    import os

    try:
        return Store(MICROVM_STORE).choice()
    except CannotIsolate as error:
        if os.geteuid() == 0:
            pytest.fail(f"the microvm rung was not built: {error}; run scripts/setup.sh dev")
        pytest.skip(f"the microvm rung: {error}")
