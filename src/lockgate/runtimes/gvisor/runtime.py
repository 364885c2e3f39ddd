"""The gvisor rung."""
from __future__ import annotations
import contextlib, msgspec
from pathlib import Path
from lockgate.contract.bounds import Bounds
from lockgate.contract.errors import CannotIsolate, HostFault
from lockgate.runtimes.container import plan
from lockgate.runtimes import forked
from lockgate.runtimes.framed import FramedMachine
from lockgate.runtimes.gvisor import bundle, image
from lockgate.runtimes.gvisor.machine import GvisorMachine
import json

class GvisorTemplate(forked.ForkedTemplate):
    def _make(self, bounds: Bounds) -> FramedMachine:
        return GvisorMachine(bounds)

def start(runsc, store, tree=None, restore=True, preload=()):
    img = image.find_or_build(store, tree)
    work = store/"work"; work.mkdir(exist_ok=True)
    p = {"runsc": runsc, "flags": list(bundle.FLAGS), "work": str(work), "config": json.dumps(bundle.config(img.path)),
         "modules": bundle.modules({"preload": list(preload)}), "restore": restore}
    launcher = str(Path(__file__).with_name("launcher.py"))
    parent = forked.launch([plan.interpreter(), "-I", "-S", launcher], json.dumps(p).encode(), 60.0, lambda s,e,d: HostFault(f"{s} {e} {d}", next_step="x"))
    return GvisorTemplate("gvisor", "user-space kernel", parent, contextlib.ExitStack())
