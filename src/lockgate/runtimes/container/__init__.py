"""The container rung. See runtime.py for what it is, launcher.py, template.py and slot.py for how it confines."""

from lockgate.runtimes.container.runtime import ContainerRuntime
from lockgate.runtimes.forked import ForkedTemplate as ContainerTemplate
from lockgate.runtimes.framed import FramedMachine as ContainerMachine

__all__ = ["ContainerMachine", "ContainerRuntime", "ContainerTemplate"]
