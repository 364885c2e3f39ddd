"""Fixtures for every folder. Each package keeps its own in `<package>_fixtures.py` or a helper and is imported here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside this file are importable from every folder

from hypothesis import settings

from audit_fixtures import audit_link, audit_nursery
from container_fixtures import (
    container_attack,
    container_open_run,
    container_open_template,
    container_run,
    container_template,
)
from egress_fixtures import egress_world
from gate_fixtures import gate, gate_config, gate_run, rung_or_skip
from gvisor_fixtures import gvisor_run, gvisor_template
from microvm_fixtures import microvm_choice
from supervisor_fixtures import forking_supervisor, own_supervisor, supervisor
from wasm_guest_fixtures import wasm_guest, wasm_numbers, wasm_tiny

settings.register_profile("lockgate", database=None)  # leaves nothing behind
settings.load_profile("lockgate")

__all__ = [
    "audit_link",
    "audit_nursery",
    "container_attack",
    "container_open_run",
    "container_open_template",
    "container_run",
    "container_template",
    "egress_world",
    "forking_supervisor",
    "gate",
    "gate_config",
    "gate_run",
    "gvisor_run",
    "gvisor_template",
    "microvm_choice",
    "own_supervisor",
    "rung_or_skip",
    "supervisor",
    "wasm_guest",
    "wasm_numbers",
    "wasm_tiny",
]
