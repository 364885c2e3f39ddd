"""Which of the guest's image sets serves a package set: the guest has what is linked into it, and nothing is installed.

Rule 1: a set is served only if every package of it is linked into the guest in that very version. What is not there is
        refused by name before anything runs; no other version is put in its place in silence (X11).
"""

from __future__ import annotations

import re
from typing import Final

from lockgate.contract.errors import CannotIsolate
from lockgate.runtimes.protocol import TemplateSpec
from lockgate.runtimes.wasm import image_recipe

OWN: Final = tuple(image_recipe.SETS)
"""Package sets that the rung brings itself, by name: `env="numpy-pandas"` needs no build of a package set."""
BARE: Final = "stdlib"
WARM: Final = "numpy-pandas"
_WARM_FOR: Final = frozenset({"numpy", "pandas"})
_SEPARATORS: Final = re.compile(r"[-_.]+")


def plain(name: str) -> str:
    """Return a package's name as PEP 503 compares it."""
    return _SEPARATORS.sub("-", name).lower()


def image_set(spec: TemplateSpec) -> str:
    """Return the image set for a template."""
    if spec.env in OWN:
        return str(spec.env)
    return WARM if any(plain(name) in _WARM_FOR for name, _ in spec.packages) else BARE


def check(spec: TemplateSpec, linked: tuple[tuple[str, str], ...]) -> None:
    """Hold a package set to what the guest has.

    Raises:
        CannotIsolate: a package is not linked in, or in another version; names the first, and what serves it.

    """
    have = {plain(name): version for name, version in linked}
    for name, version in spec.packages:
        there = have.get(plain(name))
        if there is None:
            raise CannotIsolate(
                f"the wasm rung cannot serve the package set {spec.env!r}: {name} is not linked into its guest",
                next_step="use another rung for this set, or one of the rung's own: " + ", ".join(OWN),
            )
        if there != version:
            raise CannotIsolate(
                f"the wasm rung cannot serve the package set {spec.env!r}: it asks for {name} {version}, and the guest "
                f"has {there}",
                next_step=f"build the set with {name}=={there}, use one of the rung's own ({', '.join(OWN)}), or "
                "another rung",
            )
