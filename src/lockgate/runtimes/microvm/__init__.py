"""The microvm rung. See runtime.py for what it is, build.py for what it is made of, loader.py and cage.py for how."""

from lockgate.runtimes.microvm.runtime import MicrovmRuntime

__all__ = ["MicrovmRuntime"]
