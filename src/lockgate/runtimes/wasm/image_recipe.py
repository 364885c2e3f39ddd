"""What goes into a memory image, and the text that plants it: our guest files, the modules that are imported ahead.

Rule 1: the recipe's digest covers every byte that shapes an image. Another recipe is another image.
Rule 2: nothing of a host, a user or a time is in it: the same recipe gives the same bytes anywhere.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Final

from lockgate.contract.errors import CannotIsolate, UnknownEnv
from lockgate.runtimes.wasm import guest_abi

# What runs import most; paid once, when the image is made.
_STDLIB: Final = """abc argparse ast asyncio base64 binascii bisect calendar cmath collections contextlib copy csv
dataclasses datetime decimal difflib enum fractions functools getpass glob hashlib heapq hmac html html.parser importlib
inspect io itertools json linecache locale logging math numbers operator os pathlib pprint queue random re secrets shlex
shutil socket sqlite3 statistics string struct subprocess tempfile textwrap threading time timeit traceback types typing
unicodedata urllib.parse uuid warnings xml.etree.ElementTree zipfile zlib zoneinfo"""
_NUMPY: Final = "numpy numpy.random numpy.linalg numpy.fft pandas"
SETS: Final[dict[str, tuple[str, ...]]] = {
    "stdlib": tuple(_STDLIB.split()),
    "numpy-pandas": (*_STDLIB.split(), *_NUMPY.split()),
}
# Order: each file finds the ones before it as names.
_FILES: Final = ("values.py", "host.py", "runner.py", "wasm/absent.py", "wasm/loop.py", "wasm/ints.py", "wasm/rung.py")
# What answers the guest while its image is made: inode numbers and the steps of the clock come from there.
_MAKERS: Final = (
    "driver.py", "memfs.py", "nodes.py", "wasi.py", "wasi_errno.py", "wasi_files.py", "wasi_paths.py", "workshop.py",
)  # fmt: skip

_BOOT: Final = """
def _plant(files, preload, numbers):
    import sys, types
    modules = {}
    for name, source in files:
        module = types.ModuleType(name)
        module.__dict__.update(modules)
        exec(compile(source, "<" + name + ">", "exec", dont_inherit=True), module.__dict__)
        modules[name] = module
    sys.modules["_lockgate"] = modules["rung"]
    modules["rung"].settle(preload, numbers)
_what = (
    %s,
    %s,
    %s,
)
_plant(*_what)
del _plant, _what
"""


def preload(set_name: str) -> tuple[str, ...]:
    """Return the modules that a set imports ahead.

    Raises:
        UnknownEnv: there is no such set.

    """
    found = SETS.get(set_name)
    if found is None:
        raise UnknownEnv(
            f"the wasm rung has no image set {set_name!r}", next_step="use one of: " + ", ".join(sorted(SETS))
        )
    return found


def set_for(env: str | None) -> str:
    """Return the image set that serves a package set's name: none at all means the standard library."""
    return "stdlib" if env is None else env


def guest_directory() -> Path:
    """Return where the guest's files are: inside an installed package, or beside `src` in a checkout."""
    package = Path(__file__).resolve().parents[2]
    for candidate in (package / "_guest", package.parents[1] / "guest"):
        if (candidate / "wasm" / "rung.py").is_file():
            return candidate
    raise CannotIsolate(
        "the wasm rung cannot be had: the guest's files (guest/wasm) are missing",
        next_step="reinstall lockgate: its files are incomplete",
    )


def boot(set_name: str) -> bytes:
    """Return the source that plants our files and imports the set's modules, for one turn of the guest."""
    where = guest_directory()
    files = [(Path(name).stem, (where / name).read_text("utf-8")) for name in _FILES]
    modules = preload(set_name)
    # repr() of text and tuples of text is Python source for the same.
    return (_BOOT % (repr(files), repr(modules), "numpy" in modules)).encode()


def digest(set_name: str, *guest: str) -> str:
    """Return the recipe's digest: what is planted, the guest's own digests, and the files that answer it meanwhile."""
    seen = hashlib.sha256(boot(set_name))
    seen.update(json.dumps([guest, guest_abi.PAGE, guest_abi.TURN]).encode())
    for name in _MAKERS:
        seen.update(hashlib.sha256(Path(__file__).with_name(name).read_bytes()).digest())
    return seen.hexdigest()
