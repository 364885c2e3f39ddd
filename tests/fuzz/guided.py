"""Fuzz one target with coverage guidance: `python tests/fuzz/guided.py strictjson -max_total_time=600`.

Needs atheris. Only our own packages are instrumented: everything would take a minute to start.
"""

from __future__ import annotations

import importlib
import sys

import atheris

with atheris.instrument_imports(
    include=["lockgate.contract", "lockgate.policy", "lockgate.config", "lockgate.broker.exports"]
):
    targets = importlib.import_module("fuzz_targets")

name = sys.argv.pop(1)
atheris.Setup([*sys.argv, str(targets.CORPUS / name)], targets.TARGETS[name])
atheris.Fuzz()
