"""The gvisor rung. See runtime.py for what it is, launcher.py, box.py and zygote.py for how a box comes to be."""

from lockgate.runtimes.gvisor.machine import GvisorMachine
from lockgate.runtimes.gvisor.runtime import GvisorRuntime, GvisorTemplate

__all__ = ["GvisorMachine", "GvisorRuntime", "GvisorTemplate"]
