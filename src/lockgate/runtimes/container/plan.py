"""What a template's tree is made of: the interpreter, its standard library, the libraries they need, the packages.

Rule 1: the sandbox's paths are fixed and neutral (layout.py); where things lie on this host stays on this side.
Rule 2: only what is needed is shown: no site-packages of the interpreter, no library directory of the host.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockgate.runtimes.container import elf, layout
from lockgate.runtimes.protocol import Unavailable


@dataclass(frozen=True)
class Plan:
    """Sources of one tree; `target` paths are inside the sandbox.

    Attributes:
        binds: (source, target) shown read-only in place.
        copies: (source, target) copied into the tree's own memory: small, and not worth a mount each.
        covers: directories inside `binds` that are hidden behind an empty one.
        links: (target, name) symbolic links.

    """

    binds: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    copies: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    covers: list[str] = field(default_factory=list[str])
    links: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def data(self) -> dict[str, Any]:
        """Return the plan as JSON can hold it."""
        return asdict(self)


class PlanError(Exception):
    """This host lacks a piece that every template needs."""

    def __init__(self, unavailable: Unavailable) -> None:
        super().__init__(unavailable.missing)
        self.unavailable = unavailable


def interpreter() -> str:
    """Return the interpreter that runs code: the one a virtual environment was made from, never the environment's."""
    base = getattr(sys, "_base_executable", None) or sys.executable
    return os.path.realpath(base)


def guest_directory() -> Path:
    """Return where the guest's files are: inside an installed package, or beside `src` in a checkout."""
    package = Path(__file__).resolve().parents[2]
    for candidate in (package / "_guest", package.parents[1] / "guest"):
        if (candidate / "runner.py").is_file():
            return candidate
    raise PlanError(
        Unavailable(missing="the guest runner (guest/runner.py)", fix="reinstall lockgate: its files are incomplete")
    )


def build(tree: str | None) -> Plan:
    """Return the plan for the package tree `tree`, or for the standard library alone.

    Raises:
        PlanError: the interpreter is not usable for this.

    """
    python = interpreter()
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    stdlib = os.path.realpath(sysconfig.get_path("stdlib"))
    platform = os.path.realpath(
        Path(sys.base_exec_prefix, getattr(sys, "platlibdir", "lib"), version)  # Fedora keeps lib-dynload apart
    )
    plan = Plan()
    plan.binds.append((python, layout.PYTHON))
    plan.binds.append((stdlib, f"{layout.STDLIB}/{version}"))
    for name in ("site-packages", "dist-packages", "ensurepip"):
        if Path(stdlib, name).is_dir():
            plan.covers.append(f"{layout.STDLIB}/{version}/{name}")
    dynload = Path(stdlib, "lib-dynload")
    if platform != stdlib and Path(platform, "lib-dynload").is_dir() and not dynload.is_dir():
        raise PlanError(
            Unavailable(
                missing=f"lib-dynload below {stdlib} (it is below {platform})",
                fix="run lockgate with a Python whose extension modules lie in its standard library",
            )
        )
    roots = [python, *sorted(str(one) for one in dynload.glob("*.so") if not one.name.startswith("_tkinter"))]
    inside: tuple[str, ...] = (stdlib + "/",)
    if tree is not None:
        real = os.path.realpath(tree)
        plan.binds.append((real, layout.PACKAGES))
        roots += sorted(str(one) for one in Path(real).rglob("*.so*") if one.is_file())
        inside = (*inside, real + "/")
    for name, source in sorted(elf.closure(roots, inside).items()):
        plan.copies.append((source, f"{layout.STDLIB}/{Path(name).name}"))
    loader = elf.read(python)
    if loader is None or loader.interpreter is None:
        raise PlanError(
            Unavailable(
                missing=f"a dynamically linked interpreter ({python} is none)",
                fix="run lockgate with a Python that can load extension modules",
            )
        )
    plan.links.extend([("usr/lib", "/lib"), ("usr/lib", "/lib64"), ("lib", "/usr/lib64")])
    plan.copies.append((os.path.realpath(loader.interpreter), loader.interpreter))
    _own_modules(plan)
    return plan


def _own_modules(plan: Plan) -> None:
    """Our modules and the guest's, as data below BOOT; packages on the way are empty on purpose."""
    package = Path(__file__).resolve().parents[2]
    for file in sorted((package / "kernel").glob("*.py")):
        plan.copies.append((str(file), f"{layout.BOOT}/lockgate/kernel/{file.name}"))
    for name in ("dialog", "nursery"):
        plan.copies.append((str(package / "runtimes" / f"{name}.py"), f"{layout.BOOT}/lockgate/runtimes/{name}.py"))
    for name in ("layout", "slot", "template"):
        file = package / "runtimes" / "container" / f"{name}.py"
        plan.copies.append((str(file), f"{layout.BOOT}/lockgate/runtimes/container/{name}.py"))
    for file in sorted(guest_directory().glob("*.py")):
        plan.copies.append((str(file), f"{layout.BOOT}/guest/{file.name}"))
