"""The container rung. See runtime.py for what it is, launcher.py, template.py and slot.py for how it confines."""

from lockgate.runtimes.container.handle import ContainerTemplate
from lockgate.runtimes.container.machine import ContainerMachine
from lockgate.runtimes.container.runtime import ContainerRuntime

__all__ = ["ContainerMachine", "ContainerRuntime", "ContainerTemplate"]
