"""Fixtures for every folder. Each package keeps its own in `<package>_fixtures.py` or a helper and is imported here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside this file are importable from every folder

import pytest
from hypothesis import settings

from audit_fixtures import audit_link, audit_nursery
from container_fixtures import (
    container_attack,
    container_open_run,
    container_open_template,
    container_run,
    container_template,
    open_folder,
)
from egress_fixtures import egress_world
from gate_fixtures import gate, gate_config, gate_run, rung_or_skip
from gvisor_fixtures import gvisor_run, gvisor_template
from microvm_fixtures import microvm_choice, microvm_template, use_kvm
from supervisor_fixtures import forking_supervisor, own_supervisor, supervisor
from wasm_guest_fixtures import wasm_guest, wasm_numbers, wasm_tiny
from wasm_rung_fixtures import wasm_gate, wasm_gate_run, wasm_run, wasm_start, wasm_template


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kvm", action="store_true", help="machines of the microvm rung by hardware: make test-kvm")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--kvm"):
        use_kvm()


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
    "microvm_template",
    "open_folder",
    "own_supervisor",
    "rung_or_skip",
    "supervisor",
    "wasm_gate",
    "wasm_gate_run",
    "wasm_guest",
    "wasm_numbers",
    "wasm_run",
    "wasm_start",
    "wasm_template",
    "wasm_tiny",
]
